"""Matmuls of experts on a CPU, without gradients, by the faster of torch's two libraries.

``torch.bmm`` calls MKL, which uses AVX2 on AMD's CPUs. oneDNN, which computes torch's convolutions, uses AVX-512 there:
on Zen 5 it multiplies float32 matrices at twice MKL's rate. It takes one matmul at a time and costs about 10 µs a call,
so small matrices stay with MKL. On Intel's CPUs both have the same rate, and MKL is used throughout.

The choice depends on the CPU, the shapes and the number of threads alone, never on a measurement: a machine gives the
same numbers in every process. ``torch.backends.mkldnn.flags(enabled=False)`` switches oneDNN off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.ops.eager_conditions import in_mode, is_plain_eager, no_grad_needed

__all__ = ["expert_bmm", "expert_bmm_parts", "expert_mm", "is_faster_by_onednn"]

_MIN_MACS_PER_THREAD = 2**21
"""Multiply-adds of a matmul for each thread from which oneDNN's rate makes up for its call."""
_MIN_ROWS, _MIN_SIDE = 8, 32
"""Rows, and least summands and columns, from which oneDNN is faster."""

_Linear = Callable[[Tensor, Tensor], Tensor]


def expert_bmm(left_EMK: Tensor, right_EKN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Batched matmul (E, M, N), as ``torch.bmm``; operands may have any strides.

    >>> left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    >>> torch.equal(expert_bmm(left, right), torch.bmm(left, right))
    True
    """
    linear = _onednn_for(left_EMK, right_EKN)
    if linear is None:
        return torch.bmm(left_EMK, right_EKN, out=out)
    if out is None:
        out = left_EMK.new_empty(*left_EMK.shape[:2], right_EKN.shape[2])
    for y, left, right in zip(out.unbind(), left_EMK.unbind(), right_EKN.mT.unbind(), strict=True):
        y.copy_(linear(left, right))
    return out


def expert_bmm_parts(left_EMK: Tensor, right_EKN: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """`expert_bmm` for callers that read the matmuls once: each part comes with the experts (e, M, N) it is of.

    MKL's result is one part; oneDNN's one per expert, which is read while it is in the CPU's cache, without a copy.

    >>> [(experts, y.shape) for experts, y in expert_bmm_parts(torch.ones(2, 3, 4), torch.ones(2, 4, 5))]
    [(slice(0, 2, None), torch.Size([2, 3, 5]))]
    """
    linear = _onednn_for(left_EMK, right_EKN)
    if linear is None:
        yield slice(0, len(left_EMK)), torch.bmm(left_EMK, right_EKN)
        return
    for e, (left, right) in enumerate(zip(left_EMK.unbind(), right_EKN.mT.unbind(), strict=True)):
        yield slice(e, e + 1), linear(left, right).unsqueeze(0)


def expert_mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Matmul (M, N), as ``torch.mm``; operands may have any strides.

    >>> expert_mm(torch.ones(2, 3), torch.ones(3, 1)).tolist()
    [[3.0], [3.0]]
    """
    linear = _onednn_for(left_MK, right_KN)
    return left_MK @ right_KN if linear is None else linear(left_MK, right_KN.T)


def _onednn_for(left: Tensor, right: Tensor) -> _Linear | None:
    """The linear layer of oneDNN if it multiplies these faster than MKL."""
    M, K, N = *left.shape[-2:], right.shape[-1]
    # the shapes first: most small matmuls end here
    macs = M * K * N
    if M < _MIN_ROWS or min(K, N) < _MIN_SIDE or macs < _MIN_MACS_PER_THREAD * torch.get_num_threads():
        return None
    if left.dtype != torch.float32 or right.dtype != torch.float32 or left.device.type != "cpu":
        return None
    linear = _onednn_linear() if is_faster_by_onednn() else None
    if linear is None or not torch.backends.mkldnn.enabled:
        return None
    # it has no gradient and no rule for transforms, and modes that count or trace operators do not know it
    return linear if is_plain_eager(left, right) and no_grad_needed(left, right) and not in_mode() else None


@lru_cache(maxsize=1)
def is_faster_by_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL on this CPU: an AMD CPU from Zen 5 on.

    SSE4a is AMD's alone. Zen 4 has AVX-512 without AVX-VNNI, and executes it in halves, so that MKL's AVX2 loses
    nothing.
    """
    capabilities = cast("dict[str, Any]", getattr(torch.cpu, "get_capabilities", dict)())
    return all(capabilities.get(name) is True for name in ("sse4a", "avx512_f", "avx_vnni"))


@lru_cache(maxsize=1)
def _onednn_linear() -> _Linear | None:
    """Multiplies (M, K) by the transpose of (N, K), or None if this torch has no such operator.

    Inductor calls it for linear layers of frozen networks. It is no public one, so its result is checked once.
    """
    try:
        operator = cast("Any", torch.ops).mkldnn._linear_pointwise.default

        def linear(left_MK: Tensor, right_NK: Tensor) -> Tensor:
            return cast("Tensor", operator(left_MK, right_NK, None, "none", [], ""))

        with torch.no_grad(), torch.device("cpu"):
            left, right = (torch.arange(end, dtype=torch.float32) for end in (6, 12))
            left, right = left.view(2, 3), right.view(3, 4)
            works = torch.equal(linear(left, right.T), left @ right)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return None
    return linear if works else None

"""Conditions under which fast eager code with in-place updates and hand-written gradients may run.

Under ``torch.vmap`` there are no memory formats but the contiguous one, no values on the host, and no updates in place
of tensors that have no such axis.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

__all__ = [
    "check_vmap",
    "has_host_values",
    "has_vmap_axis",
    "in_forward_ad",
    "in_mode",
    "in_transform",
    "in_vmap",
    "is_eager_cpu",
    "is_plain_eager",
    "no_grad_needed",
]


def is_eager_cpu(*tensors: Tensor) -> bool:
    """Whether all tensors are plain float32 or float64 CPU tensors, outside tracing, compilation and transforms."""
    return is_plain_eager(*tensors) and all(
        tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64) for tensor in tensors
    )


def is_plain_eager(*tensors: Tensor) -> bool:
    """Whether all tensors are plain ones, outside tracing, compilation and transforms.

    >>> is_plain_eager(torch.ones(2)), torch.vmap(lambda x: x * is_plain_eager(x))(torch.ones(2)).tolist()
    (True, [0.0, 0.0])
    """
    traced = torch._C._get_tracing_state() is not None  # pyright: ignore
    if traced or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return False
    if in_transform() or in_forward_ad():
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def has_host_values(tensor: Tensor) -> bool:
    """Whether sizes may be computed from values: not of meta and fake tensors, nor in a trace, which stores them.

    >>> has_host_values(torch.ones(2)), has_host_values(torch.ones(2, device="meta"))
    (True, False)
    """
    traced = torch._C._get_tracing_state() is not None  # pyright: ignore
    return not traced and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def in_mode() -> bool:
    """Whether a mode sees the operators or functions of torch that are called, other than a default device.

    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with torch.device("cpu"):
    ...     in_mode()
    False
    >>> with FlopCounterMode(display=False):
    ...     in_mode()
    True
    """
    private = cast("Any", torch)._C
    if private._len_torch_dispatch_stack():
        return True
    modes = range(private._len_torch_function_stack())
    return any(not isinstance(private._get_function_stack_at(place), DeviceContext) for place in modes)


def in_transform() -> bool:
    """Whether eager code runs under a transform of ``torch.func``, such as ``grad`` or ``vmap``."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


def in_forward_ad() -> bool:
    """Whether eager code runs in a ``torch.autograd.forward_ad.dual_level``, where tensors may have tangents.

    >>> with torch.autograd.forward_ad.dual_level():
    ...     in_forward_ad()
    True
    """
    if torch.compiler.is_compiling():
        return False
    return cast("int", forward_ad._current_level) >= 0  # pyright: ignore[reportPrivateUsage]


def in_vmap() -> bool:
    """Whether code runs under ``torch.vmap``, outside or inside of other transforms.

    >>> in_vmap(), bool(torch.vmap(lambda x: x * in_vmap())(torch.ones(2)).all())
    (False, True)
    """
    if not in_transform():
        return False
    functorch = cast("Any", torch)._C._functorch
    return any(level.key() == functorch.TransformType.Vmap for level in functorch.get_interpreter_stack())


def has_vmap_axis(tensor: Tensor) -> bool:
    """Whether a tensor has an axis of its own for a surrounding ``torch.vmap``."""
    functorch = cast("Any", torch)._C._functorch
    wrapped = cast("Any", tensor)
    while functorch.is_functorch_wrapped_tensor(wrapped):
        if functorch.is_batchedtensor(wrapped):
            return True
        wrapped = functorch.get_unwrapped(wrapped)
    return False


def check_vmap(owner: str, norm: nn.Module) -> None:
    """Raises if a BatchNorm would update statistics that the samples or networks under ``torch.vmap`` share."""
    if norm.training and in_vmap() and not has_vmap_axis(cast("Tensor", norm.running_mean)):
        raise RuntimeError(
            f"{owner}: BatchNorm in training mode updates running statistics that all samples under vmap share; call "
            "eval() on the network for per-sample gradients"
        )


def no_grad_needed(*tensors: Tensor) -> bool:
    """Whether autograd records nothing for these tensors.

    >>> no_grad_needed(torch.ones(2)), no_grad_needed(torch.ones(2, requires_grad=True))
    (True, False)
    """
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))

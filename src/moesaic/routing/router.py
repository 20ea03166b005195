"""Base class of the routers: a linear score for every unit and expert, then a choice.

A patch's score for an expert is the expert's p×p kernel applied to the patch, without bias (Chowdhury et al. 2023,
Section 3.1: g = ⟨w_s, x^(j)⟩). To write a router, subclass ``Router`` and implement ``choose``.
"""

from __future__ import annotations

import inspect
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_positive
from moesaic.ops import autocast_off
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing_record import Routing, Unit
from moesaic.tensor_checks import check_feature_map

__all__ = [
    "Noise",
    "Router",
    "batch_invariant_matmul",
    "mask_scores",
    "round_up",
    "router_init_std",
    "sample_noise",
    "stable_topk",
]

Noise = Literal["uniform", "gaussian", "gumbel"]
"""Noise on scores for exploration: uniform as in Chen et al. 2022, Gaussian as in Riquelme et al. 2021, or Gumbel,
which samples experts from the softmax."""


class Router(nn.Module):
    """Scores the patches of a map with one kernel per expert: ``weight`` (E, C, p, p).

    Scores are computed in float32 at least, whatever the dtype of the map and of autocast, because a rounding error in
    a score can change the choice.
    """

    def __init__(
        self,
        in_channels: int,
        experts: int,
        patch_size: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, in_channels=in_channels, experts=experts, patch_size=patch_size)
        self.in_channels = in_channels
        self.experts = experts
        self.patch_size = patch_size
        self.weight = nn.Parameter(
            torch.empty(experts, in_channels, patch_size, patch_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises small random kernels: random choices, nearly uniform gates."""
        fan_in = self.in_channels * self.patch_size**2
        nn.init.normal_(self.weight, std=0.1 / math.sqrt(fan_in), generator=generator)

    def scores(self, x: Tensor) -> Tensor:
        """Returns the scores (B, N, E) of a map (B, C, H, W), patches in row-major order."""
        p = self.patch_size
        B, C, H, W = x.shape
        dtype = torch.promote_types(x.dtype, torch.float32)
        with autocast_off(x):
            # one matmul over patches in a fixed order, so that the result does not depend on the memory format
            patches = x.to(dtype).permute(0, 2, 3, 1).reshape(B, H // p, p, W // p, p, C).transpose(2, 3)
            kernels = self.weight.to(dtype).permute(2, 3, 1, 0)
            N, D, E = (H // p) * (W // p), p * p * C, self.weight.shape[0]
            return batch_invariant_matmul(patches.reshape(B * N, D), kernels.reshape(D, E)).reshape(B, N, E)

    def choose(
        self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        """Returns the routing for scores (B, N, E); implemented by subclasses.

        Units where ``mask`` (B, N) is False are padding: no expert gets them, and they do not count. It is passed only
        if there is one, so that a router for units without padding need not have the parameter.
        """
        raise TypeError(f"{type(self).__name__} does not implement choose(scores, unit, grid)")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        check_feature_map(type(self).__name__, x, self.in_channels, self.patch_size, self.weight)
        grid = (x.shape[2] // self.patch_size, x.shape[3] // self.patch_size)
        if mask is None:
            return self.choose(self.scores(x), unit="patch", grid=grid)
        if "mask" not in inspect.signature(self.choose).parameters:
            raise TypeError(
                f"{type(self).__name__}: choose() has no parameter mask, so it cannot route padded tokens; add "
                "mask=None to it, or route without a mask"
            )
        return self.choose(self.scores(x), unit="patch", grid=grid, mask=mask)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, experts={self.experts}, patch_size={self.patch_size}"


def batch_invariant_matmul(rows: Tensor, columns: Tensor) -> Tensor:
    """Matmul in which equal rows get equal results, however many other rows there are.

    A matmul rather than a convolution, which would use TF32. Rows and columns are padded to multiples of 16, because
    GEMMs sum in another order at the edges of their tiles: equal units would not tie, and a unit's scores would depend
    on the batch size.
    """
    if torch.onnx.is_in_onnx_export():  # ONNX Runtime sums in one order everywhere
        return rows @ columns
    M, E = rows.shape[0], columns.shape[1]
    # F.pad copies even if it adds nothing; under a compiler a plain test would be a guard on the batch size
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy: a quarter of a second

        aligned = statically_known_true(M % 16 == 0)
    else:
        aligned = M % 16 == 0
    rows = rows if aligned else F.pad(rows, (0, 0, 0, -M % 16))
    return (rows @ F.pad(columns, (0, -E % 16)))[:M, :E]


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Returns the indices of the ``k`` largest scores along the last axis, largest first; ties go to the lower index.

    >>> stable_topk(torch.tensor([1.0, 3.0, 3.0, 0.0]), 2).tolist()
    [1, 2]
    """
    if torch.onnx.is_in_onnx_export():
        # ONNX has no stable sort, but its TopK prefers the lower index; torch.topk leaves ties undefined
        return scores.topk(k).indices
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def mask_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Returns scores (B, N, …) in which units outside of ``mask`` (B, N) come last and have no weight in a softmax.

    They get the lowest finite number rather than -inf, so that a softmax over padding alone is not NaN.
    """
    if mask is None:
        return scores
    return scores.masked_fill(~mask.view(*mask.shape, *[1] * (scores.ndim - 2)), torch.finfo(scores.dtype).min)


def sample_noise(
    kind: Noise, scores: Tensor, generator: torch.Generator | None = None, batch: GlobalBatch | None = None
) -> Tensor:
    """Returns noise for scores (…, E): Unif[0, 1], N(0, 1/E²) or standard Gumbel, in their shape and dtype.

    Scores of a part of a ``batch`` get their part of the noise for the whole batch.

    >>> noise = sample_noise("uniform", torch.zeros(100, 4), torch.Generator().manual_seed(0))
    >>> noise.shape, bool(noise.min() >= 0), bool(noise.max() <= 1)
    (torch.Size([100, 4]), True, True)
    """
    if batch is not None:
        return batch.draw(scores, lambda whole: sample_noise(kind, whole, generator))
    shape, device, dtype = scores.shape, scores.device, scores.dtype
    if kind == "gaussian":
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) / shape[-1]
    noise = torch.rand(shape, generator=generator, device=device, dtype=dtype)
    if kind == "uniform":
        return noise
    tiny = torch.finfo(dtype).tiny
    return -(-noise.clamp_min(tiny).log()).clamp_min(tiny).log()


def round_up(share: float) -> int:
    """Rounds a share of the units up, but for floating-point error.

    >>> round_up(1.1 * 100 / 10), 1.1 * 100 / 10
    (11, 11.000000000000002)
    """
    if isinstance(share, Tensor):  # sizes are tensors under torch.jit.trace
        share = share.item()
    return math.ceil(round(share, 6))


def router_init_std(patches: int, dim: int) -> float:
    """Standard deviation Θ(1 / (n² log(poly(n)) √d)) of Chowdhury et al. 2023, eq. 7, for n patches of d numbers.

    The constant is 1 and log(poly(n)) is taken as log n. One patch, of which nothing is selected, counts as two.

    >>> router_init_std(16, 784)
    5.031...e-05
    """
    n = max(patches, 2)
    return 1 / (n**2 * math.log(n) * math.sqrt(dim))

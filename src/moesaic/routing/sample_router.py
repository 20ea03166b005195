"""Router scores for whole samples, linear in the sum of their patches.

Chen et al. 2022, Section 3.2: h(x; Θ) = Σ_p Θᵀ x^(p), with Θ initialised to zero (Algorithm 1). The patches are summed
before the matmul, which then costs P times less.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.ops import autocast_off
from moesaic.routing.router import batch_invariant_matmul
from moesaic.tensor_checks import check_feature_map, check_tensor

__all__ = ["SampleRouter"]


class SampleRouter(nn.Module):
    """One score for each sample and expert, (B, E): h_e = Σ_p (⟨θ_e, x_p⟩ + b_e).

    A sample is a set of patches (P, D) or one vector (D,); with ``patch_size`` it is an image (C, H, W), and the scores
    are a p×p convolution at stride p summed over all positions. ``weight`` is (E, D), and (E, C, p, p) for images.
    Scores are computed in float32 at least, whatever the dtype of the samples and of autocast.

    Weights are initialised to zero, so that the router noise decides at first.

    Args:
        dim: length D of a patch; number of channels C of an image.
        experts: number of experts E.
        patch_size: p, for images; None for samples that are given as patches.
        bias: whether every patch adds b_e; the paper has none.
        device: device of the weights.
        dtype: dtype of the weights.

    >>> import torch
    >>> SampleRouter(50, experts=8)(torch.randn(3, 4, 50)).tolist()[0]          # four patches in each sample
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    >>> SampleRouter(3, experts=4, patch_size=4)(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 4])
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        patch_size: int | None = None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("SampleRouter", dim=dim, experts=experts)
        if patch_size is not None:
            check_positive("SampleRouter", patch_size=patch_size)
        self.dim = dim
        self.experts = experts
        self.patch_size = patch_size
        shape = (experts, dim) if patch_size is None else (experts, dim, patch_size, patch_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises all weights to zero (Algorithm 1 of the paper)."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        with autocast_off(x):
            total, patches = self._sum_patches(x.to(dtype).contiguous())  # one order of sums for every memory format
            scores = batch_invariant_matmul(total, self.weight.to(dtype).flatten(1).T)
            return scores if self.bias is None else scores + patches * self.bias.to(dtype)

    def _sum_patches(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns the sum of each sample's patches (B, D), and the number of patches."""
        if self.patch_size is None:
            return (x, 1) if x.ndim == 2 else (x.sum(1), x.shape[1])
        (B, C, H, W), p = x.shape, self.patch_size
        total = x.reshape(B, C, H // p, p, W // p, p).sum((2, 4))
        return total.flatten(1), (H // p) * (W // p)

    def _check(self, x: Tensor) -> None:
        if self.patch_size is not None:
            check_feature_map("SampleRouter", x, self.dim, self.patch_size, self.weight)
            return
        check_tensor("SampleRouter", x, "samples", self.weight)
        if x.ndim not in (2, 3) or x.shape[-1] != self.dim:
            images = "; for images (B, C, H, W) set patch_size" if x.ndim == 4 else ""
            raise ValueError(
                f"SampleRouter: takes patches (B, P, {self.dim}) or vectors (B, {self.dim}), "
                f"got {tuple(x.shape)}{images}"
            )
        if not x.is_floating_point():
            raise TypeError(f"SampleRouter: takes floating-point samples, got {x.dtype}; convert with x.float()")

    def extra_repr(self) -> str:
        return f"{self.dim}, experts={self.experts}, patch_size={self.patch_size}, bias={self.bias is not None}"

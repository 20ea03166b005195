"""Noise on scores: it lets units try experts that are not quite their best.

Uniform as in Chen et al. 2022, Gaussian as in Riquelme et al. 2021, Gumbel for choices drawn from
the softmax.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Noise", "draw_noise"]

Noise = Literal["uniform", "gaussian", "gumbel"]


def draw_noise(kind: Noise, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Noise for scores (…, E): Unif[0, 1], N(0, 1/E²) or standard Gumbel, in their shape and dtype.

    >>> drawn = draw_noise("uniform", torch.zeros(100, 4), torch.Generator().manual_seed(0))
    >>> drawn.shape, bool(drawn.min() >= 0), bool(drawn.max() <= 1)
    (torch.Size([100, 4]), True, True)
    """
    shape, device, dtype = scores.shape, scores.device, scores.dtype
    if kind == "gaussian":
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) / shape[-1]
    drawn = torch.rand(shape, generator=generator, device=device, dtype=dtype)
    if kind == "uniform":
        return drawn
    tiny = torch.finfo(dtype).tiny
    return -(-drawn.clamp_min(tiny).log()).clamp_min(tiny).log()

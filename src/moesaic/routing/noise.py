"""Router noise, added to the scores for exploration.

Uniform as in Chen et al. 2022, Gaussian as in Riquelme et al. 2021, Gumbel to sample experts from the softmax.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Noise", "sample_noise"]

Noise = Literal["uniform", "gaussian", "gumbel"]


def sample_noise(kind: Noise, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Returns noise for scores (…, E): Unif[0, 1], N(0, 1/E²) or standard Gumbel, in their shape and dtype.

    >>> noise = sample_noise("uniform", torch.zeros(100, 4), torch.Generator().manual_seed(0))
    >>> noise.shape, bool(noise.min() >= 0), bool(noise.max() <= 1)
    (torch.Size([100, 4]), True, True)
    """
    shape, device, dtype = scores.shape, scores.device, scores.dtype
    if kind == "gaussian":
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) / shape[-1]
    noise = torch.rand(shape, generator=generator, device=device, dtype=dtype)
    if kind == "uniform":
        return noise
    tiny = torch.finfo(dtype).tiny
    return -(-noise.clamp_min(tiny).log()).clamp_min(tiny).log()

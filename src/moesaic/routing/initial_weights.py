"""Initial weights of routers."""

from __future__ import annotations

import math

__all__ = ["router_init_std"]


def router_init_std(patches: int, dim: int) -> float:
    """Standard deviation Θ(1 / (n² log(poly(n)) √d)) of Chowdhury et al. 2023, eq. 7, for n patches of d numbers.

    The constant is 1 and log(poly(n)) is taken as log n. One patch, of which nothing is selected, counts as two.

    >>> router_init_std(16, 784)
    5.031...e-05
    """
    n = max(patches, 2)
    return 1 / (n**2 * math.log(n) * math.sqrt(dim))

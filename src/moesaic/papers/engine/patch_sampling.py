"""What sources of patches do alike: check a draw, balance its classes, and lay patches on their places."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.checks import check_choice, check_positive
from moesaic.data.splits import Split

__all__ = ["balanced", "blocks", "check_draw", "check_patches", "even_orders", "lay_out"]

_BLOCK = 1 << 22  # random numbers at once; bounds the memory, not what is drawn


def check_patches(owner: str, patches: int) -> None:
    """Refuse samples without room for a patch beside the discriminative one."""
    check_positive(owner, patches=patches)
    if patches < 2:
        raise ValueError(
            f"{owner}: patches={patches} leaves no room for patches around the discriminative one; use 2 or more"
        )


def check_draw(owner: str, keys: Tensor, samples: int, split: Split, classes: int) -> None:
    """Refuse keys that are none, unknown splits, and samples that cannot be as many of each class."""
    if keys.ndim != 1 or keys.dtype != torch.int64:
        raise ValueError(
            f"{owner}: keys have the shape {tuple(keys.shape)} and are {keys.dtype}; "
            "make them with keyed_random.keys: (T,) torch.int64"
        )
    check_choice(owner, "split", split, get_args(Split))
    check_positive(owner, samples=samples)
    if samples % classes:
        below = samples - samples % classes
        ways = f"{below} or {below + classes}" if below else f"{classes}"
        raise ValueError(
            f"{owner}: samples={samples} is not divisible by classes={classes}, "
            f"so the classes cannot be balanced; use {ways}"
        )


def balanced(keys: Tensor, stream: str, samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Labels (T, B), as many of each class in random order, and each sample's number (T, B) within its class.

    >>> labels, ranks = balanced(keyed_random.keys(0, [0]), "labels", samples=6, classes=2)
    >>> labels.sum().item(), sorted(ranks[labels == 1].tolist())
    (3, [0, 1, 2])
    """
    order = keyed_random.permutations(keys, stream, samples)
    return order % classes, order // classes


def even_orders(keys: Tensor, stream: str, size: int, count: int) -> Tensor:
    """(T, count) numbers from 0 to ``size`` − 1, where none comes again before all others came.

    >>> even_orders(keyed_random.keys(0, [0]), "orders", size=3, count=6).view(2, 3).sort().values.tolist()
    [[0, 1, 2], [0, 1, 2]]
    """
    rounds = -(-count // size)
    parts = [
        keyed_random.bits(some, stream, rounds, size).argsort(dim=-1, stable=True).flatten(1)[:, :count].clone()
        for some in blocks(keys, rounds * size)
    ]
    return torch.cat(parts)


def blocks(keys: Tensor, each: int) -> tuple[Tensor, ...]:
    """The keys in blocks that draw ``each`` numbers a key without needing more memory for more keys."""
    return torch.split(keys, max(1, _BLOCK // each))


def lay_out(decisive: Tensor, others: Tensor, place: Tensor) -> Tensor:
    """(…, N): ``decisive`` (…) on its ``place`` (…), and ``others`` (…, N − 1) around it in their order.

    >>> lay_out(torch.tensor([7]), torch.tensor([[1, 2, 3]]), torch.tensor([2])).tolist()
    [[1, 2, 7, 3]]
    """
    N = others.shape[-1] + 1
    n, place = torch.arange(N, device=others.device), place.unsqueeze(-1)
    source = torch.where(n == place, 0, n + (n < place))
    return torch.cat([decisive.unsqueeze(-1), others], dim=-1).gather(-1, source)

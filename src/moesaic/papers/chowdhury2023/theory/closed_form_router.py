"""The separately trained router in closed form (Chowdhury et al. 2023, eqs 6, 7, 11, Algorithm 1, Section M.1).

The loss of the routers is linear in their kernels, so its gradient does not depend on them: a step
of SGD adds η/B times the signed patch sums of its batch, in whatever order batches come. After whole
epochs, with S_s the sum of all patches of all samples of class s,

    w_s = w_s(0) + η · epochs / B · (S_s − S_r)

where r is the class that s was trained against. Classes are 0 … c − 1 and router s belongs to class
s; of two classes, class 1 is the paper's y = +1. For more, routers train in pairs (0, 1), (2, 3), …;
the paper takes c to be even. Of an odd number, the last class trains against class 0, and only its
own kernel moves.

The formula is exact where every batch has B samples. Where B does not divide the samples of a pair,
the last batch of an epoch is shorter and its samples count for more, B/|batch| times: `batch_weights`
has these weights for given orders of the samples. In pairs of more than two classes each pair has its
own batches; call `trained_routers` once for each pair then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require
from moesaic.routing import router

__all__ = ["batch_weights", "class_sums", "opponents", "router_init_std", "trained_routers"]


def opponents(classes: int) -> list[int]:
    """For each class the class that its router is trained against.

    >>> opponents(4), opponents(5)
    ([1, 0, 3, 2], [1, 0, 3, 2, 0])
    """
    check_counts("opponents", classes=classes)
    require("opponents", classes >= 2, "c ≥ 2", f"classes={classes}", "a router is trained against another class")
    even = classes - classes % 2
    return [s ^ 1 if s < even else 0 for s in range(classes)]


def class_sums(patch_sums: Tensor, labels: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """(…, c, D): the patch sums (…, B, D) of all samples of a class added up, each times its weight (…, B).

    >>> class_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 1, 0]), classes=2).tolist()
    [[5.0], [2.0]]
    """
    member = torch.nn.functional.one_hot(labels, classes).to(patch_sums.dtype)
    if weights is not None:
        member = member * weights.to(patch_sums.dtype)[..., None]
    return member.transpose(-1, -2) @ patch_sums


def batch_weights(orders: Tensor, batch: int) -> Tensor:
    """(…, B): how often each sample counts over all epochs, as a share of a full batch's samples.

    ``orders`` (…, epochs, B) lists the samples as each epoch visits them. A sample counts once an
    epoch in a full batch, batch/|last batch| times in the shorter last one.

    >>> batch_weights(torch.tensor([[0, 1, 2], [2, 0, 1]]), batch=2).tolist()
    [2.0, 3.0, 3.0]
    """
    check_counts("batch_weights", batch=batch)
    samples = orders.shape[-1]
    rest = samples % batch
    by_place = torch.ones(samples, dtype=torch.float64, device=orders.device)
    if rest:
        by_place[-rest:] = batch / rest
    counted = torch.zeros(orders.shape, dtype=torch.float64, device=orders.device)
    return counted.scatter(-1, orders, by_place.expand(orders.shape)).sum(-2)


def trained_routers(
    class_sums: Tensor, initial: Tensor, *, learning_rate: float, epochs: int = 1, batch: int = 1
) -> Tensor:
    """(…, c, D): the kernels that Algorithm 1's first phase ends with, from `class_sums` (…, c, D).

    Where sums are weighted by `batch_weights`, the weights already count the epochs: leave ``epochs``
    at 1.

    >>> sums = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    >>> trained_routers(sums, torch.zeros(2, 2), learning_rate=0.5, epochs=4, batch=2).tolist()
    [[3.0, -2.0], [-3.0, 2.0]]
    """
    check_counts("trained_routers", epochs=epochs, batch=batch)
    if class_sums.shape[-2:] != initial.shape[-2:]:
        raise ValueError(
            f"trained_routers: class sums are {tuple(class_sums.shape)}, initial kernels {tuple(initial.shape)}; "
            "both must end in (classes, D)"
        )
    against = class_sums[..., opponents(class_sums.shape[-2]), :]
    return initial + learning_rate * epochs / batch * (class_sums - against)


def router_init_std(n: int, d: int) -> float:
    """σ_r of eq. (7), with constant 1 and log(poly(n)) taken as log n: 1 / (n² log n √d).

    >>> router_init_std(16, 784)
    5.031...e-05
    """
    check_counts("router_init_std", n=n, d=d)
    require("router_init_std", n >= 2, "n ≥ 2", f"n={n}", "log n is 0 there, and one patch needs no router")
    return router.router_init_std(n, d)

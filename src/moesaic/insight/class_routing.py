"""What routing has to do with the class of an image: where experts look, class by class, and how much that tells.

The router is never told the classes. If what an expert looks at depends on the class nevertheless,
the place alone says something about the class; how much is measured as mutual information, in bits,
beside what labels in random order would seem to give, for few images give some by accident.

Shapes, beyond the legend of `record`: K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.keyed_random import keys, permutations
from moesaic.routing_record import Routing

__all__ = ["ClassRouting", "Information", "check_labels", "class_routing", "information", "tell_class"]

SHUFFLES = 200
"""Random orders of the labels that tell what chance gives."""

FOLDS = 5
LEAST_FOR_FOLDS = 20


@dataclass(frozen=True)
class Information:
    """How much a choice tells of the class, in bits."""

    bits: float
    by_chance: float
    """What labels in random order stay below in 95 % of cases."""
    most: float
    """What knowing the class is worth: its entropy."""

    @property
    def real(self) -> bool:
        """Whether it is more than chance gives."""
        return self.bits > self.by_chance


@dataclass(frozen=True, eq=False)
class ClassRouting:
    """Made by `class_routing`; tensors are float64 on the CPU."""

    images: tuple[int, ...]
    """(K,): how many of each class."""
    reach: Tensor
    """(K, E, N): the share of a class's images in which the expert works on the patch; where the router is soft,
    the patch's mean share in what the expert gets."""
    gate: Tensor
    """(K, E, N): the mean gate in those images, 0 where there are none."""
    information: Information
    """Of one choice of the layer, drawn at random: which expert works on which patch."""
    expert_information: tuple[Information, ...]
    """Of one patch of the expert, drawn at random."""
    told: float | None
    """The share of images whose class a simple rule (naive Bayes, on images it has not seen) tells from the choices
    alone; None where the router is soft, or images too few to try."""
    commonest: float
    """The share it would get right by always naming the commonest class."""


def class_routing(routing: Routing, labels: Tensor, classes: int, *, seed: int = 0) -> ClassRouting:
    """Compare the routing of images of different classes.

    ``labels`` (B,) are from 0 to ``classes`` − 1.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([0, 0, 0, 3, 3, 3]).view(6, 1, 1)           # one expert: patch 0 of some, 3 of others
    >>> routing = Routing("patch", torch.zeros(6, 4, 1), index, torch.full((6, 1, 1), 0.5), "expert", grid=(2, 2))
    >>> found = class_routing(routing, torch.tensor([0, 0, 0, 1, 1, 1]), classes=2)
    >>> found.reach[:, 0].tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    >>> found.information.bits                                           # the place tells the class
    1.0
    """
    labels = check_labels("class_routing", labels, routing.batch, classes)
    work_BEN = _work(routing)
    gate_BEN = routing.weights.detach().cpu().double().mT
    own_KB = torch.nn.functional.one_hot(labels, classes).double().T
    count_K = own_KB.sum(1)
    total_KEN = torch.einsum("kb,ben->ken", own_KB, work_BEN)
    worked_KEN = torch.einsum("kb,ben->ken", own_KB, routing.mask.cpu().double().mT)
    gated_KEN = torch.einsum("kb,ben->ken", own_KB, gate_BEN)
    soft = routing.dispatch is not None
    return ClassRouting(
        images=tuple(int(count) for count in count_K),
        reach=total_KEN / count_K.clamp(min=1)[:, None, None],
        gate=gated_KEN / worked_KEN.clamp(min=1),
        information=information(work_BEN.flatten(1), labels, classes, seed=seed),
        expert_information=tuple(
            information(work_BEN[:, e], labels, classes, seed=seed) for e in range(routing.experts)
        ),
        told=None if soft else tell_class(work_BEN.flatten(1), labels, classes, seed=seed),
        commonest=float(count_K.max() / max(1, len(labels))),
    )


def information(work: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> Information:
    """The mutual information of an image's class and one of its options, drawn by its weights ``work`` (B, M).

    Rows are made to sum to 1; an image whose row is 0 does not count.

    >>> import torch
    >>> work = torch.eye(2).repeat(50, 1)                                # options 0 and 1 in turn
    >>> information(work, torch.arange(100) % 2, 2).bits, information(work, torch.arange(100) // 50, 2).bits
    (1.0, 0.0)
    """
    work = work.detach().cpu().double()
    total = work.sum(1)
    share_BM, labels = work[total > 0] / total[total > 0, None], labels[total > 0]
    B = len(labels)
    if not B:
        return Information(0.0, 0.0, 0.0)
    own_BK = torch.nn.functional.one_hot(labels, classes).double()
    orders = permutations(keys(seed, range(SHUFFLES)), "labels", B)
    found = [_bits(own_BK[order].T @ share_BM / B) for order in (torch.arange(B), *orders)]
    # what the class tells of itself
    return Information(found[0], sorted(found[1:])[int(0.95 * SHUFFLES)], _bits(own_BK.mean(0).diag()))


def _bits(joint_KM: Tensor) -> float:
    """Σ p(k, m) log₂ p(k, m) / (p(k) p(m))."""
    apart_KM = joint_KM.sum(1, keepdim=True) * joint_KM.sum(0, keepdim=True)
    ratio_KM = torch.where(joint_KM > 0, joint_KM / torch.where(apart_KM > 0, apart_KM, 1), 1)
    return max(0.0, float((joint_KM * ratio_KM.log2()).sum()))


def _work(routing: Routing) -> Tensor:
    """(B, E, N) float64 on the CPU: 1 where the expert works on the unit; soft: the unit's share in what it gets."""
    work_BNE = routing.mask if routing.dispatch is None else routing.dispatch.detach().mean(-1)
    return work_BNE.cpu().double().mT


def tell_class(chosen_BM: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> float | None:
    """The share of images whose class naive Bayes tells from zeros and ones (B, M); each fold is told by the others.

    None where images are too few to try.

    >>> import torch
    >>> labels = torch.arange(40) % 2
    >>> tell_class(torch.nn.functional.one_hot(labels), labels, classes=2)
    1.0
    """
    chosen_BM = chosen_BM.detach().cpu().double()
    B = len(labels)
    if B < LEAST_FOR_FOLDS:
        return None
    fold_B = permutations(keys(seed, [0]), "folds", B)[0] % FOLDS
    right = 0
    for fold in range(FOLDS):
        test_B = fold_B == fold
        own_KB = torch.nn.functional.one_hot(labels[~test_B], classes).double().T
        count_K = own_KB.sum(1)
        often_KM = (own_KB @ chosen_BM[~test_B] + 0.5) / (count_K[:, None] + 1)
        prior_K = ((count_K + 0.5) / (count_K + 0.5).sum()).log()
        seen = chosen_BM[test_B]
        likely = seen @ often_KM.log().T + (1 - seen) @ (1 - often_KM).log().T + prior_K
        right += int((likely.argmax(1) == labels[test_B]).sum())
    return right / B


def check_labels(owner: str, labels: Tensor, batch: int, classes: int) -> Tensor:
    """Labels (B,) on the CPU, if they are one class for each image."""
    labels = labels.detach().cpu()
    if labels.shape != (batch,) or labels.is_floating_point():
        raise ValueError(
            f"{owner}: labels are {tuple(labels.shape)} {labels.dtype}; give one whole number for each of the "
            f"{batch} images"
        )
    if batch and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"{owner}: labels go from {int(labels.min())} to {int(labels.max())}; with classes={classes} they "
            f"must be from 0 to {classes - 1}"
        )
    return labels.long()

"""Routing by class: which patches experts select in each class, and how much the selection says about the class.

The router never sees labels. If its selection nevertheless depends on the class, the selected position
carries information about the class: the mutual information in bits, compared with its value for
shuffled labels, since the estimate is above 0 for few images.

Shapes, beyond the legend of `routing_record`: K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.keyed_random import keys, permutations
from moesaic.routing_record import Routing

__all__ = [
    "ClassMaps",
    "ClassRouting",
    "Information",
    "check_labels",
    "class_maps",
    "class_routing",
    "information",
    "probe_accuracy",
]

MIN_CLASS_IMAGES = 20
"""Numbers about a class with fewer images are unreliable."""

SHUFFLES = 200
"""Shuffles of the labels for the chance level."""

FOLDS = 5
MIN_PROBE_IMAGES = 20


@dataclass(frozen=True)
class Information:
    """Mutual information of the class and one selection, in bits."""

    bits: float
    by_chance: float
    """95 % quantile for shuffled labels."""
    most: float
    """The entropy of the class: the upper bound."""

    @property
    def significant(self) -> bool:
        """Whether it is above the chance level."""
        return self.bits > self.by_chance


@dataclass(frozen=True, eq=False)
class ClassMaps:
    """Selection rates and gates of patches by class; made by `class_maps`. Tensors are float64 on the CPU."""

    images: tuple[int, ...]
    """(K,): images per class."""
    selection_rate: Tensor
    """(K, E, N): share of the images of a class in which the expert selects the patch; for a soft router, the mean
    dispatch weight of the patch."""
    gate: Tensor
    """(K, E, N): mean gate in those images, 0 if there is none."""


@dataclass(frozen=True, eq=False)
class ClassRouting:
    """Routing by class, and its dependence on the class; made by `class_routing`. Tensors are float64 on the CPU."""

    images: tuple[int, ...]
    """(K,): images per class."""
    selection_rate: Tensor
    """(K, E, N): share of the images of a class in which the expert selects the patch; for a soft router, the mean
    dispatch weight of the patch."""
    gate: Tensor
    """(K, E, N): mean gate in those images, 0 if there is none."""
    information: Information
    """Of one (expert, patch) selection of the layer, drawn at random."""
    expert_information: tuple[Information, ...]
    """Of one patch of the expert, drawn at random."""
    probe_accuracy: float | None
    """Cross-validated accuracy of a naive Bayes classifier that sees the selection alone; None for a soft router, or
    with too few images."""
    majority_share: float
    """Share of the most frequent class."""


def class_routing(routing: Routing, labels: Tensor, classes: int, *, seed: int = 0) -> ClassRouting:
    """Compares the routing of images of different classes; ``labels`` (B,) are from 0 to ``classes`` − 1.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([0, 0, 0, 3, 3, 3]).view(6, 1, 1)           # one expert: patch 0 of some, 3 of others
    >>> routing = Routing("patch", torch.zeros(6, 4, 1), index, torch.full((6, 1, 1), 0.5), "expert", grid=(2, 2))
    >>> found = class_routing(routing, torch.tensor([0, 0, 0, 1, 1, 1]), classes=2)
    >>> found.selection_rate[:, 0].tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    >>> found.information.bits                                           # the position determines the class
    1.0
    """
    labels = check_labels("class_routing", labels, routing.batch, classes)
    work_BEN = _work(routing)
    maps = class_maps(routing, labels, classes)
    soft = routing.dispatch is not None
    return ClassRouting(
        images=maps.images,
        selection_rate=maps.selection_rate,
        gate=maps.gate,
        information=information(work_BEN.flatten(1), labels, classes, seed=seed),
        expert_information=tuple(
            information(work_BEN[:, e], labels, classes, seed=seed) for e in range(routing.experts)
        ),
        probe_accuracy=None if soft else probe_accuracy(work_BEN.flatten(1), labels, classes, seed=seed),
        majority_share=max(maps.images) / max(1, len(labels)),
    )


def class_maps(routing: Routing, labels: Tensor, classes: int) -> ClassMaps:
    """Selection rates and mean gates in images of each class; ``labels`` (B,) are from 0 to ``classes`` − 1.

    >>> import torch
    >>> index = torch.tensor([0, 0, 3]).view(3, 1, 1)
    >>> routing = Routing("patch", torch.zeros(3, 4, 1), index, torch.full((3, 1, 1), 0.5), "expert", grid=(2, 2))
    >>> maps = class_maps(routing, torch.tensor([0, 1, 1]), classes=2)
    >>> maps.selection_rate[:, 0].tolist(), maps.gate[1, 0].tolist()
    ([[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5]], [0.5, 0.0, 0.0, 0.5])
    """
    labels = check_labels("class_maps", labels, routing.batch, classes)
    gate_BEN = routing.weights.detach().cpu().double().mT
    own_KB = torch.nn.functional.one_hot(labels, classes).double().T
    count_K = own_KB.sum(1)
    total_KEN = torch.einsum("kb,ben->ken", own_KB, _work(routing))
    worked_KEN = torch.einsum("kb,ben->ken", own_KB, routing.mask.cpu().double().mT)
    gated_KEN = torch.einsum("kb,ben->ken", own_KB, gate_BEN)
    return ClassMaps(
        images=tuple(int(count) for count in count_K),
        selection_rate=total_KEN / count_K.clamp(min=1)[:, None, None],
        gate=gated_KEN / worked_KEN.clamp(min=1),
    )


def information(work: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> Information:
    """Mutual information of the class and one option of an image, drawn with the weights ``work`` (B, M).

    Rows are normalised to sum 1; images with a row of zeros are ignored.

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
    # the last is the entropy of the class
    return Information(found[0], sorted(found[1:])[int(0.95 * SHUFFLES)], _bits(own_BK.mean(0).diag()))


def _bits(joint_KM: Tensor) -> float:
    """Σ p(k, m) log₂ p(k, m) / (p(k) p(m))."""
    apart_KM = joint_KM.sum(1, keepdim=True) * joint_KM.sum(0, keepdim=True)
    ratio_KM = torch.where(joint_KM > 0, joint_KM / torch.where(apart_KM > 0, apart_KM, 1), 1)
    return max(0.0, float((joint_KM * ratio_KM.log2()).sum()))


def _work(routing: Routing) -> Tensor:
    """(B, E, N) float64 on the CPU: 1 where the expert selects the unit; soft: the mean dispatch weight."""
    work_BNE = routing.mask if routing.dispatch is None else routing.dispatch.detach().mean(-1)
    return work_BNE.cpu().double().mT


def probe_accuracy(selected_BM: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> float | None:
    """Cross-validated accuracy of naive Bayes that predicts the class from binary features (B, M).

    None if there are too few images.

    >>> import torch
    >>> labels = torch.arange(40) % 2
    >>> probe_accuracy(torch.nn.functional.one_hot(labels), labels, classes=2)
    1.0
    """
    selected_BM = selected_BM.detach().cpu().double()
    B = len(labels)
    if B < MIN_PROBE_IMAGES:
        return None
    fold_B = permutations(keys(seed, [0]), "folds", B)[0] % FOLDS
    correct = 0
    for fold in range(FOLDS):
        test_B = fold_B == fold
        own_KB = torch.nn.functional.one_hot(labels[~test_B], classes).double().T
        count_K = own_KB.sum(1)
        rate_KM = (own_KB @ selected_BM[~test_B] + 0.5) / (count_K[:, None] + 1)
        prior_K = ((count_K + 0.5) / (count_K + 0.5).sum()).log()
        features_BM = selected_BM[test_B]
        log_likelihood = features_BM @ rate_KM.log().T + (1 - features_BM) @ (1 - rate_KM).log().T + prior_K
        correct += int((log_likelihood.argmax(1) == labels[test_B]).sum())
    return correct / B


def check_labels(owner: str, labels: Tensor, batch: int, classes: int) -> Tensor:
    """Returns the labels (B,) on the CPU; raises unless there is one class index for each image."""
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

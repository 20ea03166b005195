"""The mean routing of a layer over some batches, as `fit` records it for each epoch.

Sums stay on the layer's device and are read once, at the end. They are tensors, so that a checkpoint can save them,
and are changed in place, so that a CUDA graph can add to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.insight.metrics import (
    entropy_of_counts,
    floats,
    mean_of_pairs,
    overlap,
    overlap_by_chance,
    score_entropy,
)
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing_record import Chooser, Routing

__all__ = ["LayerRouting", "RoutingSums"]

_DECIMALS = 5


@dataclass(frozen=True)
class LayerRouting:
    """The mean routing of a layer over some batches."""

    chooser: Chooser
    load: tuple[float, ...]
    """Load share of each expert."""
    entropy: float
    """Routing entropy over its maximum: 0 for certain choices, 1 for uniform ones."""
    coverage: float
    """Share of units that at least one expert gets."""
    overlap: float | None
    """Mean overlap (Jaccard) of pairs of experts; None unless experts choose."""
    chance: float | None
    """The overlap of random choices of the same sizes; None unless experts choose."""
    class_entropy: float
    """Dispatch entropy of the classes over its maximum: 0 if each expert gets a single class, 1 if each gets all."""


class RoutingSums:
    """Sums over the batches of a layer.

    >>> import torch
    >>> index = torch.tensor([[[0]], [[0]], [[1]], [[1]]])               # four samples, two to each expert
    >>> routing = Routing("sample", torch.zeros(4, 1, 2), index, torch.ones(4, 1, 1), "unit")
    >>> sums = RoutingSums.empty(routing, classes=2)
    >>> sums.add(routing, torch.tensor([0, 0, 1, 1]))
    >>> sums.mean()
    LayerRouting(chooser='unit', load=(0.5, 0.5), entropy=1.0, coverage=1.0, overlap=None, chance=None,
    class_entropy=0.0)
    """

    def __init__(self, chooser: Chooser, sums: Tensor, class_load_KE: Tensor) -> None:
        self.chooser: Chooser = chooser
        self._sums = sums
        """(5,): images; over images, the sums of entropy, coverage, overlap and overlap by chance."""
        self._class_load_KE = class_load_KE

    @classmethod
    def empty(cls, routing: Routing, classes: int) -> RoutingSums:
        """Returns sums for a layer with routings such as this one."""
        device = routing.scores.device
        zeros = torch.zeros(classes, routing.experts, device=device)
        return cls(routing.chooser, torch.zeros(5, dtype=torch.float64, device=device), zeros)

    @torch.no_grad()
    def add(self, routing: Routing, labels: Tensor, batch: GlobalBatch | None = None) -> None:
        """Adds a batch, whose images have the classes ``labels`` (B,); does not wait for the device.

        Where its images are spread over processes as ``batch``, all of them add all images.
        """
        if batch is None:
            self._add(routing, labels)
            return
        own = RoutingSums(self.chooser, torch.zeros_like(self._sums), torch.zeros_like(self._class_load_KE))
        own._add(routing, labels)
        self._sums += batch.sum(own._sums)
        self._class_load_KE += batch.sum(own._class_load_KE)

    def _add(self, routing: Routing, labels: Tensor) -> None:
        if not routing.batch * routing.units:
            return
        mask_BNE = routing.mask
        work_BNE = routing.weights.detach() if routing.chooser == "soft" else mask_BNE
        self._class_load_KE.index_add_(0, labels, work_BNE.sum(1).to(self._class_load_KE.dtype))
        zero = torch.zeros((), device=self._sums.device)
        covered = mask_BNE.any(-1).float().mean()
        pairs, chance = zero, zero
        if routing.chooser == "expert":
            pairs = mean_of_pairs(overlap(routing))
            chance = overlap_by_chance(routing) / routing.batch
        means = torch.stack([each.double() for each in (zero + 1, score_entropy(routing), covered, pairs, chance)])
        self._sums += routing.batch * means

    @property
    def images(self) -> int:
        """The number of images added; waits for the device."""
        return int(self._sums[0])

    def clear(self) -> None:
        """Remove all batches."""
        self._sums.zero_()
        self._class_load_KE.zero_()

    def mean(self) -> LayerRouting:
        """Returns the means; waits for the device."""
        images, entropy, coverage, pairs, chance = floats(self._sums)
        images = max(images, 1)
        count_KE = self._class_load_KE.cpu()
        load_E = count_KE.double().sum(0)
        total = float(load_E.sum()) or 1.0
        highest = math.log(len(count_KE)) if len(count_KE) > 1 else 1.0
        chosen = self.chooser == "expert"
        return LayerRouting(
            self.chooser,
            tuple(round(each / total, _DECIMALS) for each in floats(load_E)),
            round(entropy / images, _DECIMALS),
            round(coverage / images, _DECIMALS),
            round(pairs / images, _DECIMALS) if chosen else None,
            round(chance / images, _DECIMALS) if chosen else None,
            round(entropy_of_counts(count_KE) / highest, _DECIMALS),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the sums."""
        return {"sums": self._sums, "class_load": self._class_load_KE}

    @classmethod
    def from_state(cls, chooser: Chooser, state: Mapping[str, Tensor], device: torch.device) -> RoutingSums:
        """Restores what `state_dict` returned."""
        return cls(chooser, state["sums"].to(device), state["class_load"].to(device))

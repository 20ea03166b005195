"""Where a paper's experiments are carried out: cells of trials in, what they measured out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import draws
from moesaic.data import DigitPatches, PatternPatches, load_digits
from moesaic.models import Networks, TwoLayer
from moesaic.theory import coupling, proper_routing, routed_share
from moesaic.training import Cells, Progress, Schedule, Trained, accuracy, train_trials

__all__ = ["Cell", "Lab", "Result"]

Array = NDArray[np.float64]

ENGINE = 2
"""Raised when trials come out differently than before, so that no cell of before is taken for one of now."""

_PROBE = 50
"""Samples on which the activation pattern of neurons is followed."""


@dataclass(frozen=True)
class Cell:
    """Trials of one network on one number of samples."""

    model: TwoLayer
    schedule: Schedule
    samples: int
    trials: int
    patterns: PatternPatches | None = None
    """The distribution of Section 4.2 to draw from; None: digits."""
    test_samples: int = 1000
    follow_patterns: bool = False
    """Whether to record after every epoch how many neurons switch as at initialisation."""

    def __post_init__(self) -> None:
        if self.follow_patterns and self.schedule.stop_at_zero_error:
            raise ValueError(
                "Cell: follow_patterns=True looks at all trials after every epoch, but with stop_at_zero_error=True "
                "some stop before others; use a schedule with stop_at_zero_error=False"
            )


@dataclass(frozen=True, eq=False)
class Result:
    """What the trials of a cell measured; arrays begin with the axis of trials."""

    accuracy: Array
    """(T,) on test samples, in percent."""
    epochs: Array
    """(T,) until training stopped."""
    errors: Array
    """(T,) samples on the wrong side in the last epoch."""
    seconds: float
    routed: Array = field(default_factory=lambda: np.empty(0))
    """(T, c, N) separate training: the share of a class whose patch is in the top l of its router, l = 1 … N."""
    largest_gate: Array = field(default_factory=lambda: np.empty(0))
    """(T, c) joint training: the share of a class whose patch gets the largest gate of the class's best expert."""
    kept_patterns: Array = field(default_factory=lambda: np.empty(0))
    """(T, epochs + 1): the share of neurons that switch as at initialisation, before training and after each epoch."""


class Lab:
    """Carries out cells, keeps the results on disk, and does no cell twice."""

    def __init__(self, cells: Cells, digits: DigitPatches, *, device: str, seed: int, progress: Progress) -> None:
        self.digits = digits
        self._cells = cells
        self._device = device
        self.seed = seed
        self._progress = progress
        self._digest = _digest(digits)

    def carry_out(self, named: Mapping[str, Cell]) -> dict[str, Result]:
        """The results of the cells, by name."""
        todo = {cell: name for name, cell in named.items() if self._cells.find(name, self._spec(cell)) is None}
        self._progress.begin("all experiments", sum(cell.trials * cell.schedule.epochs for cell in todo))
        found: dict[Cell, Result] = {}
        for name, cell in named.items():
            if cell not in found:
                kept = self._cells.get_or_run(name, self._spec(cell), self._work(name, cell))
                arrays = {key: np.asarray(value, dtype=np.float64) for key, value in kept.result.items()}
                found[cell] = Result(**arrays, seconds=kept.seconds)
        self._progress.end()
        return {name: found[cell] for name, cell in named.items()}

    def _spec(self, cell: Cell) -> dict[str, Any]:
        source = {"digits": self._digest} if cell.patterns is None else asdict(cell.patterns)
        return {
            "engine": ENGINE,
            "model": asdict(cell.model),
            "schedule": asdict(cell.schedule),
            "source": source,
            "samples": cell.samples,
            "test_samples": cell.test_samples,
            "trials": cell.trials,
            "seed": self.seed,
            "follow_patterns": cell.follow_patterns and _PROBE,
        }

    def _work(self, name: str, cell: Cell) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            self._progress.begin(name, cell.trials * cell.schedule.epochs)
            try:
                return self._measure(cell)
            finally:
                self._progress.end()

        return work

    def _measure(self, cell: Cell) -> dict[str, Any]:
        source = cell.patterns or self.digits
        follower = None
        if cell.follow_patterns:
            keys = draws.keys(self.seed, range(cell.trials), self._device)
            probe = source.draw(keys, _PROBE, "test")
            follower = _PatternFollower(probe.pool, probe.index)
        trained = train_trials(
            cell.model,
            source,
            trials=range(cell.trials),
            samples=cell.samples,
            schedule=cell.schedule,
            seed=self.seed,
            device=self._device,
            chunk=cell.trials if cell.follow_patterns else None,
            progress=self._progress,
            watch=follower,
        )
        measured: dict[str, Any] = {"epochs": trained.epochs.tolist(), "errors": trained.errors.tolist()}
        measured.update(self._test(cell, trained))
        if follower is not None:
            measured["kept_patterns"] = torch.stack(follower.shares, dim=1).tolist()
        return measured

    def _test(self, cell: Cell, trained: Trained) -> dict[str, Any]:
        networks = trained.networks
        test = (cell.patterns or self.digits).draw(trained.keys, cell.test_samples, "test")
        measured: dict[str, Any] = {"accuracy": (100 * accuracy(networks, test)).tolist()}
        if cell.model.kind != "cnn":
            scores = networks.scores(test.pool, test.index).double()
            if cell.model.kind == "separate":
                measured["routed"] = routed_share(scores, test.labels, test.discriminative).tolist()
            else:
                found = proper_routing(scores, test.labels, test.discriminative)
                measured["largest_gate"] = found.largest_gate.tolist()
        return measured


class _PatternFollower:
    """Watches which neurons switch as at initialisation."""

    def __init__(self, pool: Tensor, index: Tensor) -> None:
        self.shares: list[Tensor] = []
        self._pool, self._index = pool, index
        self._start: Tensor | None = None

    def __call__(self, epoch: int, networks: Networks, which: Tensor) -> None:
        now = networks.neuron_responses(self._pool, self._index[which])
        if self._start is None:
            self._start = now
        self.shares.append(coupling(now, self._start).mean.double().mean(dim=-1).cpu())


def _digest(digits: DigitPatches) -> str:
    """Tells whether digits are the same, wherever they come from."""
    content = hashlib.sha256(repr((digits.patches, digits.classes)).encode())
    for split in ("train", "test"):
        loaded = load_digits(split, digits.data_dir)
        content.update(np.ascontiguousarray(loaded.pixels).tobytes())
        content.update(np.ascontiguousarray(loaded.kinds).tobytes())
    return content.hexdigest()[:16]

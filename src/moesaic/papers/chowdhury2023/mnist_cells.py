"""The cells of Chowdhury et al. 2023: trials of one two-layer network on one number of samples."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.data import load_digits
from moesaic.papers.chowdhury2023.digit_patches import DigitPatches
from moesaic.papers.chowdhury2023.pattern_data import PatternPatches
from moesaic.papers.chowdhury2023.theory.pseudo_network import coupling
from moesaic.papers.chowdhury2023.theory.routing_property import proper_routing, routed_share
from moesaic.papers.chowdhury2023.trial_training import Schedule, Trained, accuracy, train_trials
from moesaic.papers.chowdhury2023.two_layer import Networks, TwoLayer
from moesaic.papers.engine import claims
from moesaic.papers.engine.runner import Lab

__all__ = ["Plan", "Result", "Study", "Test", "TwoLayerCell"]

Array = NDArray[np.float64]

ENGINE = 2
"""Raised when trials come out differently than before, so that no cell of before is taken for one of now."""

_PROBE = 50
"""Samples on which the activation pattern of neurons is followed."""


@dataclass(frozen=True)
class TwoLayerCell:
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
                "TwoLayerCell: follow_patterns=True looks at all trials after every epoch, but with "
                "stop_at_zero_error=True some stop before others; use a schedule with stop_at_zero_error=False"
            )

    @property
    def steps(self) -> int:
        return self.trials * self.schedule.epochs

    def obstacle(self, lab: Lab) -> str | None:
        return None

    def spec(self, lab: Lab) -> dict[str, Any]:
        source = {"digits": _digest(lab.digits)} if self.patterns is None else asdict(self.patterns)
        return {
            "engine": ENGINE,
            "model": asdict(self.model),
            "schedule": asdict(self.schedule),
            "source": source,
            "samples": self.samples,
            "test_samples": self.test_samples,
            "trials": self.trials,
            "seed": lab.seed,
            "follow_patterns": self.follow_patterns and _PROBE,
        }

    def measure(self, lab: Lab) -> dict[str, Any]:
        source = self.patterns or lab.digits
        follower = None
        if self.follow_patterns:
            keys = keyed_random.keys(lab.seed, range(self.trials), lab.device)
            probe = source.draw(keys, _PROBE, "test")
            follower = _PatternFollower(probe.pool, probe.index)
        trained = train_trials(
            self.model,
            source,
            trials=range(self.trials),
            samples=self.samples,
            schedule=self.schedule,
            seed=lab.seed,
            device=lab.device,
            chunk=self.trials if self.follow_patterns else None,
            progress=lab.progress,
            watch=follower,
        )
        measured: dict[str, Any] = {"epochs": trained.epochs.tolist(), "errors": trained.errors.tolist()}
        measured.update(self._test(lab, trained))
        if follower is not None:
            measured["kept_patterns"] = torch.stack(follower.shares, dim=1).tolist()
        return measured

    def _test(self, lab: Lab, trained: Trained) -> dict[str, Any]:
        networks = trained.networks
        test = (self.patterns or lab.digits).draw(trained.keys, self.test_samples, "test")
        measured: dict[str, Any] = {"accuracy": (100 * accuracy(networks, test)).tolist()}
        if self.model.kind != "cnn":
            scores = networks.scores(test.pool, test.index).double()
            if self.model.kind == "separate":
                measured["routed"] = routed_share(scores, test.labels, test.discriminative).tolist()
            else:
                found = proper_routing(scores, test.labels, test.discriminative)
                measured["largest_gate"] = found.largest_gate.tolist()
        return measured

    def result(self, kept: dict[str, Any]) -> Result:
        return Result(**{key: np.asarray(value, dtype=np.float64) for key, value in kept.items()})


@dataclass(frozen=True, eq=False)
class Result:
    """What the trials of a cell measured; arrays begin with the axis of trials."""

    accuracy: Array
    """(T,) on test samples, in percent."""
    epochs: Array
    """(T,) until training stopped."""
    errors: Array
    """(T,) samples on the wrong side in the last epoch."""
    routed: Array = field(default_factory=lambda: np.empty(0))
    """(T, c, N) separate training: the share of a class whose patch is in the top l of its router, l = 1 … N."""
    largest_gate: Array = field(default_factory=lambda: np.empty(0))
    """(T, c) joint training: the share of a class whose patch gets the largest gate of the class's best expert."""
    kept_patterns: Array = field(default_factory=lambda: np.empty(0))
    """(T, epochs + 1): the share of neurons that switch as at initialisation, before training and after each epoch."""


Plan = claims.Plan[Result]
Study = claims.Study[Result]
Test = claims.Test[Result]


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


@cache
def _digest(digits: DigitPatches) -> str:
    """Tells whether digits are the same, wherever they come from."""
    content = hashlib.sha256(repr((digits.patches, digits.classes)).encode())
    for split in ("train", "test"):
        loaded = load_digits(split, digits.data_dir)
        content.update(np.ascontiguousarray(loaded.pixels).tobytes())
        content.update(np.ascontiguousarray(loaded.kinds).tobytes())
    return content.hexdigest()[:16]

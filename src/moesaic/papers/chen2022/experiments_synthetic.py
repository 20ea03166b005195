"""Experiments of Chen et al. 2022 on synthetic data: Tables 1 and 3 to 9, Figures 1 and 3 to 5, and the theory.

`MixtureCell` trains the trials of one network in one setting of Definition 3.1. `AdditiveCell` and `SmoothingCell`
evaluate Theorem 4.1 and Lemma 5.1. `plan` lists the cells of a preset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.insight import expert_accuracy, inner_products
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches, ClusterSetting
from moesaic.papers.chen2022.theory.additive_classifiers import AdditiveClassifier
from moesaic.papers.chen2022.theory.exploration_stage import exploration_steps, initial_groups
from moesaic.papers.chen2022.theory.smoothing import routing_probabilities, steepest_scores
from moesaic.papers.chen2022.trial_training import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.papers.chen2022.two_layer_networks import FilterActivation, Mixture, Mixtures
from moesaic.papers.engine import paper
from moesaic.papers.engine.cells import AnalyticCell, ArrayCell, Cell, CellArrays
from moesaic.papers.engine.findings import Claim
from moesaic.papers.engine.runner import Runner

__all__ = [
    "ACTIVATIONS",
    "INIT_SCALES",
    "SETTINGS",
    "SIZES",
    "AdditiveCell",
    "ClaimCheck",
    "ExperimentResults",
    "MixtureCell",
    "Plan",
    "Sizes",
    "SmoothingCell",
    "claim",
    "plan",
    "test_accuracy",
]

Array = NDArray[np.float64]
Plan = paper.Plan[CellArrays]
ExperimentResults = paper.ExperimentResults[CellArrays]
ClaimCheck = paper.ClaimCheck[CellArrays]

ENGINE = 1
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

RECORDER = 2
"""Version of what is measured during training; older cells lack the sum of the router's rows."""

_PROBE = 2000
"""Test samples on which accuracy and expected load are measured during training."""


def claim(id: str, where: str, statement: str, published: float | str | None, rule: str) -> Claim:
    """Returns a claim of this paper."""
    return Claim(id, "chen2022", where, statement, published, rule)


@dataclass(frozen=True)
class MixtureCell(ArrayCell):
    """Trains the trials of one network, each on its own samples."""

    model: Mixture
    schedule: MixtureSchedule
    setting: ClusterSetting
    trials: int = 10
    samples: int = 16_000
    test_samples: int = 16_000
    follow: int = 0
    """Steps between two measurements during training; 0 for none."""

    @property
    def steps(self) -> int:
        return self.trials * self.schedule.steps

    @property
    def explored(self) -> int:
        """T_1, the number of steps of the exploration stage, from the printed rates and σ0."""
        return exploration_steps(self.schedule.learning_rate, self.model.init_scale)

    def spec(self, runner: Runner) -> dict[str, Any]:
        recorder = {"recorder": RECORDER} if self.setting == "figure 1" else {}  # of the others no claim reads it
        return {"engine": ENGINE, "mixture": asdict(self), "probe": _PROBE, "seed": runner.seed, **recorder}

    def measure(self, runner: Runner) -> dict[str, Any]:
        source = ClusterPatches.setting(self.setting)
        recorder = _TrainingRecorder(self, source, runner.seed) if self.follow else None
        trained = train_mixtures(
            self.model,
            source,
            trials=range(self.trials),
            samples=self.samples,
            schedule=self.schedule,
            seed=runner.seed,
            device=runner.device,
            progress=runner.progress,
            callback=recorder,
            callback_steps=() if recorder is None else recorder.record_steps,
        )
        measured: dict[str, Any] = {
            "steps": trained.steps.tolist(),
            "losses": _rounded(trained.losses),
            "errors": trained.errors.tolist(),
            **self._test_measurements(source, trained),
        }
        if recorder is not None:
            measured |= recorder.measurements()
        return measured

    def _test_measurements(self, source: ClusterPatches, trained: TrainedMixtures) -> dict[str, Any]:
        """Measures the trained networks one trial at a time: the samples of all trials are hundreds of megabytes."""
        found: list[dict[str, Any]] = []
        for t in range(self.trials):
            keys = trained.keys[t : t + 1]
            mixtures = trained.mixtures.of(torch.tensor([t], device=keys.device))
            test = source.draw(keys, self.test_samples, "test")
            accuracy, chosen = test_accuracy(mixtures, test, keys)
            each: dict[str, Any] = {"accuracy": accuracy}
            if self.model.routed:
                train = source.draw(keys, self.samples, "train")
                each |= {
                    "test_dispatch": _dispatch_counts(chosen, test, self.model.experts)[0].tolist(),
                    "train_dispatch": _dispatch_counts(trained.dispatch[t : t + 1], train, self.model.experts)[
                        0
                    ].tolist(),
                    "expert_accuracy": _rounded(_expert_accuracies(mixtures, test)[0]),
                }
            found.append(each)
        return {name: [each[name] for each in found] for name in found[0]}


class _TrainingRecorder:
    """Callback that measures networks while they train."""

    def __init__(self, cell: MixtureCell, source: ClusterPatches, seed: int) -> None:
        self._regular = range(0, cell.schedule.steps + 1, cell.follow)
        explored = (cell.explored,) if cell.explored <= cell.schedule.steps else ()
        self.record_steps = sorted({*self._regular, *explored})
        self._cell, self._source, self._seed = cell, source, seed
        self._recorded: dict[tuple[int, int], dict[str, Any]] = {}
        self._probes: dict[tuple[int, ...], ClusterData] = {}

    def __call__(self, step: int, mixtures: Mixtures, data: ClusterData, which: Tensor) -> None:
        E, router = mixtures.model.experts, mixtures.router
        if router is None:
            raise ValueError("MixtureCell: follow measures routers, and a single network has none; use follow=0")
        keys = keyed_random.keys(self._seed, which.cpu(), which.device)
        trials = tuple(int(trial) for trial in which)
        probe = self._probes.setdefault(trials, self._source.draw(keys, _PROBE, "test"))
        scores = mixtures.scores(data.patches)
        noise = keyed_random.coarse_uniform(keys, f"chen2022/look {step}", scores.shape[1], E)
        counts = _dispatch_counts(mixtures.choose(scores, noise), data, E)
        tested = (
            keyed_random.coarse_uniform(keys, f"chen2022/probe {step}", _PROBE, E)
            if mixtures.model.noise_in_test
            else None
        )
        outputs, _ = mixtures.predict(probe.patches, tested)
        features, centres = (each.to(keys.device) for each in (self._source.features, self._source.centres))
        rows = router[:, :, None]
        measured: dict[str, Tensor] = {
            "dispatch": counts,
            "probe_accuracy": 100 * _is_correct(outputs, probe.labels).double().mean(dim=1),
            "load": routing_probabilities(scores[:, :_PROBE].double()).mean(dim=1),
            "expert_feature": inner_products(mixtures.weights, features),
            "expert_centre": inner_products(mixtures.weights, centres),
            "router_feature": inner_products(rows, features),
            "router_centre": inner_products(rows, centres),
            "router_sum": _relative_sum(router),
        }
        if step == 0:
            measured["groups"] = initial_groups(mixtures.weights, features)
        if step <= self._cell.explored:  # of a trial that stops earlier, the last measurement is used
            measured["explored_accuracy"] = _expert_accuracies(mixtures, probe)
        for place, trial in enumerate(trials):
            self._recorded[step, trial] = {name: _rounded(values[place]) for name, values in measured.items()}

    def measurements(self) -> dict[str, Any]:
        """Returns the measurements at the S regular steps (T, S, …), and those that are made once (T, …)."""
        trials = range(self._cell.trials)
        names = [name for name in self._recorded[0, 0] if name not in ("groups", "explored_accuracy")]
        seen: dict[str, Any] = {
            f"track_{name}": [[self._last(step, t)[name] for step in self._regular] for t in trials] for name in names
        }
        seen["groups"] = [self._recorded[0, t]["groups"] for t in trials]
        if self._cell.explored in self.record_steps:
            seen["explored_accuracy"] = [self._last(self._cell.explored, t)["explored_accuracy"] for t in trials]
        return {"track_steps": list(self._regular), **seen}

    def _last(self, step: int, trial: int) -> dict[str, Any]:
        """Returns the measurements at the step, or the last ones before training stopped."""
        return next(
            self._recorded[moment, trial] for moment in range(step, -1, -1) if (moment, trial) in self._recorded
        )


def test_accuracy(mixture: Mixtures, test: ClusterData, keys: Tensor) -> tuple[float, Tensor]:
    """Returns one network's accuracy in percent and the experts (1, B), with noise if the model has it in tests."""
    noise = None
    if mixture.model.noise_in_test:
        noise = keyed_random.coarse_uniform(keys, "chen2022/test noise", test.labels.shape[1], mixture.model.experts)
    outputs, chosen = mixture.predict(test.patches, noise)
    return 100 * _is_correct(outputs, test.labels).double().mean().item(), chosen


def _is_correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether y·F > 0."""
    return (2.0 * labels - 1.0) * outputs > 0


def _dispatch_counts(chosen: Tensor, data: ClusterData, experts: int) -> Tensor:
    """(T, K, E): number of samples of each cluster that were routed to each expert."""
    clusters = int(data.clusters.max()) + 1
    pair = torch.nn.functional.one_hot(data.clusters * experts + chosen, clusters * experts)
    return pair.sum(dim=1).view(-1, clusters, experts)


def _expert_accuracies(mixtures: Mixtures, data: ClusterData) -> Tensor:
    """(T, E, K): accuracy of each expert on all samples of each cluster."""
    starts = range(0, data.patches.shape[1], 2000)
    parts = [mixtures.expert_outputs(data.patches[:, start : start + 2000]) for start in starts]
    guesses = (torch.cat(parts, dim=1) > 0).long().transpose(1, 2)
    return expert_accuracy(guesses, data.labels, data.clusters)


def _relative_sum(router: Tensor) -> Tensor:
    """(T,): norm of the sum of a router's rows (T, E, D) over the sum of their norms; 0 for a router of zeros."""
    of_sum = router.sum(dim=1).square().sum(dim=-1).sqrt()
    of_rows = router.square().sum(dim=-1).sqrt()
    return of_sum / of_rows.sum(dim=1).clamp_min(1e-30)


def _rounded(values: Tensor) -> Any:
    """Returns nested lists of the values with five significant digits, since cells are stored as text."""
    exact: Array = values.double().cpu().numpy()
    size = 10.0 ** (4 - np.floor(np.log10(np.where(exact == 0, 1, np.abs(exact)))))
    return (np.round(exact * size) / size).tolist()


SETTINGS: tuple[ClusterSetting, ...] = (1, 2, 3, 4)
ACTIVATIONS: tuple[FilterActivation, ...] = get_args(FilterActivation)
INIT_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""σ0 of the sweep. At d = 50 Theorem 4.2 allows 0.27 to 0.96."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a preset."""

    trials: int
    """Trials of mixtures."""
    single_trials: int
    samples: int
    """Training samples per trial, and test samples."""
    recordings: int
    """Times that networks are measured during training, before the last step."""
    printed: tuple[ClusterSetting, ...]
    """Settings of the mixtures as printed, which need eight times as many steps."""
    printed_singles: bool
    singles: tuple[tuple[FilterActivation, int], ...]
    """Activation and filters of the single networks of Tables 1 and 3."""
    single_settings: tuple[ClusterSetting, ...]
    everything: bool
    """Also Table 8, Figure 1, the sweep over σ0, and load balancing as printed."""


SIZES: dict[str, Sizes] = {
    "quick": Sizes(4, 2, 3000, 25, (1,), False, (("identity", 128), ("cubic", 128)), (1,), False),
    "short": Sizes(
        10,
        10,
        16_000,
        50,
        SETTINGS,
        True,
        (("identity", 128), ("identity", 512), ("cubic", 128), ("cubic", 512)),
        SETTINGS,
        True,
    ),
}
SIZES["full"] = SIZES["short"]  # which are the paper's own


def plan(preset: str, fidelity: Fidelity) -> Plan:
    """Returns the cells of a preset, by names such as "moe/cubic/s1"."""
    sizes = SIZES[preset]
    if fidelity == "best":
        return {}
    cells: dict[str, Cell[CellArrays]] = {}
    for setting in SETTINGS if fidelity == "released" else sizes.printed:
        cells[f"moe/cubic/s{setting}"] = _mixture(sizes, fidelity, "cubic", setting)
        cells[f"moe/identity/s{setting}"] = _mixture(sizes, fidelity, "identity", setting)
        if fidelity == "released" or sizes.everything:
            cells[f"balanced/identity/s{setting}"] = _mixture(sizes, fidelity, "identity", setting, balance=True)
    if fidelity == "released" or sizes.printed_singles:
        cells |= _singles(sizes, fidelity)
    cells["explored/cubic/s3"] = _explored(sizes, fidelity)
    if fidelity == "print":
        cells |= {f"theory/additive/s{setting}": AdditiveCell(setting) for setting in (*SETTINGS, 7)}
        cells["theory/smoothing"] = SmoothingCell()
    if sizes.everything:
        cells |= _figure_1(fidelity, sizes.trials)
        if fidelity == "print":
            for scale in INIT_SCALES:
                cell = _mixture(sizes, fidelity, "cubic", 3)
                cells[f"init/{scale}"] = replace(cell, model=replace(cell.model, init_scale=scale))
    return cells


def _mixture(
    sizes: Sizes, fidelity: Fidelity, activation: FilterActivation, setting: ClusterSetting, *, balance: bool = False
) -> MixtureCell:
    schedule = MixtureSchedule.of(fidelity, balance=balance)
    return MixtureCell(
        Mixture.of(fidelity, activation),
        schedule,
        setting,
        sizes.trials,
        sizes.samples,
        sizes.samples,
        follow=0 if balance else schedule.steps // sizes.recordings,
    )


def _explored(sizes: Sizes, fidelity: Fidelity) -> MixtureCell:
    """The mixture where Theorem 4.2 is about it: as printed at T_1, as released when its early stopping ends training.

    T_1 is a formula of the printed rates; the released code has other units, and a rule of its own when to stop.
    """
    cell = _mixture(sizes, fidelity, "cubic", 3)
    if fidelity == "released":
        return cell
    return replace(cell, schedule=replace(cell.schedule, steps=cell.explored), follow=cell.explored)


def _singles(sizes: Sizes, fidelity: Fidelity) -> dict[str, Cell[CellArrays]]:
    def single(activation: FilterActivation, filters: int, setting: ClusterSetting) -> MixtureCell:
        model, schedule = Mixture.single(fidelity, activation, filters), MixtureSchedule.single(fidelity, activation)
        return MixtureCell(model, schedule, setting, sizes.single_trials, sizes.samples, sizes.samples)

    cells: dict[str, Cell[CellArrays]] = {}
    for setting in sizes.single_settings:
        for activation, filters in sizes.singles:
            cells[f"single/{activation}-{filters}/s{setting}"] = single(activation, filters, setting)
    for activation in ACTIVATIONS:
        cells[f"table7/{activation}"] = single(activation, 128, 7)
        if sizes.everything:
            cells |= {f"table8/{activation}/s{setting}": single(activation, 128, setting) for setting in (1, 2)}
    return cells


def _figure_1(fidelity: Fidelity, trials: int) -> dict[str, Cell[CellArrays]]:
    schedule = MixtureSchedule.of(fidelity)
    kinds: Sequence[FilterActivation] = ("cubic", "identity")
    return {
        f"figure1/{kind}": MixtureCell(
            Mixture.of(fidelity, kind, experts=4), schedule, "figure 1", trials, 1600, 1600, schedule.steps // 50
        )
        for kind in kinds
    }


@dataclass(frozen=True)
class AdditiveCell(AnalyticCell):
    """Measures the best additive classifier on samples of a setting (Theorem 4.1)."""

    setting: ClusterSetting
    trials: int = 10
    samples: int = 16_000

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"additive": self.setting, "trials": self.trials, "samples": self.samples, "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        source = ClusterPatches.setting(self.setting)
        classifier = AdditiveClassifier(source.features, source.centres, source.alpha, source.gamma)
        accuracy: list[float] = []
        for trial in range(self.trials):
            data = source.draw(keyed_random.keys(runner.seed, [trial]), self.samples, "test")
            right = (2.0 * data.labels - 1.0) * classifier(data.patches) > 0
            accuracy.append(100 * right.double().mean().item())
        return {"accuracy": accuracy}


@dataclass(frozen=True)
class SmoothingCell(AnalyticCell):
    """Computes exactly how much routing probabilities change with the scores (Lemma 5.1).

    The pairs of scores, for 2 to 16 experts, are random ones at small and large distances, and constructed ones whose
    probabilities change most.
    """

    pairs: int = 4000

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"smoothing": self.pairs, "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        random: list[float] = []
        made: list[float] = []
        experts = (2, 4, 8, 16)
        key = keyed_random.keys(runner.seed, [0])
        for many in experts:
            name = f"chen2022/smoothing {many}"
            scores = keyed_random.normal(key, f"{name} scores", self.pairs, many)[0] / 2
            reach = 10 ** (4 * keyed_random.uniform(key, f"{name} reach", self.pairs, 1)[0] - 4)
            moved = scores + reach * (2 * keyed_random.uniform(key, f"{name} moves", self.pairs, many)[0] - 1)
            random.append(_steepness(scores, moved))
            made.append(max(_steepness(*steepest_scores(many, distance)) for distance in (1e-4, 1e-3, 1e-2, 0.1)))
        return {"experts": list(experts), "random": random, "made": made}


def _steepness(scores: torch.Tensor, moved: torch.Tensor) -> float:
    """Returns the largest change of a probability over the largest change of a score."""
    change = (routing_probabilities(scores) - routing_probabilities(moved)).abs().amax(dim=-1)
    return (change / (scores - moved).abs().amax(dim=-1)).max().item()

"""Which cells Chen et al. 2022 need on synthetic data: Tables 1 and 3 to 9, Figures 1 and 3 to 5, and the theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from moesaic import keyed_random
from moesaic.fidelity import Fidelity
from moesaic.papers.chen2022.cluster_data import ClusterPatches, ClusterSetting
from moesaic.papers.chen2022.mixture_networks import FilterActivation, Mixture
from moesaic.papers.chen2022.synthetic_cells import MixtureCell, Plan
from moesaic.papers.chen2022.theory.additive import AdditiveClassifier
from moesaic.papers.chen2022.theory.smoothing import routing_probabilities, steepest_scores
from moesaic.papers.chen2022.trial_training import MixtureSchedule
from moesaic.papers.engine.analytic_experiment import Calculation, Measured
from moesaic.papers.engine.runner import Cell, Lab

__all__ = ["ACTIVATIONS", "INIT_SCALES", "SETTINGS", "SIZES", "AdditiveCell", "Sizes", "SmoothingCell", "plan"]

SETTINGS: tuple[ClusterSetting, ...] = (1, 2, 3, 4)
ACTIVATIONS: tuple[FilterActivation, ...] = get_args(FilterActivation)
INIT_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""σ0 of the sweep. At d = 50 Theorem 4.2 allows 0.27 to 0.96."""


@dataclass(frozen=True)
class Sizes:
    """How much a preset does."""

    trials: int
    """Of mixtures."""
    single_trials: int
    samples: int
    """For training, and as many for the test."""
    looks: int
    """At networks during training, before the last step."""
    printed: tuple[ClusterSetting, ...]
    """Settings of the mixtures as printed, which take eight times as many steps."""
    printed_singles: bool
    singles: tuple[tuple[FilterActivation, int], ...]
    """Activation and filters of the single networks of Tables 1 and 3."""
    single_settings: tuple[ClusterSetting, ...]
    everything: bool
    """Also Table 8, Figure 1, the sweep over σ0, and load balancing as printed."""


SIZES: dict[str, Sizes] = {
    "quick": Sizes(4, 2, 3000, 25, (1,), False, (("identity", 128), ("cubic", 128)), (1,), False),
    "full": Sizes(
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


def plan(preset: str, fidelity: Fidelity) -> Plan:
    """The cells of a preset, by names such as "moe/cubic/s1"."""
    sizes = SIZES[preset]
    if fidelity == "best":
        return {}
    cells: dict[str, Cell[Measured]] = {}
    for setting in SETTINGS if fidelity == "released" else sizes.printed:
        cells[f"moe/cubic/s{setting}"] = _mixture(sizes, fidelity, "cubic", setting)
        cells[f"moe/identity/s{setting}"] = _mixture(sizes, fidelity, "identity", setting)
        if fidelity == "released" or sizes.everything:
            cells[f"balanced/identity/s{setting}"] = _mixture(sizes, fidelity, "identity", setting, balance=True)
    if fidelity == "released" or sizes.printed_singles:
        cells |= _singles(sizes, fidelity)
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
        follow=0 if balance else schedule.steps // sizes.looks,
    )


def _singles(sizes: Sizes, fidelity: Fidelity) -> dict[str, Cell[Measured]]:
    def single(activation: FilterActivation, filters: int, setting: ClusterSetting) -> MixtureCell:
        model, schedule = Mixture.single(fidelity, activation, filters), MixtureSchedule.single(fidelity, activation)
        return MixtureCell(model, schedule, setting, sizes.single_trials, sizes.samples, sizes.samples)

    cells: dict[str, Cell[Measured]] = {}
    for setting in sizes.single_settings:
        for activation, filters in sizes.singles:
            cells[f"single/{activation}-{filters}/s{setting}"] = single(activation, filters, setting)
    for activation in ACTIVATIONS:
        cells[f"table7/{activation}"] = single(activation, 128, 7)
        if sizes.everything:
            cells |= {f"table8/{activation}/s{setting}": single(activation, 128, setting) for setting in (1, 2)}
    return cells


def _figure_1(fidelity: Fidelity, trials: int) -> dict[str, Cell[Measured]]:
    schedule = MixtureSchedule.of(fidelity)
    kinds: Sequence[FilterActivation] = ("cubic", "identity")
    return {
        f"figure1/{kind}": MixtureCell(
            Mixture.of(fidelity, kind, experts=4), schedule, "figure 1", trials, 1600, 1600, schedule.steps // 50
        )
        for kind in kinds
    }


@dataclass(frozen=True)
class AdditiveCell(Calculation):
    """The best classifier that adds up what it says of each patch, on samples of a setting (Theorem 4.1)."""

    setting: ClusterSetting
    trials: int = 10
    samples: int = 16_000

    def spec(self, lab: Lab) -> dict[str, Any]:
        return {"additive": self.setting, "trials": self.trials, "samples": self.samples, "seed": lab.seed}

    def measure(self, lab: Lab) -> dict[str, Any]:
        source = ClusterPatches.setting(self.setting)
        classifier = AdditiveClassifier(source.features, source.centres, source.alpha, source.gamma)
        accuracy: list[float] = []
        for trial in range(self.trials):
            data = source.draw(keyed_random.keys(lab.seed, [trial]), self.samples, "test")
            right = (2.0 * data.labels - 1.0) * classifier(data.patches) > 0
            accuracy.append(100 * right.double().mean().item())
        return {"accuracy": accuracy}


@dataclass(frozen=True)
class SmoothingCell(Calculation):
    """How much the probabilities of being routed change with the scores, exactly (Lemma 5.1).

    Random pairs of scores, near and far, with 2 to 16 experts; and pairs that are made to change most.
    """

    pairs: int = 4000

    def spec(self, lab: Lab) -> dict[str, Any]:
        return {"smoothing": self.pairs, "seed": lab.seed}

    def measure(self, lab: Lab) -> dict[str, Any]:
        random: list[float] = []
        made: list[float] = []
        experts = (2, 4, 8, 16)
        key = keyed_random.keys(lab.seed, [0])
        for many in experts:
            name = f"chen2022/smoothing {many}"
            scores = keyed_random.normal(key, f"{name} scores", self.pairs, many)[0] / 2
            reach = 10 ** (4 * keyed_random.uniform(key, f"{name} reach", self.pairs, 1)[0] - 4)
            moved = scores + reach * (2 * keyed_random.uniform(key, f"{name} moves", self.pairs, many)[0] - 1)
            random.append(_steepness(scores, moved))
            made.append(max(_steepness(*steepest_scores(many, distance)) for distance in (1e-4, 1e-3, 1e-2, 0.1)))
        return {"experts": list(experts), "random": random, "made": made}


def _steepness(scores: torch.Tensor, moved: torch.Tensor) -> float:
    """The largest change of a probability for every unit by which a score changes."""
    change = (routing_probabilities(scores) - routing_probabilities(moved)).abs().amax(dim=-1)
    return (change / (scores - moved).abs().amax(dim=-1)).max().item()

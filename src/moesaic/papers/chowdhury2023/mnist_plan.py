"""The experiments of Chowdhury et al. 2023, Section 5.1, as cells: which networks, on how many samples, how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesaic.fidelity import Fidelity
from moesaic.papers.chowdhury2023.mnist_cells import Plan, TwoLayerCell
from moesaic.papers.chowdhury2023.pattern_data import PatternPatches
from moesaic.papers.chowdhury2023.trial_training import Schedule
from moesaic.papers.chowdhury2023.two_layer import TwoLayer

__all__ = ["COUPLED_WIDTH", "LEVEL", "PATTERNS", "SIZES", "Sizes", "plan"]


LEVEL = 95.0
"""Test accuracy in percent at which sample sizes are compared, here and in the paper."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a preset."""

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
    """Whether Figures 5 to 7 are also done as released, which always takes 150 epochs."""
    own_comparison: bool
    """Whether our own network is also compared with a CNN and over l."""


SIZES = {
    "full": Sizes(
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
    ),
}

PATTERNS = PatternPatches(patches=16, dim=64, delta_d=0.3, delta_r=0.6, pattern_sets=8, close=3)
"""Section 4.2 with l* = 4."""
COUPLED_WIDTH = 4000

_CAREFUL_CNN = replace(TwoLayer.cnn("print", neurons=64), train_output=True)
"""The best of some twenty CNNs of the size of `TwoLayer.best`, chosen on the same validation samples."""


def plan(preset: str, fidelity: Fidelity) -> Plan:
    """The cells there are, by name: experiment, line, and place on its axis."""
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
    if fidelity == "print":
        cells |= _theory_plan()
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


def _best_plan(sizes: Sizes) -> Plan:
    printed, best = Schedule.of("print"), Schedule.of("best")
    cells: dict[str, TwoLayerCell] = {}
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
    return cells

"""Figure of the expressive power of channel masks (Wang et al. 2019, supplement A.1)."""

from __future__ import annotations

from typing import Any, TypeAlias

from moesaic.papers.engine import paper
from moesaic.papers.wang2019.experiments_expressivity import CollisionCell, RankCell
from moesaic.papers.wang2019.theory.channel_ranks import printed_rank
from moesaic.papers.wang2019.theory.mask_collisions import coin_collision, subset_collision
from moesaic.report.chart import Chart, Panel, Series

__all__ = ["charts"]

ExperimentResults: TypeAlias = paper.ExperimentResults[Any]

_PAPER = "wang2019"

_LAYERS = (1, 2, 3)

_OPEN = (1, 2, 3, 4)


def charts(experiment: ExperimentResults) -> list[Chart]:
    """Returns the chart, if there are results for one of its panels."""
    return [chart for chart in [_power(experiment)] if chart.panels]


def _power(experiment: ExperimentResults) -> Chart:
    panels: list[Panel] = []
    if experiment.has_results(*(f"ranks/L={layers}" for layers in _LAYERS)):
        panels.append(_ranks(experiment))
    if experiment.has_results(*(f"collisions/one/{n}" for n in _OPEN)):
        panels.append(_collisions(experiment))
    return Chart(
        "expressive-power",
        _PAPER,
        "Supplement A.1",
        "What do masks of channels do to what a network can tell apart?",
        "Left: the rank of networks with 3 channels, of which masks leave 2 open, on patches with 4 features. One mask "
        "for all inputs makes the rank that of a narrower network; a mask for each input lifts it above the dense "
        "network's; one that looks at half of the input does not, from three layers on. The printed rank is the square "
        "of the dense network's. Right: how likely two inputs are to open the same of 8 channels. The printed formula "
        "is right where exactly n are open, and wrong where each opens for itself.",
        tuple(panels),
    )


def _ranks(experiment: ExperimentResults) -> Panel:
    cell = experiment.plan["ranks/L=1"]
    assert isinstance(cell, RankCell)
    x = tuple(map(float, _LAYERS))
    found = [experiment.results[f"ranks/L={layers}"] for layers in _LAYERS]
    kinds = {
        "a mask for each input": ("dynamic", "best"),
        "dense": ("dense", "joint"),
        "a mask by half of the input": ("one_sided", "separate"),
        "one mask for all inputs": ("static", "cnn"),
    }
    lines = [
        Series(label, role, x, tuple(float(each[kind].mean()) for each in found))
        for label, (kind, role) in kinds.items()
    ]
    printed = tuple(float(printed_rank(cell.widths[0], layers)) for layers in _LAYERS)
    lines.insert(0, Series("dense, as printed", "printed", x, printed))
    return Panel("Rank", "Layers L", "Rank", tuple(lines), log_y=True)


def _collisions(experiment: ExperimentResults) -> Panel:
    cells = [experiment.plan[f"collisions/one/{n}"] for n in _OPEN]
    found = [experiment.results[f"collisions/one/{n}"] for n in _OPEN]
    x = tuple(map(float, _OPEN))
    lines: list[Series] = []
    for label, kind, role in (("exactly n open", "subsets", "best"), ("each for itself", "coins", "cnn")):
        lines.append(Series(f"{label}, drawn", role, x, tuple(float(each[kind].mean()) for each in found)))
    known = [cell for cell in cells if isinstance(cell, CollisionCell)]
    exact = {
        "C(m, n)⁻¹, as printed": tuple(subset_collision(cell.widths, cell.open_channels) for cell in known),
        "each for itself, calculated": tuple(coin_collision(cell.widths, cell.probabilities) for cell in known),
    }
    roles = ("best", "cnn")
    lines += [Series(label, role, x, y) for role, (label, y) in zip(roles, exact.items(), strict=True)]
    return Panel("Two inputs with the same channels", "Open channels n of 8", "Probability", tuple(lines), log_y=True)

"""Figures of VGG-16 with channel gates on CIFAR-10 (Wang et al. 2019): accuracy, cost, and the use of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from moesaic.intervals import mean
from moesaic.papers.engine import paper
from moesaic.papers.wang2019.claims_vgg16 import accuracies, lead_at_equal_cost
from moesaic.papers.wang2019.experiments_vgg16 import COSTS, REMEDY_COST, GateResult, runs_of
from moesaic.papers.wang2019.vgg_widths import WIDENINGS
from moesaic.report.chart import Chart, Panel, Series

__all__ = ["charts"]

ExperimentResults: TypeAlias = paper.ExperimentResults[Any]

_PAPER = "wang2019"

_COST = "Multiply-adds of an image, as a share of VGG-16's"

_ACCURACY = "Test accuracy (%)"

_STATIC = tuple(f"cost/static/{cost}" for cost in (*COSTS, 1))

_TITLES = {
    "embedding": "a larger embedding network",
    "schedule": "gates that learn for longer",
    "noise": "noise on the gates",
    "topk": "top-k, straight through",
    "distil": "a teacher",
}


def charts(experiment: ExperimentResults) -> list[Chart]:
    """Returns the charts for which there are results."""
    drawn = [draw(experiment) for draw in (_costs, _remedies, _gates, _widenings)]
    return [chart for chart in drawn if chart.panels]


def _costs(experiment: ExperimentResults) -> Chart:
    """Accuracy against cost."""
    panels: list[Panel] = []
    gated = [f"cost/gated/{cost}" for cost in COSTS]
    if experiment.has_results(*_STATIC, *gated):
        lines = [
            _curve(experiment, "with gates (DeepMoE)", "best", gated),
            _curve(experiment, "static, of smaller width", "cnn", _STATIC),
        ]
        panels.append(Panel("", _COST, _ACCURACY, tuple(lines), log_x=True))
    return Chart(
        "accuracy-cost",
        _PAPER,
        "Our own",
        "At equal cost, are gates better than a narrower network?",
        "VGG-16 on CIFAR-10. With gates, every image opens some of the channels; the static network has fewer "
        "channels, the same for all images. Both train equally long. Gates are worth having where their line is above "
        "the other. Costs include the network that sets the gates. Mean over trials and its 95 % interval.",
        tuple(panels),
    )


def _remedies(experiment: ExperimentResults) -> Chart:
    """Leads of all remedies over a static network of equal cost."""
    panels: list[Panel] = []
    names = {f"cost/gated/{REMEDY_COST}": "none", **{f"remedy/{name}": title for name, title in _TITLES.items()}}
    if experiment.has_results(*_STATIC, *names):
        every = [lead_at_equal_cost(experiment, prefix) for prefix in names]
        trials = min(map(len, every))
        leads = [lead[:trials] for lead in every]
        lines = tuple(
            Series(f"{place}: {title}", f"remedy-{place}", (float(place),), (float(lead.mean()),), _deviations(lead))
            for place, (title, lead) in enumerate(zip(names.values(), leads, strict=True))
        )
        panels.append(Panel("", "Remedy", "Lead over a static network (points)", lines, level=0.0))
    return Chart(
        "remedies",
        _PAPER,
        "Our own",
        "What makes gates better?",
        f"VGG-16 with gates on CIFAR-10, at {REMEDY_COST:g} of the multiply-adds of VGG-16: as it is, and with what "
        "could help. Above the dotted line it is more accurate than a narrower VGG-16 of equal cost. Mean and standard "
        "deviation over trials.",
        tuple(panels),
    )


def _gates(experiment: ExperimentResults) -> Chart:
    """Dead, always-on and dynamic channels of each layer."""
    panels: list[Panel] = []
    for cost in COSTS:
        prefix = f"cost/gated/{cost}"
        if not experiment.has_results(prefix):
            continue
        usage = np.stack([run.usage for run in runs_of(experiment, prefix)])  # (T, layers, 3)
        shares = 100 * usage / usage.sum(2, keepdims=True)
        x = tuple(float(number) for number in range(1, usage.shape[1] + 1))
        kinds = (("dynamic", "best"), ("always on", "joint"), ("dead", "cnn"))
        lines = [
            Series(label, role, x, tuple(shares[:, :, place].mean(0).tolist()), _deviations(shares[:, :, place]))
            for (label, role), place in zip(kinds, (2, 1, 0), strict=True)
        ]
        panels.append(Panel(f"cost {cost:g}", "Convolution", "Channels (%)", tuple(lines)))
    return Chart(
        "gates-by-layer",
        _PAPER,
        "Our own",
        "Which channels depend on the image?",
        "Of every gated convolution of VGG-16, counted from the image: channels that are open for some test images "
        "(dynamic), for all or for none (dead). Without dynamic ones the network is a static, narrower one. Mean and "
        "standard deviation over trials.",
        tuple(panels),
    )


def _widenings(experiment: ExperimentResults) -> Chart:
    """Widenings without gates, at equal weights, and gated, at equal weights and multiply-adds."""
    panels: list[Panel] = []
    names = {**{name: column.title for name, column in WIDENINGS.items()}, "vgg16": "VGG-16"}
    if experiment.has_results(*(f"wide/{kind}/{name}" for kind in ("gated", "dense") for name in names)):
        lines = tuple(
            _curve(
                experiment,
                title,
                "cnn" if name == "vgg16" else name,
                [f"wide/gated/{name}", f"wide/dense/{name}"],
                spread="deviation",
            )
            for name, title in names.items()
        )
        panels.append(Panel("", _COST, _ACCURACY, lines, log_x=True))
    return Chart(
        "widenings",
        _PAPER,
        "Table 1",
        "Where in VGG-16 do more channels pay?",
        "Four ways to widen VGG-16, all to 1.64 times its weights. The right end of a line is the widened network as "
        "it is, the left end the same network gated down to the multiply-adds of VGG-16, which itself is gated to "
        "half. Right ends compare networks of equal weights, left ends those of equal weights and equal work. Mean and "
        "standard deviation over trials, CIFAR-10.",
        tuple(panels),
    )


def _curve(
    experiment: ExperimentResults, label: str, role: str, prefixes: Sequence[str], spread: str = "interval"
) -> Series:
    """Mean accuracy against mean cost, with Student's interval or the standard deviation as spread."""
    several: list[list[GateResult]] = [runs_of(experiment, prefix) for prefix in prefixes]
    reached = [accuracies(runs) for runs in several]
    halves = (
        _deviations(np.stack(reached, axis=1))
        if spread == "deviation"
        else tuple((found.high - found.low) / 2 for found in map(mean, reached))
    )
    # three digits, since these are the ticks of the axis
    costs = tuple(float(f"{np.mean([run.cost for run in runs]):.3g}") for runs in several)
    return Series(label, role, costs, tuple(float(each.mean()) for each in reached), halves)


def _deviations(values: Any) -> tuple[float, ...]:
    """Standard deviations over trials of values (T,) or (T, …)."""
    return tuple(np.atleast_1d(np.std(values, axis=0, ddof=1)).tolist())

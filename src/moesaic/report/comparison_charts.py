"""A comparison of models as charts: accuracy against labels, against the work of training, and within groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate
from moesaic.report.chart import Chart, Panel, Series
from moesaic.report.comparison_words import prefix_of
from moesaic.report.style import MANY
from moesaic.training.comparison_result import Comparison, Run
from moesaic.training.paired_comparison import FLOPS_PER_IMAGE, PairedComparison, accuracies, group_accuracies

__all__ = ["comparison_charts"]

Array = NDArray[np.float64]

FOLDER = "compare"
"""Of the figures, beside each other as those of a paper."""

_ACCURACY = "test accuracy (%)"
_MOST_GROUPS = 12


def comparison_charts(found: Comparison, paired_comparisons: Sequence[PairedComparison]) -> list[Chart]:
    """The figures of a comparison."""
    charts = [_labels(found, paired_comparisons), _work(found)]
    if found.groups:
        charts.append(_groups(found))
    return charts


def _labels(found: Comparison, paired_comparisons: Sequence[PairedComparison]) -> Chart:
    lines = tuple(
        _line(model.name, _role(found, i), found.samples, accuracies(found, model.name))
        for i, model in enumerate(found.models)
    )
    levels = {contrast.saving.level for contrast in paired_comparisons if contrast.saving is not None}
    level = levels.pop() if len(levels) == 1 else None
    dotted = (
        " Where a line crosses the dotted one, its network has reached that accuracy: the further left, the fewer "
        "labels it took."
        if level is not None
        else ""
    )
    return Chart(
        "labels",
        FOLDER,
        "Labels",
        "Accuracy against labelled images",
        "How many of the test images each network gets right, after training with so many labelled images. Higher is "
        f"better; bars are 95 % intervals over {found.trials} trials.{dotted}",
        (Panel("", "labelled images", _ACCURACY, lines, level=level, log_x=len(found.samples) > 2),),
    )


def _work(found: Comparison) -> Chart:
    most = found.samples[-1]
    curves = {model.name: _mean_curve(found.runs_of(model.name, most)) for model in found.models}
    flops = {model.name: FLOPS_PER_IMAGE * model.macs * curves[model.name][0] for model in found.models}
    size, prefix = prefix_of(max(float(each.max()) for each in flops.values()))
    operations = [
        _smooth(each.name, _role(found, i), flops[each.name] / size, curves[each.name][2])
        for i, each in enumerate(found.models)
    ]
    times = [_smooth(each.name, _role(found, i), *curves[each.name][1:]) for i, each in enumerate(found.models)]
    return Chart(
        "work",
        FOLDER,
        "Work",
        f"Accuracy while training with {most:,} labelled images",
        "The same networks while they learn, mean over trials: on the left against the operations that training took, "
        "on the right against its time on the machine named below. Further left is cheaper.",
        (
            Panel("operations", f"training operations ({prefix}FLOP)", _ACCURACY, tuple(operations)),
            Panel("time", "seconds of training", _ACCURACY, tuple(times)),
        ),
    )


def _mean_curve(runs: Sequence[Run]) -> tuple[Array, Array, Array]:
    """Images seen, seconds and accuracy at each test, mean over trials; as far as all runs go."""
    length = min(len(run.curve) for run in runs)
    points = [[(each.images, each.seconds, each.accuracy) for each in run.curve[:length]] for run in runs]
    images, seconds, accuracy = np.array(points, dtype=np.float64).mean(axis=0).T
    return images, seconds, accuracy


def _smooth(label: str, role: str, x: Array, y: Array) -> Series:
    """A line without markers, which would stand too close."""
    places: Array = np.linspace(float(x[0]), float(x[-1]), 4 * MANY)
    values: Array = np.interp(places, x, y)
    return Series(label, role, tuple(map(float, places)), tuple(map(float, values)))


def _groups(found: Comparison) -> Chart:
    tables = {model.name: group_accuracies(found, model.name) for model in found.models}
    panels = [
        Panel(
            group,
            "labelled images",
            _ACCURACY,
            tuple(
                _line(name, _role(found, i), found.samples, [row[g] for row in table])
                for i, (name, table) in enumerate(tables.items())
            ),
            log_x=len(found.samples) > 2,
        )
        for g, group in enumerate(found.groups[:_MOST_GROUPS])
    ]
    return Chart(
        "groups",
        FOLDER,
        "Groups",
        "Accuracy within groups of test images",
        "The same accuracies, each over one group of the test images. A network that goes by something that only "
        "comes along with the class does well in some groups and badly in others.",
        tuple(panels),
        columns=min(len(panels), 4),
    )


def _line(label: str, role: str, x: Sequence[int], estimates: Sequence[Estimate]) -> Series:
    """A line of means, with bars; an interval that ends at 0 or 100 % is drawn as far as its longer half goes."""
    spread = tuple(max(each.high - each.value, each.value - each.low) for each in estimates)
    return Series(label, role, tuple(map(float, x)), tuple(each.value for each in estimates), spread)


def _role(found: Comparison, number: int) -> str:
    """The looks of the CNN for what others are compared with, of joint-training pMoE for the first of these."""
    return ("cnn", "joint")[number] if number < 2 else found.models[number].name

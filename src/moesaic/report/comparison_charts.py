"""Charts of a comparison of models: accuracy against labels, against training cost, and within groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate
from moesaic.report.chart import Chart, Panel, Series
from moesaic.report.chart_style import MANY_POINTS
from moesaic.report.comparison_sentences import on_frozen_backbones, prefix_of, trial_count
from moesaic.training.comparison_result import Comparison, Run
from moesaic.training.paired_comparison import FLOPS_PER_IMAGE, PairedComparison, accuracies, group_accuracies

__all__ = ["comparison_charts"]

Array = NDArray[np.float64]

FOLDER = "compare"
"""Folder of the figures."""

_ACCURACY = "test accuracy (%)"
_MAX_GROUPS = 12


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
    levels = {pair.saving.level for pair in paired_comparisons if pair.saving is not None}
    level = levels.pop() if len(levels) == 1 else None
    dotted = (
        " The dotted line is the accuracy at which labels are compared: a line that crosses it further left needs "
        "fewer labels."
        if level is not None
        else ""
    )
    return Chart(
        "labels",
        FOLDER,
        "Labels",
        "Accuracy against labelled images",
        "Test accuracy of each network against the number of labelled training images. Higher is "
        f"better; bars are 95 % intervals over {trial_count(found)} trials.{dotted}",
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
    in_flops = Panel("FLOPs", f"training {prefix}FLOPs", _ACCURACY, tuple(operations))
    in_time = Panel("time", "seconds of training", _ACCURACY, tuple(times))
    frozen = on_frozen_backbones(found)
    against = (
        "against the training time of the heads on the machine named below; backbones are frozen, and their features "
        "were computed once"
        if frozen
        else "left against training FLOPs, right against training time on the machine named below"
    )
    return Chart(
        "work",
        FOLDER,
        "Work",
        f"Accuracy while training with {most:,} labelled images",
        f"Test accuracy during training, mean over trials: {against}. Further left is cheaper.",
        (in_time,) if frozen else (in_flops, in_time),
    )


def _mean_curve(runs: Sequence[Run]) -> tuple[Array, Array, Array]:
    """Images seen, seconds and accuracy at each test, mean over trials, up to the end of the shortest run."""
    length = min(len(run.curve) for run in runs)
    points = [[(each.images, each.seconds, each.accuracy) for each in run.curve[:length]] for run in runs]
    images, seconds, accuracy = np.array(points, dtype=np.float64).mean(axis=0).T
    return images, seconds, accuracy


def _smooth(label: str, role: str, x: Array, y: Array) -> Series:
    """A line without markers."""
    places: Array = np.linspace(float(x[0]), float(x[-1]), 4 * MANY_POINTS)
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
        for g, group in enumerate(found.groups[:_MAX_GROUPS])
    ]
    return Chart(
        "groups",
        FOLDER,
        "Groups",
        "Accuracy within groups of test images",
        "Test accuracy within each group of test images. A network that relies on a feature that only correlates with "
        "the class has a high accuracy in some groups and a low one in others.",
        tuple(panels),
        columns=min(len(panels), 4),
    )


def _line(label: str, role: str, x: Sequence[int], estimates: Sequence[Estimate]) -> Series:
    """A line of means with symmetric error bars, the longer half of each interval; drawings end them at 0 and 100 %."""
    spread = tuple(max(each.high - each.value, each.value - each.low) for each in estimates)
    return Series(label, role, tuple(map(float, x)), tuple(each.value for each in estimates), spread)


def _role(found: Comparison, number: int) -> str:
    """The style of the CNN for the baseline, of joint-training pMoE for the first other model."""
    return ("cnn", "joint")[number] if number < 2 else found.models[number].name

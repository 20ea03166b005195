"""Figures of our claims on routing by token: accuracy against cost, against labels, and against training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate, percentage
from moesaic.papers.engine import paper
from moesaic.papers.token_routing.claims import branch_stages, label_accuracies, stages
from moesaic.papers.token_routing.continued_training import Stage
from moesaic.papers.token_routing.experiments import LABELS, VIT_ARMS
from moesaic.report.chart import Chart, Panel, Series

__all__ = ["charts"]

ExperimentResults: TypeAlias = paper.ExperimentResults[Any]

_PAPER = "token_routing"
_ACCURACY = "Test accuracy (%)"
_TITLES = {
    "dense": ("dense", "cnn"),
    "moe": ("mixtures of experts", "best"),
    "soft": ("soft mixtures", "joint"),
    "skip": ("half of the tokens skipped", "separate"),
    "shallow": ("dense, 9 blocks", "shallow"),
    "narrow": ("dense, narrow MLPs", "narrow"),
}
_KINDS = {"vit": "ViT", "resnet": "ResNet-20", "wrn": "WRN-10-10"}


def charts(experiment: ExperimentResults) -> list[Chart]:
    """Returns the charts for which there are results."""
    drawn = [draw(experiment) for draw in (_costs, _labels, _upcycling)]
    return [chart for chart in drawn if chart.panels]


def _costs(experiment: ExperimentResults) -> Chart:
    """A point for each network: accuracy against multiply-adds."""
    found = {
        title: (role, stages(experiment, f"vit/{name}"))
        for name, (title, role) in _TITLES.items()
        if experiment.has_results(f"vit/{name}")
    }
    if "dense" in found:
        found["split"] = ("split", branch_stages(experiment, "vit/dense", "split"))
    lines = tuple(_point(title, role, some) for title, (role, some) in found.items())
    return Chart(
        "token-accuracy-cost",
        _PAPER,
        "Equal cost",
        "What do routed transformers reach for their cost?",
        "Vision transformers on CIFAR-10. Networks below one another have as many multiply-adds. Mean over trials and "
        "its 95 % interval.",
        (Panel("", "Multiply-adds of an image (millions)", _ACCURACY, lines),) if len(found) > len(VIT_ARMS) else (),
    )


def _labels(experiment: ExperimentResults) -> Chart:
    panels: list[Panel] = []
    for kind in ("vit", "wrn"):
        names = [f"labels/{kind}/{arm}/{samples}" for arm in ("dense", "routed") for samples in LABELS]
        if experiment.has_results(*names):
            lines = tuple(
                _line(label, role, LABELS, [percentage(row) for row in label_accuracies(experiment, kind, arm)])
                for arm, label, role in (("dense", "dense", "cnn"), ("routed", "expert choice", "best"))
            )
            panels.append(Panel(_KINDS[kind], "Labels", _ACCURACY, lines, log_x=True))
    return Chart(
        "token-labels",
        _PAPER,
        "Few labels",
        "Does expert choice save labels?",
        "A vision transformer and a wide residual network on few images of CIFAR-10, each dense and with expert "
        "choice, by one recipe. Mean over trials and its 95 % interval.",
        tuple(panels),
    )


def _upcycling(experiment: ExperimentResults) -> Chart:
    panels = tuple(
        Panel(_KINDS[kind], "Images seen (millions)", _ACCURACY, _training_lines(experiment, kind))
        for kind in ("vit", "resnet")
        if experiment.has_results(f"{kind}/dense", f"{kind}/longer")
    )
    return Chart(
        "token-upcycling",
        _PAPER,
        "Upcycling",
        "Is upcycling better than training longer?",
        "CIFAR-10. A trained network is upcycled, or trained on as it is; a third one trains for as long from scratch. "
        "Mean over trials and its 95 % interval.",
        panels,
    )


def _training_lines(experiment: ExperimentResults, kind: str) -> tuple[Series, ...]:
    base = stages(experiment, f"{kind}/dense")
    start = base[0].images / 1e6
    lines: list[Series] = []
    for branch, label, role in (("continued", "trained on", "cnn"), ("upcycled", "upcycled", "best")):
        further = branch_stages(experiment, f"{kind}/dense", branch)
        ends = (start, start + further[0].images / 1e6)
        lines.append(_line(label, role, ends, [_accuracy(base), _accuracy(further)]))
    longer = stages(experiment, f"{kind}/longer")
    lines.append(_line("from scratch", "joint", [longer[0].images / 1e6], [_accuracy(longer)]))
    return tuple(lines)


def _accuracy(found: Sequence[Stage]) -> Estimate:
    return percentage([stage.accuracy for stage in found])


def _point(label: str, role: str, found: Sequence[Stage]) -> Series:
    return _line(label, role, [found[0].macs / 1e6], [_accuracy(found)])


def _line(label: str, role: str, x: Sequence[float], found: Sequence[Estimate]) -> Series:
    halves: NDArray[np.float64] = np.array([(each.high - each.low) / 2 for each in found])
    return Series(label, role, tuple(map(float, x)), tuple(each.value for each in found), tuple(halves.tolist()))

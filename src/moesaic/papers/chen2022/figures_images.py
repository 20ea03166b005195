"""Table 2 and Figure 7 of Chen et al. 2022 with our measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.data.cifar10 import CIFAR10_CLASSES
from moesaic.insight.embedding_map import tsne
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.experiments_images import (
    EXPERTS,
    FROG,
    RELEASED_RUNS,
    SHIP,
    Embedding,
    ImageResult,
    TaskName,
    released_runs_of,
    runs_of,
)
from moesaic.papers.engine import paper
from moesaic.report.chart import Chart, Counts, Group, Panel, Points, Series

__all__ = ["NETWORKS", "charts"]

Array = NDArray[np.float64]
ExperimentResults = paper.ExperimentResults[ImageResult]

NETWORKS = {"cnn": "the two-layer CNN", "mobilenetv2": "MobileNetV2", "resnet18": "ResNet18"}

_TASKS: dict[TaskName, str] = {
    "rotate": "Rotate",
    "rotate-sharp": "Rotate, sharp test",
    "cifar10": "CIFAR-10",
}
_KINDS = {"single": "single network", "mixture": "mixture of four"}
_RELEASED_KINDS = {**_KINDS, "no-black": "mixture without black images"}


def charts(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Returns the charts for which there are results."""
    made: list[Chart] = []
    if (printed := experiments.get("print")) is not None:
        made += [_table_2(printed), _figure_7(printed)]
    if (released := experiments.get("released")) is not None:
        made.append(_table_2_released(released))
    return [chart for chart in made if chart.panels]


def _table_2(experiment: ExperimentResults) -> Chart:
    panels: list[Panel] = []
    for task, title in _TASKS.items():
        for network, named in NETWORKS.items():
            runs = {kind: runs_of(experiment, task, network, kind) for kind in _KINDS}
            series = tuple(_curve(label, kind, runs[kind]) for kind, label in _KINDS.items() if runs[kind])
            if series:
                name = f"{title}: {named.removeprefix('the ')}"
                panels.append(Panel(name, "Epoch", "Test accuracy (%)", series))
    return Chart(
        "table-2",
        "chen2022",
        "Table 2",
        "Does a mixture of four networks see more than one network?",
        "Test accuracy after every epoch of one network, and of a mixture of four such networks of which each image is "
        "shown to one. Mean over trials, with their standard deviation. CIFAR-10-Rotate asks whether a photograph was "
        "turned by 30°; its ten classes are clusters that nobody names. The verdicts look at the last epoch.",
        tuple(panels),
        columns=3 if len(panels) > 2 else None,
    )


def _table_2_released(experiment: ExperimentResults) -> Chart:
    panels: list[Panel] = []
    for network in RELEASED_RUNS:
        runs = {kind: released_runs_of(experiment, network, kind) for kind in _RELEASED_KINDS}
        series = tuple(_curve(label, kind, runs[kind]) for kind, label in _RELEASED_KINDS.items() if runs[kind])
        if series:
            panels.append(Panel(f"Rotate: {NETWORKS[network]}", "Epoch", "Test accuracy (%)", series))
    return Chart(
        "table-2-released",
        "chen2022",
        "Table 2",
        "Does a mixture see more with the authors' code?",
        "Test accuracy on sharp images after every epoch, trained on blurred ones with the authors' code: one network, "
        "a mixture of four, and the same mixture without black images in its experts' BatchNorm. Mean over trials, "
        "with their standard deviation. The verdicts look at the best epoch of each run.",
        tuple(panels),
        columns=2 if len(panels) > 1 else None,
    )


def _curve(label: str, role: str, runs: Sequence[ImageResult]) -> Series:
    values = np.stack([run.accuracies for run in runs])
    x = tuple(float(epoch) for epoch in range(1, values.shape[1] + 1))
    spread = tuple(values.std(axis=0, ddof=1).tolist()) if len(runs) > 1 else None
    return Series(label, role, x, tuple(values.mean(axis=0).tolist()), spread)


def _figure_7(experiment: ExperimentResults) -> Chart:
    panels: list[Panel] = []
    cars, rotated = _embedding(experiment, "cifar10"), _embedding(experiment, "rotate")
    by_expert = {e: (f"expert {e + 1}", f"expert-{e + 1}") for e in range(EXPERTS)}
    by_class = {k: (CIFAR10_CLASSES[k], CIFAR10_CLASSES[k]) for k in (FROG, SHIP)}
    if cars is not None:
        panels.append(_points("CIFAR-10, cars", tsne(cars.points), cars.experts, by_expert))
    if rotated is not None:
        plane = tsne(rotated.points)
        panels.append(_points("CIFAR-10-Rotate, turned", plane, rotated.experts, by_expert))
        panels.append(_points("frogs and ships of these", plane, rotated.clusters, by_class))
    runs = runs_of(experiment, "rotate", "resnet18", "mixture")
    if runs:
        counts = tuple(tuple(row) for row in runs[0].dispatch[1].tolist())
        table = Counts(CIFAR10_CLASSES, tuple(f"expert {e + 1}" for e in range(EXPERTS)), counts)
        panels.append(Panel("who gets which class, turned", "", "", counts=table))
    return Chart(
        "figure-7",
        "chen2022",
        "Figure 7",
        "Do the classes of CIFAR-10 go to different experts?",
        "Test images of one label as a mixture of ResNet18 sees them: features of the chosen expert, by t-SNE. "
        "Points that are close look alike to the network. Features of different experts lie apart by "
        "themselves; what tells of clusters is which class went where, as the table counts it.",
        tuple(panels),
        columns=2 if len(panels) > 1 else None,
    )


def _embedding(experiment: ExperimentResults, task: TaskName) -> Embedding | None:
    return next((run.embedding for run in runs_of(experiment, task, "resnet18", "mixture") if run.embedding), None)


def _points(title: str, plane: Array, kinds: NDArray[np.int64], styles: Mapping[int, tuple[str, str]]) -> Panel:
    """Draws points coloured by kind; ``styles`` has the label and role of each kind."""
    groups: list[Group] = []
    for kind, (label, role) in styles.items():
        places = plane[kinds == kind].round(2)
        if len(places):
            groups.append(Group(label, role, tuple(places[:, 0].tolist()), tuple(places[:, 1].tolist())))
    return Panel(title, "", "", points=Points(tuple(groups)))

"""Figures 10 to 12 and 14 to 16 and Table 2 of Chowdhury et al. 2023 with our measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.claims_images import MAJORITY, MINORITY
from moesaic.papers.chowdhury2023.experiments_images import CONVERGED, FIGURES, Arm, WideResult, runs_of, sizes_of
from moesaic.papers.engine import paper
from moesaic.report.chart import Chart, Panel, Series

__all__ = ["charts"]

Array = NDArray[np.float64]
ExperimentResults = paper.ExperimentResults[Any]

_PAPER = "chowdhury2023"
_LINES: dict[tuple[Fidelity, Arm], tuple[str, str]] = {
    ("released", "wrn"): ("WRN", "cnn"),
    ("released", "pmoe"): ("WRN-pMoE", "joint"),
    ("best", "wrn"): ("WRN, our recipe", "best-cnn"),
    ("best", "pmoe"): ("WRN-pMoE, our form and recipe", "best"),
    ("print", "wrn"): ("WRN, as printed", "printed-wrn"),
    ("print", "pmoe"): ("WRN-pMoE, as printed", "printed-pmoe"),
}
"""Label and role of each series; labels without a form are as released."""
_SAMPLES = "Number of training samples N"
_ACCURACY = "Test accuracy (%)"
_SEEN = "Thousands of images seen"

_QUESTIONS = {
    "celeba-smiling": "How many labelled faces does routing save in a deep network?",
    "celeba-spurious": "Does routing see through a spurious feature?",
    "celeba-4class": "Does routing save labels with four classes, too?",
    "cifar10": "Does routing help where the object fills the image?",
    "cifar10-noise": "Does routing help where the object is small on a photograph?",
    "cifar-vehicles": "Does routing help where one quarter of the image decides?",
}
_MORE = {
    "celeba-smiling": "The dotted line is at 86 %, where the paper compares.",
    "celeba-spurious": "In training 95 % of those who smile have black hair and 95 % of the others blond hair; a "
    "network that looks at hair errs on test faces with the other hair. The closer the two lines of a network on the "
    "right, the less it does.",
    "celeba-4class": "Faces smile or not, with or without eyeglasses.",
    "cifar10": "Ten classes, as they are.",
    "cifar10-noise": "Images of CIFAR-10 of half the size at a random place on a photograph of a flower.",
    "cifar-vehicles": "Four kinds of vehicles, of half the size in one quarter of the image; animals in the others.",
}


def charts(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Returns the charts for which there are results."""
    drawn = [_figure(experiments, task) for task in FIGURES]
    return [chart for chart in (*drawn, _table_2(experiments)) if chart.panels]


def _figure(experiments: Mapping[Fidelity, ExperimentResults], task: str) -> Chart:
    figure = FIGURES[task]
    lines = [
        series
        for (fidelity, arm), (label, role) in _LINES.items()
        if fidelity in experiments
        for series in _against_samples(experiments[fidelity], task, arm, label, role, lambda run: run.accuracy)
    ]
    panels: list[Panel] = []
    if lines:
        level = 86.0 if task == "celeba-smiling" else None
        panels.append(Panel("all test images", _SAMPLES, _ACCURACY, tuple(lines), level=level, log_x=True))
    if task == "celeba-spurious":
        panels += _groups(experiments)
    return Chart(
        figure.where.lower().replace(" ", "-"),
        _PAPER,
        figure.where,
        _QUESTIONS[task],
        "A wide residual network (WRN), and the same network with a pMoE layer for its last convolution, trained as "
        f"released if nothing else is said. {_MORE[task]} Mean and standard deviation over trials.",
        tuple(panels),
    )


def _groups(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Panel]:
    """Accuracy of faces with the hair colour that is usual for their class in training, and of the others."""
    experiment = experiments.get("released")
    if experiment is None:
        return []
    arms: tuple[Arm, Arm] = ("wrn", "pmoe")
    lines: list[Series] = []
    for arm in arms:
        label, role = _LINES["released", arm]
        for names, group in ((MAJORITY, "hair as usual"), (MINORITY, "the other hair")):

            def share(run: WideResult, names: Sequence[str] = names) -> float:
                return float(np.mean([run.groups[name] for name in names]))

            lines += _against_samples(experiment, "celeba-spurious", arm, f"{label}, {group}", role, share)
    if not lines:
        return []
    return [Panel("by hair, as released", _SAMPLES, _ACCURACY, tuple(lines), log_x=True)]


def _against_samples(
    experiment: ExperimentResults, task: str, arm: Arm, label: str, role: str, value: Callable[[WideResult], float]
) -> list[Series]:
    """Returns mean and standard deviation over trials; nothing without results."""
    sizes = sizes_of(experiment, task, arm)
    if not sizes:
        return []
    values = [np.array([value(run) for run in runs_of(experiment, task, arm, samples)]) for samples in sizes]
    means = tuple(float(each.mean()) for each in values)
    return [Series(label, role, tuple(map(float, sizes)), means, tuple(float(each.std(ddof=1)) for each in values))]


def _table_2(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    experiment = experiments.get("released")
    panels: list[Panel] = []
    arms: tuple[Arm, Arm] = ("wrn", "pmoe")
    for samples in sizes_of(experiment, "celeba-4class") if experiment is not None else ():
        lines: list[Series] = []
        for arm in arms:
            runs = runs_of(experiment, "celeba-4class", arm, samples) if experiment is not None else []
            curves = np.stack([run.training for run in runs])
            label, role = _LINES["released", arm]
            x = tuple(samples * epoch / 1000 for epoch in range(1, curves.shape[1] + 1))
            spread = tuple(curves.std(axis=0, ddof=1).tolist())
            lines.append(Series(label, role, x, tuple(curves.mean(axis=0).tolist()), spread))
        panels.append(Panel(f"N = {samples:,}", _SEEN, "Training accuracy (%)", tuple(lines), level=CONVERGED))
    return Chart(
        "table-2",
        _PAPER,
        "Table 2",
        "Does a network with a pMoE layer learn its training images sooner?",
        f"Four classes of CelebA. A curve that reaches the dotted {CONVERGED:g} % further left needs fewer steps; a "
        "step of WRN-pMoE takes fewer multiply-adds as well. Mean and standard deviation over trials.",
        tuple(panels),
    )

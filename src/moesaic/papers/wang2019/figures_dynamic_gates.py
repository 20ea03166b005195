"""Figures of gates that depend on the image against controls of equal cost, and the table of all arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from moesaic.papers.engine import paper
from moesaic.papers.wang2019.claims_dynamic_gates import static_leads
from moesaic.papers.wang2019.experiments_dynamic_gates import ARMS, NETWORKS, arm_runs, networks_of
from moesaic.papers.wang2019.experiments_vgg16 import GateResult
from moesaic.report.chart import Chart, Panel, Series

__all__ = ["LEADS", "QUANTITIES", "arms_table", "charts"]

ExperimentResults: TypeAlias = paper.ExperimentResults[Any]

LEADS, QUANTITIES = "equal-cost-leads", "equal-cost-arms"
"""Ids of the charts."""

_MEASURED: dict[str, Callable[[GateResult], float]] = {
    "Test accuracy (%)": lambda run: run.accuracy,
    "Cost (share of VGG-16's)": lambda run: run.cost,
    "Embedding's accuracy (%)": lambda run: run.embedding_accuracy,
    "Gates that differ (%)": lambda run: run.differing,
    "Entropy of a gate (bits)": lambda run: run.entropy,
    "Information on the class (bits)": lambda run: run.information,
}


def charts(experiment: ExperimentResults) -> list[Chart]:
    """Returns the charts if there are results."""
    networks = networks_of(experiment)
    names = [f"equal-cost/{arm}/{network}" for arm in ("dense", "narrow", *ARMS) for network in networks]
    if not networks or not experiment.has_results(*names):
        return []
    return [_leads(experiment, networks), _quantities(experiment, networks)]


def _leads(experiment: ExperimentResults, networks: Sequence[str]) -> Chart:
    """Leads of all arms over a static network of equal cost."""
    panels: list[Panel] = []
    for network in networks:
        lines = [
            _line(place, arm, static_leads(experiment, arm, network))
            for place, arm in enumerate(arm for arm in ARMS if arm != "static")
        ]
        title = NETWORKS[network].title
        panels.append(Panel(title, "Arm", "Lead over a static network (points)", tuple(lines), level=0.0))
    return Chart(
        LEADS,
        "wang2019",
        "Our own",
        "Does it help that gates depend on the image?",
        "CIFAR-10. Arms 1 and 2 have the same gates for all images, arms 3 to 7 gates that depend on the image, and "
        "arms 8 and 9 learn from a teacher. Mean and standard deviation over trials.",
        tuple(panels),
    )


def _quantities(experiment: ExperimentResults, networks: Sequence[str]) -> Chart:
    """What was measured of each arm; each panel has a line per network, over the numbers of the arms."""
    panels: list[Panel] = []
    for quantity, measure in _MEASURED.items():
        lines: list[Series] = []
        for network in networks:
            several = [[measure(run) for run in arm_runs(experiment, arm, network)] for arm in ARMS]
            known = [place for place, values in enumerate(several) if np.isfinite(values).all()]
            lines.append(
                Series(
                    NETWORKS[network].title,
                    network,
                    tuple(map(float, known)),
                    tuple(float(np.mean(several[place])) for place in known),
                    tuple(float(np.std(several[place], ddof=1)) for place in known),
                )
            )
        panels.append(Panel("", "Arm", quantity, tuple(lines)))
    numbered = ", ".join(f"{place} {arm.title}" for place, arm in enumerate(ARMS.values()))
    return Chart(
        QUANTITIES,
        "wang2019",
        "Our own",
        "What the arms came to",
        f"CIFAR-10. Arms: {numbered}. Mean and standard deviation over trials.",
        tuple(panels),
    )


def arms_table(charts: Sequence[Chart]) -> str:
    """Returns the arms as a table in Markdown, from the charts of a run; "not run here" in place of what is missing."""
    quantities = next((chart for chart in charts if chart.id == QUANTITIES), None)
    lines = [f"| network | arm | {' | '.join(_MEASURED)} |", f"| --- | --- |{' ---: |' * len(_MEASURED)}"]
    if quantities is None:
        return "\n".join([*lines, f"| all | all | {' | '.join(['not run here'] * len(_MEASURED))} |"])
    for line, title in enumerate(each.label for each in quantities.panels[0].series):
        for place, arm in enumerate(ARMS.values()):
            cells = [_cell(panel.series[line], float(place)) for panel in quantities.panels]
            lines.append(f"| {title} | {arm.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(series: Series, x: float) -> str:
    if x not in series.x:
        return "–"
    place = series.x.index(x)
    spread = 0.0 if series.spread is None else series.spread[place]
    return f"{series.y[place]:.3g} ± {spread:.2g}"


def _line(place: int, arm: str, values: Any) -> Series:
    label = f"{place + 1}: {ARMS[arm].title}"
    return Series(label, arm, (float(place + 1),), (float(values.mean()),), (float(values.std(ddof=1)),))

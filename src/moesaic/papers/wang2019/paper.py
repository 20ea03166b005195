"""Wang et al. 2019, "Deep Mixture of Experts via Shallow Embedding" (DeepMoE).

Routing by channel: the supplement's claims on expressive power and on four widenings of VGG-16 (`claims_expressivity`,
without training), gated against static networks of equal cost on CIFAR-10 (`claims_vgg16`), and whether it helps that
gates depend on the image (`claims_dynamic_gates`). The main paper's tables were not available, and no claim is about
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.paper import ExperimentResults, Paper, Plan
from moesaic.papers.engine.runner import Runner
from moesaic.papers.wang2019 import (
    claims_dynamic_gates,
    claims_expressivity,
    claims_vgg16,
    experiments_dynamic_gates,
    experiments_expressivity,
    experiments_vgg16,
    figures_dynamic_gates,
    figures_expressivity,
    figures_vgg16,
)
from moesaic.papers.wang2019.causes import CAUSES
from moesaic.papers.wang2019.glossary import GLOSSARY
from moesaic.report.chart import Chart

__all__ = ["PAPER"]


def plan(preset: str, fidelity: Fidelity) -> Plan[Any]:
    """Returns the cells: as printed, those that train nothing; in our form, those that train."""
    if fidelity == "print":
        return experiments_expressivity.plan()
    return {**experiments_vgg16.plan(preset, fidelity), **experiments_dynamic_gates.plan(preset, fidelity)}


def charts(experiments: Mapping[Fidelity, ExperimentResults[Any]]) -> list[Chart]:
    """Returns the charts for which there are results."""
    drawn = figures_expressivity.charts(experiments["print"]) if "print" in experiments else []
    for draw in (figures_vgg16.charts, figures_dynamic_gates.charts):
        drawn += draw(experiments["best"]) if "best" in experiments else []
    return drawn


def notes(preset: str, runner: Runner) -> list[str]:
    """Returns remarks for the report."""
    lost = (
        "Wang et al.: Table 1 of the supplement has lost five cells in the copy at hand (Conv11 to Conv13 of W1-High, "
        "Conv3 and Conv4 of W4-Low); they are solved for, so that all four columns have equally many weights."
    )
    return [lost, claims_vgg16.NOTE, claims_dynamic_gates.NOTE] if preset != "quick" else [lost]


def check_data(data_dir: Path | None) -> None:
    """Raises if CIFAR-10 is damaged. If it is missing, its claims are not run."""
    if data_dir is not None:
        experiments_vgg16.check_data(data_dir)


PAPER: Paper[Any] = Paper(
    id="wang2019",
    title="Deep Mixture of Experts via Shallow Embedding (Wang et al. 2019), supplement",
    about="The channels of a convolution are its experts: a small network looks at the image first and says which "
    "channels of every layer work on it. The supplement argues that such a network, though sparse, can tell as much "
    "apart as a dense one, and gives four ways to widen VGG-16. Here its argument is calculated, and networks with "
    "gates are put beside narrower ones of equal cost on CIFAR-10.",
    checks=(*claims_expressivity.CHECKS, *claims_vgg16.CHECKS, *claims_dynamic_gates.CHECKS),
    plan=plan,
    charts=charts,
    notes=notes,
    check_data=check_data,
    headline="rank-dynamic",
    glossary=GLOSSARY,
    letters={"L": "layers", "M": "features", "m": "widths", "n": "open_channels"},
    causes=CAUSES,
)

"""Chen et al. 2022, "Towards Understanding Mixture of Experts in Deep Learning".

Routing by sample: synthetic data with clusters (`claims_synthetic`, `claims_theory`; `claims_print_vs_released` undoes
single differences between print and code), CIFAR-10 and CIFAR-10-Rotate (`claims_images` as printed,
`claims_released_images` as released), and sentences in three languages (`claims_language`). Every trial has its own
random samples; the released code trains ten times on one dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022 import (
    claims_images,
    claims_language,
    claims_print_vs_released,
    claims_released_images,
    claims_synthetic,
    claims_theory,
    experiments_ensembles,
    experiments_images,
    experiments_language,
    experiments_print_vs_released,
    experiments_synthetic,
    figures_images,
    figures_language,
    figures_synthetic,
)
from moesaic.papers.chen2022.causes import CAUSES
from moesaic.papers.chen2022.glossary import GLOSSARY
from moesaic.papers.engine.paper import ExperimentResults, Paper, Plan
from moesaic.papers.engine.runner import Runner
from moesaic.report.chart import Chart

__all__ = ["PAPER"]


def plan(preset: str, fidelity: Fidelity) -> Plan[Any]:
    """Returns the cells on synthetic data, images and sentences."""
    return {
        **experiments_synthetic.plan(preset, fidelity),
        **experiments_ensembles.plan(preset, fidelity),
        **experiments_print_vs_released.plan(preset, fidelity),
        **experiments_images.plan(preset, fidelity),
        **experiments_language.plan(preset, fidelity),
    }


def charts(experiments: Mapping[Fidelity, ExperimentResults[Any]]) -> list[Chart]:
    """Returns the charts for which there are results."""
    return [
        *figures_synthetic.charts(experiments),
        *figures_images.charts(experiments),
        *figures_language.charts(experiments),
    ]


def notes(preset: str, runner: Runner) -> list[str]:
    """Returns remarks for the report."""
    sizes = experiments_synthetic.SIZES[preset]
    many = f"{sizes.trials} trials"
    if sizes.single_trials != sizes.trials:
        many += f" of mixtures and {sizes.single_trials} of single networks"
    remarks = [
        f"Synthetic data: {many}, each with {sizes.samples:,} training and as many test samples of its "
        "own (the paper: 10, with 16,000; the released code has one data set and ten initialisations).",
        "As printed, the rates 0.001 and 0.1 on data of unit scale need more than the released code's 501 steps; "
        "networks get 4000. The initial scale is not printed; σ0 = 0.01 here.",
    ]
    if preset != "quick":
        remarks += [claims_images.NOTE, claims_language.NOTE]
    else:
        remarks.append("Quick: smaller samples and fewer trials than the paper; --preset short has them all.")
    return remarks


def check_data(data_dir: Path | None) -> None:
    """Raises if a dataset is damaged. If images or sentences are missing, their claims are not run."""
    if data_dir is not None:
        experiments_images.check_data(data_dir)
        experiments_language.check_data(data_dir)


def compact(name: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves the first and the last moment of tracks, which are all that claims read, and drops the losses."""
    kept = {key: value for key, value in result.items() if key != "losses"}
    for key in kept:
        if key.startswith("track_") and key not in ("track_steps", "track_probe_accuracy", "track_router_sum"):
            kept[key] = [[trial[0], trial[-1]] for trial in kept[key]]
    return kept


PAPER: Paper[Any] = Paper(
    id="chen2022",
    title="Towards Understanding Mixture of Experts in Deep Learning (Chen et al. 2022)",
    about="A router sends each sample to one of several experts. The data have clusters, and in each cluster another "
    "feature tells the class: too much for a single network that treats all patches alike, easy for an expert that "
    "sees one cluster only. The paper says that mixtures of nonlinear experts find the clusters by themselves, and "
    "that mixtures of linear experts do not.",
    checks=(
        *claims_synthetic.CHECKS,
        *claims_theory.CHECKS,
        *claims_print_vs_released.CHECKS,
        *claims_images.CHECKS,
        *claims_released_images.CHECKS,
        *claims_language.CHECKS,
    ),
    plan=plan,
    charts=charts,
    notes=notes,
    check_data=check_data,
    headline="table1-nonlinear-ahead",
    glossary=GLOSSARY,
    letters={"M": "experts", "J": "filters"},
    compact=compact,
    causes=CAUSES,
)

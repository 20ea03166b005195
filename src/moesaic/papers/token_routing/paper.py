"""Claims of our own on routing by token, checked as those of the papers are.

Vision transformers on CIFAR-10: mixtures of experts, skipped tokens and conversions of trained networks against dense
networks of equal cost, and few labels beside a convolutional network (`claims`). The networks train on a GPU; their
costs are counted anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.findings import GlossaryEntry
from moesaic.papers.engine.paper import ExperimentResults, Paper
from moesaic.papers.engine.runner import Runner
from moesaic.papers.token_routing import claims, experiments, figures
from moesaic.papers.token_routing.continued_training import check_data
from moesaic.report.chart import Chart

__all__ = ["PAPER"]

_GLOSSARY: tuple[GlossaryEntry, ...] = (
    ("ViT", r"\bViTs?\b", "a vision transformer: it computes on tokens, one for each patch of an image"),
    ("token", r"\btokens?\b", "the features of a patch of 4×4 pixels; an image of 32×32 has 64"),
    ("MLP", r"\bMLPs?\b", "two linear layers in each block of a transformer, which treat every token alone"),
    ("dense", r"\bdense\b", "without routing: the whole network works on all tokens"),
    (
        "multiply-adds",
        r"\bmultiply-adds\b",
        "how often a network multiplies and adds for one image: what it costs to run, on any machine",
    ),
    ("expert choice", r"\bexpert choice\b", "each expert picks the tokens or patches that score highest for it"),
    ("upcycling", r"(?i)\bupcycl", "a trained layer becomes a mixture of experts, each a copy of it"),
    ("CIFAR-10", r"\bCIFAR-10\b", "small photos of ten kinds of things, such as cars, frogs and ships"),
)


def charts(experiments: Mapping[Fidelity, ExperimentResults[Any]]) -> list[Chart]:
    """Returns the charts for which there are results."""
    return figures.charts(experiments["best"]) if "best" in experiments else []


def notes(preset: str, runner: Runner) -> list[str]:
    """Returns remarks for the report."""
    return [claims.NOTE]


def compact(name: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reduces the curves of a run to their ends."""
    if "base" not in result:
        return result
    branches: Mapping[str, Mapping[str, Any]] = result["branches"]
    return {"base": _ends(result["base"]), "branches": {branch: _ends(stage) for branch, stage in branches.items()}}


def _ends(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {**stage, "training": stage["training"][-1:], "losses": stage["losses"][-1:]}


PAPER: Paper[Any] = Paper(
    id="token_routing",
    title="Routing by token: claims of our own",
    about="In a vision transformer each token can be routed: to one of several experts in place of the MLP, or past "
    "whole blocks. Here such networks are put beside dense ones of equal cost on CIFAR-10, trained from scratch, "
    "converted from trained ones, and on few labels. No paper makes these claims; their rules were written before the "
    "runs.",
    checks=claims.CHECKS,
    plan=experiments.plan,
    charts=charts,
    notes=notes,
    check_data=check_data,
    headline="moe-ahead",
    glossary=_GLOSSARY,
    compact=compact,
)

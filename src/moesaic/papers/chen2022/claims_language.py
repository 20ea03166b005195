"""Claims of Chen et al. 2022, Appendix A.4, on sentences in three languages: Tables 10 and 11, Figure 8.

Rules and limits were written before anything was measured. Epochs and ranges of learning rates were
set after a look at the first trial's validation part, and not changed once test sentences were looked
at, though as printed the router's rate that is picked is then the lowest of its range.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moesaic.fidelity import Fidelity
from moesaic.insight import DispatchTable
from moesaic.intervals import mean
from moesaic.papers.chen2022.experiments_language import (
    EXPERTS,
    ClaimCheck,
    ExperimentResults,
    LanguageCell,
    LanguageResult,
)
from moesaic.papers.chen2022.tsne import in_plane
from moesaic.papers.engine.decision_rules import CheckResult, at_least, at_most
from moesaic.papers.engine.findings import Claim
from moesaic.report.chart import Chart, Counts, Group, Marker, Panel, Points, Series

__all__ = ["CHECKS", "NOTE", "PUBLISHED", "charts", "plan"]

PUBLISHED = DispatchTable(
    ("English", "French", "Russian"), ((1374, 3745, 2999, 31882), (23470, 3335, 13182, 13), (833, 9405, 7723, 39))
)
"""Table 11."""

NOTE = (
    "Language (Tables 10 and 11, Figure 8): tweets stand in for the paper's texts, and are far fewer: at most 5 000 of "
    "each language in place of 200 000 English, 200 000 French and 90 000 Russian ones. Vectors come from frequencies "
    "of characters and know less about sentiment than the BERT model of the paper. Trials split the same sentences "
    "anew: their test parts overlap, also with the sentences that learning rates were picked on, so that intervals are "
    "somewhat too narrow."
)
"""What a reader of the report should know."""

_CELL = "language"
_SETTING = (
    "Five trials, each with its own random split (80 % training), on at most 5 000 tweets of each language "
    "in place of the paper's 490 000 texts, and with an embedding from characters in place of BERT's. Single "
    "network and mixture train alike, equally long, and each with the learning rates that are best, of nine tries, on "
    "a fifth of the first trial's training sentences."
)
_BLIND = (PUBLISHED.entropy / PUBLISHED.cluster_entropy + 1) / 2
_PURE = 90.0
_TITLES: dict[Fidelity, str] = {"print": "as printed", "released": "as released"}


def plan(preset: str, fidelity: Fidelity) -> dict[str, LanguageCell]:
    """The cell of a fidelity, in the full preset."""
    if preset != "full" or fidelity == "best":
        return {}
    released = LanguageCell(bias=True, softmax_twice=True, piece=32, balance=0.1)
    return {_CELL: LanguageCell() if fidelity == "print" else released}


def _lead(experiment: ExperimentResults) -> CheckResult:
    single, mixture = experiment.results[_CELL].accuracy.T
    return at_least(mean(mixture - single), 0.0)


def _mixed(experiment: ExperimentResults) -> CheckResult:
    tables = experiment.results[_CELL].dispatch
    return at_most(mean([table.entropy / table.cluster_entropy for table in tables]), round(_BLIND, 3))


def _clustered(experiment: ExperimentResults) -> CheckResult:
    return at_least(mean(experiment.results[_CELL].purity), _PURE)


CHECKS: tuple[ClaimCheck, ...] = (
    ClaimCheck(
        Claim(
            "table10-language",
            "chen2022",
            "Table 10",
            "On sentiment in three languages, a mixture of four experts classifies better than a single network "
            "(lead in points).",
            2.09,
            f"Test accuracy of the mixture less that of the single network, mean over trials with Student's 95 % "
            f"interval. {_SETTING} Holds if the interval is at or above 0, fails if it is below, else partly.",
        ),
        (_CELL,),
        _lead,
    ),
    ClaimCheck(
        Claim(
            "table11-by-language",
            "chen2022",
            "Table 11",
            "The router, which is not told the language, distributes sentences largely by language (dispatch entropy "
            "given languages, over the entropy of the languages: 0 by language alone, 1 blind).",
            round(PUBLISHED.entropy / PUBLISHED.cluster_entropy, 3),
            f"Dispatch entropy (eq. 6.1) of test sentences with languages as clusters, over the entropy of the "
            f"languages, mean over trials with Student's 95 % interval. {_SETTING} Holds if the interval is at or "
            f"below {_BLIND:.3f}, halfway from the paper's table to a router blind to languages, fails if it is above, "
            "else partly.",
        ),
        (_CELL,),
        _mixed,
    ),
    ClaimCheck(
        Claim(
            "fig8-languages",
            "chen2022",
            "Figure 8",
            "Embedded sentences form clusters by language (percent of sentences whose nearest neighbour speaks the "
            "same language).",
            "clusters by language",
            f"Of the test sentences' vectors, the percentage whose nearest other one (cosine) is of the same language, "
            f"mean over trials with Student's 95 % interval. {_SETTING} Holds if the interval is at or above "
            f"{_PURE:g}, fails if it is below, else partly.",
        ),
        (_CELL,),
        _clustered,
    ),
)


def charts(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Tables 10 and 11 and Figure 8, where there are results."""
    results = {
        _TITLES[each]: experiment.results[_CELL]
        for each, experiment in experiments.items()
        if _CELL in experiment.results
    }
    return [_accuracies(results), _dispatch(results), _clusters(results)] if results else []


def _accuracies(results: Mapping[str, LanguageResult]) -> Chart:
    panels: list[Panel] = []
    for title, result in results.items():
        x = tuple(float(trial) for trial in range(1, len(result.accuracy) + 1))
        single, mixture = (tuple(each.tolist()) for each in result.accuracy.T)
        lines = (Series("single network", "single", x, single), Series("mixture of four", "mixture", x, mixture))
        panels.append(Panel(title, "Trial", "Test accuracy (%)", lines))
    names = next(iter(results.values())).dispatch[0].clusters
    told = "; ".join(
        f"{title}: {', '.join(f'{name} {a:.1f} / {b:.1f}' for name, a, b in zip(names, *means, strict=True))}"
        for title, means in ((title, result.by_language.mean(0)) for title, result in results.items())
    )
    return Chart(
        "table-10",
        "chen2022",
        "Table 10",
        "Is a mixture better than one network, when nobody tells the language?",
        f"Each trial has its own split of the sentences. Accuracy by language, single / mixture: {told}.",
        tuple(panels),
    )


def _dispatch(results: Mapping[str, LanguageResult]) -> Chart:
    tables = {"the paper's": PUBLISHED} | {title: result.dispatch[0] for title, result in results.items()}
    panels = [
        Panel(
            f"{title}: {table.entropy / table.cluster_entropy:.2f}",
            "",
            "",
            counts=Counts(table.clusters, tuple(f"expert {e + 1}" for e in range(len(table.load))), table.counts),
        )
        for title, table in tables.items()
    ]
    return Chart(
        "table-11",
        "chen2022",
        "Table 11",
        "Which expert gets which language?",
        "Test sentences by language and expert, of the first trial here. A router that knows languages fills each "
        "column from one row. The number above a table is its dispatch entropy over that of the languages: 0 by "
        "language alone, 1 blind to it.",
        tuple(panels),
    )


def _clusters(results: Mapping[str, LanguageResult]) -> Chart:
    first = next(iter(results.values()))
    x, y = in_plane(first.points).round(2).T

    def group(label: str, role: str, which: NDArray[np.bool_], marker: Marker = "o", meaning: str = "") -> Group:
        return Group(label, role, tuple(x[which].tolist()), tuple(y[which].tolist()), marker, meaning)

    names = first.dispatch[0].clusters
    moods: tuple[tuple[Marker, str], ...] = (("x", "negative"), ("o", "positive"))
    spoken = [
        group(name, f"language-{k}", (first.languages == k) & (first.labels == mood), *look)
        for k, name in enumerate(names)
        for mood, look in enumerate(moods)
    ]
    panels = [Panel("by language", "", "", points=Points(tuple(spoken)))]
    for title, result in results.items():
        groups = [group(f"expert {e + 1}", f"expert-{e + 1}", result.chosen == e) for e in range(EXPERTS)]
        panels.append(Panel(f"by expert, {title}", "", "", points=Points(tuple(g for g in groups if g.x))))
    return Chart(
        "figure-8",
        "chen2022",
        "Figure 8",
        "Do sentences of a language lie together?",
        f"{first.told} {len(x)} test sentences of the first trial, brought into the plane by t-SNE; neighbours in the "
        "picture are neighbours in the embedding, and axes mean nothing. Where languages are clusters, a router can "
        "send each to an expert.",
        tuple(panels),
    )

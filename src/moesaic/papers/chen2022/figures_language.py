"""Tables 10 and 11 and Figure 8 of Chen et al. 2022: sentiment in three languages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moesaic.insight.embedding_map import tsne
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.claims_language import PUBLISHED
from moesaic.papers.chen2022.experiments_language import (
    CELL,
    EXPERTS,
    ExperimentResults,
    LanguageResult,
)
from moesaic.report.chart import Chart, Counts, Group, Marker, Panel, Points, Series

__all__ = ["charts"]

_TITLES: dict[Fidelity, str] = {"print": "as printed", "released": "as released"}


def charts(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Returns the charts if there are results."""
    results = {
        _TITLES[each]: experiment.results[CELL]
        for each, experiment in experiments.items()
        if CELL in experiment.results
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
    by_language = "; ".join(
        f"{title}: {', '.join(f'{name} {a:.1f} / {b:.1f}' for name, a, b in zip(names, *means, strict=True))}"
        for title, means in ((title, result.by_language.mean(0)) for title, result in results.items())
    )
    return Chart(
        "table-10",
        "chen2022",
        "Table 10",
        "Is a mixture better than one network, when nobody tells the language?",
        f"Each trial has its own split of the sentences. Accuracy by language, single / mixture: {by_language}.",
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
    x, y = tsne(first.points).round(2).T

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
        f"{first.embedding_description} {len(x)} test sentences of the first trial, brought into the plane by t-SNE; "
        "neighbours in the picture are neighbours in the embedding, and axes mean nothing. Where languages are "
        "clusters, a router can send each to an expert.",
        tuple(panels),
    )

"""Terms that claims and charts use, each with a short definition for readers who are new to the field.

A term may have another meaning in one paper: the entries of a paper's own glossary replace the shared ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from moesaic.papers.engine.findings import Finding, GlossaryEntry
from moesaic.report.chart import Chart, Panel

__all__ = ["letter_pattern", "used_terms"]


def letter_pattern(letter: str) -> str:
    """Returns a regular expression that matches a mathematical symbol, but not the same letter within a word."""
    return rf"(?<![\w*]){letter}(?![\w*])"


_SHARED: tuple[GlossaryEntry, ...] = (
    ("CNN", r"\bCNNs?\b", "here a network whose neurons look at every patch of a sample"),
    ("pMoE", r"\bpMoE\b", "a mixture of experts by patch: every expert looks only at the patches its router picks"),
    ("expert", r"\bexperts?\b", "one of several small networks, each of which gets a part of the work"),
    ("router", r"\brouters?\b", "scores all patches of a sample for an expert, which gets those that score best"),
    (
        "separate training",
        r"(?i)\bseparate[- ]training\b|\bseparately trained\b",
        "routers are trained first and stay as they are while the experts learn; each class has its expert",
    ),
    ("joint training", r"(?i)\bjoint[- ]training\b", "routers and experts learn together"),
    ("gate", r"\bgates?\b", "how much a picked patch counts for its expert; the gates of an expert sum to 1"),
    (
        "discriminative",
        r"\bdiscriminative\b",
        "so is called the patch that tells a sample's class; the others tell nothing",
    ),
    ("N", letter_pattern("N"), "the number of training samples"),
    ("k", letter_pattern("k"), "the number of experts"),
    ("l", letter_pattern("l"), "the number of patches that each expert takes"),
    ("l*", r"(?<!\w)l\*", "the least l with which an expert is sure to get the discriminative patch"),
    ("points", r"\bpoints\b", "percentage points of test accuracy: from 90 % to 92 % are two"),
    (
        "exponent",
        r"\bexponent\b|\bto the power\b",
        "with exponent 1 a number doubles when the other does, with 0.5 it grows by 41 %, with 0 it stays, "
        "below 0 it falls",
    ),
    ("Ω(1)", r"Ω\(1\)", "at least some constant above 0, however large everything else becomes"),
    ("linearly separable", r"\blinearly separable\b", "a weighted sum of all pixels already tells the classes apart"),
    ("activation pattern", r"\bactivation pattern\b", "on which patches a neuron responds and on which it is silent"),
    (
        "pseudo-network",
        r"\bpseudo-network\b",
        "stands for the real network in the proofs; its neurons respond where they did before training",
    ),
)


def used_terms(
    findings: Iterable[Finding], charts: Iterable[Chart], glossary: Sequence[GlossaryEntry] = ()
) -> dict[str, str]:
    """Returns the terms that occur in a paper's statements and charts, with their definitions.

    ``glossary`` has the paper's own entries.

    >>> finding = Finding("a", "p", "Figure 7", "Falls with l.", "print", "full", None, None, None, "", "holds", 1.0)
    >>> used_terms([finding], [])
    {'l': 'the number of patches that each expert takes'}
    """
    texts = [finding.statement for finding in findings]
    texts += [text for chart in charts for text in _texts(chart)]
    own = {term for term, _, _ in glossary}
    entries = (*glossary, *(entry for entry in _SHARED if entry[0] not in own))
    return {term: meaning for term, pattern, meaning in entries if any(re.search(pattern, text) for text in texts)}


def _texts(chart: Chart) -> Iterator[str]:
    yield from (chart.title, chart.caption, *chart.row_titles)
    for panel in chart.panels:
        yield from (panel.title, panel.x_label, panel.y_label, *_labels(panel))


def _labels(panel: Panel) -> Iterator[str]:
    yield from (line.label for line in panel.series)
    if panel.points is not None:
        yield from (group.label for group in panel.points.groups)
    if panel.counts is not None:
        yield from (*panel.counts.rows, *panel.counts.columns)

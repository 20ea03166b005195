"""The words of the field that claims and charts use, each with a sentence for someone who meets it first."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moesaic.ledger import Chart, Finding

__all__ = ["explained"]

_LETTER = r"(?<![\w*]){}(?![\w*])"

_GLOSSARY = (
    ("CNN", r"\bCNNs?\b", "here a network whose neurons look at every patch of a sample"),
    ("pMoE", r"\bpMoE\b", "a mixture of experts by patch: every expert looks only at the patches its router picks"),
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
    ("N", _LETTER.format("N"), "the number of training samples"),
    ("k", _LETTER.format("k"), "the number of experts"),
    ("l", _LETTER.format("l"), "the number of patches that each expert takes"),
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
"""Word, pattern that finds it, what it means."""


def explained(findings: Iterable[Finding], charts: Iterable[Chart]) -> dict[str, str]:
    """The words that occur in statements and charts, with their meanings; others would only be in the way.

    >>> finding = Finding("a", "p", "Figure 7", "Falls with l.", "print", "full", None, None, None, "", "holds", 1.0)
    >>> explained([finding], [])
    {'l': 'the number of patches that each expert takes'}
    """
    texts = [finding.statement for finding in findings]
    for chart in charts:
        texts += [chart.title, chart.caption]
        for panel in chart.panels:
            texts += [panel.x_label, panel.y_label, *(line.label for line in panel.series)]
    return {word: meaning for word, pattern, meaning in _GLOSSARY if any(re.search(pattern, text) for text in texts)}

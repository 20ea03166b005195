"""The words of the field that claims and charts use, each with a sentence for someone who meets it first.

A word may mean something else in another paper: what stands under the paper's id goes before what all share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moesaic.papers.engine.findings import Finding
from moesaic.report.chart import Chart, Panel

__all__ = ["explained"]

_LETTER = r"(?<![\w*]){}(?![\w*])"

_Entry = tuple[str, str, str]
"""Word, pattern that finds it, what it means."""

_SHARED: tuple[_Entry, ...] = (
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

_OF_PAPER: dict[str, tuple[_Entry, ...]] = {
    "chen2022": (
        (
            "mixture",
            r"(?i)\bMoEs?\b|\bmixtures?\b",
            "of experts, MoE in the paper: a router sends every sample to one expert, which alone decides on it",
        ),
        ("expert", r"\bexperts?\b", "one of several networks, each of which learns from the samples it gets"),
        ("router", r"\brouters?\b", "scores the experts for a sample; the one that scores best gets it"),
        ("gate", r"\bgates?\b", "the router's score of the chosen expert, by which its output is multiplied"),
        (
            "single network",
            r"(?i)\bsingle (?:\w+ )?(?:models?|networks?|experts?|CNNs?)\b|\bsingle \((?:non)?linear\)",
            "one network that decides on all samples, without a router",
        ),
        (
            "linear and nonlinear",
            r"(?i)\b(?:non)?linear\b",
            "a nonlinear network cubes the responses of its filters (or bends them otherwise), a linear one only "
            "sums them",
        ),
        (
            "cluster",
            r"\bclusters?\b",
            "the hidden group that a sample belongs to; each has a signal of its own that tells the class",
        ),
        (
            "feature signal",
            r"\bfeature (?:signals?|vectors?|noises?)\b",
            "the pattern of a sample's cluster, whose sign is the class; every sample also has another cluster's "
            "pattern with a random sign, the feature noise",
        ),
        (
            "centre signal",
            r"\b(?:cluster-)?cent(?:er|re) (?:signals?|vectors?)\b",
            "the pattern by which a sample's cluster can be told, and nothing about its class",
        ),
        (
            "dispatch",
            r"\bdispatch\b(?! entrop)",
            "which expert gets how many samples of which cluster",
        ),
        (
            "dispatch entropy",
            r"(?i)\bdispatch entrop(?:y|ies)\b|\bentropy\b",
            "how mixed the clusters are within an expert, in nats: 0 if every expert gets samples of one cluster "
            "only; if every expert gets all alike, 1.39 for four clusters and 2.30 for ten",
        ),
        (
            "load balancing",
            r"(?i)\bload[- ]balanc(?:ing|e)\b",
            "a term added to the loss that is small when all experts get equally many samples",
        ),
        ("load", r"(?i)\bloads?\b(?![- ]balanc)", "the share of the samples that an expert gets"),
        ("filter", r"\bfilters?\b", "the weights of one neuron, which looks at every patch in turn"),
        (
            "inner product",
            r"\binner products?\b",
            "how much of a pattern is in a weight: 0 for none, and the larger the more of it was learned",
        ),
        (
            "setting",
            r"(?i)\bsettings? [1-4]\b",
            "how strong the signals in the samples are; the paper tries four settings, of which in 3 and 4 feature "
            "signal and feature noise are equally strong",
        ),
        (
            "exploration stage",
            r"\bexploration stage\b",
            "the first steps of training, in which experts come to differ while the router hardly moves",
        ),
        (
            "additive classifier",
            r"\badditive\b",
            "whatever looks at each patch alone and sums up, as a single network does with any activation",
        ),
        ("activation", r"\bactivations?\b", "what a neuron makes of what it sees in a patch: its cube, for example"),
        ("CNN", r"\bCNNs?\b", "a network of convolutions"),
        ("CIFAR-10", r"\bCIFAR-10\b(?!-)", "small photos of ten kinds of things, such as cars, frogs and ships"),
        (
            "CIFAR-10-Rotate",
            r"\bCIFAR-10-Rotate\b",
            "the same photos, upright and turned by 30°; the question is whether a photo is turned",
        ),
        (
            "embedding",
            r"(?i)\bembed(?:ded|dings?)\b",
            "a sentence or photo as a list of numbers, similar for what is alike",
        ),
        (
            "t-SNE",
            r"\bt-SNE\b",
            "lays samples out in a plane so that neighbours stay neighbours; directions and distances mean nothing",
        ),
        ("M", _LETTER.format("M²?"), "the number of experts"),
        ("K", _LETTER.format("K"), "the number of clusters"),
        ("J", _LETTER.format("J"), "the number of filters of an expert"),
    ),
    "wang2019": (
        (
            "channel",
            r"\bchannels?\b",
            "one of the maps that a convolution makes of an image; here each is an expert, which works or is left out",
        ),
        ("gate", r"\bgates?\b|\bgated\b", "opens a channel for an image, or closes it, which saves its work"),
        ("mask", r"\bmasks?\b", "which channels of every layer are open"),
        ("static", r"\bstatic\b", "the same for all images"),
        ("DeepMoE", r"\bDeepMoE\b", "a network whose channels are gated for every image by a small network beside it"),
        (
            "embedding network",
            r"\bembedding network\b",
            "the small network that looks at an image first and sets the gates of all layers",
        ),
        (
            "multiply-adds",
            r"\bmultiply-adds\b",
            "how often a network multiplies and adds for one image: what it costs to run, on any machine",
        ),
        ("VGG-16", r"\bVGG-16\b", "a network of thirteen convolutions, one after the other"),
        ("CIFAR-10", r"\bCIFAR-10\b", "small photos of ten kinds of things, such as cars, frogs and ships"),
        ("rank", r"\branks?\b", "how many independent things a network of a kind can tell apart"),
        (
            "blind",
            r"\bblind\b",
            "channels are blind to a difference that none of their filters responds to",
        ),
        (
            "Hamming distance",
            r"\bHamming\b",
            "the share of gates that are open for one of two images and closed for the other",
        ),
        ("dead", r"\bdead\b", "so is called a channel that is open for no image"),
        ("k", r"\btop-k\b", "in top-k: how many gates are open for every image, those with the highest scores"),
        ("N", _LETTER.format("N"), "the number of patches of an input, 2^L"),
        ("L", _LETTER.format("L"), "the number of layers"),
        ("M", _LETTER.format("M"), "the number of features by which patches differ"),
        ("m", _LETTER.format("m"), "the number of channels of a layer"),
        ("n", _LETTER.format("n"), "the number of its channels that are open, or of all where it has no mask"),
        ("C(m, n)", r"C\(m, n\)", "in how many ways n of m can be chosen"),
    ),
}


def explained(findings: Iterable[Finding], charts: Iterable[Chart]) -> dict[str, str]:
    """The words that occur in a paper's statements and charts, with their meanings; others would only be in the way.

    >>> finding = Finding("a", "p", "Figure 7", "Falls with l.", "print", "full", None, None, None, "", "holds", 1.0)
    >>> explained([finding], [])
    {'l': 'the number of patches that each expert takes'}
    """
    texts = [(finding.paper, finding.statement) for finding in findings]
    texts += [(chart.paper, text) for chart in charts for text in _texts(chart)]
    words: dict[str, str] = {}
    for paper in dict.fromkeys(paper for paper, _ in texts):
        own = _OF_PAPER.get(paper, ())
        shared = [entry for entry in _SHARED if entry[0] not in {word for word, _, _ in own}]
        for word, pattern, meaning in (*own, *shared):
            if any(re.search(pattern, text) for whose, text in texts if whose == paper):
                words.setdefault(word, meaning)
    return words


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

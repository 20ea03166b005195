"""Definitions of the terms of Chen et al. 2022, for the report."""

from __future__ import annotations

from moesaic.papers.engine.findings import GlossaryEntry
from moesaic.papers.engine.glossary import letter_pattern

__all__ = ["GLOSSARY"]

GLOSSARY: tuple[GlossaryEntry, ...] = (
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
        "a nonlinear network cubes the responses of its filters (or bends them otherwise), a linear one only sums them",
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
    ("M", letter_pattern("M²?"), "the number of experts"),
    ("K", letter_pattern("K"), "the number of clusters"),
    ("J", letter_pattern("J"), "the number of filters of an expert"),
)

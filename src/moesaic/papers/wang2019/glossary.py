"""Definitions of the terms of Wang et al. 2019, for the report."""

from __future__ import annotations

from moesaic.papers.engine.findings import GlossaryEntry
from moesaic.papers.engine.glossary import letter_pattern

__all__ = ["GLOSSARY"]

GLOSSARY: tuple[GlossaryEntry, ...] = (
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
    ("N", letter_pattern("N"), "the number of patches of an input, 2^L"),
    ("L", letter_pattern("L"), "the number of layers"),
    ("M", letter_pattern("M"), "the number of features by which patches differ"),
    ("m", letter_pattern("m"), "the number of channels of a layer"),
    ("n", letter_pattern("n"), "the number of its channels that are open, or of all where it has no mask"),
    ("C(m, n)", r"C\(m, n\)", "in how many ways n of m can be chosen"),
)

"""Data sets and distributions of the papers."""

from moesaic.data.clusters import ClusterData, ClusterPatches, ClusterSetting
from moesaic.data.digit_patches import DigitPatches
from moesaic.data.digits import DIGIT_SIZE, Digits, load_digits
from moesaic.data.embeddings import Embeddings, embed_sentences
from moesaic.data.mosaics import DigitMosaics, digit_mosaics
from moesaic.data.patterns import PatternPatches
from moesaic.data.sentences import SOURCES, Sentences, SentenceSource, load_sentences, read_sentences
from moesaic.data.trials import PatchSource, Split, TrialData

__all__ = [
    "DIGIT_SIZE",
    "SOURCES",
    "ClusterData",
    "ClusterPatches",
    "ClusterSetting",
    "DigitMosaics",
    "DigitPatches",
    "Digits",
    "Embeddings",
    "PatchSource",
    "PatternPatches",
    "SentenceSource",
    "Sentences",
    "Split",
    "TrialData",
    "digit_mosaics",
    "embed_sentences",
    "load_digits",
    "load_sentences",
    "read_sentences",
]

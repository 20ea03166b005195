"""Data sets and distributions of the papers."""

from moesaic.data.clusters import ClusterData, ClusterPatches, ClusterSetting
from moesaic.data.digit_patches import DigitPatches
from moesaic.data.digits import DIGIT_SIZE, Digits, load_digits
from moesaic.data.mosaics import DigitMosaics, digit_mosaics
from moesaic.data.patterns import PatternPatches
from moesaic.data.trials import PatchSource, Split, TrialData

__all__ = [
    "DIGIT_SIZE",
    "ClusterData",
    "ClusterPatches",
    "ClusterSetting",
    "DigitMosaics",
    "DigitPatches",
    "Digits",
    "PatchSource",
    "PatternPatches",
    "Split",
    "TrialData",
    "digit_mosaics",
    "load_digits",
]

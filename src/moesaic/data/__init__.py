"""Data sets and distributions of the papers."""

from moesaic.data.mosaics import DigitMosaics, digit_mosaics
from moesaic.data.trials import PatchSource, TrialData

__all__ = ["DigitMosaics", "PatchSource", "TrialData", "digit_mosaics"]

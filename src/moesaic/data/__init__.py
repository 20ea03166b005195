"""What the networks learn from: the papers' data sets, built from data that comes with the installation."""

from moesaic.data.mosaics import DIGIT_SIZE, DigitMosaics, Split, digit_mosaics

__all__ = ["DIGIT_SIZE", "DigitMosaics", "Split", "digit_mosaics"]

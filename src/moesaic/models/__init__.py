"""Networks of the papers."""

from moesaic.models.mixtures import Mixture, Mixtures
from moesaic.models.two_layer import Networks, TwoLayer

__all__ = ["Mixture", "Mixtures", "Networks", "TwoLayer"]

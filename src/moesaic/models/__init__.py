"""Networks of the papers."""

from moesaic.models.two_layer import Networks, TwoLayer

__all__ = ["Networks", "TwoLayer"]

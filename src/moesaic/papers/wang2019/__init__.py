"""Wang et al. 2019: routing by channel."""

from moesaic.papers.wang2019.paper import PAPER

__all__ = ["PAPER"]

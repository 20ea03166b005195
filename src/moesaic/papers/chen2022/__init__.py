"""Chen et al. 2022: routing by sample."""

from moesaic.papers.chen2022.paper import PAPER

__all__ = ["PAPER"]

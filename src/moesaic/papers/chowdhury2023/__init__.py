"""Chowdhury et al. 2023: routing by patch."""

from moesaic.papers.chowdhury2023.paper import PAPER

__all__ = ["PAPER"]

"""The papers: their experiments, their claims, and whether these hold."""

from moesaic.papers.claims import Paper
from moesaic.papers.rerun import PAPERS, Outcome, reproduce

__all__ = ["PAPERS", "Outcome", "Paper", "reproduce"]

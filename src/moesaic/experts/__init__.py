"""What runs: E experts of one shape, their weights stacked in one tensor."""

from moesaic.experts.conv import ConvExperts
from moesaic.experts.experts import Experts
from moesaic.experts.mlp import MLPExperts
from moesaic.experts.norm import ExpertNorm

__all__ = ["ConvExperts", "ExpertNorm", "Experts", "MLPExperts"]

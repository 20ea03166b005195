"""What runs: E experts of one shape, their weights stacked in one tensor."""

from moesaic.experts.conv import ConvExperts
from moesaic.experts.experts import Experts
from moesaic.experts.mlp import MLPExperts
from moesaic.experts.norm import ExpertNorm
from moesaic.experts.samples import LinearExperts, PatchNetExperts, SampleExperts

__all__ = [
    "ConvExperts",
    "ExpertNorm",
    "Experts",
    "LinearExperts",
    "MLPExperts",
    "PatchNetExperts",
    "SampleExperts",
]

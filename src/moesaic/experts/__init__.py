"""Experts: E networks of one shape, their weights stacked in one tensor."""

from moesaic.experts.conv_experts import ConvExperts
from moesaic.experts.mlp_experts import MLPExperts
from moesaic.experts.sample_experts import LinearExperts, PatchNetExperts, SampleExperts
from moesaic.experts.sharding import clip_grad_norm_, expert_parameters, shard_experts, unshard_experts
from moesaic.experts.stacked_experts import ExpertNorm, Experts

__all__ = [
    "ConvExperts",
    "ExpertNorm",
    "Experts",
    "LinearExperts",
    "MLPExperts",
    "PatchNetExperts",
    "SampleExperts",
    "clip_grad_norm_",
    "expert_parameters",
    "shard_experts",
    "unshard_experts",
]

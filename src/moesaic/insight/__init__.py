"""Metrics over routing records, overlays, the collapse alarm, and explanations of trained networks."""

from moesaic.insight.channel_metrics import channel_usage, class_shares, gate_distances, open_gates, specific_gates
from moesaic.insight.cluster_dispatch import DispatchTable, dispatch_table
from moesaic.insight.collapse_alarm import CollapseAlarm, CollapseEvent, CollapseWarning, check_scores
from moesaic.insight.embedding_map import embedding_map
from moesaic.insight.explain import collect_outputs, explain
from moesaic.insight.image_cost import image_costs
from moesaic.insight.metrics import (
    agreement,
    coverage,
    dead_experts,
    dispatch_entropy,
    load_share,
    overlap,
    routing_entropy,
    summary,
    utilisation,
)
from moesaic.insight.overlays import overlay
from moesaic.insight.training_history import TrainingHistory, expert_accuracy, inner_products

__all__ = [
    "CollapseAlarm",
    "CollapseEvent",
    "CollapseWarning",
    "DispatchTable",
    "TrainingHistory",
    "agreement",
    "channel_usage",
    "check_scores",
    "class_shares",
    "collect_outputs",
    "coverage",
    "dead_experts",
    "dispatch_entropy",
    "dispatch_table",
    "embedding_map",
    "expert_accuracy",
    "explain",
    "gate_distances",
    "image_costs",
    "inner_products",
    "load_share",
    "open_gates",
    "overlap",
    "overlay",
    "routing_entropy",
    "specific_gates",
    "summary",
    "utilisation",
]

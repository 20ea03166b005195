"""Metrics over routing records, overlays, the collapse alarm, and explanations of trained networks."""

from moesaic.insight.channel_explanation import ChannelExplanation
from moesaic.insight.channel_metrics import (
    ChannelUsage,
    GateDistances,
    SpecificGate,
    channel_usage,
    class_shares,
    gate_distances,
    open_gates,
    specific_gates,
)
from moesaic.insight.cluster_dispatch import DispatchTable, dispatch_table
from moesaic.insight.collapse_alarm import CollapseAlarm, CollapseEvent, CollapseWarning, check_scores
from moesaic.insight.embedding_map import EmbeddingMap, embedding_map
from moesaic.insight.explain import Explanation, collect_outputs, explain
from moesaic.insight.image_cost import Costs, MeanCost, image_costs
from moesaic.insight.metrics import (
    Agreement,
    Summary,
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
from moesaic.insight.training_history import MetricSeries, TrainingHistory, expert_accuracy, inner_products

__all__ = [
    "Agreement",
    "ChannelExplanation",
    "ChannelUsage",
    "CollapseAlarm",
    "CollapseEvent",
    "CollapseWarning",
    "Costs",
    "DispatchTable",
    "EmbeddingMap",
    "Explanation",
    "GateDistances",
    "MeanCost",
    "MetricSeries",
    "SpecificGate",
    "Summary",
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

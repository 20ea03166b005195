"""Look at what the routing did, and what training does to it: metrics, tables, pictures, alarms, tracks."""

from moesaic.insight.alarm import CollapseAlarm, CollapseWarning, check_scores
from moesaic.insight.dispatch import DispatchTable, dispatch_table
from moesaic.insight.explain import Explanation, explain, look
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
from moesaic.insight.tracks import Line, Track, expert_accuracy, inner_products

__all__ = [
    "Agreement",
    "CollapseAlarm",
    "CollapseWarning",
    "DispatchTable",
    "Explanation",
    "Line",
    "Summary",
    "Track",
    "agreement",
    "check_scores",
    "coverage",
    "dead_experts",
    "dispatch_entropy",
    "dispatch_table",
    "expert_accuracy",
    "explain",
    "inner_products",
    "load_share",
    "look",
    "overlap",
    "overlay",
    "routing_entropy",
    "summary",
    "utilisation",
]

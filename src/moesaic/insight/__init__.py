"""Look at what the routing did: metrics, pictures, alarms; all of them read ``Routing`` records."""

from moesaic.insight.alarm import CollapseAlarm, CollapseWarning, check_scores
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

__all__ = [
    "Agreement",
    "CollapseAlarm",
    "CollapseWarning",
    "Summary",
    "agreement",
    "check_scores",
    "coverage",
    "dead_experts",
    "dispatch_entropy",
    "load_share",
    "overlap",
    "overlay",
    "routing_entropy",
    "summary",
    "utilisation",
]

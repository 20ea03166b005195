"""Routers: scores in, a ``Routing`` record out; and balance losses."""

from moesaic.routing.auxiliary_losses import entropy_loss, importance_loss, load_balance_loss, z_loss
from moesaic.routing.channel_gate import ChannelGate, gate_l1
from moesaic.routing.expert_choice import ExpertChoice
from moesaic.routing.keep_choice import KeepChoice
from moesaic.routing.registry import RouterLike, list_routers, register_router
from moesaic.routing.router import Router
from moesaic.routing.sample_router import SampleRouter
from moesaic.routing.soft import SoftRouter
from moesaic.routing.token_choice import TokenChoice
from moesaic.routing_record import UNASSIGNED, Routing

__all__ = [
    "UNASSIGNED",
    "ChannelGate",
    "ExpertChoice",
    "KeepChoice",
    "Router",
    "RouterLike",
    "Routing",
    "SampleRouter",
    "SoftRouter",
    "TokenChoice",
    "entropy_loss",
    "gate_l1",
    "importance_loss",
    "list_routers",
    "load_balance_loss",
    "register_router",
    "z_loss",
]

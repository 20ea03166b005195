"""Routed layers: a router, experts and a backend behind one ``nn.Module``; and hooks on their routing."""

from moesaic.layers.channel_moe import ChannelMoE
from moesaic.layers.heads import AttentionHead, PooledHead, create_head
from moesaic.layers.patch_moe import PatchMoE
from moesaic.layers.recording import RoutedLayer, RoutingHook, record_routing, routed_layers, routing_hook
from moesaic.layers.routed_head import RoutedHead
from moesaic.layers.sample_moe import SampleMoE
from moesaic.layers.token_moe import TokenMoE
from moesaic.layers.token_skip import TokenSkip

__all__ = [
    "AttentionHead",
    "ChannelMoE",
    "PatchMoE",
    "PooledHead",
    "RoutedHead",
    "RoutedLayer",
    "RoutingHook",
    "SampleMoE",
    "TokenMoE",
    "TokenSkip",
    "create_head",
    "record_routing",
    "routed_layers",
    "routing_hook",
]

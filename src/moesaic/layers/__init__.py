"""Routed layers: a router, experts and a backend behind one ``nn.Module``; and hooks on their routing."""

from moesaic.layers.channel_moe import ChannelMoE
from moesaic.layers.patch_moe import PatchMoE
from moesaic.layers.recording import RoutedLayer, RoutingHook, record_routing, routed_layers, routing_hook
from moesaic.layers.sample_moe import SampleMoE

__all__ = [
    "ChannelMoE",
    "PatchMoE",
    "RoutedLayer",
    "RoutingHook",
    "SampleMoE",
    "record_routing",
    "routed_layers",
    "routing_hook",
]

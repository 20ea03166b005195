"""What is routed: layers that join a router, experts and a backend; and a way to look at their routing."""

from moesaic.layers.channel_moe import ChannelMoE
from moesaic.layers.patch_moe import PatchMoE
from moesaic.layers.recording import Observer, Routed, observe, record_routing, routed_layers
from moesaic.layers.sample_moe import SampleMoE

__all__ = ["ChannelMoE", "Observer", "PatchMoE", "Routed", "SampleMoE", "observe", "record_routing", "routed_layers"]

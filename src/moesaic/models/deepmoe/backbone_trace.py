"""The trace of a DeepMoE backbone with its gated convolutions replaced by ones that compute only open channels."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

from torch import fx, nn

from moesaic.models.deepmoe.gated_conv import ConsumerConv, GatedConv, GatedReLU
from moesaic.ops.channel.bn_folding import fold_norm
from moesaic.ops.dispatch import ChannelConv

__all__ = ["MakeConv", "compact_layers", "sparse_modules", "trace_layers", "with_open_channels"]

MakeConv = Callable[[ChannelConv, str | None, str | None, bool], nn.Module]
"""Makes the replacement of a gated convolution or consumer from the folded convolution, the names of the layers whose
gates select its output and its input channels, and whether its output has only the open channels."""


class _LayerTracer(fx.Tracer):
    """Treats gated convolutions, their activations and their consumers as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (GatedConv, GatedReLU, ConsumerConv)) or super().is_leaf_module(m, module_qualified_name)


def trace_layers(backbone: nn.Module) -> fx.Graph:
    """The trace of a backbone, in which gated convolutions and their consumers are calls of modules."""
    return _LayerTracer().trace(backbone)


def sparse_modules(backbone: nn.Module, graph: fx.Graph, make: MakeConv) -> dict[str, Any]:
    """The modules and tensors that a trace refers to, by name: ``make``'s convolutions, and copies of the rest."""
    compact = compact_layers(backbone)
    copies: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        name = str(node.target)
        parent, _, attribute = name.rpartition(".")
        module = getattr(backbone.get_submodule(parent), attribute)
        if isinstance(module, GatedConv):
            found[name] = make(fold_norm(module.weights()), module.name, module.producer, module.name in compact).eval()
        elif isinstance(module, ConsumerConv):
            found[name] = make(fold_norm(_channel_conv(module)), None, module.producer, False).eval()
        elif isinstance(module, GatedReLU):
            found[name] = module.plain()
        else:
            found[name] = deepcopy(module, copies)
            found[name].requires_grad_(False)
    return found


def with_open_channels(graph: fx.Graph, modules: dict[str, Any], conv: type[nn.Module]) -> fx.GraphModule:
    """The traced network, with the open channels of all gated layers as a second argument, passed to all ``conv``."""
    image = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(image):
        opened = graph.placeholder("opened")
    for node in graph.nodes:
        node.type = None  # annotations that are strings cannot be pickled
        if node.op == "call_module" and isinstance(modules[str(node.target)], conv):
            node.args = (*node.args, opened)
    return fx.GraphModule(modules, graph)


def compact_layers(backbone: nn.Module) -> set[str]:
    """The gated layers whose consumers read maps of only the open channels."""
    if any(isinstance(module, nn.PReLU) and module.num_parameters > 1 for module in backbone.modules()):
        return set()  # it has a weight per channel
    consumers = [module for module in backbone.modules() if isinstance(module, (GatedConv, ConsumerConv))]
    return {consumer.producer for consumer in consumers if consumer.producer is not None}


def _channel_conv(conv: ConsumerConv) -> ChannelConv:
    padding = cast("tuple[int, int]", conv.padding)[0]
    return ChannelConv(
        conv.weight, conv.bias, None, conv.stride[0], padding, "identity", conv.out_channels, conv.block_in
    )

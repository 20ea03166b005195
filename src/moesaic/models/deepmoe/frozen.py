"""``freeze``: an inference module that computes only the open channels of a network with channel gates.

Masked execution computes every channel. A frozen network has its weights folded and laid out once, so that open
channels can be gathered without asking whether a weight has changed, a hook is registered or a gradient is needed:

- one image through a sequential network: GEMMs of the open blocks (`moesaic.models.deepmoe.frozen_sequence`)
- a batch, or a network with shortcuts: convolutions of the channels that any sample opens
  (`moesaic.ops.channel.gathered_conv`); samples that open the same channels run together where that is cheaper
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from moesaic import context_stacks
from moesaic.layers.channel_moe import ChannelMoE, FrozenChannelMoE
from moesaic.layers.frozen_module import FrozenModule, check_freezable
from moesaic.models.deepmoe.frozen_embedding import FrozenEmbedding
from moesaic.models.deepmoe.frozen_sequence import FrozenConv, FrozenSequence
from moesaic.models.deepmoe.gated_conv import ConsumerConv, GatedConv
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.ops import autocast_off
from moesaic.ops.channel import costs
from moesaic.ops.channel.bn_folding import fold_norm
from moesaic.ops.channel.costs import ConvCosts
from moesaic.ops.channel.gathered_conv import BlockLayout, group_samples
from moesaic.ops.channel.workspace import Workspace, WorkspacePool
from moesaic.ops.dispatch import ChannelConv
from moesaic.routing.channel_heads import FrozenHeads

__all__ = ["FrozenDeepMoE", "freeze"]


@overload
def freeze(model: DeepMoE) -> FrozenDeepMoE: ...
@overload
def freeze(model: ChannelMoE) -> FrozenChannelMoE: ...
@overload
def freeze(model: nn.Module) -> FrozenModule: ...
def freeze(model: nn.Module) -> FrozenModule:
    """Returns an inference module for the CPU that computes only the open channels of a network with channel gates.

    Its output equals that of ``model`` in eval mode up to rounding. BatchNorm is folded into the convolutions and all
    weights are laid out once. They are copies: after training or loading weights, freeze the model again. The frozen
    module has no gradients, cannot be trained, moved, compiled or exported, and may be called from several threads at
    once. `moesaic.record_routing` records its gates under the names that the model's layers have.

    Args:
        model: a `DeepMoE` (such as ``create_model("vgg16_deepmoe", …)``) or a single `ChannelMoE` layer, in eval mode,
            on the CPU, in float32 or float64, without hooks.

    >>> import torch, moesaic
    >>> model = moesaic.create_model("vgg16_deepmoe", num_classes=10, width=0.1).eval()
    >>> fast, x = moesaic.freeze(model), torch.randn(1, 3, 32, 32)
    >>> torch.allclose(fast(x), model(x), atol=1e-4)
    True
    """
    if isinstance(model, DeepMoE):
        return FrozenDeepMoE(model)
    if isinstance(model, ChannelMoE):
        return FrozenChannelMoE(model)
    raise TypeError(
        f"freeze: {type(model).__name__} has no channel gates to freeze; it takes a DeepMoE network, made by "
        "moesaic.models.deepmoe.network.deepmoe or create_model('…_deepmoe'), or a ChannelMoE layer"
    )


class FrozenDeepMoE(FrozenModule):
    """A `DeepMoE` for inference on the CPU that computes only open channels; `freeze` makes one.

    Calling it returns the logits (B, num_classes).
    """

    def __init__(self, model: DeepMoE) -> None:
        super().__init__(check_freezable(model))
        self.in_channels: int = cast(nn.Conv2d, model.embedding.body[0]).in_channels
        self._embedding = FrozenEmbedding(model.embedding)
        self._heads = FrozenHeads(list(model.heads().values()))
        graph = _LayerTracer().trace(model.backbone)
        modules = _frozen_modules(model.backbone, graph)
        self._sequence = FrozenSequence.of(graph, modules, model.gated)
        self.backbone = _with_open_channels(graph, modules)
        self._gated = [cast(FrozenConv, modules[name]) for name in model.gated]
        self._layout = BlockLayout.of(layer.conv for layer in self._gated)
        self._producers = [None if of.producer is None else model.gated.index(of.producer) for of in self._gated]
        macs = {cost.outs: cost.macs_per_pair for cost in model.conv_costs}
        self._pixels = [macs[name] // modules[name].conv.weight[0, 0].numel() for name in model.gated]
        """Output pixels of each gated layer for images of the size that the model was built for."""
        self._workspaces = WorkspacePool()

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, self.in_channels)
        with autocast_off(x), torch.inference_mode():
            logits = self._run(x)
        return logits.clone()  # a normal tensor, that autograd may save

    def _run(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            workspace = self._workspaces.acquire(x)
            scores = self._heads.scores(self._embedding.run(x, workspace))
            self._call_routing_hooks(scores)
            logits = self._run_samples(x, scores, workspace)
            self._workspaces.release(x, workspace)
            return logits
        scores = self._heads.scores(self._embedding.run(x, None))
        self._call_routing_hooks(scores)
        groups = self._groups(scores)
        if len(groups) == 1:
            return self._run_samples(x, scores)
        parts = [self._run_samples(x[samples], scores[samples]) for samples in groups]
        logits, order = torch.cat(parts), torch.tensor([sample for samples in groups for sample in samples])
        return torch.empty_like(logits).index_copy_(0, order, logits)

    def _run_samples(self, x: Tensor, scores: Tensor, workspace: Workspace | None = None) -> Tensor:
        """The logits of samples that run together; with a workspace those of one image."""
        if workspace is not None and self._sequence is not None:
            return self._sequence.run(x, self._heads.open_blocks(scores), workspace)
        opened = self._layout.open(self._heads.gates(scores))
        return self.backbone(x, {layer.name: some for layer, some in zip(self._gated, opened, strict=True)})

    def _groups(self, scores: Tensor) -> list[list[int]]:
        """Samples that run together."""

        def cost(batch_size: int, is_open: NDArray[np.bool_]) -> float:
            opened = self._layout.count_open(is_open)
            total = costs.CPU_COSTS.call * len(self._gated)
            for layer, pixels, producer, outs in zip(self._gated, self._pixels, self._producers, opened, strict=True):
                ins = layer.conv.weight.shape[1] if producer is None else opened[producer]
                total += ConvCosts.of(layer.conv, batch_size * pixels).cheapest(ins, outs)[1]
            return total

        return group_samples((self._heads.gates(scores) != 0).numpy(), cost)

    def _call_routing_hooks(self, scores: Tensor) -> None:
        if not context_stacks.routing_hooks or not any(layer.has_routing_hooks for layer in self._gated):
            return
        with torch.inference_mode(False):
            for layer, routing in zip(self._gated, self._heads.routings(scores.clone()), strict=True):
                layer.call_routing_hooks(routing)


class _LayerTracer(fx.Tracer):
    """Treats gated convolutions and their consumers as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (GatedConv, ConsumerConv)) or super().is_leaf_module(m, module_qualified_name)


def _frozen_modules(backbone: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """Frozen copies of the modules and tensors that a trace refers to, by name."""
    compact = _compact_layers(backbone)
    copies: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        name = str(node.target)
        parent, _, attribute = name.rpartition(".")
        module = getattr(backbone.get_submodule(parent), attribute)
        if isinstance(module, GatedConv):
            conv = fold_norm(module.weights())
            found[name] = FrozenConv(conv, module.name, module.producer, compact=module.name in compact).eval()
        elif isinstance(module, ConsumerConv):
            conv = fold_norm(_channel_conv(module))
            found[name] = FrozenConv(conv, None, module.producer, compact=False).eval()
        else:
            found[name] = deepcopy(module, copies)
            found[name].requires_grad_(False)
    return found


def _compact_layers(backbone: nn.Module) -> set[str]:
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


def _with_open_channels(graph: fx.Graph, modules: dict[str, Any]) -> fx.GraphModule:
    """The traced network, with the open channels of all gated layers as a second argument."""
    image = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(image):
        opened = graph.placeholder("opened")
    for node in graph.nodes:
        node.type = None  # annotations that are strings cannot be pickled
        if node.op == "call_module" and isinstance(modules[str(node.target)], FrozenConv):
            node.args = (*node.args, opened)
    return fx.GraphModule(modules, graph)

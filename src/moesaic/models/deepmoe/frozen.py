"""``freeze``: an inference module that computes only the open channels of a network with channel gates.

Masked execution computes every channel. A frozen network has its weights folded and laid out once, so that open
channels can be gathered without asking whether a weight has changed, a hook is registered or a gradient is needed:

- one image through a sequential network: GEMMs of the open blocks (`moesaic.models.deepmoe.frozen_cpu_sequential`)
- a batch, or a network with shortcuts: convolutions of the channels that any sample opens
  (`moesaic.ops.channel.gathered_conv`); samples that open the same channels run together where that is cheaper
- on a GPU: kernels in which every image has its own open blocks (`moesaic.models.deepmoe.frozen_gpu`)
"""

from __future__ import annotations

from typing import cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic import context_stacks
from moesaic.layers.channel_moe import ChannelMoE, FrozenChannelMoE
from moesaic.layers.frozen_module import FrozenModule, check_freezable
from moesaic.models.deepmoe.backbone_trace import sparse_modules, trace_layers, with_open_channels
from moesaic.models.deepmoe.frozen_cpu_sequential import FrozenConv, FrozenSequence
from moesaic.models.deepmoe.frozen_embedding import FrozenEmbedding
from moesaic.models.deepmoe.frozen_gpu import FrozenGPUDeepMoE
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.ops import autocast_off
from moesaic.ops.channel import costs
from moesaic.ops.channel.costs import ConvCosts
from moesaic.ops.channel.gathered_conv import BlockLayout, group_samples
from moesaic.ops.channel.workspace import Workspace, WorkspacePool
from moesaic.ops.dispatch import ChannelConv
from moesaic.routing.frozen_channel_gates import FrozenHeads

__all__ = ["FrozenDeepMoE", "freeze"]


@overload
def freeze(model: DeepMoE) -> FrozenDeepMoE | FrozenGPUDeepMoE: ...
@overload
def freeze(model: ChannelMoE) -> FrozenChannelMoE: ...
@overload
def freeze(model: nn.Module) -> FrozenModule: ...
def freeze(model: nn.Module) -> FrozenModule:
    """Returns an inference module that computes only the open channels of a network with channel gates.

    Its output equals that of ``model`` in eval mode up to rounding. BatchNorm is folded into the convolutions and all
    weights are laid out once. They are copies: after training or loading weights, freeze the model again. The frozen
    module has no gradients, cannot be trained, moved, compiled or exported, and may be called from several threads at
    once. `moesaic.record_routing` records its gates under the names that the model's layers have.

    Args:
        model: a `DeepMoE` (such as ``create_model("vgg16_deepmoe", …)``) in eval mode without hooks, on the CPU in
            float32 or float64, or on a CUDA device in any floating dtype; or a single `ChannelMoE` layer on the CPU.

    >>> import torch, moesaic
    >>> model = moesaic.create_model("vgg16_deepmoe", num_classes=10, width=0.1).eval()
    >>> fast, x = moesaic.freeze(model), torch.randn(1, 3, 32, 32)
    >>> torch.allclose(fast(x), model(x), atol=1e-4)
    True
    """
    if isinstance(model, DeepMoE):
        on_gpu = next(model.parameters()).device.type == "cuda"
        return FrozenGPUDeepMoE(model) if on_gpu else FrozenDeepMoE(model)
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
        super().__init__(*check_freezable(model))
        self.in_channels = model.embedding.in_channels
        self._embedding = FrozenEmbedding(model.embedding)
        self._heads = FrozenHeads(list(model.heads().values()))
        graph = trace_layers(model.backbone)
        modules = sparse_modules(model.backbone, graph, _frozen_conv)
        self._sequence = FrozenSequence.of(graph, modules, model.gated)
        self.backbone = with_open_channels(graph, modules, FrozenConv)
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
        logits = torch.cat(parts)
        order = torch.tensor([sample for samples in groups for sample in samples], device=logits.device)
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


def _frozen_conv(conv: ChannelConv, name: str | None, producer: str | None, compact: bool) -> FrozenConv:
    return FrozenConv(conv, name, producer, compact=compact)

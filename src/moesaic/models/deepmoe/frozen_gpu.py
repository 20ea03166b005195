"""A `DeepMoE` for inference on a GPU, every image with its own open channels.

Nothing is decided on the host: `moesaic.ops.triton.open_channel_blocks` makes the lists of open blocks on the device,
and convolutions read them there (`moesaic.ops.triton.channel_conv`). So a batch runs without waiting for the GPU, and
is replayed from a CUDA graph (`moesaic.layers.inference_graphs`). Where the kernels do not apply (no Triton, float64,
blocks of fewer than `LEAST_BLOCK` channels) closed channels are computed and multiplied by zero.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic import context_stacks
from moesaic.layers.frozen_module import FrozenModule, check_freezable
from moesaic.layers.inference_graphs import CudaInference, InferenceGraphs
from moesaic.models.deepmoe.backbone_trace import sparse_modules, trace_layers, with_open_channels
from moesaic.models.deepmoe.conv_fusion import fuse_followers
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork, unit_scale
from moesaic.models.deepmoe.fused_conv import FusedConv, OpenedBlocks
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.ops import autocast_off
from moesaic.ops.channel.bn_folding import batch_norm_tensors, fold_norm
from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.triton_backend import kernels_available
from moesaic.routing.frozen_channel_gates import FrozenHeads

__all__ = ["FrozenGPUDeepMoE"]

LEAST_BLOCK = 8
"""Blocks of fewer channels are less than what one load of a kernel reads."""
_ALIGNED = 8
"""Channels of the embedding network are filled up to multiples of this: 16 bytes of a 16-bit map."""


class FrozenGPUDeepMoE(FrozenModule):
    """A `DeepMoE` for inference on a GPU that computes only open channels; `moesaic.freeze` makes one.

    Calling it returns the logits (B, num_classes).
    """

    def __init__(self, model: DeepMoE) -> None:
        super().__init__(*check_freezable(model, gpu=True))
        self.in_channels = model.embedding.in_channels
        heads = list(model.heads().values())
        self._heads = FrozenHeads(heads)
        blocks = dict(zip(model.gated, self._heads.layer_blocks(), strict=True))
        wide = all(head.block >= min(LEAST_BLOCK, head.channels) for head in heads)
        self.uses_kernels = wide and kernels_available(heads[0].weight)
        """Whether closed channels are left out, and not computed and multiplied by zero."""

        def fused(conv: ChannelConv, name: str | None, producer: str | None, compact: bool) -> FusedConv:
            outs, ins = (None if layer is None else blocks[layer] for layer in (name, producer))
            return FusedConv(conv, outs, ins, compact)

        graph = trace_layers(model.backbone)
        modules = sparse_modules(model.backbone, graph, fused)
        fuse_followers(graph, modules)
        self._gated = [cast(FusedConv, modules[name]) for name in model.gated]
        for module in modules.values():
            if isinstance(module, nn.Conv2d):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        self.backbone = with_open_channels(graph, modules, FusedConv).eval()
        self._embedding, self._center = list[FusedConv](), None
        if isinstance(model.embedding, EmbeddingNetwork):
            self._embedding = _embedding_convs(model.embedding)
            center = model.embedding.center
            self._center = None if center is None else unit_scale(center)
        self._dimension = model.embedding.dimension
        for module in (*modules.values(), *self._embedding):
            if isinstance(module, FusedConv):
                module.lay_out(self.dtype, kernels=self.uses_kernels)
        self.graphs = InferenceGraphs(CudaInference(self.device)) if self.device.type == "cuda" else None
        """The CUDA graphs from which it runs; None: it runs eagerly."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, self.in_channels)
        if self.graphs is None or self._has_routing_hooks():
            return self._run(x).clone()  # a normal tensor, that autograd may save
        return self.graphs.run(self, self._run, x)

    def _run(self, x: Tensor) -> Tensor:
        """The logits, an inference tensor."""
        with autocast_off(x), torch.inference_mode():
            scores = self._heads.scores(self._embed(x))
            self._call_routing_hooks(scores)
            return self.backbone(x, self._open(scores))

    def _embed(self, x: Tensor) -> Tensor:
        """The embeddings (B, D)."""
        if not self._embedding:  # a constant
            return x.new_ones(len(x), self._dimension)
        for conv in self._embedding:
            x = conv(x, None)
        embedding = x.mean((2, 3))[:, : self._dimension]
        if self._center is None:
            return embedding
        mean, factor = self._center
        return (embedding - mean) * factor

    def _open(self, scores: Tensor) -> OpenedBlocks:
        return self._heads.open_lists(scores) if self.uses_kernels else self._heads.gates(scores)

    def _has_routing_hooks(self) -> bool:
        return bool(context_stacks.routing_hooks) and any(layer.has_routing_hooks for layer in self._gated)

    def _call_routing_hooks(self, scores: Tensor) -> None:
        if not self._has_routing_hooks():
            return
        with torch.inference_mode(False):
            for layer, routing in zip(self._gated, self._heads.routings(scores.clone()), strict=True):
                layer.call_routing_hooks(routing)


def _embedding_convs(network: EmbeddingNetwork) -> list[FusedConv]:
    """The convolutions of an embedding network in eval mode, with further channels that are zero."""
    layers = list(network.body)
    convs: list[FusedConv] = []
    more_in = 0
    for conv, norm in zip(layers[::3], layers[1::3], strict=True):
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        folded = fold_norm(ChannelConv(conv.weight, conv.bias, batch_norm_tensors(norm), 2, 1, "relu", 1, 1))
        assert folded.bias is not None
        more_out = -conv.out_channels % _ALIGNED
        weight, bias = F.pad(folded.weight, (0, 0, 0, 0, 0, more_in, 0, more_out)), F.pad(folded.bias, (0, more_out))
        convs.append(FusedConv(ChannelConv(weight, bias, None, 2, 1, "relu", 1, 1)))
        more_in = more_out
    return convs

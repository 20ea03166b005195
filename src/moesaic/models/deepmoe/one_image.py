"""A network with gates for one image on a CPU, where to ask whether a short way may be taken takes longer than a layer.

`EmbeddingNetwork`, `ChannelHeads` and `GatedLayers` each look at all of their modules before they take theirs: does one
learn, does somebody listen, has a weight changed? With a quarter of VGG-16's channels open that is a tenth of the
time. Here it is asked once for all three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moesaic.layers.channel_chain import Products
from moesaic.layers.channel_network import GatedLayers
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.ops.channel.bn_folding import SmallConvs
from moesaic.ops.hooks import Listeners
from moesaic.ops.weight_cache import CachedValue, TensorRefs
from moesaic.routing.channel_heads import ChannelHeads, JoinedHeads, open_on_host

__all__ = ["OneImage"]


class _Ready(NamedTuple):
    """All that is made of the weights."""

    embedding: SmallConvs
    heads: JoinedHeads
    chain: Products


class OneImage:
    """What a `DeepMoE` makes of one image, if it may take the short way through all of its parts.

    Args:
        backbone: one chain of layers; else there is no short way.
        embedding: the network that looks at the image first.
        heads: of the backbone's gated layers.
        layers: these.
    """

    def __init__(
        self, backbone: nn.Module, embedding: EmbeddingNetwork, heads: ChannelHeads, layers: GatedLayers
    ) -> None:
        self._layers = layers
        self._all_heads = heads
        self._heads = list(heads.heads.values())
        self._convs = embedding.folded
        self._in_channels = self._convs.layers[0][0].in_channels
        gated = [module for layer in layers.layers.values() for module in (layer.conv, layer.norm) if module]
        self._held = TensorRefs([*(module for pair in self._convs.layers for module in pair), *self._heads, *gated])
        norms = [norm for _, norm in self._convs.layers] + [
            layer.norm for layer in layers.layers.values() if layer.norm
        ]
        self._learn = [*norms, *self._heads]
        self._listeners = Listeners([*backbone.modules(), *embedding.modules(), *self._heads])
        self._ready = CachedValue[_Ready | None]()

    def __call__(self, x: Tensor) -> Tensor | None:
        """The backbone's scores, or None where something must go the long way; gradients must be off."""
        chain = self._layers.chain
        if chain is None or x.ndim != 4 or x.shape[1] != self._in_channels or not self._convs.is_small(x):
            return None
        if self._listeners or any(module.training for module in self._learn) or torch.onnx.is_in_onnx_export():
            return None
        if not self._layers.may_leave_out(x):
            return None
        ready = self._ready.of(self._held.now(), self._make)
        if ready is None or ready.chain.dtype != x.dtype:
            return None
        with torch.inference_mode():  # where operations take a tenth less time
            scores = ready.heads.scores(ready.embedding.run(x, mean=True))
            y = chain.run(x, open_on_host(scores, self._heads), ready.chain)
        return y.clone()  # a tensor like any other

    def _make(self) -> _Ready | None:
        chain = self._layers.chain
        if chain is None or not self._all_heads.alike:
            return None
        products = chain.products()
        weights = [*(conv.weight for conv, _ in self._convs.layers), *(head.weight for head in self._heads)]
        if products.dtype is None or any(weight.dtype != products.dtype for weight in weights):
            return None
        return _Ready(self._convs.small(), self._all_heads.joined(products.dtype), products)

"""The embedding network of a frozen DeepMoE: BatchNorm folded, and GEMMs for small maps of one image."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.models.deepmoe.embedding_network import ConstantEmbedding, EmbeddingNetwork, unit_scale
from moesaic.ops.channel.bn_folding import batch_norm_tensors, fold_norm
from moesaic.ops.channel.cpu_block_conv import WHOLE_BLOCK, BlockConv, BlockMap, OpenBlocks
from moesaic.ops.channel.workspace import Workspace
from moesaic.ops.dispatch import ChannelConv

__all__ = ["FrozenEmbedding"]

SMALL_MAP = 1024
"""On maps of at most this many pixels, one image runs as GEMMs, which take two thirds of the time."""


class FrozenEmbedding:
    """Computes the embeddings (B, D) of images, as an `EmbeddingNetwork` in eval mode does; its weights are copies.

    A `ConstantEmbedding` stays what it is.
    """

    def __init__(self, network: EmbeddingNetwork | ConstantEmbedding) -> None:
        self._center = None
        self._convs: list[ChannelConv] = []
        self._open: list[OpenBlocks] = []
        if isinstance(network, ConstantEmbedding):
            return
        if network.center is not None:
            mean, factor = unit_scale(network.center)
            self._center = mean.clone(), factor
        layers = list(network.body)
        for conv, norm in zip(layers[::3], layers[1::3], strict=True):
            assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
            O, C = conv.weight.shape[:2]
            # two halves, one for each of two cores: on small maps a single GEMM makes little use of several
            block = O // 2 if O % 2 == 0 and O // 2 >= WHOLE_BLOCK else O
            block_in = self._open[-1].size if self._open else C
            tensors = batch_norm_tensors(norm)
            self._convs.append(fold_norm(ChannelConv(conv.weight, conv.bias, tensors, 2, 1, "relu", block, block_in)))
            self._open.append(OpenBlocks(np.arange(O // block), None, O, block))
        # the first GEMM reads a plain map, the others the blocks of the one before
        self._first = [BlockConv(conv, gated_input=False, relu=True) for conv in self._convs]
        self._later = [BlockConv(conv, gated_input=True, relu=True) for conv in self._convs]

    def run(self, x: Tensor, workspace: Workspace | None) -> Tensor:
        """The embeddings of a batch; with a workspace that of one image. In inference mode."""
        if not self._convs:
            return x.new_ones(len(x), 1)
        embedding = self._embed(x, workspace)
        if self._center is None:
            return embedding
        mean, factor = self._center
        return (embedding - mean) * factor

    def _embed(self, x: Tensor, workspace: Workspace | None) -> Tensor:
        for layer, conv in enumerate(self._convs):
            if workspace is not None and x.shape[2] * x.shape[3] <= SMALL_MAP:
                return self._run_blocks(x, layer, workspace)
            x = F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding).relu_()
        return x.mean((2, 3))

    def _run_blocks(self, x: Tensor, first: int, workspace: Workspace) -> Tensor:
        y: BlockMap = self._first[first].run(x, None, self._open[first], workspace)
        for layer in range(first + 1, len(self._convs)):
            y = self._later[layer].run(y, self._open[layer - 1], self._open[layer], workspace)
        return y.mean(workspace)

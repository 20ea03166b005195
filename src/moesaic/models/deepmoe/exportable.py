"""A DeepMoE in the form in which it is exported: only the open channels are computed, one image at a time.

Everything is plain torch, so that `torch.export` and ONNX can express it. BatchNorm is folded. A layer's weights are
stored in pieces, all weights of a filter for one block of input channels; the pieces of the open blocks are gathered
into the kernel of an ordinary convolution, and maps between gated layers have only the open channels. Blocks that are
shorter than the others are filled up with zeros.

Under ``mode="relu"`` the number of open channels depends on the image, so that shapes inside are dynamic. A layer that
is all closed computes its first block with a gate of 0, since operations may refuse maps without channels.

The images of a batch open different channels. A scan runs them one after another, so that a batch takes the time of its
images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from moesaic.models.deepmoe.backbone_trace import compact_layers, sparse_modules, trace_layers, with_open_channels
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.ops.dispatch import ChannelConv
from moesaic.routing.router import stable_topk

__all__ = ["ExportableDeepMoE", "OpenBlocks", "SparseConv"]


class OpenBlocks(NamedTuple):
    """The open blocks of a layer for one image."""

    index: Tensor
    """(n,): block numbers."""
    gates: Tensor
    """(n,)"""


class SparseConv(nn.Module):
    """A folded convolution of one image that reads and computes only the open blocks of channels.

    Args:
        conv: the convolution, without BatchNorm.
        name: the gated layer whose gates select its output channels; None where they are not gated.
        producer: the gated layer whose gates select its input channels; None where they are not gated.
        compact: whether its output has only the open channels.
        compact_in: whether its input has only the open channels.
    """

    weight: Tensor
    """(filters, pieces of a filter, channels of a block · ks²)"""
    bias: Tensor
    """(blocks, channels of a block)"""
    first_piece: Tensor
    """(blocks, channels of a block, 1): of each filter."""

    def __init__(
        self, conv: ChannelConv, name: str | None, producer: str | None, *, compact: bool, compact_in: bool
    ) -> None:
        super().__init__()
        assert conv.bias is not None
        self.name = name
        self.producer = producer
        self.compact = compact
        self.compact_in = compact_in
        self.stride, self.padding, self.activation = conv.stride, conv.padding, conv.activation
        self.outs, self.ins, self.kernel_size, _ = conv.weight.shape
        self.block, self.block_in = (conv.block_out if name else self.outs), (conv.block_in if producer else self.ins)
        fill = (-self.outs % self.block, -self.ins % self.block_in)
        weight = F.pad(conv.weight, (0, 0, 0, 0, 0, fill[1], 0, fill[0]))
        filters, pieces = weight.shape[0], weight.shape[1] // self.block_in
        self.register_buffer("weight", weight.reshape(filters, pieces, -1))
        self.register_buffer("bias", F.pad(conv.bias, (0, fill[0])).view(-1, self.block))
        self.register_buffer("first_piece", (torch.arange(filters) * pieces).view(-1, self.block, 1))

    def forward(self, x: Tensor, opened: Mapping[str, OpenBlocks]) -> Tensor:
        ins = None if self.producer is None else opened[self.producer].index
        if ins is not None and not self.compact_in:
            x = F.pad(x, (0, 0, 0, 0, 0, -self.ins % self.block_in))
            x = x.view(-1, self.block_in, *x.shape[2:]).index_select(0, ins).flatten(0, 1).unsqueeze(0)
        if self.name is None:
            y = F.conv2d(x, self._kernel(None, ins), self.bias.flatten(), self.stride, self.padding)
            return self._activate(y)
        outs, gates = opened[self.name]
        bias = self.bias.index_select(0, outs).flatten()
        y = F.conv2d(x, self._kernel(outs, ins), bias, self.stride, self.padding)
        y = self._activate(y * gates.unsqueeze(1).expand(-1, self.block).reshape(1, -1, 1, 1))
        return y if self.compact else self._scatter(y, outs)

    def _kernel(self, outs: Tensor | None, ins: Tensor | None) -> Tensor:
        """(open outs, open ins, ks, ks)"""
        ks = self.kernel_size
        if ins is None:
            kernel = self.weight if outs is None else self.weight.view(*self.bias.shape, -1).index_select(0, outs)
            return kernel.reshape(-1, self.ins, ks, ks)
        first = self.first_piece if outs is None else self.first_piece.index_select(0, outs)
        # one list of pieces, so that every weight is copied once
        pieces = (first + ins).flatten()
        kernel = self.weight.flatten(0, 1).index_select(0, pieces)
        return kernel.view(-1, self.block_in * ins.shape[0], ks, ks)

    def _scatter(self, y: Tensor, outs: Tensor) -> Tensor:
        """All channels, zero in closed ones."""
        H, W = y.shape[2:]
        full = y.new_zeros(self.bias.shape[0], self.block, H, W)
        full = full.index_put((outs,), y.view(-1, self.block, H, W))
        return full.view(1, -1, H, W)[:, : self.outs]

    def _activate(self, y: Tensor) -> Tensor:
        return F.relu(y) if self.activation == "relu" else y


class ExportableDeepMoE(nn.Module):
    """A `DeepMoE` for export that computes only open channels; its weights are copies.

    Args:
        model: the network, in eval mode.
        one_image: whether it takes a single image only; otherwise a scan runs over the batch.

    >>> import moesaic
    >>> model = moesaic.create_model("vgg16_deepmoe", num_classes=10, width=0.1).eval()
    >>> x = torch.randn(2, 3, 32, 32)
    >>> torch.allclose(ExportableDeepMoE(model)(x), model(x), atol=1e-4)
    True
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, model: DeepMoE, *, one_image: bool = False) -> None:
        super().__init__()
        self.one_image = one_image
        self.embedding = _folded(model.embedding)
        heads = list(model.heads().values())
        self.gated = model.gated
        self._topk = heads[0].mode == "topk"
        self._blocks = [head.blocks for head in heads]
        self._open = [head.keep or 0 for head in heads]
        graph = trace_layers(model.backbone)
        compact_maps = bool(compact_layers(model.backbone))

        def make(conv: ChannelConv, name: str | None, producer: str | None, compact: bool) -> SparseConv:
            return SparseConv(conv, name, producer, compact=compact, compact_in=compact_maps)

        self.backbone = with_open_channels(graph, sparse_modules(model.backbone, graph, make), SparseConv)
        biases = [head.weight.new_zeros(head.blocks) if head.bias is None else head.bias for head in heads]
        self.register_buffer("weight", torch.cat([head.weight.detach() for head in heads]))
        self.register_buffer("bias", torch.cat([bias.detach() for bias in biases]))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(self.embedding(x).mean((2, 3)), self.weight, self.bias)
        index, gates = self._best(scores) if self._topk else (None, F.relu(scores))
        choices = (gates, scores if index is None else index)
        if self.one_image:
            return self._run(x, *(choice[0] for choice in choices))
        from torch._higher_order_ops.scan import scan

        def step(carry: Tensor, sample: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            image, *choices = sample
            return carry.clone(), self._run(image.unsqueeze(0), *choices).squeeze(0)

        _, logits = scan(step, x.new_zeros(1), (x, *choices))
        return logits

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The open blocks of all layers under ``mode="topk"``, each layer's counted from 0, and their gates."""
        parts = scores.split(self._blocks, 1)
        index = [stable_topk(part, keep) for part, keep in zip(parts, self._open, strict=True)]
        best = [part.gather(1, each) for part, each in zip(parts, index, strict=True)]
        return torch.cat(index, 1), F.softplus(torch.cat(best, 1))

    def _run(self, x: Tensor, gates: Tensor, choice: Tensor) -> Tensor:
        """The logits of one image: ``choice`` has the open blocks of all layers, or under ``"relu"`` the scores."""
        if self._topk:
            pairs = zip(choice.split(self._open), gates.split(self._open), strict=True)
            opened = [OpenBlocks(index, gate) for index, gate in pairs]
        else:
            pairs = zip(choice.split(self._blocks), gates.split(self._blocks), strict=True)
            opened = [_positive(scores, gate) for scores, gate in pairs]
        return self.backbone(x, dict(zip(self.gated, opened, strict=True)))


def _positive(scores_E: Tensor, gates_E: Tensor) -> OpenBlocks:
    """The blocks whose scores are not below or equal to 0: a score of NaN is open, so that it stays visible."""
    is_open = ~(scores_E <= 0)
    first = is_open[:1] | ~is_open.any()  # at least one
    index = torch.cat([first, is_open[1:]]).nonzero()[:, 0]
    return OpenBlocks(index, gates_E.index_select(0, index))


def _folded(embedding: EmbeddingNetwork) -> nn.Sequential:
    layers = list(embedding.body)
    convs = [
        fuse_conv_bn_eval(cast(nn.Conv2d, conv), cast(nn.BatchNorm2d, norm))
        for conv, norm in zip(layers[::3], layers[1::3], strict=True)
    ]
    return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))

"""A DeepMoE in the form in which it is exported: only the open channels are computed, one image at a time.

Everything is plain torch, so that `torch.export` and ONNX can express it. BatchNorm is folded. Of a layer's weights the
pieces of the open blocks, all weights of a filter for one block of input channels, are gathered into the kernel of an
ordinary convolution, and maps between gated layers have only the open channels. Blocks that are shorter than the others
are filled up with zeros.

A runtime lays constant kernels out in advance and gathered ones not, so a gathered multiply-add takes `GATHERED` times
as long. Where gathering would take longer in all, the convolutions are dense and closed channels multiplied by zero:
under ``mode="topk"`` that is known at export, and the network is exported as it is; under ``"relu"`` and ``"hard"`` it
is decided for each image.

Under these two the number of open channels depends on the image, so that shapes inside are dynamic. A layer that is
all closed computes its first block with a gate of 0, since operations may refuse maps without channels.

The images of a batch open different channels. A scan runs them one after another, so that a batch takes the time of its
images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from moesaic.models.deepmoe.backbone_trace import compact_layers, sparse_modules, trace_layers, with_open_channels
from moesaic.models.deepmoe.embedding_network import ConstantEmbedding, EmbeddingNetwork, unit_scale
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.ops.dispatch import ChannelConv
from moesaic.routing.channel_gate import hard_gates
from moesaic.routing.router import stable_topk

__all__ = ["ExportableDeepMoE", "OpenBlocks", "SparseConv", "exportable_deepmoe"]

GATHERED = 3.0
"""Time of a gathered multiply-add, relative to one of a dense convolution (VGG-16 in ONNX Runtime)."""
GATHERED_PIECE = 7.0
"""Time of copying a piece, which a block of input channels shares, relative to a dense multiply-add."""


def exportable_deepmoe(model: DeepMoE, *, one_image: bool = False) -> nn.Module:
    """The form of a network that is fastest when exported: an `ExportableDeepMoE`, or the network itself."""
    exportable = ExportableDeepMoE(model, one_image=one_image)
    return exportable if exportable.gains() else model


class OpenBlocks(NamedTuple):
    """The open blocks of a layer for one image."""

    blocks: Tensor | None
    """(n,): block numbers; None for all of them in order."""
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
    """(filters, channels, ks, ks), filled up to whole blocks."""
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
        self.outs, self.ins = conv.weight.shape[:2]
        self.block, self.block_in = (conv.block_out if name else self.outs), (conv.block_in if producer else self.ins)
        fill = (-self.outs % self.block, -self.ins % self.block_in)
        self.register_buffer("weight", F.pad(conv.weight, (0, 0, 0, 0, 0, fill[1], 0, fill[0])).contiguous())
        self.register_buffer("bias", F.pad(conv.bias, (0, fill[0])).view(-1, self.block))
        filters, channels = self.weight.shape[:2]
        first_piece = torch.arange(filters) * (channels // self.block_in)
        self.register_buffer("first_piece", first_piece.view(-1, self.block, 1))

    def forward(self, x: Tensor, opened: Mapping[str, OpenBlocks]) -> Tensor:
        ins = None if self.producer is None else opened[self.producer].blocks
        outs, gates = (None, None) if self.name is None else opened[self.name]
        if ins is not None and not self.compact_in:
            x = F.pad(x, (0, 0, 0, 0, 0, -self.ins % self.block_in))
            x = x.view(-1, self.block_in, *x.shape[2:]).index_select(0, ins).flatten(0, 1).unsqueeze(0)
        bias = self.bias.flatten()[: self.outs] if outs is None else self.bias.index_select(0, outs).flatten()
        y = F.conv2d(x, self._kernel(outs, ins), bias, self.stride, self.padding)
        if gates is not None:
            gates = gates.unsqueeze(1).expand(-1, self.block).reshape(-1)
            y = y * (gates[: self.outs] if outs is None else gates).view(1, -1, 1, 1)
        y = F.relu(y) if self.activation == "relu" else y
        return y if outs is None or self.compact else self._scatter(y, outs)

    def _kernel(self, outs: Tensor | None, ins: Tensor | None) -> Tensor:
        """Returns (open outs, open ins, ks, ks)."""
        weight, (ks, _) = self.weight, self.weight.shape[2:]
        if ins is None:
            if outs is None:
                return weight[: self.outs, : self.ins]
            return weight.view(*self.bias.shape, -1).index_select(0, outs).view(-1, self.ins, ks, ks)
        first = self.first_piece.flatten(0, 1)[: self.outs] if outs is None else self.first_piece.index_select(0, outs)
        # one list of pieces, so that every weight is copied once
        pieces = (first + ins).flatten()
        kernel = weight.view(-1, self.block_in * ks * ks).index_select(0, pieces)
        return kernel.view(-1, self.block_in * ins.shape[0], ks, ks)

    def _scatter(self, y: Tensor, outs: Tensor) -> Tensor:
        """All channels, zero in closed ones."""
        H, W = y.shape[2:]
        full = y.new_zeros(self.bias.shape[0], self.block, H, W)
        full = full.index_put((outs,), y.view(-1, self.block, H, W))
        return full.view(1, -1, H, W)[:, : self.outs]


class ExportableDeepMoE(nn.Module):
    """A `DeepMoE` for export that computes only open channels; its weights are copies.

    Args:
        model: the network, in eval mode.
        one_image: whether it takes a single image only; otherwise a scan runs over the batch.

    >>> from moesaic.models import deepmoe
    >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    >>> model = deepmoe(network, num_classes=10).eval()
    >>> x = torch.randn(2, 3, 32, 32)
    >>> torch.allclose(ExportableDeepMoE(model)(x), model(x), atol=1e-4)
    True
    """

    weight: Tensor
    """(all blocks, D): the heads of all layers."""
    bias: Tensor
    channels_of: Tensor
    """(all blocks, layers): the channels that a block adds to its layer."""
    constant: Tensor
    """Channels of convolutions that are not gated, numbered after the layers."""
    ins: Tensor
    """(convolutions,): which number of channels a convolution reads."""
    outs: Tensor
    """(convolutions,): which number of channels it computes."""
    cost: Tensor
    """(convolutions,): of a pair of open channels, in multiply-adds of a dense convolution."""

    def __init__(self, model: DeepMoE, *, one_image: bool = False) -> None:
        super().__init__()
        self.one_image = one_image
        self.embedding = None if isinstance(model.embedding, ConstantEmbedding) else _folded(model.embedding)
        heads = list(model.heads().values())
        self.gated = model.gated
        self._topk = heads[0].mode == "topk"
        self._gate = hard_gates if heads[0].mode == "hard" else F.relu
        self._blocks = [head.blocks for head in heads]
        self._open = [head.keep or 0 for head in heads]
        biases = [head.weight.new_zeros(head.blocks) if head.bias is None else head.bias for head in heads]
        weight, bias = (
            torch.cat([head.weight.detach() for head in heads]),
            torch.cat([bias.detach() for bias in biases]),
        )
        if isinstance(model.embedding, EmbeddingNetwork) and model.embedding.center is not None:
            mean, factor = unit_scale(model.embedding.center)
            weight = weight * factor
            bias = bias - weight @ mean
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self._set_costs(model)
        graph = trace_layers(model.backbone)
        compact_maps = bool(compact_layers(model.backbone))

        def make(conv: ChannelConv, name: str | None, producer: str | None, compact: bool) -> SparseConv:
            return SparseConv(conv, name, producer, compact=compact, compact_in=compact_maps)

        self.backbone = with_open_channels(graph, sparse_modules(model.backbone, graph, make), SparseConv)
        self.eval().requires_grad_(False)

    def _set_costs(self, model: DeepMoE) -> None:
        heads = list(model.heads().values())
        names: dict[str | int, int] = {name: number for number, name in enumerate(self.gated)}
        channels = [
            torch.full((head.blocks,), head.block).clamp_max(head.channels - head.block * torch.arange(head.blocks))
            for head in heads
        ]
        channels_of = cast(Tensor, torch.block_diag(*(each.float().unsqueeze(1) for each in channels)))
        self.register_buffer("channels_of", channels_of)
        constant: list[int] = []
        for cost in model.conv_costs:
            for width in (cost.ins, cost.outs):
                if isinstance(width, int) and width not in names:
                    names[width] = len(names)
                    constant.append(width)
        blocks = {name: head.block for name, head in zip(self.gated, heads, strict=True)}
        factors = [
            GATHERED + (GATHERED_PIECE / blocks[cost.ins] if isinstance(cost.ins, str) else 0.0)
            for cost in model.conv_costs
        ]
        self.register_buffer("constant", torch.tensor(constant, dtype=torch.float32))
        self.register_buffer("ins", torch.tensor([names[cost.ins] for cost in model.conv_costs]))
        self.register_buffer("outs", torch.tensor([names[cost.outs] for cost in model.conv_costs]))
        costs = [cost.macs_per_pair * factor for cost, factor in zip(model.conv_costs, factors, strict=True)]
        all_open = self._channels(torch.ones(len(self.channels_of)))
        macs = torch.tensor([float(cost.macs_per_pair) for cost in model.conv_costs])
        dense = (macs * all_open[self.ins] * all_open[self.outs]).sum()
        self.register_buffer("cost", torch.tensor(costs) / dense)

    def _channels(self, is_open: Tensor) -> Tensor:
        """The open channels of all layers, followed by ``constant``."""
        return torch.cat([is_open @ self.channels_of, self.constant])

    def _is_cheaper(self, is_open: Tensor) -> Tensor:
        """Whether gathering takes less time than dense convolutions, from which blocks are open (all blocks,)."""
        channels = self._channels(is_open.float())
        return (self.cost * channels[self.ins] * channels[self.outs]).sum() < 1

    def gains(self) -> bool:
        """Whether gathering can be faster than dense convolutions."""
        if not self._topk:
            return True
        is_open = [torch.arange(blocks) < keep for blocks, keep in zip(self._blocks, self._open, strict=True)]
        return bool(self._is_cheaper(torch.cat(is_open)))

    def forward(self, x: Tensor) -> Tensor:
        scores = self._scores(x)
        choices = self._best(scores) if self._topk else (self._gate(scores), scores)
        if self.one_image:
            return self._run(x, *(choice[0] for choice in choices))
        from torch._higher_order_ops.scan import scan

        def step(carry: Tensor, sample: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            image, gates, choice = sample
            return carry.clone(), self._run(image.unsqueeze(0), gates, choice).squeeze(0)

        _, logits = scan(step, x.new_zeros(1), (x, *choices))
        return logits

    def _scores(self, x: Tensor) -> Tensor:
        """Scores (B, all blocks) of all layers."""
        if self.embedding is None:
            return (self.weight[:, 0] + self.bias).expand(x.shape[0], -1)
        return F.linear(self.embedding(x).mean((2, 3)), self.weight, self.bias)

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The gates of the open blocks of all layers under ``"topk"``, and the blocks, numbered from 0 in a layer."""
        parts = _split(scores, self._blocks, 1)
        index = [stable_topk(part, keep) for part, keep in zip(parts, self._open, strict=True)]
        best = [part.gather(1, each) for part, each in zip(parts, index, strict=True)]
        return F.softplus(torch.cat(best, 1)), torch.cat(index, 1)

    def _run(self, x: Tensor, gates: Tensor, choice: Tensor) -> Tensor:
        """The logits of one image: ``choice`` has the open blocks of all layers under ``"topk"``, else the scores."""
        if self._topk:
            return self._run_gathered(x, gates, choice)
        cheaper = self._is_cheaper(~(choice <= 0))
        return torch.cond(cheaper, self._run_gathered, self._run_dense, (x, gates, choice))

    def _run_dense(self, x: Tensor, gates: Tensor, scores: Tensor) -> Tensor:
        parts = zip(self.gated, _split(gates, self._blocks), strict=True)
        return self.backbone(x, {name: OpenBlocks(None, gate) for name, gate in parts})

    def _run_gathered(self, x: Tensor, gates: Tensor, choice: Tensor) -> Tensor:
        sizes = self._open if self._topk else self._blocks
        pairs = zip(_split(choice, sizes), _split(gates, sizes), strict=True)
        make = OpenBlocks if self._topk else _positive
        return self.backbone(x, {name: make(*pair) for name, pair in zip(self.gated, pairs, strict=True)})


def _positive(scores_E: Tensor, gates_E: Tensor) -> OpenBlocks:
    """The blocks whose scores are not below or equal to 0: a score of NaN is open, so that it stays visible."""
    is_open = ~(scores_E <= 0)
    first = is_open[:1] | ~is_open.any()  # at least one
    index = torch.cat([first, is_open[1:]]).nonzero()[:, 0]
    return OpenBlocks(index, gates_E.index_select(0, index))


def _split(values: Tensor, sizes: Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", values.split(list(sizes), axis))


def _folded(embedding: EmbeddingNetwork) -> nn.Sequential:
    layers = list(embedding.body)
    convs = [
        fuse_conv_bn_eval(cast(nn.Conv2d, conv), cast(nn.BatchNorm2d, norm))
        for conv, norm in zip(layers[::3], layers[1::3], strict=True)
    ]
    return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))

"""A frozen sequential network for one image on a CPU.

With a quarter of the channels open, a convolution of VGG-16 takes less time than the calls around it: of modules, of
views, of tensor operations on a hundred indices. So the gates of all layers are processed once, in numpy, and a gated
convolution does only what is necessary (`moesaic.ops.channel.cpu_block_conv`): gather the open weights, unfold, GEMM,
ReLU, gate. Pooling after it is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import eq, sub
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from moesaic.layers.recording import RoutedLayer
from moesaic.ops.channel.cpu_block_conv import WHOLE_BLOCK, BlockConv, BlockMap, OpenBlocks
from moesaic.ops.channel.gathered_conv import OpenChannels, memory_format, open_conv, split
from moesaic.ops.channel.workspace import Workspace
from moesaic.ops.dispatch import ChannelConv
from moesaic.routing.frozen_channel_gates import OpenBlockList
from moesaic.routing_record import Routing

__all__ = ["FrozenConv", "FrozenSequence"]

ROUNDED_CHANNELS = 16
"""Channels that are gated one by one are opened in multiples of this number, the additional ones with a gate of 0: a
GEMM is as fast, and fewer distinct shapes need a plan."""


class FrozenConv(RoutedLayer):
    """A folded convolution of a frozen network, with gated output channels, gated input channels, or both.

    Args:
        conv: the convolution, without BatchNorm.
        name: the gated layer whose gates select its output channels; None where they are not gated.
        producer: the gated layer whose gates select its input channels; None where they are not gated.
        compact: whether its output has only the open channels.
    """

    def __init__(self, conv: ChannelConv, name: str | None, producer: str | None, *, compact: bool) -> None:
        super().__init__()
        self.conv = conv
        self.name = name
        self.producer = producer
        self.compact = compact
        O, C = conv.weight.shape[:2]
        self._all_outs, self._all_ins = OpenChannels.all(O), OpenChannels.all(C)

    def forward(self, x: Tensor, opened: Mapping[str, OpenChannels]) -> Tensor:
        ins = self._all_ins if self.producer is None else opened[self.producer]
        outs = self._all_outs if self.name is None else opened[self.name]
        y = open_conv(x, self.conv, ins, outs)
        return y if self.compact else outs.scatter(y, memory_format(x))

    def call_routing_hooks(self, routing: Routing) -> None:
        """Report the gates of a batch."""
        self._call_routing_hooks(routing)


@dataclass(eq=False, slots=True)
class _GatedStep:
    """A gated layer with the ReLU and the pooling after it."""

    layer: FrozenConv
    relu: bool
    pool: nn.MaxPool2d | None = None
    block_conv: BlockConv | None = None


@dataclass(frozen=True)
class _Call:
    """A function or method that the network calls on the map."""

    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        call = getattr(x, self.target) if isinstance(self.target, str) else partial(self.target, x)
        return call(*self.args, **self.options)


Step = _GatedStep | Callable[[Tensor], Tensor]


class FrozenSequence:
    """Runs one image through a network in which every layer reads only the one before it."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        gated = [step for step in self._steps if isinstance(step, _GatedStep)]
        for step in gated:
            step.block_conv = BlockConv(
                step.layer.conv, gated_input=step.layer.producer is not None, relu=step.relu, pool=step.pool
            )
        self._sizes = [(step.layer.conv.weight.shape[0], step.layer.conv.block_out) for step in gated]
        """Channels and block size of each gated layer."""
        blocks = [-(-channels // size) for channels, size in self._sizes]
        self._starts = np.cumsum([0, *blocks])
        """The first block of each layer among those of all layers, and their number."""
        self._block_in_layer = np.concatenate([np.arange(number) for number in blocks])
        self._layer = np.repeat(np.arange(len(blocks)), blocks)
        """The layer of each block."""
        self._multiple = np.array(
            [max(ROUNDED_CHANNELS // size, 1) if size < WHOLE_BLOCK else 1 for _, size in self._sizes]
        )
        """Each layer opens a multiple of this number of blocks."""
        self._rounds = bool((self._multiple > 1).any())

    @staticmethod
    def of(graph: fx.Graph, modules: Mapping[str, nn.Module], gated: Sequence[str]) -> FrozenSequence | None:
        """The sequence of a traced network, or None where it is not sequential.

        Args:
            graph: the trace.
            modules: the frozen modules by name.
            gated: names of the gated layers in execution order.
        """
        nodes = list(graph.nodes)
        if len(nodes) < 3 or nodes[0].op != "placeholder" or nodes[-1].args != (nodes[-2],):
            return None
        steps: list[Step] = []
        names: list[str] = []
        for before, node in pairwise(nodes[:-1]):
            if node.all_input_nodes != [before] or node.args[:1] != (before,) or len(before.users) != 1:
                return None
            module = modules[str(node.target)] if node.op == "call_module" else None
            last = steps[-1] if steps else None
            if isinstance(module, FrozenConv):
                if module.name is None or (module.producer is not None and [module.producer] != names[-1:]):
                    return None
                names.append(module.name)
                steps.append(_GatedStep(module, module.conv.activation == "relu"))
            elif isinstance(module, nn.ReLU) and isinstance(last, _GatedStep):
                last.relu = True
            elif isinstance(last, _GatedStep) and last.pool is None and _is_max_pool(module):
                last.pool = cast(nn.MaxPool2d, module)
            elif module is None:
                steps.append(_Call(node.target, node.args[1:], dict(node.kwargs)))
            elif not isinstance(module, nn.Identity):
                steps.append(module)
        return FrozenSequence(steps) if names == list(gated) else None

    def run(self, x: Tensor, blocks: OpenBlockList, workspace: Workspace) -> Tensor:
        """The output for one image that opens these blocks of all layers; in inference mode."""
        opened = iter(self._open_layers(blocks, np.float32 if x.dtype == torch.float32 else np.float64))
        y: BlockMap | Tensor = x
        before = None
        for step in self._steps:
            if isinstance(step, _GatedStep):
                assert step.block_conv is not None
                here = next(opened)
                y = step.block_conv.run(y, before, here, workspace)
                if not step.layer.compact:
                    y = y.full()
                before = here
            else:
                y = step(y.compact() if isinstance(y, BlockMap) else y)
        return y.compact() if isinstance(y, BlockMap) else y

    def _open_layers(self, found: OpenBlockList, dtype: type[np.floating[Any]]) -> list[OpenBlocks]:
        """The open blocks of each layer; at least one each."""
        offsets = found.offsets
        if self._rounds or any(map(eq, offsets, offsets[1:])):
            found = self._rounded(found)
        opened, gates, offsets = found
        blocks, gates = self._block_in_layer[opened], torch.from_numpy(gates.astype(dtype, copy=False)[:, None, None])
        parts = split(gates, list(map(sub, offsets[1:], offsets)))
        return [
            OpenBlocks(blocks[start:stop], part, channels, size)
            for start, stop, part, (channels, size) in zip(offsets, offsets[1:], parts, self._sizes, strict=False)
        ]

    def _rounded(self, found: OpenBlockList) -> OpenBlockList:
        """With closed blocks added, whose gates are 0: at least one per layer, and a multiple of ``_multiple``."""
        opened, gates, offsets = found
        counts = np.diff(offsets)
        more = np.maximum(-(-counts // self._multiple) * self._multiple, 1) - counts
        closed = np.ones(self._block_in_layer.size, bool)
        closed[opened] = False
        so_far = np.cumsum(closed)
        before = so_far[self._starts[:-1]] - closed[self._starts[:-1]]
        layer = self._layer
        added = np.flatnonzero(closed & (so_far - before[layer] <= more[layer]))
        opened = np.concatenate([opened, added])
        order = np.argsort(opened, kind="stable")
        opened = opened[order]
        gates = np.concatenate([gates, np.zeros(added.size, gates.dtype)])[order]
        return OpenBlockList(opened, gates, np.searchsorted(opened, self._starts).tolist())


def _is_max_pool(module: nn.Module | None) -> bool:
    return type(module) is nn.MaxPool2d and not module.return_indices

"""A network that is one chain of layers, run for one image on a CPU without detours.

With a quarter of the channels open a convolution of VGG-16 takes less time than the calls around it: of modules, of
views, of the library's operations on index lists of a hundred numbers. So the index lists of all layers come from
numpy at once, and a gated convolution is what cannot be left out: copy the open weights, unfold the map, multiply,
scale and shift, ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from moesaic.layers.channel_moe import ChannelMoE
from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.listeners import Listeners
from moesaic.ops.narrow_conv import FEW_PIXELS, Channels, Rates, narrow_image, output_size, pieces_of_a_filter
from moesaic.ops.skipping import block_layout

__all__ = ["Chain"]

Floats = NDArray[np.floating[Any]]


@dataclass(eq=False, slots=True)
class _Step:
    """A gated layer, and the ReLU behind it if there is one."""

    layer: ChannelMoE
    number: int
    """Among the gated layers."""
    reads: bool
    """Whether it reads the open channels of the gated layer before it; else all of a map."""
    hands_on: bool
    relu: bool
    plan: _Plan | None = None


class Chain:
    """The steps of a network whose every layer reads the one before it and nothing else.

    Args:
        steps: gated layers, and whatever else is called with the map alone.
        skipped: modules that are not called, since they do nothing or what they do is done by others.
    """

    def __init__(self, steps: Sequence[_Step | Callable[[Tensor], Tensor]], skipped: Sequence[nn.Module]) -> None:
        self.steps = list(steps)
        self._listeners = Listeners(skipped)

    @staticmethod
    def of(
        network: nn.Module,
        layers: Mapping[str, ChannelMoE],
        sources: Mapping[str, str | None],
        hand_on: frozenset[str],
    ) -> Chain | None:
        """The chain that a network is, or None where it is none.

        ``network`` holds the layers under their names, and is traced, not run.
        """
        try:
            nodes = list(cast("Iterable[fx.Node]", _Tracer().trace(network).nodes))
        except Exception:  # whatever its forward does with what it is given: then it is no chain
            return None
        modules = dict(cast("Iterable[tuple[str, nn.Module]]", network.named_modules()))
        names = list(layers)
        steps: list[_Step | Callable[[Tensor], Tensor]] = []
        skipped: list[nn.Module] = []
        for before, node in pairwise(nodes[:-1]):
            if node.all_input_nodes != [before] or node.args[:1] != (before,) or len(before.users) != 1:
                return None
            module = modules.get(str(node.target)) if node.op == "call_module" else None
            gated = steps[-1] if steps else None
            if isinstance(module, ChannelMoE):
                name = str(node.target)
                number, source = names.index(name), sources[name]
                if number != sum(isinstance(step, _Step) for step in steps):
                    return None
                if source is not None and (number == 0 or source != names[number - 1]):
                    return None
                steps.append(_Step(module, number, source is not None, name in hand_on, module.activation == "relu"))
            elif isinstance(module, nn.ReLU) and isinstance(gated, _Step):
                gated.relu = True
            elif isinstance(module, nn.Identity):
                pass
            elif module is not None:
                steps.append(module)
                continue
            elif node.op == "call_module":
                return None
            else:
                steps.append(_Call(node.target, node.args[1:], dict(node.kwargs)))
                continue
            skipped.append(module)
        last = nodes[-1]
        if len(nodes) < 3 or nodes[0].op != "placeholder" or last.args != (nodes[-2],):
            return None
        return Chain(steps, skipped) if sum(isinstance(step, _Step) for step in steps) == len(names) else None

    def may_run(self, x: Tensor, convs: Sequence[ChannelConv]) -> bool:
        """Whether this image can take this way: on a CPU, with weights as they usually lie, and nobody listening."""
        if x.shape[0] != 1 or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return False
        if any(conv.weight.dtype != x.dtype or not conv.weight.is_contiguous() for conv in convs):
            return False
        return not self._listeners

    def run(
        self, x: Tensor, gates: Floats, convs: Sequence[ChannelConv], scale_and_shift: tuple[Tensor, Tensor]
    ) -> Tensor:
        """What the network makes of one image with these gates of the blocks of all layers."""
        opened = _open(gates, convs, scale_and_shift)
        before = None
        for step in self.steps:
            if not isinstance(step, _Step):
                x = step(x)
                continue
            conv, here, plan = convs[step.number], opened[step.number], step.plan
            if plan is None or plan.conv is not conv or plan.size_in != x.shape[2:]:
                plan = step.plan = _Plan.of(conv, x.shape[2:])
            x = _gated(x, plan, before if step.reads else None, here, step.relu)
            if not step.hands_on:
                x = here.channels().put(x)
            before = here
        return x


@dataclass(eq=False, slots=True)
class _Plan:
    """What is the same for every image of a size."""

    conv: ChannelConv
    size_in: torch.Size
    C: int
    rows: int
    columns: int
    size: int
    """Channels in a piece of a filter."""
    weights: int
    """And weights."""
    rates: Rates

    @staticmethod
    def of(conv: ChannelConv, size_in: torch.Size) -> _Plan:
        _, C, ks, _ = conv.weight.shape
        size = C // pieces_of_a_filter(conv)
        rows, columns = (output_size(side, conv) for side in size_in)
        return _Plan(conv, size_in, C, rows, columns, size, size * ks * ks, Rates.of(conv, rows * columns))


@dataclass(eq=False, slots=True)
class _Open:
    """The open channels of a layer."""

    numbers: NDArray[np.intp]
    total: int
    pieces: NDArray[np.intp] | None
    filters: NDArray[np.intp]
    scale: Floats
    shift: Floats

    def channels(self) -> Channels:
        return Channels(torch.from_numpy(self.numbers), self.total)


def _open(gates: Floats, convs: Sequence[ChannelConv], scale_and_shift: tuple[Tensor, Tensor]) -> list[_Open]:
    """The open channels of all layers."""
    layout = block_layout(convs)
    # a gate that is not a number is not closed
    numbers, counts, blocks, block_counts = layout.opened(~(gates <= 0))
    of_block = gates[layout.block[numbers]]
    local = numbers - layout.start[numbers]
    filters = (local * layout.pieces[numbers])[:, None]
    all_scale, all_shift = (each.numpy() for each in scale_and_shift)
    scale = (of_block * all_scale[numbers]).astype(all_scale.dtype, copy=False)
    shift = (of_block * all_shift[numbers]).astype(all_shift.dtype, copy=False)
    opened: list[_Open] = []
    channel = block = 0
    for conv, count, block_count in zip(convs, counts, block_counts, strict=True):
        O = conv.weight.shape[0]
        some = slice(channel, channel + count)
        pieces = blocks[block : block + block_count] if O % conv.block_out == 0 else None
        opened.append(_Open(local[some], O, pieces, filters[some], scale[some], shift[some]))
        channel, block = channel + count, block + block_count
    return opened


def _gated(x: Tensor, plan: _Plan, before: _Open | None, here: _Open, relu: bool) -> Tensor:
    """A gated convolution of the open channels alone."""
    conv = plan.conv
    ins, outs = plan.C if before is None else len(before.numbers), len(here.numbers)
    if plan.rates.way(ins, outs)[0] == "dense":
        full = x if before is None else before.channels().put(x)
        z = here.channels().take(torch.conv2d(full, conv.weight, None, conv.stride, conv.padding))
    else:
        if before is None or ins == plan.C:
            weight = conv.weight.view(len(conv.weight), -1).index_select(0, torch.from_numpy(here.numbers))
        else:
            pieces = before.pieces
            if pieces is None:
                pieces = before.numbers[:: plan.size] // plan.size
            pairs = torch.from_numpy((here.filters + pieces).ravel())
            weight = conv.weight.view(-1, plan.weights).index_select(0, pairs).view(outs, -1)
        z = narrow_image(x, weight, conv, plan.rows, plan.columns)
    if plan.rows * plan.columns > FEW_PIXELS:
        scale, shift = (torch.from_numpy(each).view(1, -1, 1, 1) for each in (here.scale, here.shift))
        y = torch.addcmul(shift, z, scale)
        return y.relu_() if relu else y
    values = z[0].numpy()
    values *= here.scale[:, None, None]
    values += here.shift[:, None, None]
    if relu:
        np.maximum(values, 0, out=values)
    return z


class _Tracer(fx.Tracer):
    """Leaves gated layers whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, ChannelMoE) or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class _Call:
    """A function or method that the network calls on the map."""

    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        call = getattr(x, self.target) if isinstance(self.target, str) else partial(self.target, x)
        return call(*self.args, **self.options)

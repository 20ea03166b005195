"""A network that is one chain of layers, run for one image on a CPU without detours.

With a quarter of the channels open a convolution of VGG-16 takes less time than the calls around it: of modules, of
views, of the library's operations on index lists of a hundred numbers. So the gates of all layers are looked at once,
in numpy, and a gated convolution is what cannot be left out (`moesaic.ops.channel.block_gemm`): copy the open
weights, copy
what the kernels see, multiply, ReLU, gate. Pooling behind it is done along with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import eq, sub
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from moesaic.layers.channel_moe import ChannelMoE
from moesaic.ops.channel.block_gemm import WHOLE_BLOCK, BlockMap, BlockProduct, OpenBlocks
from moesaic.ops.channel.open_channels import scale_and_shift_of, split
from moesaic.ops.channel.padded_buffers import Scratch, SpareScratch
from moesaic.ops.hooks import Listeners
from moesaic.ops.weight_cache import CachedValue, TensorRefs
from moesaic.routing.channel_heads import OpenOnHost

__all__ = ["Chain", "Products"]


EVEN = 16
"""Of channels that are gated one by one a multiple of this is opened, with gates of 0 where there are too few: products
of so many channels are as fast, and views are made for each number of them."""


@dataclass(eq=False, slots=True)
class _Step:
    """A gated layer, with the ReLU and the pooling behind it."""

    layer: ChannelMoE
    number: int
    """Among the gated layers."""
    reads: bool
    """Whether it reads the open channels of the gated layer before it; else all of a map."""
    hands_on: bool
    relu: bool
    pool: nn.MaxPool2d | None = None


class Products(NamedTuple):
    """What a chain runs with."""

    layers: list[BlockProduct]
    """One for each gated layer."""
    dtype: torch.dtype | None
    """Of their weights; None where they have several, or one that is not for numpy."""
    scratch: SpareScratch


class Chain:
    """The steps of a network whose every layer reads the one before it and nothing else.

    Its weights are kept once more in the order of `BlockProduct`, until they change.

    Args:
        steps: gated layers, and whatever else is called with the map alone.
        network: whose modules are not called if what they do is done by others; who listens to one keeps the chain from
            being used.
    """

    def __init__(self, steps: Sequence[_Step | Callable[[Tensor], Tensor]], network: nn.Module) -> None:
        self.steps = list(steps)
        self._gated = [step for step in self.steps if isinstance(step, _Step)]
        self._norms = [step.layer.norm for step in self._gated if step.layer.norm is not None]
        self._listeners = Listeners(network.modules())
        self._products = CachedValue[Products]()
        # torch does not count how often BatchNorm changes its statistics, but BatchNorm does, in a buffer
        self._held = TensorRefs(
            module for step in self._gated for module in (step.layer.conv, step.layer.norm) if module
        )
        blocks = [-(-step.layer.out_channels // step.layer.block) for step in self._gated]
        self._starts = np.cumsum([0, *blocks])
        """Of each layer, the first block among those of all; and the number of all."""
        self._numbers = np.concatenate([np.arange(number) for number in blocks])
        """Of each block in its layer."""
        self._layer = np.repeat(np.arange(len(blocks)), blocks)
        """Of each block."""
        sizes = [step.layer.block for step in self._gated]
        self._multiple = np.array([max(EVEN // size, 1) if size < WHOLE_BLOCK else 1 for size in sizes])
        """Of how many blocks a layer opens a multiple."""
        self._may_round = bool((self._multiple > 1).any())
        self._sizes = [(step.layer.out_channels, step.layer.block) for step in self._gated]

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
            elif isinstance(gated, _Step) and gated.pool is None and _is_pooling(module):
                gated.pool = cast(nn.MaxPool2d, module)
            elif module is not None:
                if not isinstance(module, nn.Identity):
                    steps.append(module)
            elif node.op == "call_module":
                return None
            else:
                steps.append(_Call(node.target, node.args[1:], dict(node.kwargs)))
        last = nodes[-1]
        if len(nodes) < 3 or nodes[0].op != "placeholder" or last.args != (nodes[-2],):
            return None
        return Chain(steps, network) if sum(isinstance(step, _Step) for step in steps) == len(names) else None

    def ready(self, x: Tensor) -> Products | None:
        """What it runs with if this is one image on a CPU whose network learns nothing, and nobody listens."""
        if x.shape[0] != 1 or x.device.type != "cpu":
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return None
        if any(norm.training for norm in self._norms) or self._listeners:
            return None
        products = self.products()
        return products if products.dtype == x.dtype else None

    def products(self) -> Products:
        """The weights as they are now."""
        return self._products.of(self._held.now(), self._ordered)

    def run(self, x: Tensor, opened: OpenOnHost, products: Products) -> Tensor:
        """What the network makes of one image with these blocks of all layers; in inference mode."""
        scratch = products.scratch.take(x)
        y = self._run(x, products.layers, opened, scratch)
        products.scratch.give_back(x, scratch)
        return y

    def _run(self, x: Tensor, products: Sequence[BlockProduct], on_host: OpenOnHost, scratch: Scratch) -> Tensor:
        opened = self._opened(on_host, np.float32 if x.dtype == torch.float32 else np.float64)
        now: BlockMap | Tensor = x
        before = None
        for step in self.steps:
            if isinstance(step, _Step):
                here = opened[step.number]
                now = _gated(now, products[step.number], before if step.reads else None, here, step.hands_on, scratch)
                before = here
            else:
                now = step(now.map() if isinstance(now, BlockMap) else now)
        return now.map() if isinstance(now, BlockMap) else now

    def _opened(self, on_host: OpenOnHost, dtype: type[np.floating[Any]]) -> list[OpenBlocks]:
        """The open blocks of all layers. A layer in which all are closed gets its first one, whose gate is 0."""
        opened, gates, cuts = on_host
        if self._may_round or any(map(eq, cuts, cuts[1:])):
            opened, gates, cuts = self._rounded(on_host)
        blocks, some = self._numbers[opened], torch.from_numpy(gates.astype(dtype, copy=False)[:, None, None])
        parts = split(some, list(map(sub, cuts[1:], cuts)))
        return [
            OpenBlocks(blocks[a:b], each, channels, size)
            for a, b, each, (channels, size) in zip(cuts, cuts[1:], parts, self._sizes, strict=False)
        ]

    def _rounded(self, on_host: OpenOnHost) -> OpenOnHost:
        """With more blocks, whose gates are 0: so many of each layer that there are few numbers, and one at least."""
        opened, gates, cuts = on_host
        counts = np.diff(cuts)
        more = np.maximum(-(-counts // self._multiple) * self._multiple, 1) - counts
        closed = np.ones(self._numbers.size, bool)
        closed[opened] = False
        so_far = np.cumsum(closed)
        before = so_far[self._starts[:-1]] - closed[self._starts[:-1]]
        layer = self._layer
        added = np.flatnonzero(closed & (so_far - before[layer] <= more[layer]))
        opened = np.concatenate([opened, added])
        order = np.argsort(opened, kind="stable")
        opened = opened[order]
        gates = np.concatenate([gates, np.zeros(added.size, gates.dtype)])[order]
        return OpenOnHost(opened, gates, np.searchsorted(opened, self._starts).tolist())

    def _ordered(self) -> Products:
        convs = [step.layer.weights() for step in self._gated]
        dtypes = {conv.weight.dtype for conv in convs}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            return Products([], None, SpareScratch())
        made: list[BlockProduct] = []
        for step, conv in zip(self._gated, convs, strict=True):
            scale, shift = scale_and_shift_of([conv])
            made.append(BlockProduct(conv, scale, shift, reads_gated=step.reads, relu=step.relu, pool=step.pool))
        return Products(made, dtypes.pop(), SpareScratch())


def _gated(
    x: BlockMap | Tensor,
    product: BlockProduct,
    before: OpenBlocks | None,
    here: OpenBlocks,
    hands_on: bool,
    scratch: Scratch,
) -> BlockMap | Tensor:
    """A gated layer with its open channels alone; as a map of all channels where those who follow take no other."""
    found = product.run(x, before, here, scratch)
    return found if hands_on else found.full()


def _is_pooling(module: nn.Module | None) -> bool:
    return type(module) is nn.MaxPool2d and not module.return_indices


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

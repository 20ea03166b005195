"""Parameters and multiply-adds (MACs) of a network for one image, and the part of them that is routed.

Counted: convolutions, linear layers, ``nn.MultiheadAttention`` and routed layers, as they run on one image, and the two
matmuls of attention by ``scaled_dot_product_attention``, as in our transformers and timm's. Not counted: normalisation,
activations, pooling, additions and biases; the gather of patches; other matmuls in functions rather than modules.

A routed layer has two costs. Sparse MACs, as executed by the `torch` backend: each expert on its own units, plus the
router's scores. Dense MACs: every expert on every unit, without a router, which is the cost of the layer it replaces.
Of a block that skips tokens, sparse MACs are those of the selected tokens, dense MACs those of all of them.
For a convolution with gated channels, sparse MACs are open inputs × open outputs, plus the gates and their embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moesaic.argument_checks import check_positive
from moesaic.experts import MLPExperts, PatchNetExperts
from moesaic.layers import ChannelMoE, PatchMoE, SampleMoE, TokenMoE, TokenSkip
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.gated_conv import ConsumerConv, GatedConv
from moesaic.models.inspection import eval_mode, example_images
from moesaic.ops.channel.masked import open_channels
from moesaic.routing import ChannelGate, Router, SampleRouter
from moesaic.routing_record import Routing

__all__ = ["LayerCost", "ModelCost", "align_columns", "count_macs", "grouped"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ROUTED = (PatchMoE, TokenMoE, TokenSkip, SampleMoE, ChannelMoE, ConsumerConv, ChannelGate, EmbeddingNetwork)
_COUNTED = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear, nn.MultiheadAttention, Router, SampleRouter, *_ROUTED)


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer, for one image."""

    name: str
    kind: str
    """Class name of the layer."""
    parameters: int
    """0 for parameters that an earlier layer shares."""
    macs: int
    """Multiply-adds as executed, sparsely if the layer is routed."""
    dense_macs: int
    """Multiply-adds with every expert on every unit and no router; equal to ``macs`` if the layer is not routed."""
    routed: bool = False


@dataclass(frozen=True)
class ModelCost:
    """Cost of a network for one image; ``print`` shows a table."""

    layers: tuple[LayerCost, ...]
    """In order of their first run. Every expert of a list has an entry, for its part of the samples."""
    parameters: int
    """All parameters of the network, normalisation included."""
    routed_parameters: int
    """Parameters of routed layers: experts, routers, and the embedding that gates read."""

    @property
    def macs(self) -> int:
        """Multiply-adds of one image."""
        return sum(layer.macs for layer in self.layers)

    @property
    def dense_macs(self) -> int:
        """Multiply-adds of one image with routed layers executed densely."""
        return sum(layer.dense_macs for layer in self.layers)

    @property
    def routed_macs(self) -> int:
        """Multiply-adds of the routed layers, routers included."""
        return sum(layer.macs for layer in self.layers if layer.routed)

    @property
    def routed_dense_macs(self) -> int:
        """Multiply-adds of the same layers executed densely."""
        return sum(layer.dense_macs for layer in self.layers if layer.routed)

    @property
    def routed_share(self) -> float:
        """Fraction of the dense multiply-adds in routed layers: the most that routing can save."""
        return self.routed_dense_macs / self.dense_macs if self.dense_macs else 0.0

    def within(self, names: Collection[str]) -> tuple[LayerCost, ...]:
        """Returns the costs of the layers with these names and of those inside of them."""
        inside = tuple(f"{name}." for name in names)
        return tuple(layer for layer in self.layers if layer.name in names or layer.name.startswith(inside))

    def table(self) -> str:
        """Returns a table with a row per layer, the totals, and those of the routed layers."""
        rows = [("layer", "kind", "parameters", "multiply-adds", "of dense")]
        rows += [_row(layer.name or "(itself)", layer.kind, layer.parameters, layer) for layer in self.layers]
        rows.append(_row("all", "", self.parameters, self))
        if any(layer.routed for layer in self.layers):
            routed = ModelCost(tuple(layer for layer in self.layers if layer.routed), 0, 0)
            rows.append(_row("routed", "", self.routed_parameters, routed))
        return align_columns(rows, "<<>>>")

    def __str__(self) -> str:
        return self.table()


def count_macs(model: nn.Module, shape: tuple[int, int, int]) -> ModelCost:
    """Counts parameters and multiply-adds by running a network on one image (C, H, W), in eval mode on its own device.

    The model is not changed; a model on the meta device is counted without computing. The image is random, the same in
    every call, which matters for routers whose load depends on the image (``ChannelGate``, ``TokenChoice`` with a
    capacity); on the meta device all gates are open. Samples count as evenly distributed over the experts of a
    ``SampleMoE``.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> layer = moesaic.PatchMoE(16, 32, experts=4, patches_per_expert=2, patch_size=4, kernel_size=3)
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), layer)
    >>> print(count_macs(model, (3, 16, 16)))
    layer   kind      parameters  multiply-adds  of dense
    0       Conv2d           448        110 592     100 %
    2       PatchMoE       5 664        163 840    13.9 %
    all                    6 112        274 432    21.3 %
    routed                 5 664        163 840    13.9 %
    """
    if len(shape) != 3:
        raise ValueError(f"count_macs: shape={shape} is not an image shape; give (C, H, W), such as (3, 64, 64)")
    check_positive("count_macs", C=shape[0], H=shape[1], W=shape[2])
    model = getattr(model, "_orig_mod", model)  # unwrap a compiled model
    image = example_images(model, shape)
    with eval_mode(model), torch.no_grad():
        try:
            rows = _run("", model, image)
        except Exception as error:
            error.add_note(f"count_macs: while {type(model).__name__} ran on an image of shape {tuple(shape)}")
            raise
    seen: set[int] = set()
    routed = sum(_new_parameters(layer, seen) for layer in model.modules() if isinstance(layer, _ROUTED))
    return ModelCost(tuple(rows), sum(weight.numel() for weight in model.parameters()), routed)


def _run(name: str, module: nn.Module, x: Tensor, seen: set[int] | None = None) -> list[LayerCost]:
    """Runs a module on ``x`` and returns the cost of its layers."""
    counter = _Counter(set() if seen is None else seen)
    hooks = [hook for where, layer in _outermost(name, module, set()) for hook in counter.hooks(where, layer)]
    try:
        with _AttentionCounter(counter.add_attention):
            module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return list(counter.rows.values())


class _Counter:
    """Costs of the layers of a network while it runs.

    ``seen`` are the identities of the parameters that earlier layers have; those of the layers are added.
    """

    def __init__(self, seen: set[int]) -> None:
        self.rows: dict[str, LayerCost] = {}
        self._seen = seen
        self._running: list[LayerCost | None] = []
        """Modules that run, without costs; None for those that are counted as a whole."""

    def hooks(self, where: str, module: nn.Module) -> tuple[Any, Any]:
        """Registers the hooks of a module."""
        is_counted = isinstance(module, _COUNTED)
        running = None if is_counted else LayerCost(where, type(module).__name__, 0, 0, 0)

        def enter(*_: Any) -> None:
            self._running.append(running)

        def leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for row in _layer_rows(where, layer, args, kwargs, output, self._seen) if is_counted else ():
                self._add(row)
            self._running.pop()  # last: what ran for counting was not the network

        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, with_kwargs=True)

    def add_attention(self, macs: int) -> None:
        """Adds the multiply-adds of an attention to those of the module that runs."""
        if self._running and self._running[-1] is not None:
            self._add(replace(self._running[-1], macs=macs, dense_macs=macs))

    def _add(self, row: LayerCost) -> None:
        total = self.rows.get(row.name)
        if total is not None:  # another run of the same layer
            row = replace(total, macs=total.macs + row.macs, dense_macs=total.dense_macs + row.dense_macs)
        self.rows[row.name] = row


def _outermost(name: str, module: nn.Module, seen: set[int]) -> Generator[tuple[str, nn.Module]]:
    """Yields the modules that are in no counted layer, each once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    if isinstance(module, _COUNTED):
        return
    for child_name, child in cast("Iterable[tuple[str, nn.Module]]", module.named_children()):
        yield from _outermost(f"{name}.{child_name}".lstrip("."), child, seen)


def _layer_rows(
    name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, seen: set[int]
) -> list[LayerCost]:
    x = next(iter((*args, *kwargs.values())))
    if isinstance(layer, ChannelMoE):
        gates = _gates(layer, *args[1:], **{name: gate for name, gate in kwargs.items() if name != "x"})
        return [_channel_row(name, layer, x, *gates, _new_parameters(layer, seen))]
    if isinstance(layer, nn.MultiheadAttention):
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        return [_attention_row(name, layer, named["query"], named["key"], named["value"], _new_parameters(layer, seen))]
    return _rows(name, layer, x, output, seen)


def _rows(name: str, layer: nn.Module, x: Tensor, y: Any, seen: set[int]) -> list[LayerCost]:
    kind = type(layer).__name__
    if isinstance(layer, SampleMoE):
        return _sample_rows(name, layer, x, seen)
    if isinstance(layer, TokenSkip):
        return _skip_rows(name, layer, x, seen)
    if isinstance(layer, EmbeddingNetwork):
        embedding, _ = y
        rows = _run(f"{name}.body".lstrip("."), layer.body, x, seen)
        rows += _run(f"{name}.head".lstrip("."), layer.head, embedding, seen)
        return [replace(row, dense_macs=0, routed=True) for row in rows]
    parameters = _new_parameters(layer, seen)
    if isinstance(layer, PatchMoE):
        return [_patch_row(name, layer, x, parameters, layer.patch_size**2)]
    if isinstance(layer, TokenMoE):
        return [_patch_row(name, layer, x, parameters, 1)]
    if isinstance(layer, ChannelGate):
        return [LayerCost(name, kind, parameters, x.shape[0] * layer.weight.numel(), 0, True)]
    if isinstance(layer, ConsumerConv):
        each = y.numel() * layer.weight[0].numel() // layer.in_channels
        active = _open_channel_count(layer.gate_in(), layer.in_channels, layer.block_in)
        return [LayerCost(name, kind, parameters, each * active, each * layer.in_channels, True)]
    if isinstance(layer, _CONVOLUTIONS):
        macs = y.numel() * layer.weight[0].numel()
    elif isinstance(layer, _TRANSPOSED):
        macs = x.numel() * layer.weight[0].numel()
    elif isinstance(layer, nn.Linear):
        macs = y.numel() * layer.in_features
    elif isinstance(layer, Router):
        macs = layer.weight.numel() * x.shape[0] * x.shape[2] * x.shape[3] // layer.patch_size**2
    else:  # a sample's patches are summed first
        assert isinstance(layer, SampleRouter)
        macs = x.shape[0] * layer.weight.numel()
    return [LayerCost(name, kind, parameters, macs, macs)]


def _new_parameters(layer: nn.Module, seen: set[int]) -> int:
    """Number of parameters of a layer that no earlier layer has."""
    new = [weight for weight in layer.parameters() if id(weight) not in seen]
    seen.update(id(weight) for weight in new)
    return sum(weight.numel() for weight in new)


def _gates(
    layer: ChannelMoE, gate_out: Routing | None = None, gate_in: Routing | None = None
) -> tuple[Routing, Routing | None]:
    """The gates that a layer ran with: its arguments, or those of its `GatedConv`."""
    if gate_out is None:
        assert isinstance(layer, GatedConv)
        return layer.gates()
    return gate_out, gate_in


def _channel_row(
    name: str, layer: ChannelMoE, x: Tensor, gate_out: Routing, gate_in: Routing | None, parameters: int
) -> LayerCost:
    rows, columns = layer.map_size(x.shape[2], x.shape[3])
    pair = rows * columns * layer.kernel_size**2
    outs = _open_channel_count(gate_out, layer.out_channels, layer.block)
    ins = layer.in_channels if gate_in is None else _open_channel_count(gate_in, layer.in_channels, layer.block_in)
    dense = pair * layer.in_channels * layer.out_channels
    return LayerCost(name, type(layer).__name__, parameters, pair * ins * outs, dense, True)


def _attention_row(
    name: str, layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, parameters: int
) -> LayerCost:
    """The projections of queries, keys, values and outputs, and the two matmuls of attention."""
    pairs = query.numel() * key.shape[-2 if layer.batch_first or key.ndim == 2 else 0]
    macs = cast("int", layer.embed_dim) * (2 * query.numel() + key.numel() + value.numel()) + 2 * pairs
    return LayerCost(name, type(layer).__name__, parameters, macs, macs)


def _open_channel_count(routing: Routing, channels: int, block: int) -> int:
    """Number of open channels for one image."""
    if not routing.gate.is_meta:
        return int(open_channels(routing, channels, block).sum())
    return min(routing.gate.shape[2] * block, channels)


def _patch_row(name: str, layer: PatchMoE | TokenMoE, x: Tensor, parameters: int, positions: int) -> LayerCost:
    """The cost of a layer that routes patches of so many positions; a token has one."""
    routing, experts = layer.route(x), layer.experts
    pixels = routing.batch * routing.units * positions  # of all maps, padded, whatever their memory format
    weights = _matrix_weights(experts)
    dense, padded = x.numel() // experts.in_channels * weights, pixels * weights
    if isinstance(layer.router, Router):
        router = routing.batch * routing.units * layer.router.weight.numel()
    else:
        router = sum(row.macs for row in _run("", layer.router, x))
    places = routing.batch * routing.units * routing.experts
    if routing.dispatch is not None:  # slots in place of patches, with dispatch and combine over all patches
        slots = routing.experts * routing.dispatch.shape[3]
        mixing = slots * pixels * (experts.in_channels + experts.out_channels)
        macs = padded * slots * routing.batch // places + mixing
    else:
        taken = routing.index.numel() if routing.index is not None and not routing.may_drop else int(routing.load.sum())
        macs = padded * taken // places
    return LayerCost(name, type(layer).__name__, parameters, macs + router, dense, True)


def _matrix_weights(experts: nn.Module) -> int:
    """Weights (E, O, C, …) of stacked experts: multiply-adds of all experts for one pixel or vector."""
    return sum(weight.numel() for weight in experts.parameters() if weight.ndim > 2)


def _sample_rows(name: str, layer: SampleMoE, x: Tensor, seen: set[int]) -> list[LayerCost]:
    inside = f"{name}." if name else ""
    rows = [replace(row, dense_macs=0) for row in _run(f"{inside}router", layer.router, x, seen)]
    E, K = len(cast("nn.ModuleList", layer.experts)), layer.top_k
    if isinstance(layer.experts, nn.ModuleList):
        for e, expert in enumerate(layer.experts):
            own = _run(f"{inside}experts.{e}", expert, x, seen)
            rows += [replace(row, macs=row.macs * K // E) for row in own]
    else:
        parameters = sum(weight.numel() for weight in layer.experts.parameters())
        dense = _stacked_macs(layer.experts, x)
        rows.append(LayerCost(f"{inside}experts", type(layer.experts).__name__, parameters, dense * K // E, dense))
    return [replace(row, routed=True) for row in rows]


def _skip_rows(name: str, layer: TokenSkip, x: Tensor, seen: set[int]) -> list[LayerCost]:
    """The router, and the layers of the block on selected tokens; densely, on all tokens."""
    inside = f"{name}." if name else ""
    routing = layer.route(x)
    assert routing.index is not None
    chosen = x.gather(1, routing.index[:, 0].unsqueeze(-1).expand(-1, -1, x.shape[2]))
    scores = routing.batch * routing.units * layer.router.weight.numel()
    parameters = _new_parameters(layer.router, seen)
    rows = [LayerCost(f"{inside}router", type(layer.router).__name__, parameters, scores, 0, True)]
    dense = {row.name: row.dense_macs for row in _run(f"{inside}block", layer.block, x, set(seen))}
    sparse = _run(f"{inside}block", layer.block, chosen, seen)
    return rows + [replace(row, dense_macs=dense[row.name], routed=True) for row in sparse]


class _AttentionCounter(TorchFunctionMode):
    """Calls ``count`` with the multiply-adds of each ``scaled_dot_product_attention`` inside."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named: dict[str, Tensor] = dict(zip(("query", "key", "value"), args, strict=False))
            named |= kwargs or {}
            pairs = named["query"].shape[:-1].numel() * named["key"].shape[-2]
            self.count(pairs * (named["query"].shape[-1] + named["value"].shape[-1]))
        return func(*args, **(kwargs or {}))


def _stacked_macs(experts: nn.Module, x: Tensor) -> int:
    """Multiply-adds of all stacked experts on samples."""
    if isinstance(experts, PatchNetExperts) and experts.activation == "identity":
        return len(experts) * experts.outputs * experts.dim * x.shape[0]  # patches and filters are summed first
    each = isinstance(experts, (PatchNetExperts, MLPExperts))  # patch or token of a sample
    return _matrix_weights(experts) * (x.shape[:-1].numel() if each else x.shape[0])


def _row(name: str, kind: str, parameters: int, cost: LayerCost | ModelCost) -> tuple[str, str, str, str, str]:
    share = f"{100 * cost.macs / cost.dense_macs:.3g} %" if cost.dense_macs else "–"
    return name, kind, grouped(parameters), grouped(cost.macs), share


def align_columns(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Returns the rows of a table as lines, each column aligned to the left ("<") or to the right (">").

    >>> print(align_columns([("layer", "macs"), ("0", "12")], "<>"))
    layer  macs
    0        12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


def grouped(number: int) -> str:
    """Returns a number with its digits in groups of three: ``12 345``."""
    return f"{number:,}".replace(",", " ")

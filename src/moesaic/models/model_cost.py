"""Parameters and multiply-adds of a network for one image, and the share of them that is routed.

Counted are the products of convolutions, linear layers and routed layers, as they run on one image.
Not counted, because they are small beside these or no module runs them: normalisation, activations,
pooling, additions and biases; the gathering of patches; products inside functions, such as those of
attention. BatchNorm of the experts adds a map per expert and step that batch-mates share: not counted.

A routed layer has two prices. Executed sparsely, as the `torch` backend does it, experts work on what
they were given, and the router's scores come on top. Executed densely, every expert works on everything
and nobody routes: the price of the layer that it replaces. Of convolutions whose channels are gated the
first is active_in × active_out of the second, and gates and the embedding that they are made of come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_positive
from moesaic.experts import ConvExperts, Experts, LinearExperts, MLPExperts, PatchNetExperts
from moesaic.layers import ChannelMoE, PatchMoE, SampleMoE
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.gated_conv import ConsumerConv, GatedConv
from moesaic.ops.channel.masked import open_channels
from moesaic.routing import ChannelGate, Router, SampleRouter
from moesaic.routing_record import Routing

__all__ = ["LayerCost", "ModelCost", "count_macs", "eval_mode"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ROUTED = (PatchMoE, SampleMoE, ChannelMoE, ConsumerConv, ChannelGate, EmbeddingNetwork)
_COUNTED = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear, Router, SampleRouter, *_ROUTED)


@dataclass(frozen=True)
class LayerCost:
    """One layer of a network, for one image."""

    name: str
    kind: str
    """Its class."""
    parameters: int
    """Zero where an earlier layer shares them."""
    macs: int
    """Multiply-adds as executed: sparsely where the layer is routed."""
    dense_macs: int
    """Multiply-adds if every expert did everything and nobody routed; of a plain layer the same as ``macs``."""
    routed: bool = False


@dataclass(frozen=True)
class ModelCost:
    """What a network costs; `str` of it is a table."""

    layers: tuple[LayerCost, ...]
    """In the order in which they first ran. An expert of a list has a row, with its share of the samples."""
    parameters: int
    """All of the network's, those of normalisation included."""
    routed_parameters: int
    """Of its routed layers: experts, routers, and what routers read."""

    @property
    def macs(self) -> int:
        """Multiply-adds of one image."""
        return sum(layer.macs for layer in self.layers)

    @property
    def dense_macs(self) -> int:
        """Multiply-adds of one image if routed layers were executed densely."""
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
        """The mixture's share of the multiply-adds that a dense execution takes: what routing can save at most."""
        return self.routed_dense_macs / self.dense_macs if self.dense_macs else 0.0

    def table(self) -> str:
        """A row for each layer, the routed ones marked, and the sums."""
        rows = [("layer", "kind", "parameters", "multiply-adds", "of dense")]
        rows += [_row(layer.name or "(itself)", layer.kind, layer.parameters, layer) for layer in self.layers]
        rows.append(_row("all", "", self.parameters, self))
        if any(layer.routed for layer in self.layers):
            routed = ModelCost(tuple(layer for layer in self.layers if layer.routed), 0, 0)
            rows.append(_row("routed", "", self.routed_parameters, routed))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(cells)
            )
            for cells in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.table()


def count_macs(model: nn.Module, shape: tuple[int, int, int]) -> ModelCost:
    """Count a network by running it on one image (C, H, W), in eval mode and on the device it is on.

    Nothing of the model changes, and one on the meta device is counted without computing anything. Where
    the choice of a router depends on the image (``ChannelGate``, ``TokenChoice`` with a capacity), the image is a
    random one, the same in each call; on the meta device every gate is open that may be. Samples are taken to go to all
    experts of a ``SampleMoE`` equally often.

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
        raise ValueError(f"count_macs: shape={shape} is not that of an image; give (C, H, W), such as (3, 64, 64)")
    check_positive("count_macs", C=shape[0], H=shape[1], W=shape[2])
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    like = next((weight for weight in model.parameters() if weight.is_floating_point()), torch.zeros(()))
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    with eval_mode(model), torch.no_grad():
        try:
            rows = _run("", model, image)
        except Exception as error:
            error.add_note(f"count_macs: while {type(model).__name__} ran on an image of shape {tuple(shape)}")
            raise
    routed = {
        id(weight): weight.numel()
        for layer in model.modules()
        if isinstance(layer, _ROUTED)
        for weight in layer.parameters()
    }
    return ModelCost(tuple(rows), sum(weight.numel() for weight in model.parameters()), sum(routed.values()))


def _run(name: str, module: nn.Module, x: Tensor, seen: set[int] | None = None) -> list[LayerCost]:
    """The rows of a module's layers, as they run on ``x``."""
    rows: dict[str, LayerCost] = {}
    seen = set() if seen is None else seen

    def listen(where: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def add(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            x = next(iter((*given, *named.values())))
            if isinstance(layer, ChannelMoE):
                gates = _gates(layer, *given[1:], **{name: gate for name, gate in named.items() if name != "x"})
                found = [_channel_row(where, layer, x, *gates, _fresh(layer, seen))]
            else:
                found = _rows(where, layer, x, result, seen)
            for row in found:
                before = rows.get(row.name)
                rows[row.name] = row if before is None else _again(before, row)

        return add

    hooks = [
        layer.register_forward_hook(listen(where), with_kwargs=True) for where, layer in _outermost(name, module, set())
    ]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return list(rows.values())


def _again(before: LayerCost, row: LayerCost) -> LayerCost:
    """A layer that ran more than once."""
    return replace(before, macs=before.macs + row.macs, dense_macs=before.dense_macs + row.dense_macs)


def _outermost(name: str, module: nn.Module, seen: set[int]) -> Generator[tuple[str, nn.Module]]:
    """The counted layers of a module that lie in no other, each once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, _COUNTED):
        yield name, module
        return
    for below, child in cast("Iterable[tuple[str, nn.Module]]", module.named_children()):
        yield from _outermost(f"{name}.{below}".lstrip("."), child, seen)


def _rows(name: str, layer: nn.Module, x: Tensor, y: Any, seen: set[int]) -> list[LayerCost]:
    kind = type(layer).__name__
    if isinstance(layer, SampleMoE):
        return _sample_rows(name, layer, x, seen)
    if isinstance(layer, EmbeddingNetwork):
        embedding, _ = y
        rows = _run(f"{name}.body".lstrip("."), layer.body, x, seen)
        rows += _run(f"{name}.head".lstrip("."), layer.head, embedding, seen)
        return [replace(row, dense_macs=0, routed=True) for row in rows]
    parameters = _fresh(layer, seen)
    if isinstance(layer, PatchMoE):
        return [_patch_row(name, layer, x, parameters)]
    if isinstance(layer, ChannelGate):
        return [LayerCost(name, kind, parameters, x.shape[0] * layer.weight.numel(), 0, True)]
    if isinstance(layer, ConsumerConv):
        each = y.numel() * layer.weight[0].numel() // layer.in_channels
        active = _active(layer.gate_in(), layer.in_channels, layer.block_in)
        return [LayerCost(name, kind, parameters, each * active, each * layer.in_channels, True)]
    if isinstance(layer, _CONVOLUTIONS):
        macs = y.numel() * layer.weight[0].numel()
    elif isinstance(layer, _TRANSPOSED):
        macs = x.numel() * layer.weight[0].numel()
    elif isinstance(layer, nn.Linear):
        macs = y.numel() * layer.in_features
    elif isinstance(layer, Router):
        macs = layer.weight.numel() * x.shape[0] * x.shape[2] * x.shape[3] // layer.patch_size**2
    else:  # a sample's patches are added first
        assert isinstance(layer, SampleRouter)
        macs = x.shape[0] * layer.weight.numel()
    return [LayerCost(name, kind, parameters, macs, macs)]


def _fresh(layer: nn.Module, seen: set[int]) -> int:
    """How many parameters a layer has that no layer before it had."""
    fresh = [weight for weight in layer.parameters() if id(weight) not in seen]
    seen.update(id(weight) for weight in fresh)
    return sum(weight.numel() for weight in fresh)


def _gates(
    layer: ChannelMoE, gate_out: Routing | None = None, gate_in: Routing | None = None
) -> tuple[Routing, Routing | None]:
    """The gates that the layer ran with: as given, or as it found them."""
    if gate_out is None:
        assert isinstance(layer, GatedConv)
        return layer.gates()
    return gate_out, gate_in


def _channel_row(
    name: str, layer: ChannelMoE, x: Tensor, gate_out: Routing, gate_in: Routing | None, parameters: int
) -> LayerCost:
    rows, columns = layer.map_size(x.shape[2], x.shape[3])
    pair = rows * columns * layer.kernel_size**2
    outs = _active(gate_out, layer.out_channels, layer.block)
    ins = layer.in_channels if gate_in is None else _active(gate_in, layer.in_channels, layer.block_in)
    dense = pair * layer.in_channels * layer.out_channels
    return LayerCost(name, type(layer).__name__, parameters, pair * ins * outs, dense, True)


def _active(routing: Routing, channels: int, block: int) -> int:
    """How many channels are open for one image."""
    if not routing.gate.is_meta:
        return int(open_channels(routing, channels, block).sum())
    return min(routing.gate.shape[2] * block, channels)


def _patch_row(name: str, layer: PatchMoE, x: Tensor, parameters: int) -> LayerCost:
    routing, experts = layer.route(x), layer.experts
    pixels = routing.batch * routing.units * layer.patch_size**2  # of all maps, wherever their channels are
    dense = pixels * _pixel_macs(experts)
    if isinstance(layer.router, Router):
        router = routing.batch * routing.units * layer.router.weight.numel()
    else:
        router = sum(row.macs for row in _run("", layer.router, x))
    places = routing.batch * routing.units * routing.experts
    if routing.dispatch is not None:  # slots in place of patches, mixed from all of them and back
        slots = routing.experts * routing.dispatch.shape[3]
        mixing = slots * pixels * (layer.in_channels + experts.out_channels)
        macs = dense * slots * routing.batch // places + mixing
    else:
        taken = routing.index.numel() if routing.index is not None and not routing.may_drop else int(routing.load.sum())
        macs = dense * taken // places
    return LayerCost(name, type(layer).__name__, parameters, macs + router, dense, True)


def _pixel_macs(experts: Experts) -> int:
    """What all experts together cost at a pixel."""
    if isinstance(experts, ConvExperts):
        return experts.weight.numel()
    if isinstance(experts, MLPExperts):
        return experts.weight_in.numel() + experts.weight_out.numel()
    matrices = [weight for weight in experts.parameters() if weight.ndim > 2]  # (E, O, C, …), as far as one can know
    return sum(weight.numel() for weight in matrices)


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


def _stacked_macs(experts: nn.Module, x: Tensor) -> int:
    """What all stacked experts together cost on samples."""
    if isinstance(experts, LinearExperts):
        return experts.weight.numel() * x.shape[0]
    if isinstance(experts, PatchNetExperts):
        E, _, D = experts.weight.shape
        if experts.activation == "identity":  # patches and filters are added first
            return E * experts.outputs * D * x.shape[0]
        return experts.weight.numel() * x.shape[:-1].numel()
    if isinstance(experts, MLPExperts):
        return _pixel_macs(experts) * x.shape[:-1].numel()
    return sum(weight.numel() for weight in experts.parameters() if weight.ndim > 2) * x.shape[0]


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Eval mode inside the block, and every module's own mode again behind it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _row(name: str, kind: str, parameters: int, cost: LayerCost | ModelCost) -> tuple[str, str, str, str, str]:
    share = f"{100 * cost.macs / cost.dense_macs:.3g} %" if cost.dense_macs else "–"
    return name, kind, _grouped(parameters), _grouped(cost.macs), share


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")

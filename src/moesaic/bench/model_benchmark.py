"""Benchmark of a network with routed layers against the same network with dense layers, on this machine.

    gain  = dense time / routed time
    bound = dense time / (dense time − time of the dense layers that are routed)

The bound is Amdahl's: the gain of a network whose routed layers take no time at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.bench.identical_layers import describe_layer, equal_layers, trace_shapes
from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.network_timer import LayerGain, LayerPair, Mode, NetworkGain, NetworkTimer, Shape, amdahl
from moesaic.bench.timing import Timing
from moesaic.experts import MLPExperts
from moesaic.experts.mlp_experts import ACTIVATIONS, ActivationName
from moesaic.layers import ChannelMoE, PatchMoE, SampleMoE, TokenMoE, TokenSkip
from moesaic.models.convert import ChannelsLastPatchMoE, applied_conversions
from moesaic.models.convert_mlp import ChannelsFirstTokenMoE
from moesaic.models.model_cost import count_macs

__all__ = ["ModelBenchmark", "benchmark_model", "check_patch_routing", "dense_counterpart", "outermost_routed_layers"]


@dataclass(frozen=True)
class ModelBenchmark:
    """Result of `benchmark_model`."""

    routed_share: float
    """Of the dense counterpart's multiply-adds, in the layers that are routed."""
    routed_macs: float
    """Multiply-adds of the routed network over those of its dense counterpart."""
    bounds: Mapping[Pass, float]
    """Gain in eager mode if the routed layers took no time."""
    layers: tuple[LayerGain, ...]
    networks: tuple[NetworkGain, ...]

    def best(self, what: Pass) -> NetworkGain | None:
        """The mode in which the routed network is fastest; None if no mode has times."""
        timed = [each for each in self.networks if each.what == what and each.routed is not None]
        return min(timed, key=lambda each: cast(Timing, each.routed).median, default=None)


def dense_counterpart(model: nn.Module) -> nn.Module:
    """A copy of a network with a dense layer in place of each routed one, of the same channels and kernel.

    Behind BatchNorm and ReLU where the experts have them. In place of a ``TokenMoE`` it is an MLP: as wide as an
    expert, or as all together if they share out the neurons of one (``init="split"``). In place of a ``TokenSkip`` it
    is the block. Weights are random: times do not depend on them.

    >>> import moesaic
    >>> routed = nn.Sequential(moesaic.PatchMoE(4, 8, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3))
    >>> dense_counterpart(routed)[0]
    Conv2d(4, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    model = nn.Sequential(copy.deepcopy(model))  # so that the network itself may be the layer
    parts = {each["layer"] for each in applied_conversions(model) if each.get("init") == "split"}
    for name, layer in _routed(model, TokenSkip).items():
        model.set_submodule(name, cast("TokenSkip", layer).block)
        parts |= {f"{name}.{part.removeprefix(f'{name}.block.')}" for part in parts if part.startswith(f"{name}.")}
    for name, layer in outermost_routed_layers(model).items():
        dense = (
            _dense_mlp(layer, name in parts) if isinstance(layer, TokenMoE) else _dense_conv(cast("PatchMoE", layer))
        )
        model.set_submodule(name, dense)
    return model[0]


def benchmark_model(
    model: nn.Module,
    image: Shape,
    *,
    batch_size: int = 8,
    modes: Sequence[Mode] = ("eager",),
    passes: Sequence[Pass] = ("forward", "step"),
    repetitions: int = 10,
    autocast: torch.dtype | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ModelBenchmark:
    """Times a network with routed layers on its device against its dense counterpart.

    Args:
        model: a network with ``PatchMoE``, ``TokenMoE`` or ``TokenSkip`` layers; unchanged.
        image: (C, H, W).
        batch_size: images per batch.
        modes: ``"captured"`` needs a GPU.
        passes: forward pass in eval mode without gradients, or training step (forward and backward).
        repetitions: timed runs; routed and dense alternate.
        autocast: dtype of mixed precision.
        log: is called with lines of progress.

    >>> import moesaic
    >>> layer = moesaic.PatchMoE(8, 8, experts=2, patches_per_expert=1, patch_size=4, kernel_size=3)
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer)
    >>> found = benchmark_model(model, (3, 8, 8), batch_size=1, repetitions=1, passes=["forward"])
    >>> round(found.routed_share, 2), [each.mode for each in found.networks]
    (0.73, ['eager'])
    """
    check_patch_routing(model)
    routed = outermost_routed_layers(model)
    if not routed:
        raise ValueError(
            f"{type(model).__name__} has no routed layers; moesaic advise finds those of a dense network that gain by "
            "routing, and convert=LAYER:experts=8 behind its name converts one"
        )
    timer = NetworkTimer(image, batch_size, tuple(passes), repetitions, autocast)
    dense = dense_counterpart(model)
    shapes, cost = trace_shapes(dense, routed, image)
    pairs: list[LayerPair] = []
    for names in equal_layers(dense, shapes):
        layer = dense.get_submodule(names[0])
        pairs.append(LayerPair(names, describe_layer(layer, shapes[names[0]]), layer, routed[names[0]]))
    layers = timer.time_layers(pairs, dense, cost)
    total = timer.time_network(dense)
    inside = {what: sum(len(each.names) * each.dense[what] for each in layers) for what in passes}
    networks: list[NetworkGain] = []
    for mode in modes:
        for what in passes:
            log(f"timing the {'training step' if what == 'step' else 'forward pass'}, {mode}")
            networks += timer.compare(mode, what, dense, {"routed": model}).values()
    return ModelBenchmark(
        sum(each.share for each in layers),
        count_macs(model, image).macs / max(cost.macs, 1),
        {what: amdahl(total[what], inside[what]) for what in passes},
        tuple(layers),
        tuple(networks),
    )


def check_patch_routing(model: nn.Module) -> None:
    """Refuses networks that route channels or samples."""
    for name, layer in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(layer, (ChannelMoE, SampleMoE)):
            what = "has channel gates" if isinstance(layer, ChannelMoE) else "is a mixture of networks"
            raise ValueError(
                f"{name or type(model).__name__} {what}; only networks that route patches or tokens, or do not route "
                "yet, can be timed: benchmarks/channel.py times gates, benchmarks/export.py mixtures"
            )


def outermost_routed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The routed layers of a network by name, those inside of a block that skips tokens aside."""
    skips = _routed(model, TokenSkip)
    inside = tuple(f"{name}." for name in skips)
    found = _routed(model, PatchMoE, TokenMoE, TokenSkip)
    return {name: layer for name, layer in found.items() if name in skips or not name.startswith(inside)}


def _routed(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return {name: layer for name, layer in modules if isinstance(layer, kinds)}


def _dense_conv(layer: PatchMoE) -> nn.Module:
    C, O, ks = layer.in_channels, layer.out_channels, layer.kernel_size
    like: dict[str, Any] = {"device": next(layer.parameters()).device, "dtype": next(layer.parameters()).dtype}
    if isinstance(layer, ChannelsLastPatchMoE):
        return nn.Linear(C, O, bias=layer.bias, **like)
    conv = nn.Conv2d(C, O, ks, padding=ks // 2, bias=layer.bias, **like)
    return nn.Sequential(nn.BatchNorm2d(C, **like), nn.ReLU(), conv) if layer.expert_norm else conv


class _Activation(nn.Module):
    """An activation by its name among those of experts."""

    def __init__(self, name: ActivationName) -> None:
        super().__init__()
        self.name: ActivationName = name

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](x)

    def extra_repr(self) -> str:
        return self.name


def _dense_mlp(layer: TokenMoE, shared: bool) -> nn.Module:
    experts = layer.experts
    if not isinstance(experts, MLPExperts):
        raise ValueError(f"the TokenMoE has {type(experts).__name__}; only MLPExperts have a dense counterpart")
    J = experts.hidden_channels * (len(experts) if shared else 1)
    like: dict[str, Any] = {"device": experts.weight_in.device, "dtype": experts.weight_in.dtype}

    def linear(before: int, after: int) -> nn.Module:
        if isinstance(layer, ChannelsFirstTokenMoE):
            return nn.Conv2d(before, after, 1, bias=experts.has_bias, **like)
        return nn.Linear(before, after, bias=experts.has_bias, **like)

    hidden = (_Activation(experts.activation), nn.Dropout(experts.dropout))
    return nn.Sequential(linear(layer.dim, J), *hidden, linear(J, layer.out_dim), nn.Dropout(layer.drop.p))

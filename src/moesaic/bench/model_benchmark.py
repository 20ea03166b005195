"""What routing gains in a whole network on this machine, against the same network with dense layers.

    gain  = dense time / routed time
    bound = dense time / (dense time − time of the dense layers that are routed)

The bound is Amdahl's: the gain of a network whose routed layers take no time at all. Of a network without routed
layers, each convertible layer is timed dense and routed on its own map, and the network with all layers converted that
gain by themselves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.timing import Timing, capture_cuda_graph, time_interleaved
from moesaic.layers import ChannelMoE, PatchMoE, SampleMoE, TokenMoE, TokenSkip
from moesaic.models.convert import ChannelsLastPatchMoE, convert
from moesaic.models.convert_candidates import convertible_layers
from moesaic.models.model_cost import count_macs

__all__ = [
    "MODES",
    "NOISE",
    "LayerGain",
    "Mode",
    "ModelBenchmark",
    "NetworkGain",
    "benchmark_model",
    "dense_counterpart",
]

Mode = Literal["eager", "compiled", "captured"]
MODES: tuple[Mode, ...] = ("eager", "compiled", "captured")
NOISE = 1.05
"""Smaller ratios count as equal."""
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class NetworkGain:
    """Times of the routed network and of its dense counterpart in one mode."""

    mode: Mode
    what: Pass
    dense: Timing | None
    routed: Timing | None
    note: str | None = None
    """Why there are no times."""

    @property
    def gain(self) -> float | None:
        """Dense time over routed time; above 1 routing is faster."""
        return None if self.dense is None or self.routed is None else self.dense.median / self.routed.median


@dataclass(frozen=True)
class LayerGain:
    """Times of layers of one shape on the maps of the network: one of them, dense and routed."""

    names: tuple[str, ...]
    shape: str
    """Kernel, channels and map."""
    share: float
    """Of the dense network's multiply-adds, all layers of this shape together."""
    dense: Mapping[Pass, float] = field(default_factory=dict[Pass, float])
    """Milliseconds."""
    routed: Mapping[Pass, float] = field(default_factory=dict[Pass, float])
    note: str | None = None
    """Why it cannot be routed."""

    def gain(self, what: Pass) -> float | None:
        """Dense time over routed time of the layer."""
        return self.dense[what] / self.routed[what] if what in self.routed else None


@dataclass(frozen=True)
class ModelBenchmark:
    """Result of `benchmark_model`."""

    converted: tuple[str, ...] | None
    """Layers that were converted for the measurement; None of a network that is routed already."""
    routed_share: float
    """Of the dense counterpart's multiply-adds, in the layers that are routed."""
    routed_macs: float
    """Multiply-adds of the routed network over those of its dense counterpart."""
    bounds: Mapping[Pass, float]
    """Gain in eager mode if the routed layers took no time."""
    layers: tuple[LayerGain, ...]
    networks: tuple[NetworkGain, ...]
    """Empty of a dense network in which no layer gains."""

    def best(self, what: Pass) -> NetworkGain | None:
        """The mode in which the routed network is fastest; None if no mode has times."""
        timed = [each for each in self.networks if each.what == what and each.routed is not None]
        return min(timed, key=lambda each: cast(Timing, each.routed).median, default=None)


def dense_counterpart(model: nn.Module) -> nn.Module:
    """A copy of a network with a dense layer of the same channels and kernel in place of each ``PatchMoE``.

    Behind BatchNorm and ReLU where the experts have them. Weights are random: times do not depend on them.

    >>> import moesaic
    >>> routed = nn.Sequential(moesaic.PatchMoE(4, 8, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3))
    >>> dense_counterpart(routed)[0]
    Conv2d(4, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    model = nn.Sequential(copy.deepcopy(model))  # so that the network itself may be the layer
    for name, layer in _routed_layers(model).items():
        model.set_submodule(name, _dense_layer(layer))
    return model[0]


def benchmark_model(
    model: nn.Module,
    image: Shape,
    *,
    batch_size: int = 8,
    experts: int = 8,
    patches_per_expert: int | None = None,
    patch_size: int | str = "auto",
    modes: Sequence[Mode] = ("eager",),
    passes: Sequence[Pass] = ("forward", "step"),
    repetitions: int = 10,
    autocast: torch.dtype | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ModelBenchmark:
    """Times a network on its device against its dense counterpart.

    Args:
        model: a network with ``PatchMoE`` layers, or a dense one, some of whose layers are converted; unchanged.
        image: (C, H, W).
        batch_size: images per batch.
        experts: of converted layers.
        patches_per_expert: of converted layers, as in `convert`.
        patch_size: of converted layers, as in `convert`.
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
    _check_patch_routing(model)
    bench = _Bench(image, batch_size, tuple(passes), repetitions, autocast)
    if _routed_layers(model):
        dense = dense_counterpart(model)
        layers, converted = bench.layers_of(dense, model), None
    else:
        dense = copy.deepcopy(model)
        log(f"timing {len(_map_layers(dense, image))} convertible layers, one of each shape")
        options: dict[str, Any] = {
            "experts": experts,
            "patches_per_expert": patches_per_expert,
            "patch_size": patch_size,
        }
        layers = bench.candidates(dense, options)
        converted = tuple(name for each in layers if _gains(each, passes) for name in each.names)
        model = copy.deepcopy(model)
        if not converted:
            total = sum(each.share for each in layers if each.note is None)
            return ModelBenchmark((), total, 1.0, bench.bounds(dense, layers), layers, ())
        convert(model, converted, input_size=image, **options)
        layers = tuple(each for each in layers if _gains(each, passes))
    dense_cost, routed_cost = count_macs(dense, image), count_macs(model, image)
    networks: list[NetworkGain] = []
    for mode in modes:
        for what in passes:
            log(f"timing the {'training step' if what == 'step' else 'forward pass'}, {mode}")
            networks.append(bench.compare(mode, what, dense, model))
    return ModelBenchmark(
        converted,
        sum(each.share for each in layers),
        routed_cost.macs / max(dense_cost.macs, 1),
        bench.bounds(dense, layers),
        layers,
        tuple(networks),
    )


@dataclass(frozen=True)
class _Bench:
    image: Shape
    batch_size: int
    passes: tuple[Pass, ...]
    repetitions: int
    autocast: torch.dtype | None

    def layers_of(self, dense: nn.Module, routed: nn.Module) -> tuple[LayerGain, ...]:
        """The routed layers of a network against those of its dense counterpart."""
        found = _routed_layers(routed)
        maps = _inputs(dense, tuple(found), self.image)
        pairs = {name: (dense.get_submodule(name), layer) for name, layer in found.items()}
        return self._gains(dense, pairs, maps, {})

    def candidates(self, dense: nn.Module, options: Mapping[str, Any]) -> tuple[LayerGain, ...]:
        """The convertible layers of a dense network against what `convert` makes of them."""
        names = _map_layers(dense, self.image)
        maps = _inputs(dense, names, self.image)
        pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
        notes: dict[str, str] = {}
        for name in names:
            layer = dense.get_submodule(name)
            alone, size = nn.Sequential(copy.deepcopy(layer)), maps[name]
            if isinstance(layer, nn.Linear):
                notes[name] = "a linear layer; convert it in the network and time that"
                continue
            try:
                convert(alone, "0", input_size=size, **options)
            except ValueError as refusal:
                notes[name] = str(refusal).removeprefix("convert: ").replace("'0'", repr(name), 1)
                continue
            pairs[name] = layer, alone[0]
        return self._gains(dense, pairs, maps, notes)

    def _gains(
        self,
        network: nn.Module,
        pairs: Mapping[str, tuple[nn.Module, nn.Module]],
        maps: Mapping[str, Shape],
        notes: Mapping[str, str],
    ) -> tuple[LayerGain, ...]:
        cost = count_macs(network, self.image)
        share = {layer.name: layer.dense_macs / max(cost.dense_macs, 1) for layer in cost.layers}

        def share_of(name: str) -> float:
            return sum(value for key, value in share.items() if key == name or key.startswith(f"{name}."))

        alike: dict[tuple[str, Shape], list[str]] = {}
        for name in (*pairs, *notes):
            layer = network.get_submodule(name)
            alike.setdefault((notes.get(name, f"{layer}"), maps[name]), []).append(name)
        rows: list[LayerGain] = []
        for (_, size), names in alike.items():
            first, total = names[0], sum(map(share_of, names))
            shape = _describe(network.get_submodule(first), size)
            if first in notes:
                rows.append(LayerGain(tuple(names), shape, total, note=notes[first]))
                continue
            dense, routed = (copy.deepcopy(each) for each in pairs[first])
            x = self._images(network, size)
            times: dict[Pass, dict[str, Timing]] = {what: self._time(what, dense, routed, x) for what in self.passes}
            rows.append(
                LayerGain(
                    tuple(names),
                    shape,
                    total,
                    {what: each["dense"].median for what, each in times.items()},
                    {what: each["routed"].median for what, each in times.items()},
                )
            )
        return tuple(rows)

    def bounds(self, dense: nn.Module, layers: Sequence[LayerGain]) -> dict[Pass, float]:
        """Gain of the network in eager mode if these layers took no time."""
        found: dict[Pass, float] = {}
        x = self._images(dense, self.image)
        network = copy.deepcopy(dense)
        for what in self.passes:
            total = time_interleaved({"": self._run(what, network, x)}, self.repetitions)[""].median
            inside = sum(len(each.names) * each.dense[what] for each in layers if what in each.dense)
            found[what] = total / (total - inside) if inside < total else math.inf
        return found

    def compare(self, mode: Mode, what: Pass, dense: nn.Module, routed: nn.Module) -> NetworkGain:
        """Both networks in turns."""
        x = self._images(dense, self.image)
        if mode == "captured" and not x.is_cuda:
            return NetworkGain(mode, what, None, None, "CUDA graphs need a GPU")
        try:
            times = self._time(what, copy.deepcopy(dense), copy.deepcopy(routed), x, mode)
        except Exception as error:  # compilers raise anything
            lines = str(error).strip().splitlines()
            return NetworkGain(mode, what, None, None, f"{type(error).__name__}: {lines[0] if lines else ''}")
        return NetworkGain(mode, what, times["dense"], times["routed"])

    def _time(
        self, what: Pass, dense: nn.Module, routed: nn.Module, x: Tensor, mode: Mode = "eager"
    ) -> dict[str, Timing]:
        runs: dict[str, Callable[[], object]] = {}
        for name, model in (("dense", dense), ("routed", routed)):
            run = self._run(what, model, x, compiled=mode == "compiled")
            runs[name] = capture_cuda_graph(run) if mode == "captured" else run
        return time_interleaved(runs, self.repetitions, gpu_clock=mode == "captured")

    def _run(self, what: Pass, model: nn.Module, x: Tensor, *, compiled: bool = False) -> Callable[[], object]:
        model.train(what == "step")
        called: Callable[[Tensor], Any] = torch.compile(model) if compiled else model

        def forward() -> None:
            with torch.no_grad(), self._precision(x):
                called(x)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with self._precision(x):
                y = _logits(called(x))
            y.float().sum().backward()

        return step if what == "step" else forward

    def _precision(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def _images(self, model: nn.Module, shape: Shape) -> Tensor:
        like = next(iter(model.parameters()))
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch_size, *shape, generator=generator).to(like)
        return images.contiguous(memory_format=torch.channels_last) if like.is_cuda else images


def _gains(layer: LayerGain, passes: Iterable[Pass]) -> bool:
    """Whether a layer is faster routed, in every pass."""
    return layer.note is None and all((layer.gain(what) or 0.0) > NOISE for what in passes)


def _check_patch_routing(model: nn.Module) -> None:
    for name, layer in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(layer, (ChannelMoE, SampleMoE, TokenMoE, TokenSkip)):
            what = "is a mixture of networks" if isinstance(layer, SampleMoE) else "routes tokens"
            what = "has channel gates" if isinstance(layer, ChannelMoE) else what
            raise ValueError(
                f"{name or type(model).__name__} {what}; only networks that route patches, or do not route yet, can be "
                "timed: benchmarks/channel.py times gates, benchmarks/export.py mixtures"
            )


def _map_layers(dense: nn.Module, image: Shape) -> tuple[str, ...]:
    """Convertible layers that run on maps; MLPs are timed by other means."""
    names = convertible_layers(dense, input_size=image)
    return tuple(name for name in names if isinstance(dense.get_submodule(name), nn.Conv2d | nn.Linear))


def _routed_layers(model: nn.Module) -> dict[str, PatchMoE]:
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return {name: layer for name, layer in modules if isinstance(layer, PatchMoE)}


def _dense_layer(layer: PatchMoE) -> nn.Module:
    C, O, ks = layer.in_channels, layer.out_channels, layer.kernel_size
    like: dict[str, Any] = {"device": next(layer.parameters()).device, "dtype": next(layer.parameters()).dtype}
    if isinstance(layer, ChannelsLastPatchMoE):
        return nn.Linear(C, O, bias=layer.bias, **like)
    conv = nn.Conv2d(C, O, ks, padding=ks // 2, bias=layer.bias, **like)
    return nn.Sequential(nn.BatchNorm2d(C, **like), nn.ReLU(), conv) if layer.expert_norm else conv


def _inputs(model: nn.Module, names: Sequence[str], image: Shape) -> dict[str, Shape]:
    """Shapes (C, H, W) of what layers get for one image; of a linear layer (H, W, C)."""
    shapes: dict[str, Shape] = {}
    hooks: list[Any] = []
    for name in names:

        def record(layer: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            shapes[name] = cast(Shape, tuple(args[0].shape[1:]))

        hooks.append(model.get_submodule(name).register_forward_pre_hook(record))
    try:
        count_macs(model, image)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _describe(layer: nn.Module, size: Shape) -> str:
    conv = next((each for each in layer.modules() if isinstance(each, nn.Conv2d)), None)
    if conv is None:
        return f"linear, {size[-1]} channels on {size[0]}×{size[1]}"
    channels = (
        f"{conv.in_channels}" if conv.in_channels == conv.out_channels else f"{conv.in_channels}→{conv.out_channels}"
    )
    return f"{conv.kernel_size[0]}×{conv.kernel_size[1]}, {channels} channels on {size[1]}×{size[2]}"


def _logits(output: Any) -> Tensor:
    """The tensor, or the first one, of a network's output."""
    if isinstance(output, Tensor):
        return output
    values = cast("Iterable[Any]", output.values() if isinstance(output, Mapping) else output)
    return _logits(next(iter(values)))

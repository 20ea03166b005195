"""Two-layer MLPs of a network as units that `convert` can replace by a ``TokenMoE``, and why it cannot replace others.

A unit computes ``fc2(drop(act(fc1(x))))``, with dropout behind it perhaps, and nothing else: timm's ``Mlp`` and
``ConvMlp``, those of transformers and torchvision, an ``nn.Sequential``, a class of your own. A module
runs with made-up weights to find what it computes, so that names and classes do not matter. In transformers before
version 5, the unit is the pair of a block's modules ``intermediate`` and ``output``, the second of which adds the
residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from moesaic.argument_checks import first_line
from moesaic.experts.mlp_experts import ACTIVATIONS, ActivationName
from moesaic.layers.recording import RoutedLayer
from moesaic.models.convertible_weights import weight_refusal
from moesaic.models.inspection import all_named_modules, eval_mode
from moesaic.ops.hook_detection import has_hooks

__all__ = ["MLPUnit", "find_mlps", "looks_like_mlp", "why_not_mlp"]

_TOLERANCE = 2e-5
"""Of outputs in float32, relative to the largest."""
_SMALL_SIZES = 5, 7, 3
"""Features in, hidden and out of the MLP that runs in place of a large one."""
_NO_PADDING = ((0, 0), "valid", "same")
"""Of a 1×1 convolution."""


@dataclass(frozen=True, eq=False)
class MLPUnit:
    """An MLP of a network: fc1, activation, dropout, fc2, dropout."""

    name: str
    """Of the module in the network."""
    module: nn.Module
    fc1: nn.Linear | nn.Conv2d
    fc2: nn.Linear | nn.Conv2d
    fc1_name: str
    """Of the layer in the network."""
    fc2_name: str
    activation: ActivationName
    hidden_dropout: float
    """Of the hidden neurons."""
    dropout: float
    """Of the output."""
    output_name: str | None = None
    """Of the module after it that has fc2, in transformers before version 5."""
    adds_residual: bool = False
    """Whether the module ``output_name`` adds its second argument to the output."""

    @property
    def in_dim(self) -> int:
        return _sizes(self.fc1)[0]

    @property
    def hidden_dim(self) -> int:
        return _sizes(self.fc1)[1]

    @property
    def out_dim(self) -> int:
        return _sizes(self.fc2)[1]

    @property
    def channels_first(self) -> bool:
        """Whether it takes maps (B, C, H, W), by 1×1 convolutions, in place of tokens (B, …, C)."""
        return isinstance(self.fc1, nn.Conv2d)

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(weight.numel() for layer in (self.fc1, self.fc2) for weight in layer.parameters())


def find_mlps(model: nn.Module) -> dict[str, MLPUnit]:
    """Returns the MLPs of a network by name, in the order of its modules.

    Those on which inputs they run is not known here: the head of a classifier may be among them. MLPs inside of routed
    layers are left out.

    >>> from torch import nn
    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    >>> unit = find_mlps(nn.Sequential(nn.Conv2d(3, 8, 4), mlp))["1"]
    >>> unit.in_dim, unit.hidden_dim, unit.out_dim, unit.activation, unit.hidden_dropout
    (8, 32, 8, 'gelu', 0.1)
    """
    routed = tuple(f"{name}." for name, module in all_named_modules(model) if isinstance(module, RoutedLayer))
    found = (
        _examine(model, name)
        for name, module in all_named_modules(model)
        if name and looks_like_mlp(model, name, module)
    )
    return {unit.name: unit for unit in found if isinstance(unit, MLPUnit) and not unit.name.startswith(routed)}


def why_not_mlp(model: nn.Module, name: str) -> str | None:
    """Returns why a module is no MLP that can be replaced, as the end of a sentence; None if it is one."""
    found = _examine(model, name)
    return found if isinstance(found, str) else None


def looks_like_mlp(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a module could be an MLP, by a look at its children alone."""
    layers = [child for child in module.children() if isinstance(child, nn.Linear | nn.Conv2d)]
    return len(layers) == 2 or (len(layers) == 1 and _output_of(model, name) is not None)


def _examine(model: nn.Module, name: str) -> MLPUnit | str:
    """The unit of a name, or why there is none."""
    module = model.get_submodule(name)
    if name == "":
        return "is the model itself; put it into an nn.Sequential and name it '0'"
    if isinstance(module, RoutedLayer):
        return f"is a {type(module).__name__}, which is routed already"
    parts = _parts(model, name)
    if isinstance(parts, str):
        return parts
    refusal = _layer_refusal(parts) or _module_refusal(model, parts)
    if refusal is not None:
        return refusal
    return _run(parts)


@dataclass(frozen=True)
class _Parts:
    """A module that may be an MLP, by its children, whose names are those in the network."""

    name: str
    modules: Mapping[str, nn.Module]
    """The module itself, and in transformers before version 5 the one after it."""
    layers: Mapping[str, nn.Linear | nn.Conv2d]
    dropouts: Mapping[str, nn.Dropout]
    others: Mapping[str, nn.Module]
    """The activation, and what experts do not have."""


def _parts(model: nn.Module, name: str) -> _Parts | str:
    modules = {name: model.get_submodule(name)}
    output = _output_of(model, name)
    if output is not None:
        modules[output] = model.get_submodule(output)
    children = {
        f"{owner}.{each}": child for owner, module in modules.items() for each, child in module.named_children()
    }
    layers = {each: child for each, child in children.items() if isinstance(child, nn.Linear | nn.Conv2d)}
    if len(layers) != 2:
        kind = type(modules[name]).__name__
        is_gated = len(layers) == 3 and all(isinstance(layer, nn.Linear) for layer in layers.values())
        gated = ", as gated MLPs (SwiGLU) have" if is_gated else ""
        return f"is a {kind} with {len(layers)} Linear or Conv2d layers of its own{gated}; an MLP has two"
    dropouts = {each: child for each, child in children.items() if isinstance(child, nn.Dropout)}
    known = {*layers, *dropouts, *(each for each, child in children.items() if isinstance(child, nn.Identity))}
    others = {each: child for each, child in children.items() if each not in known}
    return _Parts(name, modules, layers, dropouts, others)


def _output_of(model: nn.Module, name: str) -> str | None:
    """The name of the module that follows the ``intermediate`` of a block, as transformers had it before version 5."""
    block, _, own = name.rpartition(".")
    if own != "intermediate" or not isinstance(getattr(model.get_submodule(name), "dense", None), nn.Linear):
        return None
    output = getattr(model.get_submodule(block), "output", None)
    return f"{block}.output".lstrip(".") if isinstance(getattr(output, "dense", None), nn.Linear) else None


def _layer_refusal(parts: _Parts) -> str | None:
    (_, fc1), (_, fc2) = parts.layers.items()
    if isinstance(fc1, nn.Conv2d) != isinstance(fc2, nn.Conv2d):
        return "has a Linear and a Conv2d; an MLP has two of a kind"
    for name, layer in parts.layers.items():
        if isinstance(layer, nn.Conv2d) and (
            layer.kernel_size != (1, 1)
            or layer.stride != (1, 1)
            or layer.groups != 1
            or layer.padding not in _NO_PADDING
        ):
            return f"has {name!r}, which is no plain 1×1 convolution"
    before, after = _sizes(fc1)[1], _sizes(fc2)[0]
    if before != after:
        gated = ", as gated MLPs (GLU) do" if before == 2 * after else ""
        return f"has {before} hidden neurons after its first layer and {after} before its second{gated}"
    return None


def _module_refusal(model: nn.Module, parts: _Parts) -> str | None:
    for name, layer in parts.layers.items():
        refusal = weight_refusal(model, name, layer)
        if refusal is not None:
            return f"has {name!r}, which {refusal}"
    own = {*parts.modules, *parts.dropouts}
    for name, module in {**parts.modules, **parts.dropouts, **parts.others}.items():
        if has_hooks(module, include_global=False):
            where = "" if name == parts.name else f"has {name!r}, which "
            return f"{where}has forward hooks, which would be lost; remove them first"
        weights = {*module._parameters, *module._buffers} if name in own else {*_tensors(module)}  # pyright: ignore[reportPrivateUsage]
        if weights and name in own:
            return f"has {' and '.join(sorted(weights))} besides its two layers, and experts have none"
        if weights:
            return f"has a {type(module).__name__} ({name!r}) inside, and experts have none"
    if len(parts.others) > 1:
        kinds = " and ".join(f"{type(child).__name__} ({name!r})" for name, child in parts.others.items())
        return f"has {kinds}, and experts have an activation alone"
    return None


def _tensors(module: nn.Module) -> Iterable[str]:
    yield from (name for name, _ in module.named_parameters())
    yield from (name for name, _ in module.named_buffers())


def _run(parts: _Parts) -> MLPUnit | str:
    """Runs the module with made-up weights and compares it with an MLP."""
    try:
        try:
            trial = _Trial(parts, _SMALL_SIZES)
            y, calls = trial.run(training=False)
        except Exception:  # its forward may depend on its sizes
            trial = _Trial(parts, None)
            y, calls = trial.run(training=False)
        in_training, _ = trial.run(training=True)
    except Exception as error:  # a forward may raise anything
        why = first_line(error)
        return f"is a {type(parts.modules[parts.name]).__name__}, which does not run on tokens alone ({why})"
    order = [name for name in calls if name in parts.layers]
    if len(order) != 2 or len(set(order)) != 2:
        return f"is a {type(parts.modules[parts.name]).__name__}, which runs its layers in the order {order}"
    activation = _activation(parts, lambda function: trial.expected(order, function), y)
    if activation is None:
        return _other_function(parts)
    if not _equal(in_training, y):
        return f"is a {type(parts.modules[parts.name]).__name__}, which computes something else in training"
    first, second = (calls.index(name) for name in order)
    dropped = {name: calls.index(name) for name in parts.dropouts if name in calls}
    if any(place < first for place in dropped.values()):
        return "drops its inputs, and experts drop hidden neurons and outputs"
    return MLPUnit(
        name=parts.name,
        module=parts.modules[parts.name],
        fc1=parts.layers[order[0]],
        fc2=parts.layers[order[1]],
        fc1_name=order[0],
        fc2_name=order[1],
        activation=activation,
        hidden_dropout=_dropout(parts.dropouts[name].p for name, place in dropped.items() if place < second),
        dropout=_dropout(parts.dropouts[name].p for name, place in dropped.items() if place > second),
        output_name=trial.output,
        adds_residual=trial.adds_residual,
    )


def _other_function(parts: _Parts) -> str:
    kind = type(parts.modules[parts.name]).__name__
    for name, child in parts.others.items():
        if _function_name(child) is None:
            known = ", ".join(ACTIVATIONS)
            return f"has the activation {type(child).__name__} ({name!r}), and experts have {known}"
    return f"is a {kind}, which does not compute fc2(activation(fc1(x)))"


def _activation(
    parts: _Parts, expected: Callable[[Callable[[Tensor], Tensor]], Tensor], y: Tensor
) -> ActivationName | None:
    """The activation with which an MLP computes ``y``."""
    names: Iterable[ActivationName] = ACTIVATIONS
    if parts.others:
        (child,) = parts.others.values()
        name = _function_name(child)
        names = () if name is None else (name,)
    return next((name for name in names if _equal(y, expected(ACTIVATIONS[name]))), None)


def _function_name(module: nn.Module) -> ActivationName | None:
    """The activation that a module computes."""
    x = torch.linspace(-6, 6, 241, device="cpu")
    try:
        with eval_mode(module), torch.no_grad():
            y = module(x.clone())
    except Exception:
        return None
    return next((name for name, function in ACTIVATIONS.items() if _equal(y, function(x))), None)


class _Trial:
    """Runs a module with made-up weights on made-up tokens, so that neither depends on what it has learned.

    The weights may be smaller than its own, ``sizes`` features in, hidden and out, to save time.
    """

    def __init__(self, parts: _Parts, sizes: tuple[int, int, int] | None) -> None:
        self.parts = parts
        names = list(parts.modules)
        self.output = names[1] if len(names) > 1 else None
        self.adds_residual = self.output is not None and _arguments(parts.modules[self.output]) > 1
        fc1, fc2 = parts.layers.values()
        C, J, O = sizes or (*_sizes(fc1), _sizes(fc2)[1])
        taps = (1, 1) if isinstance(fc1, nn.Conv2d) else ()
        self.weights: dict[str, Tensor] = {}
        for (name, layer), (before, after) in zip(parts.layers.items(), ((C, J), (J, O)), strict=True):
            self.weights[f"{name}.weight"] = _made_up((after, before, *taps), 2 / before**0.5)
            if layer.bias is not None:
                self.weights[f"{name}.bias"] = _made_up((after,), 1.0)
        self.x = _made_up((2, C, 2, 3) if taps else (2, 5, C), 1.0)

    def run(self, *, training: bool) -> tuple[Tensor, list[str]]:
        """The output without dropout, and the names of layers in the order of their calls."""
        calls: list[str] = []
        children = {**self.parts.layers, **self.parts.dropouts}
        hooks = [child.register_forward_hook(_log_call(calls, name)) for name, child in children.items()]
        whole = nn.ModuleDict({str(place): module for place, module in enumerate(self.parts.modules.values())})
        try:
            with eval_mode(whole), torch.no_grad():
                if training:
                    whole.train()
                    for child in self.parts.dropouts.values():
                        child.eval()
                y = self._call(self.parts.name, self.x)
                if self.output is not None:
                    residual = (self.x[..., :1],) if self.adds_residual else ()
                    y = self._call(self.output, y, *residual)
        finally:
            for hook in hooks:
                hook.remove()
        return y, calls

    def expected(self, order: list[str], function: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of an MLP with the made-up weights."""
        hidden = function(self._layer(order[0], self.x))
        y = self._layer(order[1], hidden)
        return y + self.x[..., :1] if self.adds_residual else y

    def _call(self, name: str, *arguments: Tensor) -> Tensor:
        own = {key.removeprefix(f"{name}."): w for key, w in self.weights.items() if key.startswith(f"{name}.")}
        return functional_call(self.parts.modules[name], own, arguments)

    def _layer(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return F.linear(x, weight, bias) if weight.ndim == 2 else F.conv2d(x, weight, bias)


def _log_call(calls: list[str], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(name)

    return hook


def _arguments(module: nn.Module) -> int:
    """How many positional arguments the forward of a module needs."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def _made_up(shape: Iterable[int], scale: float) -> Tensor:
    """Numbers of standard deviation ``scale`` that look random, at a fraction of the time of random ones."""
    shape = tuple(shape)
    count = torch.Size(shape).numel()
    ramp = torch.arange(1, count + 1, device="cpu", dtype=torch.float64).mul_(0.6180339887498949).frac_()
    return ramp.float().sub_(0.5).mul_(12**0.5 * scale).view(shape)


def _equal(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _dropout(rates: Iterable[float]) -> float:
    """The rate of several dropouts in a row."""
    left = 1.0
    for rate in rates:
        left *= 1 - rate
    return round(1 - left, 12)


def _sizes(layer: nn.Linear | nn.Conv2d) -> tuple[int, int]:
    """Features before and after a layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels

"""Layers of a network that `convert` can replace, and why it cannot replace the others.

A ``PatchMoE`` preserves the size of its map, reads all channels and pads with zeros. It can replace convolutions of
stride 1 with odd square kernels and "same" padding, and linear layers on maps (B, H, W, C), as in ConvNeXt. A
``TokenMoE`` can replace MLPs on tokens and on maps (`find_mlps`). The model runs on an image to
find the inputs of its layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from moesaic.layers.recording import RoutedLayer
from moesaic.layers.token_skip import TokenSkip
from moesaic.models.convertible_weights import weight_refusal
from moesaic.models.input_shapes import LayerInputs, MapSizes, TokenInput, input_shape, trace_inputs
from moesaic.models.inspection import all_named_modules
from moesaic.models.mlp_candidates import MLPUnit, find_mlps, looks_like_mlp, why_not_mlp

__all__ = ["convertible_layers", "find_layers", "why_not_convertible"]

Convertible = nn.Conv2d | nn.Linear | MLPUnit
_RULE = re.compile(r"(last|every)-(\d{1,4})")


def convertible_layers(model: nn.Module, *, input_size: int | Sequence[int] | None = None) -> tuple[str, ...]:
    """Returns the names of the layers and MLPs that `convert` can replace.

    Args:
        model: any network.
        input_size: height and width of the images, or (C, H, W). With it the model runs on images, which finds linear
            layers on maps and excludes convolutions on maps of one pixel and MLPs on vectors. Models of timm and
            transformers know their own size.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    >>> convertible_layers(model)
    ('2',)
    """
    shape = input_shape(model, input_size)
    units = find_mlps(model)
    return _convertible(model, units, None if shape is None else trace_inputs(model, shape, units))


def find_layers(
    model: nn.Module, layers: str | Sequence[str], units: Mapping[str, MLPUnit], traced: LayerInputs | None
) -> dict[str, Convertible]:
    """Returns the layers and MLPs that match names, patterns or rules, in the model's order; refuses the others.

    A pattern that matches MLPs, which are ``units``, is for these alone; the rules ``"last-2"`` and ``"every-2"`` count
    them.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)
    modules = dict(all_named_modules(model))
    found: set[str] = set()
    for pattern in patterns:
        rule = _RULE.fullmatch(pattern)
        if pattern in modules:
            found.add(pattern)
        elif rule is not None:
            found |= _by_rule(model, pattern, (rule[1], int(rule[2])), units, traced)
        else:
            matched = _matching(model, pattern, units)
            if not matched:
                raise ValueError(
                    f"convert: {_not_found(model, pattern, modules, units)}{_suggestion(model, units, traced)}"
                )
            found |= matched
    if not found:
        raise ValueError(f"convert: no layer is given{_suggestion(model, units, traced)}")
    reasons = {name: _refusal(model, name, units, traced) for name in modules if name in found}
    refused = [f"{name!r} {reason}" for name, reason in reasons.items() if reason is not None]
    if refused:
        raise ValueError(f"convert: {'; '.join(refused)}{_suggestion(model, units, traced)}")
    return {name: units[name] if name in units else cast("Convertible", modules[name]) for name in reasons}


def _by_rule(
    model: nn.Module,
    pattern: str,
    rule: tuple[str, int],
    units: Mapping[str, MLPUnit],
    traced: LayerInputs | None,
) -> set[str]:
    kind, number = rule
    names = [name for name in units if _token_refusal(units[name], traced) is None]
    if not names:
        owner = type(model).__name__
        raise ValueError(
            f"convert: {pattern!r} counts MLPs, and {owner} has none that can be converted"
            f"{_suggestion(model, units, traced)}"
        )
    if not 1 <= number <= len(names):
        raise ValueError(
            f"convert: {pattern!r}, but {type(model).__name__} has {len(names)} MLPs that can be converted; use "
            f"{kind}-1 to {kind}-{len(names)}"
        )
    return set(names[-number:] if kind == "last" else names[number - 1 :: number])


def _matching(model: nn.Module, pattern: str, units: Mapping[str, MLPUnit]) -> set[str]:
    """Names that match a pattern: those of MLPs, or else of convolutions and linear layers."""
    matched = {name: module for name, module in all_named_modules(model) if fnmatchcase(name, pattern)}
    if not matched.keys().isdisjoint(units):
        inside = tuple(f"{name}." for name in units)
        mlps = {name for name, module in matched.items() if looks_like_mlp(model, name, module)}
        return {name for name in mlps if not name.startswith(inside)}
    return {name for name, module in matched.items() if isinstance(module, nn.Conv2d | nn.Linear)}


def _refusal(model: nn.Module, name: str, units: Mapping[str, MLPUnit], traced: LayerInputs | None) -> str | None:
    if name in units:
        return _token_refusal(units[name], traced)
    reason = why_not_convertible(model, name, None if traced is None else traced.maps)
    owner = next((each for each in units if name.startswith(f"{each}.")), None)
    return reason if reason is None or owner is None else f"{reason}; it is a part of the MLP {owner!r}"


def why_not_convertible(model: nn.Module, name: str, maps: MapSizes | None = None) -> str | None:
    """Returns why a layer or an MLP cannot be replaced, as the end of a sentence; None if it can."""
    layer = model.get_submodule(name)
    if name == "":
        return "is the model itself; put it into an nn.Sequential and name it '0'"
    if isinstance(layer, RoutedLayer):
        return f"is a {type(layer).__name__}, which is routed already"
    if not isinstance(layer, (nn.Conv2d, nn.Linear)):
        if looks_like_mlp(model, name, layer):
            return why_not_mlp(model, name) or _inside_refusal(model, name)
        return f"is a {type(layer).__name__}, neither a Conv2d nor a Linear, nor an MLP of two linear layers"
    return _shape_refusal(layer) or weight_refusal(model, name, layer) or _map_refusal(name, layer, maps)


def _inside_refusal(model: nn.Module, name: str) -> str | None:
    """Why an MLP inside of a routed layer is none that `find_mlps` returns."""
    for outer, module in all_named_modules(model):
        if isinstance(module, RoutedLayer) and name.startswith(f"{outer}."):
            kind = type(module).__name__
            way_out = "convert first, then skip" if isinstance(module, TokenSkip) else "convert its networks before"
            return f"is inside {outer!r}, a {kind}, which is routed already; {way_out}"
    return None


def _shape_refusal(layer: nn.Conv2d | nn.Linear) -> str | None:
    if isinstance(layer, nn.Linear):
        return None
    rows, columns = layer.kernel_size
    if layer.stride != (1, 1):
        return f"has stride {_size(layer.stride)}, and a routed layer preserves the size of the map"
    if layer.groups != 1:
        kind = "depthwise" if layer.groups == layer.in_channels else "grouped"
        return f"is {kind} (groups={layer.groups}), and experts read all channels"
    if rows != columns or rows % 2 == 0:
        return f"has a {rows}×{columns} kernel, and experts have odd square kernels"
    if layer.dilation != (1, 1) and rows > 1:
        return f"has dilation {_size(layer.dilation)}, and experts have none"
    if layer.padding_mode != "zeros":
        return f"pads with {layer.padding_mode!r}, and experts pad with zeros"
    padding = layer.padding
    same = (padding == "same" or rows == 1) if isinstance(padding, str) else set(padding) == {rows // 2}
    if type(layer) is nn.Conv2d and not same:
        return f"has padding={padding!r}, and experts preserve the size of the map: padding {rows // 2} for this kernel"
    return None


def _map_refusal(name: str, layer: nn.Conv2d | nn.Linear, maps: MapSizes | None) -> str | None:
    if maps is None:
        if isinstance(layer, nn.Linear):
            return "is a Linear, which may run on maps or on vectors: give input_size=(C, H, W) to find out"
        return None
    if not maps.get(name):
        takes = "(B, H, W, C)" if isinstance(layer, nn.Linear) else "(B, C, H, W)"
        return f"did not run on a map {takes}"
    if min(H * W for H, W in maps[name]) == 1:
        return "runs on a map of one pixel, which has a single patch"
    return None


def _token_refusal(unit: MLPUnit, traced: LayerInputs | None) -> str | None:
    """Why an MLP cannot be replaced by a ``TokenMoE``, by the shapes of its inputs."""
    if traced is None:
        return None
    inputs = traced.tokens.get(unit.name, ())
    if not inputs:
        return "did not run, or not on a tensor"
    return next((reason for found in inputs if (reason := _input_refusal(unit, found)) is not None), None)


def _input_refusal(unit: MLPUnit, found: TokenInput) -> str | None:
    if len(found.shape) == 2:
        return "runs on vectors (B, C), which have no tokens"
    if len(found.shape) not in (3, 4):
        return f"runs on {len(found.shape)} axes {found.shape}, and experts on tokens (B, N, C) or maps"
    if found.shape[0] % found.batch:
        return f"runs on {found.shape} for {found.batch} images, which has no batch axis"
    if math.prod(found.shape[1:]) == unit.in_dim:
        return "runs on one token of an image, which leaves nothing to choose"
    return None


def _convertible(model: nn.Module, units: Mapping[str, MLPUnit], traced: LayerInputs | None) -> tuple[str, ...]:
    return tuple(
        name
        for name, layer in all_named_modules(model)
        if (name in units or isinstance(layer, (nn.Conv2d, nn.Linear))) and _refusal(model, name, units, traced) is None
    )


def _not_found(model: nn.Module, pattern: str, modules: Mapping[str, nn.Module], units: Mapping[str, MLPUnit]) -> str:
    owner = type(model).__name__
    others = [name for name in modules if name and fnmatchcase(name, pattern)]
    reasons = {name: why_not_convertible(model, name) for name in others[:2]}
    if others:
        more = f" (and {len(others) - 2} more)" if len(others) > 2 else ""
        return "; ".join(f"{name!r} {reason}" for name, reason in reasons.items()) + more
    layers = [*units, *(name for name, layer in modules.items() if isinstance(layer, (nn.Conv2d, nn.Linear)))]
    near = get_close_matches(pattern, layers, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(repr(name) for name in near)}?)" if near else ""
    what = f"no convolution or MLP of {owner} matches" if set(pattern) & set("*?[") else f"{owner} has no layer"
    return f"{what} {pattern!r}{hint}"


def _suggestion(model: nn.Module, units: Mapping[str, MLPUnit], traced: LayerInputs | None) -> str:
    convertible = _convertible(model, units, traced)
    if not convertible:
        return f"; no layer of this {type(model).__name__} can be converted"
    few = ", ".join(repr(name) for name in convertible[-4:])
    more = (
        f" and {len(convertible) - 4} more (moesaic.models.convertible_layers lists them)"
        if len(convertible) > 4
        else ""
    )
    return f"; convertible: {few}{more}"


def _size(pair: tuple[int, ...]) -> str:
    return str(pair[0]) if len(set(pair)) == 1 else "×".join(map(str, pair))

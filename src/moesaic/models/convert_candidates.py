"""Layers of a network that `convert` can replace by a ``PatchMoE``, and why it cannot replace the others.

A ``PatchMoE`` preserves the size of its map, reads all channels and pads with zeros. It can replace convolutions of
stride 1 with odd square kernels and "same" padding, and linear layers on maps (B, H, W, C), as in ConvNeXt. The size of
a layer's maps is found by running the model on one image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from moesaic.layers.recording import RoutedLayer
from moesaic.models.model_cost import eval_mode
from moesaic.ops.hooks import has_hooks

__all__ = [
    "MapSizes",
    "convertible_layers",
    "find_layers",
    "input_shape",
    "trace_map_sizes",
    "weight_refusal",
    "why_not_convertible",
]

MapSizes = Mapping[str, Sequence[tuple[int, int]]]
"""H and W of the maps each layer ran on; empty for layers that ran on other tensors."""


def convertible_layers(model: nn.Module, *, input_size: int | Sequence[int] | None = None) -> tuple[str, ...]:
    """Returns the names of the layers that `convert` can replace.

    Args:
        model: any network.
        input_size: height and width of the images, or (C, H, W). With it the model runs on one image, which finds
            linear layers on maps and excludes convolutions on maps of one pixel. Models of timm know their own size.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    >>> convertible_layers(model)
    ('2',)
    """
    shape = input_shape(model, input_size)
    return _convertible(model, None if shape is None else trace_map_sizes(model, shape))


def input_shape(model: nn.Module, given: int | Sequence[int] | None) -> tuple[int, int, int] | None:
    """Returns (C, H, W) of the model's images: as given, or from the ``pretrained_cfg`` of a timm model."""
    if given is None:
        config: Any = getattr(model, "pretrained_cfg", None)
        given = cast("Sequence[int] | None", config.get("input_size")) if isinstance(config, dict) else None
        if given is None:
            return None
    if isinstance(given, int):
        first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
        given = (3 if first is None else first.in_channels, given, given)
    if len(given) != 3 or any(size < 1 for size in given):
        raise ValueError(f"convert: input_size={given!r}; give the side of square images, or (C, H, W)")
    return given[0], given[1], given[2]


def trace_map_sizes(model: nn.Module, shape: tuple[int, int, int]) -> MapSizes:
    """Runs a model on one image and returns the sizes of the maps its layers ran on."""
    sizes: dict[str, list[tuple[int, int]]] = {}
    hooks: list[Any] = []
    for name, layer in _modules(model):
        if isinstance(layer, (nn.Conv2d, nn.Linear)):

            def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                x = next(iter((*args, *kwargs.values())), None)
                if isinstance(x, Tensor) and x.ndim == 4:
                    H, W = x.shape[1:3] if isinstance(layer, nn.Linear) else x.shape[2:]
                    sizes.setdefault(name, []).append((H, W))

            hooks.append(layer.register_forward_pre_hook(record, with_kwargs=True))
    like = next((weight for weight in model.parameters() if weight.is_floating_point()), torch.zeros(()))
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    try:
        with eval_mode(model), torch.no_grad():
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def find_layers(model: nn.Module, wanted: str | Sequence[str], maps: MapSizes | None) -> dict[str, nn.Module]:
    """Returns the layers that match names or patterns, in the model's order; refuses those it cannot convert."""
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    modules = dict(_modules(model))
    found: set[str] = set()
    for pattern in patterns:
        if pattern in modules:
            found.add(pattern)
            continue
        matched = {
            name
            for name, layer in modules.items()
            if isinstance(layer, (nn.Conv2d, nn.Linear)) and fnmatchcase(name, pattern)
        }
        if not matched:
            raise ValueError(f"convert: {_not_found(type(model).__name__, pattern, modules)}{_suggestion(model, maps)}")
        found |= matched
    if not found:
        raise ValueError(f"convert: no layer is given{_suggestion(model, maps)}")
    reasons = {name: why_not_convertible(model, name, maps) for name in modules if name in found}
    refused = [f"{name!r} {reason}" for name, reason in reasons.items() if reason is not None]
    if refused:
        raise ValueError(f"convert: {'; '.join(refused)}{_suggestion(model, maps)}")
    return {name: modules[name] for name in reasons}


def why_not_convertible(model: nn.Module, name: str, maps: MapSizes | None = None) -> str | None:
    """Returns why a layer cannot be replaced by a ``PatchMoE``, as the end of a sentence; None if it can."""
    layer = model.get_submodule(name)
    if name == "":
        return "is the model itself; put it into an nn.Sequential and name it '0'"
    if isinstance(layer, RoutedLayer):
        return f"is a {type(layer).__name__}, which is routed already"
    if not isinstance(layer, (nn.Conv2d, nn.Linear)):
        return f"is a {type(layer).__name__}, neither a Conv2d nor a Linear"
    return _shape_refusal(layer) or weight_refusal(model, name, layer) or _map_refusal(name, layer, maps)


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


def weight_refusal(model: nn.Module, name: str, layer: nn.Conv2d | nn.Linear) -> str | None:
    """Returns why the weights of a layer cannot be those of experts, as the end of a sentence; None if they can."""
    if isinstance(layer.weight, UninitializedParameter):
        return "has no weights yet; run the model once"
    if is_parametrized(layer):
        return (
            "has a parametrised weight, such as spectral norm's; remove it first with "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
        )
    if "weight" not in dict(layer.named_parameters()):
        return "computes its weight before each run, as weight norm does; remove that first"
    if has_hooks(layer, include_global=False):
        return "has forward hooks, which would be lost; remove them first"
    own = {id(weight) for weight in layer.parameters()}
    shared = [
        other
        for other, weight in model.named_parameters(remove_duplicate=False)
        if id(weight) in own and other.rpartition(".")[0] != name
    ]
    if shared:
        return f"shares its weights with {shared[0].rpartition('.')[0]!r}; give each a copy of its own first"
    if type(layer) not in (nn.Conv2d, nn.Linear) and not _computes_plain_layer(layer):
        return f"is a {type(layer).__name__}, which does not compute the plain layer of its weights"
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


def _computes_plain_layer(layer: nn.Conv2d | nn.Linear) -> bool:
    """Whether a subclass of Conv2d or Linear computes what the plain layer with its weights computes."""
    weight, bias = layer.weight, layer.bias
    generator = torch.Generator().manual_seed(0)
    with eval_mode(layer), torch.no_grad():
        if isinstance(layer, nn.Linear):
            x = torch.randn(1, 2, 3, layer.in_features, generator=generator).to(weight)
            expected = F.linear(x, weight, bias)
        else:
            side = layer.kernel_size[0] + 2
            x = torch.randn(1, layer.in_channels, side, side + 1, generator=generator).to(weight)
            expected = F.conv2d(x, weight, bias, padding=layer.kernel_size[0] // 2)
        try:
            output = layer(x)
        except Exception:  # it does not take a map
            return False
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return False
    return bool(torch.allclose(output, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().mean())))


def _convertible(model: nn.Module, maps: MapSizes | None) -> tuple[str, ...]:
    return tuple(
        name
        for name, layer in _modules(model)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and why_not_convertible(model, name, maps) is None
    )


def _not_found(owner: str, pattern: str, modules: Mapping[str, nn.Module]) -> str:
    layers = [name for name, layer in modules.items() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    near = get_close_matches(pattern, layers, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(repr(name) for name in near)}?)" if near else ""
    what = f"no convolution of {owner} matches" if set(pattern) & set("*?[") else f"{owner} has no layer"
    return f"{what} {pattern!r}{hint}"


def _suggestion(model: nn.Module, maps: MapSizes | None) -> str:
    convertible = _convertible(model, maps)
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


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))

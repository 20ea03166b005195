"""Which layers of a network a ``PatchMoE`` can take the place of, and why the others are not among them.

A routed layer keeps the size of its map, reads all channels and pads with zeros. That fits convolutions of
stride 1 with odd square kernels and "same" padding, 1×1 ones among them, and linear layers that run over
maps (B, H, W, C), as ConvNeXt's do. What a layer runs over, only a trial run tells.
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

__all__ = ["Maps", "convertible", "find_layers", "input_shape", "refusal", "trial"]

Maps = Mapping[str, Sequence[tuple[int, int]]]
"""H and W of the maps that each layer was seen to run over; none where it ran over something else."""


def convertible(model: nn.Module, *, input_size: int | Sequence[int] | None = None) -> tuple[str, ...]:
    """The names of the layers that `convert` can replace.

    Linear layers that run over maps are found by a trial run, and so are convolutions that see a single
    pixel, which leaves nothing to choose; it takes an input size, ``s`` or ``(C, H, W)``, where the model
    brings none along as timm's do.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    >>> convertible(model)
    ('2',)
    """
    shape = input_shape(model, input_size)
    return _fitting(model, None if shape is None else trial(model, shape))


def input_shape(model: nn.Module, given: int | Sequence[int] | None) -> tuple[int, int, int] | None:
    """(C, H, W) of the images a model takes, as given or as a model of timm says of itself."""
    if given is None:
        config: Any = getattr(model, "pretrained_cfg", None)
        given = cast("Sequence[int] | None", config.get("input_size")) if isinstance(config, dict) else None
        if given is None:
            return None
    if isinstance(given, int):
        first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
        given = (3 if first is None else first.in_channels, given, given)
    if len(given) != 3 or any(size < 1 for size in given):
        raise ValueError(f"convert: input_size={given!r}; give one side of square images, or (C, H, W)")
    return given[0], given[1], given[2]


def trial(model: nn.Module, shape: tuple[int, int, int]) -> Maps:
    """Run a model on one image to learn which maps its layers see."""
    seen: dict[str, list[tuple[int, int]]] = {}
    hooks: list[Any] = []
    for name, layer in _modules(model):
        if isinstance(layer, (nn.Conv2d, nn.Linear)):

            def look(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], name: str = name) -> None:
                x = next(iter((*given, *named.values())), None)
                if isinstance(x, Tensor) and x.ndim == 4:
                    H, W = x.shape[1:3] if isinstance(layer, nn.Linear) else x.shape[2:]
                    seen.setdefault(name, []).append((H, W))

            hooks.append(layer.register_forward_pre_hook(look, with_kwargs=True))
    like = next((weight for weight in model.parameters() if weight.is_floating_point()), torch.zeros(()))
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    try:
        with eval_mode(model), torch.no_grad():
            model(image)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def find_layers(model: nn.Module, wanted: str | Sequence[str], maps: Maps | None) -> dict[str, nn.Module]:
    """The layers that exact names or patterns name, in the model's order; an error where any of them does not fit."""
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
            raise ValueError(f"convert: {_missing(type(model).__name__, pattern, modules)}{_way_out(model, maps)}")
        found |= matched
    if not found:
        raise ValueError(f"convert: no layer is named{_way_out(model, maps)}")
    reasons = {name: refusal(model, name, maps) for name in modules if name in found}
    refused = [f"{name!r} {reason}" for name, reason in reasons.items() if reason is not None]
    if refused:
        raise ValueError(f"convert: {'; '.join(refused)}{_way_out(model, maps)}")
    return {name: modules[name] for name in reasons}


def refusal(model: nn.Module, name: str, maps: Maps | None = None) -> str | None:
    """Why the layer of that name cannot become a ``PatchMoE``, as the end of a sentence; None if it can."""
    layer = model.get_submodule(name)
    if name == "":
        return "is the model itself; put it into an nn.Sequential and name it '0'"
    if isinstance(layer, RoutedLayer):
        return f"is a {type(layer).__name__}, which routes already"
    if not isinstance(layer, (nn.Conv2d, nn.Linear)):
        return f"is a {type(layer).__name__}, neither a Conv2d nor a Linear"
    return _shape_refusal(layer) or _weight_refusal(model, name, layer) or _map_refusal(name, layer, maps)


def _shape_refusal(layer: nn.Conv2d | nn.Linear) -> str | None:
    if isinstance(layer, nn.Linear):
        return None
    rows, columns = layer.kernel_size
    if layer.stride != (1, 1):
        return f"has stride {_size(layer.stride)}, and a routed layer keeps the size of the map"
    if layer.groups != 1:
        kind = "depthwise" if layer.groups == layer.in_channels else "grouped"
        return f"is {kind} (groups={layer.groups}), and experts read all channels"
    if rows != columns or rows % 2 == 0:
        return f"has a {rows}×{columns} kernel, and experts have odd square ones"
    if layer.dilation != (1, 1) and rows > 1:
        return f"has dilation {_size(layer.dilation)}, and experts have none"
    if layer.padding_mode != "zeros":
        return f"pads with {layer.padding_mode!r}, and experts pad with zeros"
    padding = layer.padding
    same = (padding == "same" or rows == 1) if isinstance(padding, str) else set(padding) == {rows // 2}
    if type(layer) is nn.Conv2d and not same:
        return f"has padding={padding!r}, and experts keep the size of the map: padding {rows // 2} for this kernel"
    return None


def _weight_refusal(model: nn.Module, name: str, layer: nn.Conv2d | nn.Linear) -> str | None:
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
        return "carries forward hooks, which would be lost; remove them first"
    own = {id(weight) for weight in layer.parameters()}
    shared = [
        other
        for other, weight in model.named_parameters(remove_duplicate=False)
        if id(weight) in own and other.rpartition(".")[0] != name
    ]
    if shared:
        return f"shares its weights with {shared[0].rpartition('.')[0]!r}; give each a copy of its own first"
    if type(layer) not in (nn.Conv2d, nn.Linear) and not _computes_what_it_says(layer):
        return f"is a {type(layer).__name__}, which computes something else than its weights and 'same' padding say"
    return None


def _map_refusal(name: str, layer: nn.Conv2d | nn.Linear, maps: Maps | None) -> str | None:
    if maps is None:
        if isinstance(layer, nn.Linear):
            return "is a Linear, and only a trial run tells whether it runs over a map: give input_size=(C, H, W)"
        return None
    if not maps.get(name):
        takes = "(B, H, W, C)" if isinstance(layer, nn.Linear) else "(B, C, H, W)"
        return f"ran over no map {takes} in a trial run"
    if min(H * W for H, W in maps[name]) == 1:
        return "sees a map of one pixel, which leaves nothing to choose"
    return None


def _computes_what_it_says(layer: nn.Conv2d | nn.Linear) -> bool:
    """Whether a subclass is, in what it does, the layer that its weights describe."""
    weight, bias = layer.weight, layer.bias
    source = torch.Generator().manual_seed(0)
    with eval_mode(layer), torch.no_grad():
        if isinstance(layer, nn.Linear):
            x = torch.randn(1, 2, 3, layer.in_features, generator=source).to(weight)
            expected = F.linear(x, weight, bias)
        else:
            side = layer.kernel_size[0] + 2
            x = torch.randn(1, layer.in_channels, side, side + 1, generator=source).to(weight)
            expected = F.conv2d(x, weight, bias, padding=layer.kernel_size[0] // 2)
        try:
            found = layer(x)
        except Exception:  # whatever it takes, it is not a map
            return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool(torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().mean())))


def _fitting(model: nn.Module, maps: Maps | None) -> tuple[str, ...]:
    return tuple(
        name
        for name, layer in _modules(model)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and refusal(model, name, maps) is None
    )


def _missing(owner: str, pattern: str, modules: Mapping[str, nn.Module]) -> str:
    layers = [name for name, layer in modules.items() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    near = get_close_matches(pattern, layers, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(repr(name) for name in near)}?)" if near else ""
    what = f"no convolution of {owner} matches" if set(pattern) & set("*?[") else f"{owner} has no layer"
    return f"{what} {pattern!r}{hint}"


def _way_out(model: nn.Module, maps: Maps | None) -> str:
    fitting = _fitting(model, maps)
    if not fitting:
        return f"; no layer of this {type(model).__name__} can be converted"
    few = ", ".join(repr(name) for name in fitting[-4:])
    more = f" and {len(fitting) - 4} more (moesaic.models.convert_candidates lists them)" if len(fitting) > 4 else ""
    return f"; convertible: {few}{more}"


def _size(pair: tuple[int, ...]) -> str:
    return str(pair[0]) if len(set(pair)) == 1 else "×".join(map(str, pair))


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))

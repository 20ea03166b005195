"""Shapes of the inputs of a network's layers, recorded in a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.models.inspection import all_named_modules, eval_mode, example_images, input_hooks

__all__ = ["OTHER_SIZE", "LayerInputs", "MapSizes", "TokenInput", "input_shape", "trace_inputs"]

OTHER_SIZE = "; give input_size=(C, H, W) if its images have another size"
"""Ends the error of a network that does not run on images of the size that it seems to have."""
MapSizes = Mapping[str, Sequence[tuple[int, int]]]
"""H and W of the maps each layer ran on; empty for layers that ran on other tensors."""


@dataclass(frozen=True)
class TokenInput:
    """The input of an MLP in one run."""

    shape: tuple[int, ...]
    batch: int
    """Images that the network ran on."""
    block: tuple[int, ...] = ()
    """Shape of the input of the module around it."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of the layers of a network in one run."""

    maps: MapSizes
    tokens: Mapping[str, Sequence[TokenInput]] = field(default_factory=dict[str, Sequence[TokenInput]])
    """Of each MLP that ran."""


def input_shape(model: nn.Module, input_size: int | Sequence[int] | None) -> tuple[int, int, int] | None:
    """Returns (C, H, W) of the model's images: ``input_size``, or that which a model of timm or transformers has."""
    if input_size is None:
        input_size = _own_shape(model)
        if input_size is None:
            return None
    if isinstance(input_size, int):
        first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
        input_size = (3 if first is None else first.in_channels, input_size, input_size)
    if len(input_size) != 3 or any(not hasattr(size, "__index__") or size < 1 for size in input_size):
        raise ValueError(f"convert: input_size={input_size!r}; give the side of square images, or (C, H, W)")
    return input_size[0], input_size[1], input_size[2]


def _own_shape(model: nn.Module) -> int | Sequence[int] | None:
    timms: Any = getattr(model, "pretrained_cfg", None)
    if isinstance(timms, dict):
        default = cast("Sequence[int] | None", timms.get("input_size"))
        return default if default is None else _built_shape(model, default)
    side = getattr(getattr(model, "config", None), "image_size", None)  # of transformers
    return side if isinstance(side, int) else None


def _built_shape(model: nn.Module, default: Sequence[int]) -> Sequence[int]:
    """The shape for which a transformer of timm was built, where that is not the default of its architecture."""
    embed: Any = getattr(model, "patch_embed", None)
    sides: Any = getattr(embed, "img_size", None)
    if not isinstance(sides, tuple):
        return default
    channels: int = getattr(getattr(embed, "proj", None), "in_channels", default[0])
    return channels, *cast("tuple[int, int]", sides)


def trace_inputs(model: nn.Module, shape: tuple[int, int, int], mlps: Collection[str] = ()) -> LayerInputs:
    """Runs a model on images and records the inputs of its convolutions and linear layers, and of ``mlps``.

    It runs on one image, and on two where there are MLPs, to see whether their inputs have a batch axis.
    """
    batch = 2 if mlps else 1
    maps: dict[str, list[tuple[int, int]]] = {}
    tokens: dict[str, list[TokenInput]] = {}
    blocks: dict[str, tuple[int, ...]] = {}
    around = {name.rpartition(".")[0] for name in mlps}
    modules = {
        name: module
        for name, module in all_named_modules(model)
        if name in mlps or name in around or isinstance(module, nn.Conv2d | nn.Linear)
    }

    def record(name: str, x: Tensor) -> None:
        layer = modules[name]
        if isinstance(layer, nn.Conv2d | nn.Linear) and x.ndim == 4:
            H, W = x.shape[1:3] if isinstance(layer, nn.Linear) else x.shape[2:]
            maps.setdefault(name, []).append((H, W))
        if name in around:
            blocks[name] = tuple(x.shape)
        if name in mlps:
            block = blocks.get(name.rpartition(".")[0], ())
            tokens.setdefault(name, []).append(TokenInput(tuple(x.shape), batch, block))

    with input_hooks(modules, record), eval_mode(model), torch.no_grad():
        model(example_images(model, shape, batch))
    return LayerInputs(maps, tokens)

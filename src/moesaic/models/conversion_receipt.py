"""Report on a conversion by `convert`: parameters and multiply-adds before and after, difference of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.layers import TokenSkip
from moesaic.models.convert import applied_conversions
from moesaic.models.inspection import eval_mode, first_tensor, first_weight
from moesaic.models.mlp_candidates import find_mlps
from moesaic.models.model_cost import ModelCost, align_columns, count_macs, grouped

__all__ = ["ConversionReceipt", "LayerReceipt", "conversion_receipt"]


@dataclass(frozen=True)
class LayerReceipt:
    """A layer before and after its conversion, or the whole network."""

    name: str
    parameters: tuple[int, int]
    """Before and after."""
    macs: tuple[int, int]
    """Multiply-adds of one image as `count_macs` counts them, before and after."""
    difference: float
    """Largest difference of the outputs for the same input, divided by the largest output before."""


@dataclass(frozen=True)
class ConversionReceipt:
    """Layers and network before and after a conversion; ``print`` shows a table."""

    layers: tuple[LayerReceipt, ...]
    """Each with the input that it has in the original network, so that differences do not add up."""
    total: LayerReceipt

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "parameters", "after", "multiply-adds", "after", "difference")]
        rows += [_row(each) for each in (*self.layers, self.total)]
        return align_columns(rows, "<>>>>>")


def conversion_receipt(converted: nn.Module, original: nn.Module, images: Tensor) -> ConversionReceipt:
    """Compares a converted network with the original on a batch of images, in eval mode.

    Args:
        converted: a network whose layers `convert` has replaced; neither network is changed.
        original: the same network before, such as a ``copy.deepcopy`` of it.
        images: a batch (B, C, H, W) as the networks take them.

    >>> import copy, torch
    >>> from moesaic.models import ResNet18, convert
    >>> original = ResNet18(num_classes=10)
    >>> everything = {"patches_per_expert": 16, "gate": "one", "init": "upcycle"}
    >>> model = convert(copy.deepcopy(original), "body.9.second.0", experts=8, **everything, input_size=32)
    >>> receipt = conversion_receipt(model, original, torch.randn(2, 3, 32, 32))
    >>> receipt.layers[0].parameters, receipt.total.difference < 1e-5
    ((2359296, 2363392), True)
    """
    names = [conversion["layer"] for conversion in applied_conversions(converted)]
    if not names:
        raise ValueError(
            f"conversion_receipt: {type(converted).__name__} has no layer that convert replaced; give the converted "
            "network first, then the original"
        )
    if applied_conversions(original):
        raise ValueError("conversion_receipt: the original has converted layers too; give a copy from before")
    if images.ndim != 4 or not len(images):
        raise ValueError(f"conversion_receipt: images are {tuple(images.shape)}; give a batch (B, C, H, W)")
    like = first_weight(original)
    images = images.to(like.device, like.dtype)
    C, H, W = images.shape[1:]
    costs = count_macs(original, (C, H, W)), count_macs(converted, (C, H, W))
    parts = _parts(original, names)
    with eval_mode(original), eval_mode(converted), torch.no_grad():
        before, differences = _run_both(original, converted, parts, images)
        total = _difference(first_tensor(converted(images)), before)
    layers: list[LayerReceipt] = []
    for name in names:
        now = [found for part in parts[name] if (found := _name_after_skip(converted, part)) is not None]
        parameters = _parameters(original, parts[name]), _parameters(converted, now)
        macs = _macs(costs[0], parts[name]), _macs(costs[1], now)
        layers.append(LayerReceipt(name, parameters, macs, differences[name]))
    whole = (costs[0].parameters, costs[1].parameters), (costs[0].macs, costs[1].macs)
    return ConversionReceipt(tuple(layers), LayerReceipt("all", *whole, total))


def _parts(original: nn.Module, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The modules that each converted layer consists of; the output of the last one is its output."""
    units = find_mlps(original)
    ends = {name: unit.fc2_name for name, unit in units.items() if unit.output_name is not None}
    return {name: (name, ends[name]) if name in ends else (name,) for name in names}


def _run_both(
    original: nn.Module, converted: nn.Module, parts: dict[str, tuple[str, ...]], images: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Runs the original, and each converted layer on the input that the original has there."""
    differences: dict[str, float] = {}
    outputs: dict[str, Tensor] = {}

    def compute(name: str, layer: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            outputs[name] = first_tensor(layer(*args, **kwargs))

        return hook

    def compare(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found = _difference(outputs.pop(name), first_tensor(output))
            differences[name] = max(found, differences.get(name, 0.0))

        return hook

    hooks: list[Any] = []
    for name, modules in parts.items():
        layer = converted.get_submodule(_name_after_skip(converted, name) or name)
        hooks.append(original.get_submodule(name).register_forward_pre_hook(compute(name, layer), with_kwargs=True))
        hooks.append(original.get_submodule(modules[-1]).register_forward_hook(compare(name)))
    try:
        return first_tensor(original(images)), differences
    finally:
        for hook in hooks:
            hook.remove()


def _difference(found: Tensor, expected: Tensor) -> float:
    largest, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return largest / scale if scale else (0.0 if not largest else float("inf"))


def _name_after_skip(network: nn.Module, name: str) -> str | None:
    """The name of a layer whose block `moesaic.skip` may have put into a ``TokenSkip``; None if it is replaced."""
    path: list[str] = []
    for part in name.split("."):
        if isinstance(network, TokenSkip) and part not in dict(network.named_children()):
            path.append("block")
            network = network.block
        children = dict(network.named_children())
        if part not in children:
            return None
        path.append(part)
        network = children[part]
    return ".".join(path)


def _parameters(network: nn.Module, names: Sequence[str]) -> int:
    return sum(weight.numel() for name in names for weight in network.get_submodule(name).parameters())


def _macs(cost: ModelCost, names: Sequence[str]) -> int:
    return sum(layer.macs for layer in cost.within(names))


def _row(layer: LayerReceipt) -> tuple[str, ...]:
    numbers = (grouped(number) for number in (*layer.parameters, *layer.macs))
    return layer.name, *numbers, f"{layer.difference:.1e}"

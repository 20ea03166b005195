"""Layers of a network in groups of one shape: equal modules on inputs of equal shapes, which take equal times."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from moesaic.models.inspection import input_hooks
from moesaic.models.model_cost import ModelCost, count_macs

__all__ = ["InputShapes", "describe_layer", "equal_layers", "trace_shapes"]

InputShapes = dict[str, tuple[int, ...]]
"""Shapes of the inputs of layers for one image, by name."""


def trace_shapes(model: nn.Module, names: Iterable[str], image: tuple[int, int, int]) -> tuple[InputShapes, ModelCost]:
    """Runs a network on one image: shapes of the inputs of layers, those that ran, and the cost of the network."""
    shapes: InputShapes = {}

    def record(name: str, x: Tensor) -> None:
        shapes[name] = tuple(x.shape)

    with input_hooks({name: model.get_submodule(name) for name in names}, record):
        return shapes, count_macs(model, image)


def equal_layers(model: nn.Module, shapes: InputShapes) -> list[tuple[str, ...]]:
    """Names of layers in groups of one shape, in the order of the network.

    >>> model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    >>> equal_layers(model, {"0": (1, 4, 8, 8), "2": (1, 4, 8, 8)})
    [('0', '2')]
    """
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((f"{model.get_submodule(name)}", shape), []).append(name)
    return [tuple(names) for names in groups.values()]


def describe_layer(layer: nn.Module, shape: tuple[int, ...]) -> str:
    """Kernel, channels and map of a dense layer, or features and tokens of an MLP or a block.

    >>> describe_layer(nn.Conv2d(8, 16, 3), (1, 8, 4, 4))
    '3×3, 8→16 channels on 4×4'
    >>> describe_layer(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), (1, 50, 8))
    'MLP 8→32→8 on 50 tokens'
    """
    parts = [each for each in layer.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    places = shape[2:] if isinstance(parts[0], nn.Conv2d) else shape[1:-1]
    sizes = [each.weight.shape[1::-1] for each in parts]
    where = f"{places[0]} tokens" if len(places) == 1 else "×".join(map(str, places))
    if len(parts) > 2:
        return f"{type(layer).__name__}, {sizes[0][0]} features on {where}"
    if len(parts) == 2:
        return f"MLP {sizes[0][0]}→{'→'.join(str(after) for _, after in sizes)} on {where}"
    (before, after), first = sizes[0], parts[0]
    kind = f"{first.kernel_size[0]}×{first.kernel_size[1]}" if isinstance(first, nn.Conv2d) else "linear"
    return f"{kind}, {before if before == after else f'{before}→{after}'} channels on {where}"

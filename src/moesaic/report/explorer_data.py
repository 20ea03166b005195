"""The numbers of the routing explorer, packed for a page: selections, gates, class maps and predictions.

Arrays are base64 text of 8 or 16 bits per number, so that a thousand images fit into a page; the script unpacks those
it draws. Numbers that are drawn as text have at least two digits more than are shown.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moesaic.insight.channel_metrics import class_shares
from moesaic.insight.class_routing import class_maps
from moesaic.insight.explain import Explanation, ForwardPass, LayerExplanation, Maps, TopPatch, top_patches
from moesaic.insight.metrics import plural_unit
from moesaic.insight.overlays import expert_colour, expert_dash
from moesaic.insight.patch_features import principal_components
from moesaic.report.embedded_images import Picture
from moesaic.report.formatting import percent
from moesaic.routing_record import Routing

__all__ = ["CheckpointPass", "ShownImage", "explorer_data", "image_bytes", "top_class"]

MAX_MAPPED_CLASSES = 100
"""Classes with maps, at most: those with the most images."""
_TOP_CLASSES = 3
"""Predicted classes that are listed for an image."""
CANDIDATES = 48
"""Top patches per expert of which the page shows those nearest to a patch, at least."""
_COLOURS, _DASHES = 8, 4
_BASE64 = 4 / 3


@dataclass(frozen=True, eq=False)
class ShownImage:
    """An image of the explorer."""

    name: str
    label: int | None
    """True class, if known."""
    picture: Picture
    own: bool = True
    """Whether the user passed it, as opposed to an image of the dataset that statistics are over."""


@dataclass(frozen=True, eq=False)
class CheckpointPass:
    """The outputs of a network at one point of its training."""

    name: str
    """For the slider: "epoch 5"."""
    shown: ForwardPass
    """Of the images of the explorer."""
    statistics: ForwardPass
    """Of the images of the explanation."""


def explorer_data(
    explanation: Explanation,
    images: Sequence[ShownImage],
    sizes: Sequence[tuple[int, int]],
    checkpoints: Sequence[CheckpointPass],
    classes: Tensor,
    count: int,
    components: int = 0,
) -> dict[str, Any]:
    """Returns the content of the page's JSON block.

    Args:
        explanation: of the last checkpoint.
        images: those of the explorer, the user's own first.
        sizes: width and height of each embedded image.
        checkpoints: in the order of training.
        classes: class (B,) of each image of the explanation, true or predicted.
        count: top patches per expert.
        components: numbers for the features of a patch, by which the page finds the nearest top patches.
    """
    present = mapped_classes(explanation)
    total = sum(explanation.class_images[k] for k in present)
    by_name = {layer.name: layer for layer in explanation.layers}
    routing = checkpoints[-1].shown.routing
    return {
        "classes": list(explanation.class_names),
        "by": explanation.by,
        "labelled": any(image.label is not None for image in images),
        "present": present,
        "present_share": [round(explanation.class_images[k] / max(1, total), 6) for k in present],
        "colours": [expert_colour(e) for e in range(_COLOURS)],
        "top_patches": count,
        "candidates": max(count, CANDIDATES),
        "dashes": [_dash(e * _COLOURS) for e in range(_DASHES)],
        "images": {
            "name": [image.name for image in images],
            "label": [-1 if image.label is None else image.label for image in images],
            "own": sum(image.own for image in images),
            "size": [list(size) for size in sizes],
        },
        "layers": [_layer(name, each, by_name.get(name), explanation) for name, each in routing.items()],
        "checkpoints": [_checkpoint(each, classes, explanation, present, count, components) for each in checkpoints],
    }


def mapped_classes(explanation: Explanation) -> list[int]:
    """The classes that have images, at most `MAX_MAPPED_CLASSES` of them, in ascending order."""
    images = explanation.class_images
    return sorted(sorted((k for k, own in enumerate(images) if own), key=lambda k: -images[k])[:MAX_MAPPED_CLASSES])


def image_bytes(checkpoints: Sequence[CheckpointPass], components: int = 0) -> int:
    """Bytes of the page that the routing of one image takes, with so many numbers for the features of a patch."""
    total = 0
    for each in checkpoints:
        total += sum(components * features.shape[1] for features in each.shown.features.values())
        for routing in each.shown.routing.values():
            if routing.unit == "channel":
                total += -(-routing.experts // 8)
            elif routing.index is None:
                total += routing.units * routing.experts
            else:
                total += (3 if max(routing.units, routing.experts) < 256 else 4) * routing.index[0].numel()
    return round(_BASE64 * total) + 200


def top_class(patches: Sequence[TopPatch], class_names: Sequence[str]) -> str:
    """The most frequent class of the top patches of an expert: "11 of 12 smiling"."""
    labels = [patch.label for patch in patches]
    if not labels:
        return "–"
    most = max(dict.fromkeys(labels), key=labels.count)
    return f"{labels.count(most)} of {len(labels)} {class_names[most]}"


def _layer(name: str, routing: Routing, found: LayerExplanation | None, explanation: Explanation) -> dict[str, Any]:
    kind = routing.unit if routing.grid is None or routing.unit == "channel" else "map"
    prefix = 0 if routing.grid is None else routing.prefix
    return {
        "name": name or "the network itself",
        "kind": kind,
        "unit": routing.unit,
        "chooser": routing.chooser,
        "grid": None if routing.grid is None else list(routing.grid),
        "filled": None if routing.filled is None else list(routing.filled),
        "experts": routing.experts,
        "units": routing.units - prefix,
        "prefix": prefix,
        "facts": [] if found is None else [_facts(found, e, explanation) for e in range(found.experts)],
    }


def _facts(layer: LayerExplanation, expert: int, explanation: Explanation) -> list[tuple[str, str]]:
    kind = "class" if explanation.by == "label" else "predicted class"
    units = plural_unit(layer.unit)
    facts = [(f"{kind} of its top {units}", top_class(layer.top_patches[expert], explanation.class_names))]
    if layer.grid is None:
        facts = []
    if layer.chooser != "expert":
        facts.append(("load share", percent(layer.load_share[expert])))
    if layer.grid is not None:
        facts += _places(layer, expert, explanation)
        facts += [
            (prefix_name(p, layer.prefix), f"{percent(rate)} of the images")
            for p, rate in enumerate(prefix_rates(layer, expert, explanation))
            if layer.chooser != "soft"
        ]
    information = layer.expert_information[expert]
    if information.most:
        verdict = "" if information.significant else " (not above chance)"
        facts.append(
            (f"information about the {kind}", f"{information.bits:.3f} of {information.most:.2f} bits{verdict}")
        )
    if expert in layer.dead_experts:
        facts.append(("state", "dead: hardly used"))
    return facts


def _places(layer: LayerExplanation, expert: int, explanation: Explanation) -> list[tuple[str, str]]:
    """Where it looks most often, of all images."""
    rate_N = _mean_rate(layer.selection_rate, expert, explanation)
    most = int(np.argmax(rate_N))
    share = float(rate_N[most])
    if not share:
        return []
    assert layer.grid is not None
    row, column = divmod(most, layer.grid[1])
    return [(f"most frequent {layer.unit}", f"row {row + 1}, column {column + 1}: {percent(share)} of the images")]


def prefix_rates(layer: LayerExplanation, expert: int, explanation: Explanation) -> list[float]:
    """Share of all images in which the expert selects each token that has no place on the grid."""
    return [float(rate) for rate in _mean_rate(layer.prefix_rate, expert, explanation)] if layer.prefix else []


def prefix_name(token: int, count: int) -> str:
    """The name of one of ``count`` tokens in front of those on the grid."""
    return "class token" if count == 1 else f"prefix token {token + 1}"


def _mean_rate(rate_KEN: Maps, expert: int, explanation: Explanation) -> NDArray[np.float64]:
    """(N,): the mean over all images of rates by class."""
    own_K = np.array(explanation.class_images, dtype=np.float64)
    return own_K @ np.array([rates[expert] for rates in rate_KEN]) / max(1.0, own_K.sum())


def _checkpoint(
    each: CheckpointPass,
    classes: Tensor,
    explanation: Explanation,
    present: Sequence[int],
    count: int,
    components: int,
) -> dict[str, Any]:
    probabilities = each.shown.probabilities
    best = probabilities.topk(min(_TOP_CLASSES, probabilities.shape[1]), dim=1)
    indices, values = cast("list[list[int]]", best.indices.tolist()), cast("list[list[float]]", best.values.tolist())
    pairs = [list(zip(*each, strict=True)) for each in zip(indices, values, strict=True)]
    predicted = probabilities.argmax(1)
    gated = each.shown.gated
    K = len(explanation.class_names)
    return {
        "name": each.name,
        "top": [[[k, round(value, 4)] for k, value in own] for own in pairs],
        "cost": None if gated is None else [round(100 * float(macs) / gated.dense_macs, 3) for macs in gated.macs],
        "layers": [
            _gates(routing, each.statistics.routing[name], classes, K, present)
            if routing.unit == "channel"
            else _routing(routing, each.statistics.routing[name], classes, K, present, predicted, count)
            | _features(each.shown.features.get(name), components)
            for name, routing in each.shown.routing.items()
        ],
    }


def _routing(
    routing: Routing, over: Routing, classes: Tensor, K: int, present: Sequence[int], predicted: Tensor, count: int
) -> dict[str, Any]:
    maps = class_maps(over, classes, K)
    found: dict[str, Any] = {
        "share": _packed(maps.selection_rate[list(present)]),
        "mean_gate": _packed(maps.gate[list(present)]),
    }
    if routing.index is None:
        assert routing.dispatch is not None
        found["gate"] = _packed(routing.dispatch.mean(-1), bits=8)
    else:
        index = routing.index.detach().cpu().numpy()
        found |= {
            "shape": list(index.shape[1:]),
            "index": _packed_index(index),
            "gate": _packed(routing.gate),
        }
    if routing.grid is not None:
        placed = routing.without_prefix()
        # one more than are shown, as that of the image itself is left out
        found["top"] = [
            [[each.image, each.patch, round(each.score, 4), round(each.gate, 4)] for each in own]
            for own in (top_patches(placed, e, predicted, max(count, CANDIDATES) + 1) for e in range(routing.experts))
        ]
    return found


def _features(features: Tensor | None, components: int) -> dict[str, Any]:
    """The principal components of the features of every patch."""
    if features is None or not components:
        return {}
    reduced = principal_components(features, components)
    return {"features": _packed(reduced, bits=8) | {"count": reduced.shape[-1]}}


def _gates(routing: Routing, over: Routing, classes: Tensor, K: int, present: Sequence[int]) -> dict[str, Any]:
    open_BE = routing.mask.flatten(1).cpu().numpy()
    bits = np.packbits(open_BE, axis=1)
    share = class_shares(over, classes, K)[list(present)]
    return {"open": {"data": _text(bits), "bits": 8}, "row": bits.shape[1], "share": _packed(share)}


def _packed_index(index: NDArray[Any]) -> dict[str, Any]:
    """Indices of experts or units; the largest number of the format stands for unassigned places."""
    bits = 8 if index.size and int(index.max()) < 255 else 16
    text = _text(np.where(index < 0, 2**bits - 1, index).astype("u1" if bits == 8 else "<u2"))
    return {"data": text, "bits": bits}


def _packed(values: Tensor, bits: int = 16) -> dict[str, Any]:
    """Whole numbers of 8 or 16 bits, from the smallest value, or 0, to the largest."""
    array = values.detach().cpu().double().numpy()
    array = np.nan_to_num(array, posinf=0.0, neginf=0.0)
    least, most = (min(0.0, float(array.min())), float(array.max())) if array.size else (0.0, 0.0)
    steps = 2**bits - 1
    scaled: NDArray[Any] = np.rint((array - least) * (steps / (most - least))) if most > least else array * 0
    return {"data": _text(scaled.astype("<u2" if bits == 16 else "u1")), "bits": bits, "least": least, "most": most}


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _dash(expert: int) -> list[float]:
    """As SVG has it, in widths of the line."""
    dash = expert_dash(expert)
    return [] if dash == "solid" else list(dash[1])


def count_classes(images: Sequence[ShownImage], predicted: Tensor) -> list[int]:
    """The classes that images of the explorer have, true or predicted."""
    found = {int(k) if image.label is None else image.label for image, k in zip(images, predicted, strict=True)}
    return sorted(found)

"""The routing explorer of an explanation page: its template's values, embedded images, data and script.

The page is one file that loads nothing: images are WebP files in base64, numbers one JSON block, and the only script
that may run is made of the files in explorer_script, by its hash in the Content-Security-Policy.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from torch import Tensor

from moesaic.insight.explain import Explanation
from moesaic.insight.metrics import plural_unit
from moesaic.report.embedded_images import LONGEST_SIDE, EmbeddedImage, embed_images, encode_image, reduced
from moesaic.report.expert_figures import mean_images
from moesaic.report.explorer_data import (
    CheckpointPass,
    ShownImage,
    count_classes,
    explorer_data,
    image_bytes,
    mapped_classes,
)

__all__ = ["Explorer", "make_explorer"]

PAGE_BYTES = 14_000_000
"""Bytes of a page with many images, about."""
_ROUTING_BYTES = 7_000_000
"""Bytes of the routing of all images, at most: of more, fewer images are in the explorer."""
_OTHER_BYTES = 700_000
"""Reserved for the rest of the page."""
_COMPONENTS = (8, 4, 2)
"""Numbers for the features of a patch: the first with which the routing of all images fits, or the last."""
_SCRIPT_FILES = (
    *("page", "routing", "pictures", "gallery", "image_view"),
    *("class_view", "expert_view", "dispatch_view", "gate_view", "controls"),
)
"""In this order: a file may use what those before it have defined when it begins."""
_MEAN_SIDE = 128


@dataclass(frozen=True)
class Explorer:
    """Values of the template explorer.html, and what the page has beside it."""

    values: dict[str, Any]
    data: str
    """JSON without "<", so that no text in it ends its element."""
    images: tuple[EmbeddedImage, ...]
    means: tuple[EmbeddedImage, ...]
    """Mean image of each class that has maps."""
    script: str
    digest: str
    """Of the script, as the Content-Security-Policy has it."""


def make_explorer(
    explanation: Explanation,
    images: Sequence[ShownImage],
    checkpoints: Sequence[CheckpointPass],
    *,
    pixels: Tensor,
    classes: Tensor,
    top_patches: int,
) -> Explorer:
    """Packs images and routing; ``pixels`` and ``classes`` are those of the explanation."""
    given = len(images)
    room, components = 1, _COMPONENTS[-1]
    for components in _COMPONENTS:
        room = max(1, _ROUTING_BYTES // image_bytes(checkpoints, components))
        if given <= room:
            break
    if given > room:
        images = images[:room]
        checkpoints = [CheckpointPass(each.name, each.shown.images(0, room), each.statistics) for each in checkpoints]
    # sizes are known after the data, whose length they hardly change
    unsized = [(0, 0)] * len(images)
    first = json_block(explorer_data(explanation, images, unsized, checkpoints, classes, top_patches, components))
    made = embed_images([image.picture for image in images], max(1, PAGE_BYTES - _OTHER_BYTES - len(first)))
    sizes = [(each.width, each.height) for each in made]
    data = explorer_data(explanation, images, sizes, checkpoints, classes, top_patches, components)
    present = mapped_classes(explanation)
    means: list[EmbeddedImage] = []
    if any(layer["kind"] == "map" for layer in data["layers"]):
        for grey in mean_images(pixels, classes, len(explanation.class_names))[present]:
            image = np.rint(255 * grey).astype(np.uint8)[..., None].repeat(3, 2)
            means.append(encode_image(reduced(image, _MEAN_SIDE)))
    script = _script()
    return Explorer(
        values=_values(data, explanation, images, checkpoints, made, given),
        data=json_block(data),
        images=tuple(made),
        means=tuple(means),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def json_block(content: object) -> str:
    r"""JSON for a script element: nothing in it can end the element, whatever names classes and files have.

    >>> json_block(["</script>", "a & b"])
    '["\\u003c/script>","a & b"]'
    """
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script() -> str:
    """The script in one function, so that no name of it is a global one of the page."""
    folder = files("moesaic.report").joinpath("explorer_script")
    parts = (folder.joinpath(f"{name}.js").read_text("utf-8") for name in _SCRIPT_FILES)
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _values(
    data: dict[str, Any],
    explanation: Explanation,
    images: Sequence[ShownImage],
    checkpoints: Sequence[CheckpointPass],
    made: Sequence[EmbeddedImage],
    given: int,
) -> dict[str, Any]:
    names = explanation.class_names
    layers = data["layers"]
    channels = [layer for layer in layers if layer["kind"] == "channel"]
    others = [layer for layer in layers if layer["kind"] != "channel"]
    unit = "token" if any(layer["unit"] == "token" for layer in layers) else "patch"
    has_dispatch = any(layer["chooser"] != "expert" for layer in others)
    views = {"images": "Images", "classes": "Classes"}
    views |= {"experts": "Experts"} if others else {}
    views |= {"dispatch": "Dispatch"} if has_dispatch else {}
    return {
        "views": views,
        "layers": [layer["name"] for layer in layers],
        "checkpoints": [each.name for each in checkpoints],
        "labelled": data["labelled"],
        "mixed": 0 < data["images"]["own"] < len(images),
        "filter_classes": [(k, names[k]) for k in count_classes(images, checkpoints[-1].shown.probabilities.argmax(1))],
        "present_classes": [(k, names[k]) for k in data["present"]],
        "has_cost": checkpoints[-1].shown.gated is not None,
        "has_grid": any(layer["kind"] == "map" for layer in layers),
        "unit": unit,
        "units": plural_unit(unit),
        "has_prefix": any(layer["prefix"] for layer in layers),
        "has_experts": bool(others),
        "has_channels": bool(channels),
        "has_dispatch": has_dispatch,
        "has_unplaced": any(layer["kind"] not in ("map", "channel") for layer in layers),
        "note": _note(len(images), given, made),
    }


def _note(shown: int, given: int, made: Sequence[EmbeddedImage]) -> str:
    reduced_to = max((max(each.width, each.height) for each in made if each.reduced), default=None)
    parts: list[str] = []
    if shown < given:
        parts.append(
            f"The explorer has {shown:,} of {given:,} images, as the routing of more does not fit into a page; "
            "--layer NAME leaves room for more."
        )
    if reduced_to is not None:
        fewer = "" if reduced_to == LONGEST_SIDE else f"; with fewer images they have up to {LONGEST_SIDE}"
        parts.append(f"Images are reduced to {reduced_to} pixels on the long side{fewer}.")
    if any(each.width != each.height for each in made):
        parts.append("The dark margins of an image lie outside of the square that the network sees.")
    return " ".join(parts)

"""Validation of model specifications that come from files: an allow-list of arguments, and limits of their values.

A specification in a checkpoint is untrusted input. Its arguments reach constructors, timm's among them, so that only
names on a list pass: of our networks the options in their signatures, of timm's a fixed list, without those that name
files or code (``checkpoint_path``, ``pretrained_cfg``, …). Values are plain: numbers and names, none of them larger
than a network that a machine can hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from moesaic.argument_checks import printable
from moesaic.layers.heads import HEAD_OPTIONS
from moesaic.models.model_string import conversion_options
from moesaic.models.pretrained import MAX_IMAGE_SIZE
from moesaic.models.registry import WIDE_RESNET_NAME, ModelSpec, model_options
from moesaic.models.skip import skip_options
from moesaic.validated_json import InvalidFile

__all__ = ["MAX_CHANNELS", "MAX_CLASSES", "TIMM_OPTIONS", "check_spec"]

MAX_CLASSES = 1_000_000
MAX_CHANNELS = 4096
_MAX_DEPTH, _MAX_WIDTH = 1000, 100
"""Of networks that exist for every depth and width."""
_MAX_NUMBER = 1 << 16
"""Of whole numbers that have no limit of their own."""
_MAX_CONVERSIONS = 1000
_MAX_LAYERS = 10_000
_MAX_TEXT = 4096
"""Characters of a string, such as the path of a file of weights, which is never opened."""

_LIMITS: Mapping[str, int] = {
    "num_classes": MAX_CLASSES,
    "image_size": MAX_IMAGE_SIZE,
    "input_size": MAX_IMAGE_SIZE,
    "patch_size": MAX_IMAGE_SIZE,
    "kernel_size": MAX_IMAGE_SIZE,
    "in_channels": MAX_CHANNELS,
    "depth": _MAX_DEPTH,
    "patches_per_expert": MAX_IMAGE_SIZE**2,
    "tokens_per_expert": MAX_IMAGE_SIZE**2,
    "top_k": _MAX_NUMBER,
    "seed": (1 << 63) - 1,
}
_WEIGHT_OPTIONS = ("weights", "weights_sha256")
TIMM_OPTIONS = (
    *("num_classes", "in_channels", "image_size", "head", *HEAD_OPTIONS, "pretrained", *_WEIGHT_OPTIONS),
    *("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "patch_drop_rate", "drop_block_rate"),
    *("global_pool", "output_stride", "dynamic_img_size", "dynamic_img_pad", "patch_size", "window_size"),
)
"""Arguments of timm's networks that a file may give."""
_TIMM_NAME = re.compile(r"timm/[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?")
_CHOSEN_PATCH_SIZE = re.compile(r"auto|nearest-\d{1,4}")


def check_spec(spec: ModelSpec, where: str) -> None:
    """Refuses a specification with arguments or values that do not pass; ``where`` begins the message.

    >>> check_spec(ModelSpec("timm/resnet18", {"num_classes": 2, "checkpoint_path": "x.pth"}), "model.safetensors")
    Traceback (most recent call last):
    moesaic.validated_json.InvalidFile: model.safetensors: 'checkpoint_path' is no argument of timm/resnet18 that a
    file may give; it may give num_classes, in_channels, ... window_size: build the network yourself and use
    moesaic.training.load_weights(path, model)
    """
    _check_name(spec.name, where)
    if spec.name.startswith("timm/"):
        known: Collection[str] = TIMM_OPTIONS
    else:
        try:
            head = HEAD_OPTIONS if "head" in spec.arguments else ()
            known = ("num_classes", *model_options(spec.name), *head, *_WEIGHT_OPTIONS)
        except ValueError as unknown:
            raise InvalidFile(f"{where}: {printable(str(unknown))}") from unknown
    _check_arguments(spec.name, spec.arguments, known, where)
    if spec.arguments.get("num_classes") is None:
        raise InvalidFile(f"{where}: {spec.name} is given without num_classes; {_WAY_OUT}")
    if len(spec.conversions) > _MAX_CONVERSIONS:
        raise InvalidFile(f"{where}: {len(spec.conversions)} conversions, at most {_MAX_CONVERSIONS} are made")
    for conversion in spec.conversions:
        if "skip" in conversion:
            _check_arguments("skip", conversion, ("skip", *skip_options()), where)
        else:
            _check_arguments("convert", conversion, ("layer", *conversion_options()), where)


_WAY_OUT = "build the network yourself and use moesaic.training.load_weights(path, model)"


def _check_name(name: str, where: str) -> None:
    if len(name) > 200 or (name.startswith("timm/") and not _TIMM_NAME.fullmatch(name)):
        raise InvalidFile(f"{where}: {printable(name[:60])!r} is no name of a network; {_WAY_OUT}")
    wide = WIDE_RESNET_NAME.fullmatch(name)
    if wide and (int(wide[1]) > _MAX_DEPTH or int(wide[2]) > _MAX_WIDTH):
        raise InvalidFile(
            f"{where}: {printable(name[:60])} is deeper than {_MAX_DEPTH} layers or wider than {_MAX_WIDTH}; {_WAY_OUT}"
        )


def _check_arguments(owner: str, arguments: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name, value in arguments.items():
        if name not in known:
            raise InvalidFile(
                f"{where}: {printable(name[:60])!r} is no argument of {owner} that a file may give; it may give "
                f"{', '.join(known)}: {_WAY_OUT}"
            )
        fault = _fault(name, value)
        if fault:
            raise InvalidFile(
                f"{where}: {name}={printable(repr(cast('object', value))[:60])} of {owner} {fault}; {_WAY_OUT}"
            )


def _fault(name: str, value: Any) -> str:
    """What is wrong with a value; empty if nothing is."""
    if isinstance(value, list) and name in ("layer", "skip", "input_size"):
        items = cast("list[Any]", value)
        if len(items) > (3 if name == "input_size" else _MAX_LAYERS):
            return f"has {len(items)} values"
        if any(isinstance(item, list) for item in items):
            return "has lists in it"
        return next((fault for fault in (_fault(name, item) for item in items) if fault), "")
    if value is None or (name == "patch_size" and isinstance(value, str) and _CHOSEN_PATCH_SIZE.fullmatch(value)):
        return ""
    if name in _LIMITS and (isinstance(value, bool) or not isinstance(value, int)):
        return "is not a whole number"
    if isinstance(value, bool):
        return ""
    if isinstance(value, int):
        limit = _LIMITS.get(name, _MAX_NUMBER)
        least = 0 if name == "seed" else 1 if name in _LIMITS else -limit
        return "" if least <= value <= limit else f"is not from {least} to {limit}"
    if isinstance(value, float):
        return "" if math.isfinite(value) and abs(value) <= _MAX_NUMBER else f"is beyond {_MAX_NUMBER}"
    if isinstance(value, str):
        return "" if len(value) <= _MAX_TEXT else f"has {len(value)} characters, more than {_MAX_TEXT}"
    return f"is a {type(cast('object', value)).__name__}"

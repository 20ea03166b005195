"""Pretrained weights from files, and the image size and normalisation of a pretrained network.

A file is safetensors, or anything that ``torch.load(weights_only=True)`` reads. Names and shapes are compared before
anything is loaded; a classifier for other classes is left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import first_line, printable
from moesaic.models.layer_groups import classifier_names
from moesaic.tensor_files import METADATA_KEY, is_safetensors, open_tensors, parse_header, shape_differences
from moesaic.validated_json import InvalidFile, decode

__all__ = ["PretrainedConfig", "file_sha256", "load_pretrained", "read_config", "reset_classifier"]

_WRAPPERS = ("state_dict_ema", "state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the weights of a network, beside those of the optimizer."""
_WRAPPER_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")
"""Of names of weights in DistributedDataParallel and in compiled networks."""
_BATCH_COUNTER = "num_batches_tracked"
"""BatchNorm's counter, which files may lack."""
_MAX_METADATA_TEXT = 1000
"""Characters of metadata that numbers are looked for in."""
MAX_IMAGE_SIZE = 4096
"""Pixels along the side of an image that a file may ask for."""


@dataclass(frozen=True)
class _Scale:
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Header:
    """Fields of the header of moesaic's checkpoints that describe images."""

    scale: _Scale | None = None
    input_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PretrainedConfig:
    """Image size and normalisation of a pretrained network; None: unknown."""

    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def or_else(self, other: PretrainedConfig) -> PretrainedConfig:
        """Fills unknown fields from another configuration; mean and standard deviation come together."""
        mean, std = (self.mean, self.std) if self.mean and self.std else (other.mean, other.std)
        return PretrainedConfig(self.image_size or other.image_size, mean, std)


def load_pretrained(model: nn.Module, path: str | Path, sha256: str | None = None) -> None:
    """Loads the weights of a file into a network, all but a classifier of another shape or none.

    Args:
        model: the network.
        path: a file of safetensors, or one that ``torch.load(weights_only=True)`` reads.
        sha256: the digest that the file must have, if it was recorded.
    """
    path = Path(path)
    found = file_sha256(path)
    if sha256 is not None and found != sha256:
        raise ValueError(
            f"weights={str(path)!r} has the SHA-256 {found[:12]}…, and {sha256[:12]}… was recorded; the file has "
            "changed: name the one that was used, or begin anew"
        )
    tensors = _read_tensors(path)
    own = cast("Mapping[str, Tensor]", model.state_dict())
    heads = tuple(f"{name}." for name in classifier_names(model))
    of_head = {name for name in (*own, *tensors) if name.startswith(heads)} if heads else set[str]()
    fits = all(name in tensors and tensors[name].shape == own[name].shape for name in own if name in of_head)
    wanted = {name for name in own if fits or name not in of_head}
    counters = {name for name in own if name.endswith(_BATCH_COUNTER) and name not in tensors}
    faults = shape_differences(
        {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in wanted or name not in of_head},
        {name: tuple(own[name].shape) for name in own if name in wanted - counters},
    )
    if faults:
        raise InvalidFile(
            f"weights={str(path)!r} is of another network than this {type(model).__name__}: {faults}; name "
            "the network that the file was made for"
        )
    model.load_state_dict({name: tensors[name] for name in wanted if name in tensors}, strict=False)
    if not fits:
        reset_classifier(model)


def reset_classifier(model: nn.Module) -> None:
    """Initialises the linear layers of a new classifier on pretrained features as ``nn.Linear`` does.

    Some networks of timm draw them so large that the logits of few classes drown what training adds to them.
    """
    for name in classifier_names(model):
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def read_config(path: str | Path) -> PretrainedConfig:
    """Returns the image size and normalisation in the metadata of a safetensors file.

    Checkpoints of moesaic have them too.
    """
    path = _existing(path)
    if not is_safetensors(path):
        return PretrainedConfig()
    try:
        with open_tensors(path) as file:
            metadata = file.metadata
    except InvalidFile as error:
        raise _unreadable(path, error) from error
    if METADATA_KEY in metadata:
        header = cast("_Header", decode(_Header, parse_header(path, metadata[METADATA_KEY]), str(path), more=True))
        scale = header.scale or _Scale()
        size = header.input_shape[-1] if header.input_shape else None
        return _checked(path, PretrainedConfig(size, scale.mean, scale.std))
    mean, std = (_numbers(metadata.get(name, "")) or None for name in ("mean", "std"))
    sizes = _numbers(metadata.get("input_size", ""))
    return _checked(path, PretrainedConfig(int(min(sizes[-1], 1e9)) if sizes else None, mean, std))


def file_sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with _existing(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "is not there"
    raise FileNotFoundError(f"weights={str(path)!r} {what}; name a file of weights, such as model.safetensors")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights in a file, by the names that they have in the network itself."""
    try:
        if is_safetensors(path):
            with open_tensors(path) as file:
                return _unwrapped(file.tensors())
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises exceptions of every type on damaged files
        raise _unreadable(path, error) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(cast("dict[Any, Any]", content).get(wrapper), dict):
            content = cast("dict[Any, Any]", content)[wrapper]
            break
    tensors = cast("dict[Any, Any]", content) if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise InvalidFile(
            f"weights={str(path)!r} has no dictionary of tensors; save the weights with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        )
    return _unwrapped(tensors)


def _unwrapped(tensors: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    return {_WRAPPER_PREFIXES.sub("", str(name)): tensor for name, tensor in tensors.items()}


def _unreadable(path: Path, error: Exception) -> InvalidFile:
    why = printable(first_line(error))
    return InvalidFile(
        f"weights={str(path)!r} is neither whole safetensors nor a file that torch.load(weights_only=True) reads "
        f"({why}); save the weights with safetensors.torch.save_file"
    )


def _checked(path: Path, config: PretrainedConfig) -> PretrainedConfig:
    """Refuses values that no images have."""
    numbers = (*(config.mean or ()), *(config.std or ()))
    size = config.image_size
    if not all(math.isfinite(number) for number in numbers) or min(config.std or (1.0,)) <= 0:
        raise InvalidFile(f"weights={str(path)!r} has mean={config.mean} and std={config.std}; std must be above 0")
    if size is not None and not 1 <= size <= MAX_IMAGE_SIZE:
        raise InvalidFile(f"weights={str(path)!r} is for images of {size} pixels; give --img-size and another file")
    return config


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?", text[:_MAX_METADATA_TEXT]))

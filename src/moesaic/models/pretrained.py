"""Pretrained weights from files, and the image size and normalisation of a pretrained network.

A file is safetensors, or anything that ``torch.load(weights_only=True)`` reads. Names and shapes are compared before
anything is loaded; a classifier for other classes is left out.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moesaic.models.layer_groups import classifier_names

__all__ = ["PretrainedConfig", "file_sha256", "load_pretrained", "read_config", "reset_classifier"]

_WRAPPERS = ("state_dict_ema", "state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the weights of a network, beside those of the optimizer."""
_COUNTER = "num_batches_tracked"
"""BatchNorm's counter, which files may lack."""
_SHOWN = 3
"""Names of tensors that an error lists of each kind."""


@dataclass(frozen=True)
class PretrainedConfig:
    """What a pretrained network expects of its images; None: unknown."""

    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def or_else(self, other: PretrainedConfig) -> PretrainedConfig:
        """Fills what is unknown; mean and standard deviation come together."""
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
    reshaped = [
        f"{name} {tuple(tensors[name].shape)} in the file, {tuple(own[name].shape)} in the network"
        for name in own
        if name in wanted and name in tensors and tensors[name].shape != own[name].shape
    ]
    kinds = {
        "missing in the file": [
            name for name in own if name in wanted and name not in tensors and not name.endswith(_COUNTER)
        ],
        "only in the file": [name for name in tensors if name not in own and name not in of_head],
        "of another shape": reshaped,
    }
    faults = [f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise ValueError(
            f"weights={str(path)!r} is of another network than this {type(model).__name__}: {'; '.join(faults)}; name "
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
    """Returns what the metadata of a safetensors file says about images: ``mean``, ``std`` and ``input_size``.

    Checkpoints of moesaic have them too.
    """
    path = _existing(path)
    if not _is_safetensors(path):
        return PretrainedConfig()
    try:
        with cast("Any", safe_open)(path, framework="pt") as file:
            metadata = cast("dict[str, str]", file.metadata() or {})
    except SafetensorError as error:
        raise _unreadable(path, error) from error
    if "moesaic" in metadata:
        content: Any = json.loads(metadata["moesaic"])
        scale: Any = content.get("scale") or {}
        mean, std = (tuple(scale[name]) if name in scale else None for name in ("mean", "std"))
        return PretrainedConfig(content.get("input_shape", [None])[-1], mean, std)
    mean, std = (_numbers(metadata.get(name, "")) or None for name in ("mean", "std"))
    sizes = _numbers(metadata.get("input_size", ""))
    return PretrainedConfig(int(sizes[-1]) if sizes else None, mean, std)


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
    try:
        if _is_safetensors(path):
            with cast("Any", safe_open)(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in cast("Iterable[str]", file.keys())}
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(cast("dict[Any, Any]", content).get(wrapper), dict):
            content = cast("dict[Any, Any]", content)[wrapper]
            break
    tensors = cast("dict[Any, Any]", content) if isinstance(content, dict) else {}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(
            f"weights={str(path)!r} has no dictionary of tensors; save the weights with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in tensors.items()}


def _unreadable(path: Path, error: Exception) -> ValueError:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ValueError(
        f"weights={str(path)!r} is neither whole safetensors nor a file that torch.load(weights_only=True) reads "
        f"({why}); save the weights with safetensors.torch.save_file"
    )


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: the length of the header, then its JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?", text))


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

"""Checkpoints of networks, and of training in progress.

A network is one safetensors file, with what is needed to use it in its header: how the network was made, the
names of its classes, how bytes become its input. Training in progress is another, which has everything that the
next step depends on and is enough by itself. There is no pickle in either, so nothing in a file runs. A file is
written beside its place and then renamed: whatever exists is complete, and a full disk leaves the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from moesaic.data.datasets import ImageDataset, Normalize
from moesaic.files import as_json, write_atomic
from moesaic.models.registry import ModelSpec
from moesaic.routing import RouterLike
from moesaic.write_errors import way_out

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Metadata",
    "load_checkpoint",
    "load_weights",
    "read_tensors",
    "save_network",
    "write_tensors",
]

NETWORK = "model.safetensors"
"""The network in the folder of a run."""

_KEY = "moesaic"
_FORMAT = 1
_SHOWN = 3
"""Names of tensors that an error lists of each kind."""


class CheckpointError(ValueError):
    """A file or folder of a run is damaged, or belongs to another network or run."""


@dataclass(frozen=True)
class Metadata:
    """The metadata in the file of a network."""

    spec: ModelSpec | None
    """How the network was made; None if unknown."""
    class_names: tuple[str, ...]
    cluster_names: tuple[str, ...]
    normalize: Normalize | None
    """From bytes to what the network sees; None where it is not as simple as that."""
    input_shape: tuple[int, int, int]
    """Channels, height and width of the images it was trained on."""
    task_name: str
    metrics: Mapping[str, Any]
    """Epochs done, accuracy, accuracies of clusters: what was measured when it was written."""
    tested: str = ""
    """Fingerprint of the images it was tested on, which none of those that it was trained on is among."""

    @classmethod
    def of(cls, dataset: ImageDataset, spec: ModelSpec | None, metrics: Mapping[str, Any]) -> Metadata:
        """Returns the metadata of a network that was trained on a dataset."""
        C, H, W = dataset.train.pixels.shape[1:]
        names, tested = (dataset.class_names, dataset.cluster_names), dataset.test.fingerprint()
        return cls(spec, *names, dataset.normalize, (C, H, W), dataset.name, metrics, tested)

    def to_json(self) -> dict[str, Any]:
        """Returns the metadata as JSON represents it."""
        content = as_json(asdict(self))
        content["scale"] = content.pop("normalize")
        return {"format": _FORMAT, **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Metadata:
        """Reads what ``to_json`` returned."""
        spec, scale = content["spec"], content["scale"]
        C, H, W = content["input_shape"]
        return cls(
            None if spec is None else ModelSpec.from_json(spec),
            tuple(content["class_names"]),
            tuple(content["cluster_names"]),
            None if scale is None else Normalize(tuple(scale["mean"]), tuple(scale["std"])),
            (C, H, W),
            content["task_name"],
            content["metrics"],
            content.get("tested", ""),
        )


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained network and its metadata, whose fields are attributes here too."""

    path: Path
    model: nn.Module
    """In eval mode, and channels_last as `fit` trains it."""
    metadata: Metadata

    @property
    def spec(self) -> ModelSpec:
        """How the network was made."""
        assert self.metadata.spec is not None, "load_checkpoint refuses a file without"
        return self.metadata.spec

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.metadata.class_names

    @property
    def cluster_names(self) -> tuple[str, ...]:
        return self.metadata.cluster_names

    @property
    def normalize(self) -> Normalize | None:
        return self.metadata.normalize

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.metadata.input_shape

    @property
    def task_name(self) -> str:
        return self.metadata.task_name

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.metadata.metrics


def load_checkpoint(
    path: str | Path, device: torch.device | str = "cpu", *, router: RouterLike | None = None
) -> Checkpoint:
    """The network of a run, made anew and with its weights; ``path`` is the folder of the run or the file itself.

    A router that is not moesaic's is never imported by its name in the file: give the class as ``router``, or call
    `moesaic.routing.register_router` first.

    >>> import tempfile
    >>> spec = ModelSpec("wrn10_1", {"num_classes": 2})
    >>> metadata = Metadata(spec, ("cat", "dog"), ("cat", "dog"), None, (3, 32, 32), "pets", {"accuracy": 97.0})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_network(Path(folder) / "model.safetensors", spec.build(), metadata)
    ...     checkpoint = load_checkpoint(folder)
    >>> checkpoint.class_names, checkpoint.metrics["accuracy"], checkpoint.model(torch.zeros(1, 3, 32, 32)).shape
    (('cat', 'dog'), 97.0, torch.Size([1, 2]))
    """
    path, tensors, metadata = _read_network(Path(path))
    if metadata.spec is None:
        raise CheckpointError(
            f"load_checkpoint: {path} does not say how its network was made; build the network yourself and use "
            "moesaic.training.load_weights(path, model), or give fit a spec"
        )
    if router is not None and not metadata.spec.own_routers:
        raise CheckpointError(
            f"load_checkpoint: router={router!r}, but {path} has no router that is not moesaic's; leave router out"
        )
    with torch.random.fork_rng(devices=[]):  # what the weights were before does not count
        model = metadata.spec.without_weights().build(router)
    _fill(f"load_checkpoint: {path} is of another network than {metadata.spec.name} as it is made here", model, tensors)
    model.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part
    return Checkpoint(path, model.eval(), metadata)


def load_weights(path: str | Path, model: nn.Module) -> Metadata:
    """Load the weights of a checkpoint, folder or file, into a network; returns the metadata.

    A file of another network is refused: the error lists tensors that are missing, unexpected, or of another shape.

    >>> import tempfile
    >>> metadata = Metadata(None, ("cat", "dog"), ("cat", "dog"), None, (3, 1, 1), "pets", {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_network(Path(folder) / "model.safetensors", nn.Linear(3, 2), metadata)
    ...     load_weights(folder, nn.Linear(4, 2))
    Traceback (most recent call last):
    moesaic.training.checkpoint.CheckpointError: load_weights: ... is of another network than the Linear given: 1 of
    another shape: weight (2, 3) in the file, (2, 4) in the network
    """
    path, tensors, metadata = _read_network(Path(path))
    _fill(f"load_weights: {path} is of another network than the {type(model).__name__} given", model, tensors)
    return metadata


def save_network(path: Path, model: nn.Module, metadata: Metadata) -> None:
    """Write a network to a file, whole or not at all."""
    write_tensors(path, cast("Mapping[str, Tensor]", model.state_dict()), metadata.to_json())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Write tensors, and JSON in the header, to a safetensors file: whole or not at all, same bytes for same values."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in flat.items():  # tensors with two names are written twice
        if tensor.data_ptr() in seen:
            flat[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    # one key, for the order of several is not settled
    described = json.dumps(content, ensure_ascii=False, sort_keys=True)
    blob = save(flat, metadata={_KEY: described})
    try:
        write_atomic(path, blob)
    except OSError as error:
        size = f"{len(blob) / 1e6:,.1f} MB"
        last = "the last one before it is still there" if path.exists() else "there is none before it"
        raise OSError(
            error.errno,
            f"the checkpoint {path} of {size} could not be written ({error.strerror or error}); {last}. "
            f"{way_out(error, path)} and run the same again: it resumes from the last checkpoint",
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file that `write_tensors` wrote, on the CPU, and the JSON of its header."""
    try:
        with cast("Any", safe_open)(path, framework="pt") as file:
            metadata = cast("dict[str, str]", file.metadata() or {})
            tensors = {name: cast("Tensor", file.get_tensor(name)) for name in cast("list[str]", file.keys())}
        content: Any = json.loads(metadata.get(_KEY, "null"))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); it is damaged or something else: name another, or "
            "train again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} is a safetensors file, but not one that moesaic wrote: its header has no {_KEY!r}; load its "
            "tensors with safetensors.torch.load_file"
        )
    return tensors, cast("dict[str, Any]", content)


def _read_network(path: Path) -> tuple[Path, dict[str, Tensor], Metadata]:
    """The file of a network, or in the folder of a run; its tensors and metadata."""
    if path.is_dir():
        path = path / NETWORK
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is not there; {path.parent} is no folder of a run, or its run has not come to a first "
                "checkpoint yet"
            )
    elif not path.exists():
        raise FileNotFoundError(f"{path} is not there; name the folder of a run, or its {NETWORK}")
    tensors, content = read_tensors(path)
    if content.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format={content.get('format')!r}, this version of moesaic reads format={_FORMAT}; "
            f"{'name the ' + NETWORK + ' beside it' if 'format' not in content else 'use the version that wrote it'}"
        )
    return path, tensors, Metadata.from_json(content)


def _fill(refusal: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load all tensors into the model, or none; an error lists those in which file and network differ."""
    own = cast("Mapping[str, Tensor]", model.state_dict())
    reshaped = [
        f"{name} {tuple(tensors[name].shape)} in the file, {tuple(own[name].shape)} in the network"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    kinds = {
        "missing in the file": [name for name in own if name not in tensors],
        "only in the file": [name for name in tensors if name not in own],
        "of another shape": reshaped,
    }
    faults = [f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise CheckpointError(f"{refusal}: {'; '.join(faults)}")
    model.load_state_dict(dict(tensors))


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

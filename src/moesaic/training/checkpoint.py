"""Checkpoints of networks, and of training in progress.

The checkpoint of a network is a safetensors file. Its header has what inference needs: the specification of the
network, the names of its classes, the normalization of its input. The checkpoint of training in progress is another
safetensors file, with the complete state that the next step depends on. There is no pickle in either, so nothing in a
file runs, and both have a checksum that is verified on loading. Files are written to a temporary file and then renamed:
whatever exists is complete, and after a failed write the previous file is still there. Files are untrusted: the header
is validated, its specification passes `check_spec`, and shapes are compared on the meta device before any memory is
allocated for the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import first_names, printable
from moesaic.data.image_dataset import ImageDataset, Normalize
from moesaic.files import as_json
from moesaic.models.pretrained import MAX_IMAGE_SIZE
from moesaic.models.registry import ModelSpec
from moesaic.models.spec_validation import MAX_CHANNELS, MAX_CLASSES, check_spec
from moesaic.routing import RouterLike
from moesaic.tensor_files import open_tensors, shape_differences, write_tensors
from moesaic.validated_json import InvalidFile, decode, refused_as

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

_FORMAT = 1


class CheckpointError(InvalidFile):
    """A file or folder of a run is damaged, or belongs to another network or run."""


@dataclass(frozen=True)
class Metadata:
    """The metadata in the file of a network."""

    spec: ModelSpec | None
    """Specification of the network; None if unknown."""
    class_names: tuple[str, ...]
    cluster_names: tuple[str, ...]
    normalize: Normalize | None
    """Normalization of pixels to the network's input; None where the transform is not a normalization."""
    input_shape: tuple[int, int, int]
    """Channels, height and width of the images it was trained on."""
    task_name: str
    metrics: Mapping[str, Any]
    """Epochs done, accuracy, accuracies of clusters: what was measured when it was written."""
    tested: str = ""
    """Fingerprint of the test images, none of which the network was trained on."""

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
    def from_json(cls, content: Mapping[str, Any], where: str = "Metadata") -> Metadata:
        """Reads what ``to_json`` returned, and refuses anything else; ``where`` begins the message of an error."""
        header = cast("_Header", decode(_Header, content, where, more=True))
        spec, scale = header.spec, header.scale
        with refused_as(f"{where}.scale cannot be used"):
            normalize = None if scale is None else Normalize(scale.mean, scale.std)
        metadata = cls(
            None if spec is None else ModelSpec(spec.name, dict(spec.arguments), tuple(map(dict, spec.conversions))),
            tuple(map(printable, header.class_names)),  # they are printed and shown on pages
            tuple(map(printable, header.cluster_names)),
            normalize,
            header.input_shape,
            printable(header.task_name),
            header.metrics,
            header.tested,
        )
        metadata._check(where)
        return metadata

    def _check(self, where: str) -> None:
        """Refuses values that no training writes: those of a file decide about memory, and are shown on pages."""
        C, H, W = self.input_shape
        if not (1 <= C <= MAX_CHANNELS and 1 <= H <= MAX_IMAGE_SIZE and 1 <= W <= MAX_IMAGE_SIZE):
            raise InvalidFile(
                f"{where}.input_shape: {C}×{H}×{W}; up to {MAX_CHANNELS} channels and {MAX_IMAGE_SIZE}×"
                f"{MAX_IMAGE_SIZE} pixels are read"
            )
        if self.normalize is not None:
            mean, std = self.normalize.mean, self.normalize.std
            if len(mean) != C or not all(math.isfinite(number) for number in (*mean, *std)):
                raise InvalidFile(f"{where}.scale: needs a finite mean and std for each of {C} channels")
        if max(len(self.class_names), len(self.cluster_names)) > MAX_CLASSES:
            raise InvalidFile(f"{where}.class_names: {len(self.class_names)} names, at most {MAX_CLASSES} are read")
        if self.spec is not None:
            check_spec(self.spec, f"{where}.spec")
            outputs = self.spec.arguments["num_classes"]
            if len(self.class_names) > outputs:
                raise InvalidFile(f"{where}.class_names: {len(self.class_names)} names, but num_classes={outputs}")


@dataclass(frozen=True)
class _SpecHeader:
    name: str
    arguments: Mapping[str, Any]
    conversions: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class _ScaleHeader:
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class _Header:
    """The metadata as a file has it; ``scale`` is the normalization."""

    spec: _SpecHeader | None
    class_names: tuple[str, ...]
    cluster_names: tuple[str, ...]
    scale: _ScaleHeader | None
    input_shape: tuple[int, int, int]
    task_name: str
    metrics: Mapping[str, Any]
    tested: str = ""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained network and its metadata, whose fields are attributes here too."""

    path: Path
    model: nn.Module
    """In eval mode, and channels_last as `fit` trains it."""
    metadata: Metadata

    @property
    def spec(self) -> ModelSpec:
        """Specification of the network."""
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
    """Builds the network of a checkpoint and loads its weights; ``path`` is the folder of a run, or the file.

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
    with _open_network(Path(path)) as network:
        path, metadata, spec = network.path, network.metadata, network.metadata.spec
        if spec is None:
            raise CheckpointError(
                f"load_checkpoint: {path} does not say how its network was made; build the network yourself and use "
                "moesaic.training.load_weights(path, model), or give fit a spec"
            )
        if router is not None and not spec.own_routers:
            raise CheckpointError(
                f"load_checkpoint: router={router!r}, but {path} has no router that is not moesaic's; leave router out"
            )
        refusal = f"load_checkpoint: {path} is of another network than {spec.name} as it is made here"
        model = _build(spec.without_weights(), router, network, refusal)
        _fill(refusal, model, network.tensors())
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
    with _open_network(Path(path)) as network:
        refusal = f"load_weights: {network.path} is of another network than the {type(model).__name__} given"
        _refuse_differences(refusal, model, network.shapes)
        _fill(refusal, model, network.tensors())
        return network.metadata


def save_network(path: Path, model: nn.Module | Mapping[str, Tensor], metadata: Metadata) -> None:
    """Write a network, or its state dict, to a file, whole or not at all."""
    weights = cast("Mapping[str, Tensor]", model.state_dict()) if isinstance(model, nn.Module) else model
    write_tensors(path, weights, metadata.to_json())


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file that `write_tensors` wrote, on the CPU, and the JSON of its header."""
    with refused_as(f"{path} cannot be read", CheckpointError), open_tensors(path) as file:
        return file.tensors(), file.content()


@dataclass(frozen=True)
class _Network:
    """The open file of a network."""

    path: Path
    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of its tensors."""
    tensors: Callable[[], dict[str, Tensor]]
    """Reads the tensors, and verifies the checksum."""


def _runs_inside(folder: Path) -> str:
    """Names runs in a folder of runs, or in that of a comparison, as the end of a sentence."""
    runs = sorted(run.parent for pattern in ("*", "networks/*") for run in folder.glob(f"{pattern}/{NETWORK}"))
    return f"; use {first_names([str(run) for run in runs])}" if runs else ""


@contextmanager
def _open_network(path: Path) -> Generator[_Network]:
    """Opens the file of a network, or that in the folder of a run."""
    if path.is_dir():
        path = path / NETWORK
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is not there; {path.parent} is no folder of a run, or its run has not come to a first "
                f"checkpoint yet{_runs_inside(path.parent)}"
            )
    elif not path.exists():
        raise FileNotFoundError(f"{path} is not there; name the folder of a run, or its {NETWORK}")
    with ExitStack() as stack:
        with refused_as(f"{path} cannot be read", CheckpointError):
            file = stack.enter_context(open_tensors(path))
            content = file.content()
            if content.get("format") != _FORMAT:
                version = printable(repr(content.get("format"))[:40])
                way_out = "use the version that wrote it" if "format" in content else f"name the {NETWORK} beside it"
                raise CheckpointError(
                    f"{path} has format={version}, this version of moesaic reads format={_FORMAT}; {way_out}"
                )
            metadata = Metadata.from_json(content, f"{path}: header")

        def tensors() -> dict[str, Tensor]:
            with refused_as(f"{path} cannot be read", CheckpointError):
                return file.tensors()

        yield _Network(path, metadata, file.shapes, tensors)


def _build(spec: ModelSpec, router: RouterLike | None, network: _Network, refusal: str) -> nn.Module:
    """Builds a network if its tensors have the shapes in the file, so that a header cannot ask for more memory."""
    with torch.random.fork_rng(devices=[]):  # initial weights are replaced
        try:
            with torch.device("meta"), refused_as(f"{network.path}: {spec.name} cannot be made", CheckpointError):
                empty = spec.build(router)
        except CheckpointError:
            # some networks of other packages cannot be made on the meta device: the limits of arguments still hold
            if not (spec.name.startswith("timm/") or spec.own_routers):
                raise
            sizes = {size for shape in network.shapes.values() for size in shape}
            if spec.arguments["num_classes"] not in sizes:
                raise
        else:
            _refuse_differences(refusal, empty, network.shapes)
        with refused_as(f"{network.path}: {spec.name} cannot be made", CheckpointError):
            return spec.build(router)


def _refuse_differences(refusal: str, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Lists the tensors in which file and network differ."""
    network = {name: tuple(tensor.shape) for name, tensor in cast("Mapping[str, Tensor]", model.state_dict()).items()}
    differences = shape_differences(shapes, network)
    if differences:
        raise CheckpointError(f"{refusal}: {differences}")


def _fill(refusal: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load all tensors into the model, or none."""
    _refuse_differences(refusal, model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with refused_as(refusal, CheckpointError):
        model.load_state_dict(dict(tensors))

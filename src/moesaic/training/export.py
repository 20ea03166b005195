"""A trained network as one file that serves elsewhere: ONNX, torch's .pt2 (traced or compiled), or safetensors.

What is exported takes images (B, C, H, W) as floats from 0 to 1, pixels / 255, and gives logits
(B, K): the scale that the network was trained with is part of it, so that users need not know it. The
names of the classes, and all else that the checkpoint says about the network, travel in the file's
metadata. A safetensors file holds the weights alone, and `load_checkpoint` reads it.

Files keep the saving of routing: patches are gathered, experts of a mixture of networks are branches that run for their
samples only, and gated networks compute open channels only (`moesaic.models.deepmoe.exportable`).
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, first_line
from moesaic.data.image_dataset import Normalize
from moesaic.files import atomic_path, write_atomic
from moesaic.layers import SampleMoE
from moesaic.models.deepmoe.exportable import exportable_deepmoe
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.routing import Router
from moesaic.training.checkpoint import Checkpoint, save_network

__all__ = ["SUFFIXES", "Batch", "Exported", "Format", "ServingModel", "export", "load_exported"]

Format = Literal["onnx", "pt2", "aoti", "safetensors"]
Batch = Literal["dynamic", "1"]

SUFFIXES: dict[Format, str] = {
    "onnx": ".onnx",
    "pt2": ".pt2",
    "aoti": ".aoti.pt2",
    "safetensors": ".safetensors",
}
"""Suffixes of file names."""

INPUT, OUTPUT = "images", "logits"

_METADATA = "moesaic.json"
_COMPARED_BATCH_SIZES = (1, 2, 5)
"""Batches that an exported file is compared with the network on."""


class ServingModel(nn.Module):
    """A network with its scale in front: images from 0 to 1 in, logits out.

    >>> served = ServingModel(nn.Flatten(), Normalize((0.5,), (0.25,)))
    >>> served(torch.tensor([0.5, 1.0]).view(2, 1, 1, 1)).flatten().tolist()
    [0.0, 2.0]
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, scale: Normalize) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(scale.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(scale.std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.network((images - self.mean) / self.std)


@dataclass(frozen=True, eq=False)
class Exported:
    """An exported file, and images to test it on; returned by `export`."""

    path: Path
    format: Format
    bytes: int
    metadata: Mapping[str, Any]
    examples: tuple[Tensor, ...]
    """Batches of random images, of every size that the file takes among 1, 2 and 5."""
    expected: tuple[Tensor, ...]
    """The network's own logits for them."""

    def difference(self, logits: tuple[Tensor, ...]) -> float:
        """The largest difference between the logits of the file and those of the network."""
        pairs = zip(self.expected, logits, strict=True)
        return max(float((mine - other.detach()).abs().max()) for mine, other in pairs)


def export(checkpoint: Checkpoint, path: str | Path, format: Format, *, batch: Batch = "dynamic") -> Exported:
    """Write the network of a checkpoint to a file, whole or not at all.

    ``batch`` is "dynamic" for any number of images at a time, or "1" for one. For ONNX the packages
    onnx and onnxscript are needed, the extra ``moesaic[onnx]``; for AOTInductor a C++ compiler.

    >>> import tempfile
    >>> from moesaic.models.registry import ModelSpec
    >>> from moesaic.training.checkpoint import Metadata, load_checkpoint
    >>> spec = ModelSpec("wrn10_1", {"num_classes": 2})
    >>> names, normalize = ("cat", "dog"), Normalize((0.5,) * 3, (0.2,) * 3)
    >>> metadata = Metadata(spec, names, names, normalize, (3, 32, 32), "pets", {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = export(Checkpoint(Path(), spec.build(), metadata), f"{folder}/pets.safetensors", "safetensors")
    ...     again = load_checkpoint(done.path)
    >>> again.class_names
    ('cat', 'dog')
    """
    path = Path(path)
    check_choice("export", "format", format, get_args(Format))
    check_choice("export", "batch", batch, get_args(Batch))
    metadata = _metadata(checkpoint)
    if format == "safetensors":
        save_network(path, checkpoint.model, checkpoint.metadata)
        return Exported(path, format, path.stat().st_size, metadata, (), ())
    if checkpoint.normalize is None:
        raise ValueError(
            f"export: {checkpoint.path} does not say how pixels become the network's input, so a file of format="
            f"{format!r} could not take images; use format='safetensors' and scale them yourself"
        )
    _check_branches(checkpoint.model, format)
    served = ServingModel(checkpoint.model, checkpoint.normalize).cpu().eval()
    examples = _examples(checkpoint, batch)
    with torch.no_grad():
        expected = tuple(cast(Tensor, served(images)) for images in examples)
    if isinstance(checkpoint.model, DeepMoE):
        served = ServingModel(exportable_deepmoe(checkpoint.model, one_image=batch == "1"), checkpoint.normalize)
    write = {"onnx": _write_onnx, "pt2": _write_pt2, "aoti": partial(_write_aoti, expected=expected[-1])}[format]
    try:
        with _quiet(), torch.no_grad():
            write(path, served, examples[-1], batch, metadata)
    except (OSError, ValueError):
        raise
    except Exception as error:  # what tracing can raise is of every kind
        raise ValueError(
            f"export: torch cannot export {type(checkpoint.model).__name__} as {format} ({_reason(error)}); its "
            "shapes or its control flow may depend on the images: use format='safetensors'"
        ) from error
    return Exported(path, format, path.stat().st_size, metadata, examples, expected)


def load_exported(path: str | Path) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """The network of a .pt2 or .aoti.pt2 file, and its metadata.

    Only of a file that you trust: torch unpickles parts of a .pt2, and a pickle can run anything; a .aoti.pt2 is
    compiled code. Checkpoints and safetensors have neither.
    """
    if str(path).endswith(SUFFIXES["aoti"]):
        from torch._inductor import aoti_load_package

        with _quiet():
            package = aoti_load_package(str(path))
        return cast("Callable[[Tensor], Tensor]", package), json.loads(package.get_metadata()[_METADATA])
    extra = {_METADATA: ""}
    with _quiet():
        program = torch.export.load(str(path), extra_files=extra)
    return cast("Callable[[Tensor], Tensor]", program.module()), json.loads(extra[_METADATA])


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    C, H, W = checkpoint.input_shape
    return {
        **checkpoint.metadata.to_json(),
        "input": f"{INPUT}: (batch, {C}, {H}, {W}) float32, pixels / 255; the scale is part of the network",
        "preprocessing": {
            "crop": "the largest centred square",
            "resize": [H, W],
            "resample": "bicubic",
            "antialias": True,
            "scale": 1 / 255,
        },
        "output": f"{OUTPUT}: (batch, {len(checkpoint.class_names)}) float32, a score for each of class_names; their "
        "softmax is the probabilities",
    }


def _examples(checkpoint: Checkpoint, batch: Batch) -> tuple[Tensor, ...]:
    """The last of them is what the network is traced with: torch takes a batch of 1 for a constant."""
    generator = torch.Generator().manual_seed(0)
    sizes = _COMPARED_BATCH_SIZES if batch == "dynamic" else (1,)
    return tuple(torch.rand(size, *checkpoint.input_shape, generator=generator) for size in sizes)


def _shapes(batch: Batch) -> Any:
    return ({0: torch.export.Dim("batch", min=1)},) if batch == "dynamic" else None


def _write_aoti(
    path: Path, served: nn.Module, example: Tensor, batch: Batch, metadata: Mapping[str, Any], expected: Tensor
) -> None:
    from torch._inductor import aoti_compile_and_package, aoti_load_package  # pyright: ignore[reportUnknownVariableType]
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ValueError(
            "export: format='aoti' compiles the network, and there is no C++ compiler; install g++, or use format='pt2'"
        ) from error
    program = torch.export.export(served, (example,), dynamic_shapes=_shapes(batch))
    with atomic_path(path) as unfinished:
        aoti_compile_and_package(
            program,
            package_path=str(unfinished),
            inductor_configs={"aot_inductor.metadata": {_METADATA: _json(metadata)}},
        )
        logits = aoti_load_package(str(unfinished))(example)
        # mixtures of networks compile under torch 2.13 without an error, and give other logits
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            raise ValueError(
                f"export: compiled by AOTInductor the network gives other logits, by up to "
                f"{float((logits - expected).abs().max()):.1e}; use format='pt2' or 'onnx'"
            )


def _write_pt2(path: Path, served: nn.Module, example: Tensor, batch: Batch, metadata: Mapping[str, Any]) -> None:
    program = torch.export.export(served, (example,), dynamic_shapes=_shapes(batch))
    # in memory first: torch aborts the process when it cannot write to a file
    written = io.BytesIO()
    torch.export.save(program, written, extra_files={_METADATA: _json(metadata)})
    write_atomic(path, written.getvalue())


def _write_onnx(path: Path, served: nn.Module, example: Tensor, batch: Batch, metadata: Mapping[str, Any]) -> None:
    try:
        program = torch.onnx.export(
            served,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=_shapes(batch),
        )
    except ImportError as error:
        raise ValueError(
            f"export: format='onnx' needs a package that is not installed ({error.name}); "
            "install the extra: pip install 'moesaic[onnx]'"
        ) from error
    assert program is not None
    model = cast(Any, program).model
    _place_weights(model.graph)
    model.metadata_props.update({"moesaic": _json(metadata), "class_names": _json(metadata["class_names"])})
    with atomic_path(path) as unfinished:
        program.save(str(unfinished), external_data=False)


def _check_branches(model: nn.Module, format: Format) -> None:
    """Refuse mixtures whose experts route: torch cannot load, or write, branches that pad what is routed."""
    for layer in cast("Iterable[nn.Module]", model.modules()):
        if isinstance(layer, SampleMoE) and any(isinstance(each, Router) for each in layer.experts.modules()):
            raise ValueError(
                f"export: a SampleMoE whose experts route patches themselves cannot be written as {format}; use "
                "format='safetensors'"
            )


def _place_weights(graph: Any) -> None:
    """Move weights that only one branch reads into it, as ONNX Runtime lays out no weights from outside; drop others.

    Others are those that nothing reads any more, since the exporter has computed something from them.
    """
    for owner in (graph, *graph.subgraphs()):
        for name, value in list(owner.initializers.items()):
            readers = {use.node.graph for use in value.uses()}
            if not readers and not value.is_graph_output():
                del owner.initializers[name]
            elif owner is graph and len(readers) == 1 and graph not in readers:
                del owner.initializers[name]
                readers.pop().initializers[name] = value


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False)


def _reason(error: BaseException) -> str:
    """The first line of the error that caused the others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).strip()


@contextmanager
def _quiet() -> Generator[None]:
    """Silences the warnings and logs of torch's exporters."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        # where tracing fails, torch prints the graph as far as it is
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

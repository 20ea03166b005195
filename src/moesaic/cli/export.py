"""`moesaic export`: a trained network as one file that serves elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from tyro.conf import Positional, arg

from moesaic.checks import check_choice
from moesaic.cli.shared import log, user_errors

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.training.export import Exported

__all__ = ["Export"]

_ROUNDING = 1e-3
"""Logits may differ so much, relative to the largest of them."""


@dataclass(frozen=True)
class Export:
    """Write a trained network to one file that takes images as pixels / 255 and needs nothing else.

    The names of the classes and how the network was made are in the file's metadata. The file is
    tried out and compared with the network before the command ends.
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """The folder of a run, or its model.safetensors."""
    format: Annotated[str, arg(metavar="onnx|pt2|safetensors")]
    """onnx: for any runtime; pt2: for torch, without moesaic; safetensors: the weights, for moesaic."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: beside the checkpoint)")] = None
    """Where to write; FORMAT is its ending."""
    batch: Annotated[str, arg(metavar="dynamic|1")] = "dynamic"
    """Take any number of images at a time, or one."""
    overwrite: bool = False
    """Replace a file that is there already."""

    def run(self, given: Sequence[str]) -> int:
        """Write it, try it, and say how far it is from the network."""
        from moesaic.training.checkpoint import load_checkpoint
        from moesaic.training.export import Batch, Format, export

        with user_errors("export"):
            format: Any = check_choice("export", "--format", self.format, get_args(Format))
            batch: Any = check_choice("export", "--batch", self.batch, get_args(Batch))
            if format == "onnx":
                _need_onnx()
            checkpoint = load_checkpoint(self.checkpoint)
            out = self._out(checkpoint.path)
            done = export(checkpoint, out, format, batch=batch)
        found = _run(done)
        sys.stdout.write(f"{done.path}: {done.bytes / 1e6:.1f} MB; {_tried(done, found)}\n")
        if found and not done.difference(found) <= _ROUNDING * max(1.0, *(float(y.abs().max()) for y in done.expected)):
            log("this is more than rounding: do not rely on this file, and report it; --format pt2 or onnx may differ")
            return 1
        return 0

    def _out(self, checkpoint: Path) -> Path:
        """Where to write, if something may be written there."""
        out = self.out or checkpoint.with_name(f"{_name(checkpoint)}.{self.format}")
        if out.is_dir():
            raise ValueError(f"--out={str(out)!r} is a directory; name a file in it, such as {out / checkpoint.stem}")
        if not out.parent.is_dir():
            raise ValueError(f"--out={str(out)!r}: there is no directory {out.parent}; make it, or name another file")
        if out.exists() and out.samefile(checkpoint):
            raise ValueError(f"--out={str(out)!r} is the checkpoint itself; name another file")
        if out.exists() and not self.overwrite:
            raise ValueError(f"--out={str(out)!r} is there already; name another file, or give --overwrite")
        if out.suffix != f".{self.format}":
            raise ValueError(
                f"--out={str(out)!r} ends in {out.suffix or 'nothing'}; let it end in .{self.format}, as what reads "
                "it goes by that"
            )
        return out


def _name(checkpoint: Path) -> str:
    """The run's own name where the file has the name they all have."""
    return checkpoint.stem if checkpoint.stem != "model" else checkpoint.resolve().parent.name or "model"


def _need_onnx() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--format=onnx needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "install the extra: pip install 'moesaic[onnx]'"
        )


def _run(done: Exported) -> tuple[Tensor, ...] | None:
    """What the file gives for the examples; None where it cannot be run here."""
    if done.format == "safetensors":
        return None
    return _run_pt2(done) if done.format == "pt2" else _run_onnx(done)


def _tried(done: Exported, found: tuple[Tensor, ...] | None) -> str:
    if done.format == "safetensors":
        return "weights, to be read with moesaic.training.load_checkpoint"
    if found is None:
        return "not tried out: onnxruntime is not installed"
    sizes = [str(len(images)) for images in done.examples]
    tried = f"{', '.join(sizes[:-1])} and {sizes[-1]} random images" if len(sizes) > 1 else "a random image"
    return f"run on {tried}, its logits differ from the network's by at most {done.difference(found):.1e}"


def _run_pt2(done: Exported) -> tuple[Tensor, ...]:
    from moesaic.training.export import load_exported

    network, _ = load_exported(done.path)
    return tuple(cast("Tensor", network(images)) for images in done.examples)


def _run_onnx(done: Exported) -> tuple[Tensor, ...] | None:
    import torch

    try:
        import onnxruntime
    except ImportError:
        return None
    session: Any = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    return tuple(torch.from_numpy(session.run(None, {"images": images.numpy()})[0]) for images in done.examples)

"""`moesaic export`: write a trained network as ONNX, torch.export (pt2), AOTInductor or safetensors file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from tyro.conf import Positional, arg

from moesaic.argument_checks import check_choice
from moesaic.cli.shared import RouterOption, check_writable, load_run, log, user_errors

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.training.export import Exported, Format

__all__ = ["Export"]

_TOLERANCE = 1e-3
"""Largest difference of logits, relative to the largest logit."""


@dataclass(frozen=True)
class Export:
    """Export a trained network to a single file that takes images as pixels / 255.

    The metadata of the file contain the class names and the configuration of the network. The command
    runs the file and compares its logits with those of the network.
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """Run directory, or its model.safetensors."""
    format: Annotated[str, arg(metavar="onnx|pt2|aoti|safetensors")]
    """onnx: for ONNX runtimes; pt2: torch.export, runs without moesaic; aoti: pt2 compiled for this machine's
    processor; safetensors: weights for moesaic."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: next to the checkpoint)")] = None
    """Output file; its suffix is the format (.aoti.pt2 for aoti)."""
    batch_size: Annotated[str, arg(metavar="dynamic|1")] = "dynamic"
    """Batch size of the exported network: dynamic, or fixed to 1."""
    router: RouterOption = None
    """Router class of your own that the network was trained with; it is imported."""
    overwrite: bool = False
    """Overwrite an existing file."""

    def run(self, given: Sequence[str]) -> int:
        """Writes the file, runs it, and prints the largest difference of logits."""
        from moesaic.training.export import Batch, Format, export

        with user_errors("export"):
            format: Any = check_choice("export", "--format", self.format, get_args(Format))
            batch: Any = check_choice("export", "--batch-size", self.batch_size, get_args(Batch))
            if format == "onnx":
                _need_onnx()
            checkpoint = load_run(self.checkpoint, "cpu", self.router)
            out = self._out(checkpoint.path)
            done = export(checkpoint, out, format, batch=batch)
        found = _run(done)
        sys.stdout.write(f"{done.path}: {done.bytes / 1e6:.1f} MB; {_comparison(done, found)}\n")
        if found and not done.difference(found) <= _TOLERANCE * max(
            1.0, *(float(y.abs().max()) for y in done.expected)
        ):
            log("the difference is larger than rounding errors: do not use this file; try another --format")
            return 1
        return 0

    def _out(self, checkpoint: Path) -> Path:
        """The output path; raises if it cannot be written."""
        from moesaic.training.export import SUFFIXES

        run = checkpoint.resolve().parent.name  # names the file in place of model.safetensors
        stem = checkpoint.stem if checkpoint.stem != "model" else run or "model"
        suffix = SUFFIXES[cast("Format", self.format)]
        out = self.out or checkpoint.with_name(f"{stem}{suffix}")
        if out.is_dir():
            raise ValueError(f"--out={str(out)!r} is a directory; give a file name, such as {out / checkpoint.stem}")
        check_writable("--out", out)
        if out.exists() and out.samefile(checkpoint):
            raise ValueError(f"--out={str(out)!r} is the checkpoint itself; choose another file")
        if out.exists() and not self.overwrite:
            raise ValueError(f"--out={str(out)!r} exists; choose another file, or use --overwrite")
        if not out.name.endswith(suffix):
            raise ValueError(f"--out={str(out)!r} ends in {out.suffix or 'nothing'}; the suffix must be {suffix}")
        return out


def _need_onnx() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--format=onnx needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "install the extra: pip install 'moesaic[onnx]'"
        )


def _run(done: Exported) -> tuple[Tensor, ...] | None:
    """The outputs of the file for the examples; None if it cannot be run here."""
    import torch

    from moesaic.training.export import load_exported

    if done.format == "safetensors":
        return None
    if done.format in ("pt2", "aoti"):
        network, _ = load_exported(done.path)
        return tuple(network(images) for images in done.examples)
    try:
        import onnxruntime
    except ImportError:
        return None
    session: Any = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    return tuple(torch.from_numpy(session.run(None, {"images": images.numpy()})[0]) for images in done.examples)


def _comparison(done: Exported, found: tuple[Tensor, ...] | None) -> str:
    if done.format == "safetensors":
        return "weights; read them with moesaic.training.load_checkpoint"
    if found is None:
        return "not verified: onnxruntime is not installed"
    sizes = [str(len(images)) for images in done.examples]
    batches = f"batches of {', '.join(sizes[:-1])} and {sizes[-1]}" if len(sizes) > 1 else "a batch of 1"
    return f"verified on {batches}: logits differ by at most {done.difference(found):.1e}"

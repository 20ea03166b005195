"""`moesaic predict`: classes of images, with probabilities, cost and selected patches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from moesaic.argument_checks import check_positive
from moesaic.cli.faults import escaped
from moesaic.cli.shared import RouterOption, check_writable, log, resolve_device, user_errors

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.data.input_images import InputFile
    from moesaic.training.predict import Prediction
    from moesaic.training.trained_network import TrainedNetwork

__all__ = ["Predict"]

_LOG_INTERVAL = 10.0
"""Seconds between progress messages."""


@dataclass(frozen=True)
class Predict:
    """Predict the classes of images with a trained network.

    Prints a line for each image: the most probable classes and the multiply-adds of the network for this image. The
    CSV file has the probabilities of all classes as well, and the patches that each expert selected.
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """Run directory, or its model.safetensors."""
    images: Positional[Annotated[tuple[Path, ...], arg(metavar="IMAGE", help_behavior_hint="(several)")]]
    """Image files, or folders or zip files of them."""
    csv: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """CSV file to write, with a row for each image. An existing one is replaced."""
    top: Annotated[int, arg(metavar="K")] = 3
    """Number of classes to print for each image, the most probable first."""
    batch_size: int = 64
    """Images per forward pass."""
    router: RouterOption = None
    """Router class of your own that the network was trained with; it is imported."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device; auto uses a GPU if there is one."""

    def run(self, given: Sequence[str]) -> int:
        """Prints a line for each image and writes the CSV file."""
        from moesaic.data.file_sources import printable
        from moesaic.data.input_images import find_input_files, ignored_folders
        from moesaic.files import write_atomic
        from moesaic.report.prediction_csv import PredictionCSV

        with ExitStack() as stack:
            with user_errors("predict"):
                device = self._checked()
                files = find_input_files(self.images, stack)
                for folder in ignored_folders(files):
                    log(f"skipped: {folder.path} {folder.reason}")
                model = self._load(device)
            table, done = PredictionCSV(model.classes), 0
            for file, prediction in self._predictions(model, files):
                line = f"{printable(str(file.path))}: {_line(model.classes, prediction, self.top)}"
                sys.stdout.write(f"{escaped(line)}\n")
                table.add(str(file.path), prediction)
                done += 1
        with user_errors("predict"):
            if not done:
                which = f"none of the {len(files)} files is" if len(files) > 1 else f"{files[0].path} is not"
                raise ValueError(
                    f"{which} an image that can be read; give JPEG or PNG files, or folders or zip files of them"
                )
            if self.csv is not None:
                write_atomic(self.csv, table.encode())
                log(f"{done:,} of {len(files):,} files: {self.csv}")
        return 0

    def _checked(self) -> str:
        """Checks the options that do not depend on the network; returns the device."""
        check_positive("predict", top=self.top, batch_size=self.batch_size)
        if not self.images:
            raise ValueError("there are no images: pass image files, or folders or zip files of them")
        if self.csv is not None:
            if self.csv.suffix.lower() != ".csv" or self.csv.is_dir():
                raise ValueError(f"--csv={str(self.csv)!r} is not the name of a CSV file; give one that ends in .csv")
            check_writable("--csv", self.csv)
        return resolve_device("predict", self.device)

    def _load(self, device: str) -> TrainedNetwork:
        from moesaic.data.input_images import check_readable
        from moesaic.routing.registry import import_router
        from moesaic.training.trained_network import load

        model = load(self.checkpoint, device, router=None if self.router is None else import_router(self.router))
        check_readable(model.metadata.input_shape)
        return model

    def _predictions(self, model: TrainedNetwork, files: Sequence[InputFile]) -> Iterator[tuple[InputFile, Prediction]]:
        """The files that can be read, with their predictions; others are logged."""
        import torch

        from moesaic.data.decode import InvalidImage
        from moesaic.data.file_sources import UnreadableFile, printable
        from moesaic.training.predict import Predictor

        predictor, last = Predictor(model), time.monotonic()
        for start in range(0, len(files), self.batch_size):
            read: list[InputFile] = []
            pixels: list[Tensor] = []
            for file in files[start : start + self.batch_size]:
                try:
                    pixels.append(file.read(model.metadata.input_shape))
                    read.append(file)
                except (InvalidImage, UnreadableFile) as fault:
                    log(f"skipped: {printable(str(file.path))} {printable(str(fault))}")
            if read:
                yield from zip(read, predictor(model.transform(torch.stack(pixels))), strict=True)
            if time.monotonic() - last > _LOG_INTERVAL:
                last = time.monotonic()
                log(f"{start + self.batch_size:,} of {len(files):,} files done")


def _line(classes: Sequence[str], prediction: Prediction, count: int) -> str:
    shares = [f"{classes[k]} {100 * prediction.probabilities[k]:.1f} %" for k in prediction.top(count)]
    return f"{', '.join(shares)}; {prediction.macs:,} multiply-adds"

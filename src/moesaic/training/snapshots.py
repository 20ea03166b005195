"""Snapshots: copies of a network at some epochs of a run, to see later how its routing came about.

They lie in the folder ``snapshots`` of the run, each a complete checkpoint of the network; `moesaic explain` shows them
with a slider. Training does not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.argument_checks import check_positive
from moesaic.training.callbacks import Callback

if TYPE_CHECKING:
    from moesaic.training.trainer import Trainer

__all__ = ["SnapshotCallback", "find_snapshots", "snapshot_epochs"]

_FOLDER = "snapshots"
_NAME = re.compile(r"epoch-(\d+)\.safetensors")


def snapshot_epochs(epochs: int, count: int) -> tuple[int, ...]:
    """The epochs after which a run of ``epochs`` epochs writes ``count`` snapshots: dense at first, where most changes.

    The last epoch has none, as the network itself is that of the last epoch.

    >>> snapshot_epochs(50, 5), snapshot_epochs(3, 5)
    ((1, 3, 6, 16, 40), (1, 2))
    """
    check_positive("snapshot_epochs", epochs=epochs, count=count)
    last = max(1, round(0.8 * epochs)) if epochs > count + 1 else epochs - 1
    steps = [last ** (i / max(1, count - 1)) for i in range(count)]
    chosen: list[int] = []
    for step in steps:
        chosen.append(max(round(step), chosen[-1] + 1 if chosen else 1))
    return tuple(epoch for epoch in chosen if epoch < epochs)


class SnapshotCallback(Callback):
    """Writes a snapshot of the network after each of these epochs; a run without a folder has none.

    >>> SnapshotCallback((1, 5)).epochs
    (1, 5)
    """

    def __init__(self, epochs: tuple[int, ...]) -> None:
        self.epochs = epochs

    def on_epoch_end(self, trainer: Trainer) -> Mapping[str, float]:
        """Writes the weights that would be tested."""
        number = len(trainer.epochs) + 1
        if trainer.run_dir is None or number not in self.epochs:
            return {}
        with trainer.train_step.ema_weights():
            trainer.save_network(
                trainer.run_dir.folder / _FOLDER / f"epoch-{number:04}.safetensors", {"epochs": number}
            )
        return {}


def find_snapshots(path: Path, *, required: bool = False) -> list[Path]:
    """The checkpoints at ``path``: a file itself, or the snapshots of a run's folder by their epochs.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = Path(folder)
    ...     (run / "snapshots").mkdir()
    ...     for epoch in (10, 2):
    ...         (run / "snapshots" / f"epoch-{epoch:04}.safetensors").touch()
    ...     [file.name for file in find_snapshots(run)]
    ['epoch-0002.safetensors', 'epoch-0010.safetensors']
    """
    if path.is_file():
        return [path]
    folder = path / _FOLDER if (path / _FOLDER).is_dir() else path
    named = [(int(match[1]), file) for file in folder.glob("*.safetensors") if (match := _NAME.fullmatch(file.name))]
    files = [file for _, file in sorted(named)]
    if not files and required and folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
        files = [file for file in files if file.name != "training.safetensors"]
    if not files and required:
        raise ValueError(
            f"--checkpoints={str(path)!r} has no checkpoint; name a safetensors file, or a run that was trained with "
            "--snapshots"
        )
    return files

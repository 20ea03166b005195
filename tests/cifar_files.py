"""Small made-up files in the layout of CIFAR-10's binary version."""

from pathlib import Path

import numpy as np

__all__ = ["CIFAR10_NAMES", "IMAGES", "write_cifar10"]

CIFAR10_NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
IMAGES = 20
"""Images of a file: two of each class."""


def write_cifar10(data_dir: Path) -> Path:
    """Writes random images below the folder, and returns it."""
    folder = data_dir / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number, name in enumerate(CIFAR10_NAMES):
        rows = np.random.default_rng(number).integers(256, size=(IMAGES, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(IMAGES) % 10
        rows.tofile(folder / name)
    return data_dir

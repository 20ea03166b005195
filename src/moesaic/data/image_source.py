"""What a source of images gives, before it is known how they are scaled and varied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moesaic.data.datasets import LabelledImages, Skipped
from moesaic.data.decoded_cache import Cache

__all__ = ["ImageParts", "Source"]


@dataclass(frozen=True, eq=False)
class ImageParts:
    """Images to train on and to test on, of one size and with as many channels."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    """In the order of labels."""
    cluster_names: tuple[str, ...]
    """In the order of clusters; where nothing better is known, the classes."""
    skipped: tuple[Skipped, ...] = ()


class Source(Protocol):
    """A set of images that goes by a name."""

    def __call__(self, data_dir: Path | None, size: int | None, cache: Cache, seed: int) -> ImageParts:
        """The images from the files under ``data_dir``, in their canonical layout.

        ``size`` is the side asked for, None for the set's own. The seed decides what is drawn, where something is.
        """
        ...

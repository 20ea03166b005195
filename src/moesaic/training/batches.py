"""Batches of images that are stored as uint8: their order, their random numbers, and test batches.

The order of an epoch and the random numbers that an image gets in it are functions of the seed and the
epoch alone (`moesaic.keyed_random`): a run that is continued within an epoch sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data.image_dataset import RANDS_PER_IMAGE, ImageDataset

__all__ = ["eval_batches", "generator_seed", "split", "train_batches"]

_MAX_PREPARED_IMAGES = 4096
"""Images prepared together, at most: few kernels, and batches do not depend on it."""
_MAX_PREPARED_VALUES = 1 << 26
"""Pixel values prepared together, at most, unless a batch has more: a quarter of a GB as float32."""
_TEST_SEED = 10
"""Seed of the random numbers of test images, in every run."""


def train_batches(
    dataset: ImageDataset,
    sizes: Sequence[int],
    seed: int,
    epoch: int,
    device: torch.device,
    skip: int = 0,
    parts: Callable[[int], Sequence[slice]] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, of the given sizes and in random order: images (B, C, H, W) and labels (B,).

    Images beyond the sum of the sizes are left out; the first ``skip`` batches are skipped. ``parts`` returns the parts
    of a batch of so many images to yield; by default all of it.
    """
    train = dataset.train
    source = train.pixels.device
    key = keyed_random.keys(seed, [0], device)
    order = keyed_random.permutations(key, f"order {epoch}", len(train))[0]
    rand = keyed_random.uniform(key, f"luck {epoch}", len(train), RANDS_PER_IMAGE)[0].float()
    max_images = max(min(_MAX_PREPARED_IMAGES, _MAX_PREPARED_VALUES // max(train.pixels[0].numel(), 1)), 1)
    start = sum(sizes[:skip])
    for lengths in _groups(sizes[skip:], max_images):
        rows = order[start : start + sum(lengths)]
        start += sum(lengths)
        if parts is not None:
            batches = [torch.cat([batch[part] for part in parts(len(batch))]) for batch in split(rows, lengths)]
            rows, lengths = torch.cat(batches), [len(batch) for batch in batches]
        pixels = _pick(train.pixels, rows.to(source)).to(device, non_blocking=True)
        x = dataset.train_transform(pixels, rand[rows]).contiguous(memory_format=torch.channels_last)
        labels = train.labels[rows.to(source)].to(device, non_blocking=True)
        yield from zip(split(x, lengths), split(labels, lengths), strict=True)


def eval_batches(
    dataset: ImageDataset,
    device: torch.device,
    size: int,
    rows: Tensor | None = None,
    part: Callable[[int], slice] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The test images, or those at ``rows``, and their labels; what is random about them is the same in every call.

    ``part`` returns the part of a batch of so many images to yield; by default all of it.
    """
    key = keyed_random.keys(_TEST_SEED, [0])
    rand = keyed_random.uniform(key, "test", len(dataset.test), RANDS_PER_IMAGE)[0].float()
    for batch in split(torch.arange(len(dataset.test)) if rows is None else rows, size):
        batch = batch if part is None else batch[part(len(batch))]
        index = batch.to(dataset.test.pixels.device)
        x = dataset.eval_transform(_pick(dataset.test.pixels, index).to(device), rand[batch].to(device))
        yield x.contiguous(memory_format=torch.channels_last), dataset.test.labels[index].to(device)


def generator_seed(seed: int, purpose: str) -> int:
    """Returns a seed of 63 bits for a generator, independent of those for other seeds and purposes."""
    return int(keyed_random.bits(keyed_random.keys(seed, [0]), purpose, 1)[0, 0]) & ((1 << 63) - 1)


def _pick(pixels: Tensor, rows: Tensor) -> Tensor:
    """The images at ``rows``; channels_last images are indexed as (B, H, W, C), so that each is copied in one piece."""
    if pixels.is_contiguous(memory_format=torch.channels_last):
        return pixels.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2)
    return pixels[rows]


def _groups(sizes: Sequence[int], max_images: int) -> Iterator[list[int]]:
    """Groups neighbouring batches of at most so many images together, or of one batch."""
    group: list[int] = []
    for size in sizes:
        if group and sum(group) + size > max_images:
            yield group
            group = []
        group.append(size)
    if group:
        yield group


def split(values: Tensor, size: int | list[int]) -> tuple[Tensor, ...]:
    """`torch.split`, typed."""
    return cast("tuple[Tensor, ...]", values.split(size))

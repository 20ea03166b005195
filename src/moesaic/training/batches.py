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
"""Seed of what is random about images to test on: the same in every run."""


def train_batches(
    dataset: ImageDataset,
    sizes: Sequence[int],
    seed: int,
    epoch: int,
    device: torch.device,
    skip: int = 0,
    parts: Callable[[int], Sequence[slice]] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch's batches of the given sizes, in an order of their own; images (B, C, H, W) and labels (B,).

    Images that the sizes have no room for are left out; the first ``skip`` batches are passed over. ``parts`` returns
    the parts of a batch of so many images that are wanted; by default all of it.
    """
    train = dataset.train
    place = train.pixels.device
    key = keyed_random.keys(seed, [0], device)
    order = keyed_random.permutations(key, f"order {epoch}", len(train))[0]
    rand = keyed_random.uniform(key, f"luck {epoch}", len(train), RANDS_PER_IMAGE)[0].float()
    most = max(min(_MAX_PREPARED_IMAGES, _MAX_PREPARED_VALUES // max(train.pixels[0].numel(), 1)), 1)
    start = sum(sizes[:skip])
    for together in _groups(sizes[skip:], most):
        rows = order[start : start + sum(together)]
        start += sum(together)
        own = together
        if parts is not None:
            wanted = [torch.cat([batch[each] for each in parts(len(batch))]) for batch in split(rows, together)]
            rows, own = torch.cat(wanted), [len(each) for each in wanted]
        pixels = _pick(train.pixels, rows.to(place)).to(device, non_blocking=True)
        x = dataset.train_transform(pixels, rand[rows]).contiguous(memory_format=torch.channels_last)
        labels = train.labels[rows.to(place)].to(device, non_blocking=True)
        yield from zip(split(x, own), split(labels, own), strict=True)


def eval_batches(
    dataset: ImageDataset,
    device: torch.device,
    size: int,
    rows: Tensor | None = None,
    part: Callable[[int], slice] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The images to test on, or some of them, and their labels; blur and the like are the same in every call.

    ``part`` returns the part of a batch of so many images that is wanted; by default all of it.
    """
    key = keyed_random.keys(_TEST_SEED, [0])
    rand = keyed_random.uniform(key, "test", len(dataset.test), RANDS_PER_IMAGE)[0].float()
    place = dataset.test.pixels.device
    for some in split(torch.arange(len(dataset.test)) if rows is None else rows, size):
        some = some if part is None else some[part(len(some))]
        there = some.to(place)
        x = dataset.eval_transform(_pick(dataset.test.pixels, there).to(device), rand[some].to(device))
        yield x.contiguous(memory_format=torch.channels_last), dataset.test.labels[there].to(device)


def generator_seed(seed: int, purpose: str) -> int:
    """A generator's seed of 63 bits that has nothing to do with neighbouring seeds'."""
    return int(keyed_random.bits(keyed_random.keys(seed, [0]), purpose, 1)[0, 0]) & ((1 << 63) - 1)


def _pick(pixels: Tensor, rows: Tensor) -> Tensor:
    """Some of the images; with the channels last where they lie last, so that an image is one piece of memory."""
    if pixels.is_contiguous(memory_format=torch.channels_last):
        return pixels.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2)
    return pixels[rows]


def _groups(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbouring batches of at most so many images together; at least one batch."""
    group: list[int] = []
    for size in sizes:
        if group and sum(group) + size > most:
            yield group
            group = []
        group.append(size)
    if group:
        yield group


def split(values: Tensor, size: int | list[int]) -> tuple[Tensor, ...]:
    """`torch.split`, typed."""
    return cast("tuple[Tensor, ...]", values.split(size))

"""Features of a frozen backbone, computed once: a head then trains on them in seconds.

Features are what ``forward_features`` of the network returns for an image under the eval transform: its last map
(B, C, H, W) or its last tokens (B, N, C), in float32. ``forward_head`` makes logits of them. Networks of timm and
`HeadedNetwork` have both.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.data.decoded_cache import DecodedCache, Log, no_log
from moesaic.data.feature_cache import cached_features, is_cached
from moesaic.data.image_dataset import ImageDataset, LabelledImages
from moesaic.layers.recording import routed_layers
from moesaic.models.headed_network import HeadedNetwork
from moesaic.models.inspection import eval_mode
from moesaic.models.layer_groups import classifier_names

__all__ = [
    "FeatureBatches",
    "add_features",
    "check_features",
    "has_cached_features",
    "one_thread",
    "refuses_features",
]

_VERSION = 1
"""Part of cache keys, to be raised when features change."""
_BLOCK = 32
"""Images per forward pass."""
_LOG_INTERVAL = 5.0
"""Seconds between progress messages."""


def add_features(
    dataset: ImageDataset,
    model: nn.Module,
    *,
    cache_dir: Path | None = None,
    device: torch.device | str = "cpu",
    log: Log = no_log,
) -> ImageDataset:
    """Returns the dataset with the features of all its images, for ``fit(…, Recipe(trainable="head"))``.

    Args:
        dataset: images that are not augmented.
        model: a network with ``forward_features`` and ``forward_head``; everything but its classifier counts as the
            backbone. It moves to the device.
        cache_dir: folder in which the features are cached, under the digests of backbone and images; None, or a
            dataset without a digest: in memory.
        device: where to compute.
        log: called with messages about progress.
    """
    why = refuses_features(model, dataset)
    if why:
        raise ValueError(f"add_features: {why}")
    model.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part
    backbone = backbone_digest(model)

    def of(images: LabelledImages, split: str) -> LabelledImages:
        def compute() -> Iterator[NDArray[np.float32]]:
            return _blocks(model, dataset, images, torch.device(device), log)

        if cache_dir is None or not dataset.digest:
            array = np.concatenate(list(compute()))
        else:
            key = _key(dataset, backbone, images, split)
            array = cached_features(DecodedCache(cache_dir, log), key, len(images), compute)
        features = torch.from_numpy(array)
        return replace(images, features=features.permute(0, 3, 1, 2) if features.ndim == 4 else features)

    return replace(dataset, train=of(dataset.train, "train"), test=of(dataset.test, "test"), backbone=backbone)


def has_cached_features(dataset: ImageDataset, model: nn.Module, cache_dir: Path | None) -> bool:
    """Returns whether `add_features` would find the features of a dataset in the cache."""
    if cache_dir is None or not dataset.digest:
        return False
    backbone = backbone_digest(model)
    keys = (
        _key(dataset, backbone, images, split) for images, split in ((dataset.train, "train"), (dataset.test, "test"))
    )
    return all(is_cached(cache_dir, key) for key in keys)


def refuses_features(model: nn.Module, dataset: ImageDataset) -> str:
    """Returns why features cannot stand for the images of a dataset; empty if they can."""
    if not hasattr(model, "forward_features") or not hasattr(model, "forward_head"):
        return (
            f"{type(model).__name__} has no forward_features and forward_head; use a network of timm, or train without "
            "features"
        )
    if dataset.augmented or dataset.normalize is None:
        return "the images are augmented, so that features differ from step to step; use augment='none'"
    return ""


def check_features(dataset: ImageDataset, model: nn.Module) -> None:
    """Refuses features of another backbone than that of the model."""
    if backbone_digest(model) != dataset.backbone:
        raise ValueError(
            f"fit: the features of the dataset are of another backbone than that of this {type(model).__name__}; "
            "compute them with add_features(dataset, model)"
        )


def _key(dataset: ImageDataset, backbone: str, images: LabelledImages, split: str) -> str:
    content = [_VERSION, backbone, dataset.digest, split, *images.pixels.shape, repr(dataset.normalize), "float32"]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def backbone_digest(model: nn.Module) -> str:
    """Returns a hash of the weights of everything but the classifier, the same under every head.

    Options of routed layers, such as the share of tokens they keep, are no weights and are part of it.
    """
    heads = tuple(f"{name}." for name in classifier_names(model))
    headed = isinstance(model, HeadedNetwork)
    digest = hashlib.sha256(type(model.backbone if headed else model).__name__.encode())
    if headed and model.reshapes_features:
        digest.update(b"headed")  # a head of ours gets other features than the network's own head
    for name, tensor in cast("Mapping[str, Tensor]", model.state_dict()).items():
        if not name.startswith(heads):
            digest.update(json.dumps([name.removeprefix("backbone.") if headed else name, list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for name, layer in routed_layers(model).items():
        if not f"{name}.".startswith(heads):
            digest.update(f"{name.removeprefix('backbone.') if headed else name} {layer}".encode())
    return digest.hexdigest()[:24]


@dataclass(frozen=True, eq=False)
class FeatureBatches:
    """A dataset of features in place of images, and the logits of a batch of them."""

    dataset: ImageDataset
    logits: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, model: nn.Module, dataset: ImageDataset) -> FeatureBatches:
        """Makes the features of a dataset its images: batches have four axes, tokens (B, 1, N, C)."""
        assert dataset.train.features is not None and dataset.test.features is not None
        tokens = dataset.train.features.ndim == 3

        def logits(x: Tensor) -> Tensor:
            return cast("Any", model).forward_head(x[:, 0] if tokens else x)

        def in_place(images: LabelledImages) -> LabelledImages:
            assert images.features is not None
            features = images.features[:, None] if tokens else images.features
            return LabelledImages(features, images.labels, images.clusters)

        train, test = in_place(dataset.train), in_place(dataset.test)
        transforms: dict[str, Any] = {"train_transform": _identity, "eval_transform": _identity}
        return cls(replace(dataset, train=train, test=test, **transforms), logits)


@contextmanager
def one_thread() -> Generator[None]:
    """Runs operations on the CPU in one thread while the context is open.

    Those of a head are too small to share: with more threads than idle cores, most of the time would go into waiting
    for each other. The numbers also become those of any number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _identity(features: Tensor, rand: Tensor) -> Tensor:
    return features


def _blocks(
    model: nn.Module, dataset: ImageDataset, images: LabelledImages, device: torch.device, log: Log
) -> Iterator[NDArray[np.float32]]:
    """Features of the images, block by block; maps as (B, H, W, C), so that channels_last batches are copied whole."""
    assert dataset.normalize is not None
    start = logged = time.monotonic()
    for first in range(0, len(images), _BLOCK):
        x = dataset.normalize(images.pixels[first : first + _BLOCK].to(device))
        with torch.no_grad(), eval_mode(model):
            features: Tensor = cast("Any", model).forward_features(x.contiguous(memory_format=torch.channels_last))
        if features.ndim not in (3, 4):
            raise ValueError(
                f"add_features: forward_features of {type(model).__name__} returned {tuple(features.shape)}; it must "
                "be a map (B, C, H, W) or tokens (B, N, C)"
            )
        features = features.permute(0, 2, 3, 1) if features.ndim == 4 else features
        yield features.float().cpu().contiguous().numpy()
        now, done = time.monotonic(), min(first + _BLOCK, len(images))
        if now - logged > _LOG_INTERVAL and done < len(images):
            logged, remaining = now, (now - start) * (len(images) / done - 1)
            log(f"features of {done} of {len(images)} images, about {remaining:.0f} s left")

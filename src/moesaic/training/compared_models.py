"""The models of a comparison as model strings: which are compared, under what names, on images of what size."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from moesaic.layers.heads import HEAD_OPTIONS
from moesaic.models.registry import ModelSpec, create_model

__all__ = ["HEADS", "check_models", "default_samples", "expand_models", "shared_image_size", "short_names"]

HEADS = ("mean", "routed")
"""Heads that one pretrained network is compared with, the first the baseline; follows docs/heads.md."""


def check_models(models: Sequence[str]) -> None:
    """Checks whether the models exist; an error names near ones. It takes no memory."""
    for label in models:
        try:
            spec = ModelSpec.parse(label).without_weights()
            with torch.device("meta"):
                create_model(spec.name, num_classes=2, **spec.arguments)
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f"compare: models: {str(error).removeprefix('create_model: ')}") from error


def shared_image_size(models: Sequence[str]) -> int | None:
    """Returns the image size of the pretrained models, which must agree; None without such."""
    sizes: dict[int, str] = {}
    for label in models:
        size = ModelSpec.parse(label).pretrained_config().image_size
        if size is not None:
            sizes.setdefault(size, label)
    if len(sizes) > 1:
        each = " and ".join(f"{size} pixels ({label})" for size, label in sizes.items())
        raise ValueError(f"compare: models were pretrained on images of {each}; choose one size with --img-size")
    return next(iter(sizes), None)


def expand_models(models: Sequence[str]) -> tuple[str, ...]:
    """Returns the comparison that naming a single network stands for; several stay as they are.

    A converted network is compared with itself before the conversion, a routed wide residual network with the dense
    one. Of a pretrained network of timm, the heads in `HEADS` are compared on its backbone, or the head that it names
    with the first of the others; mean pooling is the baseline.

    >>> expand_models(["timm/resnet18:pretrained"])
    ('timm/resnet18:pretrained:head=mean', 'timm/resnet18:pretrained:head=routed')
    >>> expand_models(["wrn10_2_pmoe:experts=8"])
    ('wrn10_2', 'wrn10_2_pmoe:experts=8')
    """
    if len(models) != 1:
        return tuple(models)
    [model] = models
    spec = ModelSpec.parse(model)
    if spec.conversions:
        return re.split(":convert=|:skip=", model, maxsplit=1)[0], model
    if re.fullmatch(r"wrn\d+_\d+_pmoe", spec.name) and not spec.is_pretrained:
        return spec.name.removesuffix("_pmoe"), model
    if not spec.is_pretrained or not spec.name.startswith("timm/"):
        raise ValueError(
            f"compare: models={model!r} has 1 of the at least 2 models that can be compared; name another one, such as "
            f"'{spec.name},…', or a network of timm with pretrained weights, whose heads are then compared: "
            "'timm/resnet18:pretrained' or 'timm/resnet18:weights=FILE'"
        )
    head = re.search(r":head=(\w+)", model)
    if head is None:
        return tuple(f"{model}:head={name}" for name in HEADS)
    other = next(name for name in HEADS if name != head[1])
    stem = ":".join(part for part in model.split(":") if part.split("=")[0] not in ("head", *HEAD_OPTIONS))
    pair = f"{stem}:head={other}", model
    return pair if other == HEADS[0] else pair[::-1]


def short_names(models: Sequence[str]) -> list[str]:
    """Returns names for networks that tell them apart, without what all have in common.

    >>> short_names(["timm/resnet18:weights=a/b.pt:head=mean", "timm/resnet18:weights=a/b.pt:head=routed:experts=4"])
    ['head=mean', 'head=routed:experts=4']
    >>> short_names(["timm/resnet18:weights=a/b.pt", "wrn10_2"])
    ['timm/resnet18', 'wrn10_2']
    """
    parts = [model.split(":") for model in models]
    source = re.compile(r"weights=.*|pretrained(=True)?")
    without_source = [[part for part in model if not source.fullmatch(part)] for model in parts]
    one_source = len({tuple(part for part in model if source.fullmatch(part)) for model in parts}) == 1
    one_name = len({model[0] for model in parts}) == 1 and all(len(model) > 1 for model in without_source)
    options = [model[1:] for model in without_source] if one_source and one_name else without_source
    without_folders = [[re.sub(r"^(weights=).*/", r"\1", part) for part in model] for model in parts]
    for shortened in (options, without_source, without_folders):
        names = [":".join(model) for model in shortened]
        if len(set(names)) == len(names):
            return names
    return list(models)


def default_samples(images: int, classes: int) -> tuple[int, ...]:
    """Returns numbers of samples that fit so many training images: up to 1,000, a half and a quarter of that.

    The most leave a fifth of the images over, so that trials have different ones.

    >>> default_samples(5000, 10), default_samples(167, 4), default_samples(24, 2)
    ((250, 500, 1000), (25, 50, 100), (5, 10))
    """
    steps = [digit * 10**power for power in range(3) for digit in (1, 2, 5)] + [1000]
    largest = max([step for step in steps if step <= 0.8 * images], default=images)
    sizes = tuple(largest // part for part in (4, 2, 1) if largest // part >= max(classes, 3))
    return sizes or (images,)

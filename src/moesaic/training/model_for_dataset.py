"""A network by name, made for the images of a dataset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from moesaic.data.image_dataset import ImageDataset
from moesaic.layers import RoutedHead
from moesaic.models.headed_network import HeadedNetwork
from moesaic.models.inspection import eval_mode
from moesaic.models.model_cost import ModelCost, count_macs
from moesaic.models.registry import ModelSpec, model_options
from moesaic.models.spec_validation import check_spec

__all__ = ["head_note", "spec_for_dataset"]


def spec_for_dataset(requested: ModelSpec | str, dataset: ImageDataset) -> tuple[ModelSpec, ModelCost]:
    """Returns the specification of a network for a dataset's images and classes, and its cost for one image.

    ``requested`` is a specification without what follows from the dataset, or a model string (`ModelSpec.parse`). The
    network is built and run on one image, so that a network that does not fit is refused at once.

    >>> from moesaic.data.image_dataset import LabelledImages, Normalize
    >>> labels, scale = torch.arange(4), Normalize((0.5,), (0.5,))
    >>> images = LabelledImages(torch.zeros(4, 1, 64, 64, dtype=torch.uint8), labels, labels)
    >>> dataset = ImageDataset(images, images, tuple("abcd"), tuple("abcd"), scale, scale)
    >>> spec, cost = spec_for_dataset("wrn10_1_pmoe", dataset)
    >>> dict(spec.arguments)
    {'num_classes': 4, 'in_channels': 1, 'image_size': 64}
    >>> round(cost.routed_macs / cost.routed_dense_macs, 2)
    0.14
    """
    requested = ModelSpec.parse(requested) if isinstance(requested, str) else requested
    C, H, W = dataset.train.pixels.shape[1:]
    about: dict[str, Any] = {"in_channels": C, "image_size": H}
    known = {option: value for option, value in about.items() if option in model_options(requested.name)}
    arguments = {"num_classes": dataset.num_classes, **known, **requested.arguments}
    conversions = tuple({"input_size": [C, H, W], **conversion} for conversion in requested.conversions)
    spec = ModelSpec(requested.name, arguments, conversions).with_digest()
    with torch.random.fork_rng(devices=[]):
        model = spec.build()
        if (fitting := _fit_head(spec, model, (C, H, W))) is not spec:
            spec, model = fitting, fitting.build()
    check_spec(spec, f"{spec.name}: its checkpoint could not be loaded again")
    try:
        return spec, count_macs(model, (C, H, W))
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{spec.name} cannot take images of {C} channels and {H}×{W} pixels ({why}); bring them to another size, "
            "or use another network"
        ) from error


def head_note(requested: ModelSpec, spec: ModelSpec) -> str | None:
    """Returns a message for users whose routed head selects fewer positions than by default; None if it does not."""
    option = "patches_per_expert"
    if option in requested.arguments or "head" not in spec.arguments or option not in spec.arguments:
        return None
    return (
        f"the last map of {spec.name} has few positions at this image size: each expert of the routed head selects "
        f"{spec.arguments[option]}; another number: --patches-per-expert; larger maps: --img-size"
    )


def _fit_head(spec: ModelSpec, model: nn.Module, shape: tuple[int, int, int]) -> ModelSpec:
    """The specification, with half of the positions for each expert of a routed head whose default is more than all."""
    if not isinstance(model, HeadedNetwork) or not isinstance(model.head, RoutedHead):
        return spec
    if "patches_per_expert" in spec.arguments:
        return spec
    with eval_mode(model), torch.no_grad():
        features = model.forward_features(torch.zeros(1, *shape))
    positions = features.shape[1] if features.ndim == 3 else features.shape[2] * features.shape[3]
    if positions >= cast(int, model.head.moe.patches_per_expert):
        return spec
    return replace(spec, arguments={**spec.arguments, "patches_per_expert": max(positions // 2, 1)})

"""A network by name, made for the images of a dataset."""

from __future__ import annotations

from typing import Any

import torch

from moesaic.data.datasets import ImageDataset
from moesaic.models.model_cost import ModelCost, count_macs
from moesaic.models.registry import ModelSpec, model_options
from moesaic.models.spec_limits import check_spec

__all__ = ["spec_for_dataset"]


def spec_for_dataset(asked: ModelSpec | str, dataset: ImageDataset) -> tuple[ModelSpec, ModelCost]:
    """Returns the specification of a network for a dataset's images and classes, and its cost for one image.

    ``asked`` is a specification without what follows from the dataset, or its spelling (`ModelSpec.parse`). The
    network is built and run on one image, so that a network that does not fit is refused at once.

    >>> from moesaic.data.datasets import LabelledImages, Normalize
    >>> labels, scale = torch.arange(4), Normalize((0.5,), (0.5,))
    >>> images = LabelledImages(torch.zeros(4, 1, 64, 64, dtype=torch.uint8), labels, labels)
    >>> dataset = ImageDataset(images, images, tuple("abcd"), tuple("abcd"), scale, scale)
    >>> spec, cost = spec_for_dataset("wrn10_1_pmoe", dataset)
    >>> dict(spec.arguments)
    {'num_classes': 4, 'in_channels': 1, 'image_size': 64}
    >>> round(cost.routed_macs / cost.routed_dense_macs, 2)
    0.14
    """
    asked = ModelSpec.parse(asked) if isinstance(asked, str) else asked
    C, H, W = dataset.train.pixels.shape[1:]
    about: dict[str, Any] = {"in_channels": C, "image_size": H}
    known = {option: value for option, value in about.items() if option in model_options(asked.name)}
    arguments = {"num_classes": dataset.num_classes, **known, **asked.arguments}
    conversions = tuple({"input_size": [C, H, W], **conversion} for conversion in asked.conversions)
    spec = ModelSpec(asked.name, arguments, conversions).with_digest()
    with torch.random.fork_rng(devices=[]):
        model = spec.build()
    check_spec(spec, f"{spec.name}: its checkpoint could not be loaded again")
    try:
        return spec, count_macs(model, (C, H, W))
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{spec.name} cannot take images of {C} channels and {H}×{W} pixels ({why}); bring them to another size, "
            "or use another network"
        ) from error

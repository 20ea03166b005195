"""``load``: a trained network with its preprocessing, ready to be called on images."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn

from moesaic.data.input_transform import InputTransform
from moesaic.routing import RouterLike
from moesaic.training.checkpoint import Metadata, load_checkpoint

__all__ = ["TrainedNetwork", "load"]


class TrainedNetwork(nn.Module):
    """The attributes that `load` adds to a network, for type checkers; the network is of its own class."""

    transform: InputTransform
    """Maps images to the network's input, as in training."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the logits."""
    metadata: Metadata
    """Metadata of the checkpoint: specification, normalization, input shape, measured accuracies."""


def load(path: str | Path, device: torch.device | str = "cpu", *, router: RouterLike | None = None) -> TrainedNetwork:
    """Loads a trained network, in eval mode, with ``transform``, ``classes`` and ``metadata`` as attributes.

    Args:
        path: folder of a run, or its ``model.safetensors``.
        device: where the network runs, and ``transform`` puts its result.
        router: router class of your own that the network was trained with, where its name is not registered.

    >>> import tempfile
    >>> from PIL import Image
    >>> from moesaic.data import Normalize
    >>> from moesaic.models import ModelSpec
    >>> from moesaic.training.checkpoint import save_network
    >>> spec, names = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16}), ("cat", "dog")
    >>> metadata = Metadata(spec, names, names, Normalize((0.5,) * 3, (0.2,) * 3), (3, 16, 16), "pets", {})
    >>> with tempfile.TemporaryDirectory() as run:
    ...     save_network(Path(run) / "model.safetensors", spec.build(), metadata)
    ...     model = load(run)
    >>> with torch.no_grad():
    ...     probabilities = model(model.transform(Image.new("RGB", (40, 30)))).softmax(-1)
    >>> probabilities.shape, model.classes
    (torch.Size([1, 2]), ('cat', 'dog'))
    """
    checkpoint = load_checkpoint(path, device, router=router)
    if checkpoint.normalize is None:
        raise ValueError(
            f"load: {checkpoint.path} does not say how pixels become the network's input; use "
            "moesaic.training.load_checkpoint with your own transform"
        )
    model = cast("TrainedNetwork", checkpoint.model)
    model.transform = InputTransform(checkpoint.input_shape, checkpoint.normalize, device)
    model.classes = checkpoint.class_names
    model.metadata = checkpoint.metadata
    return model

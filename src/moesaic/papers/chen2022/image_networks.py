"""The networks of Chen et al. 2022 for images: a CNN, ResNet18 or MobileNetV2, alone or as the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moesaic.checks import check_choice, check_positive
from moesaic.layers import SampleMoE
from moesaic.models.image_classifier import ImageClassifier
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.resnet import ResNet18
from moesaic.models.small_cnn import SmallCNN
from moesaic.routing import SampleRouter

__all__ = ["IMAGE_NETWORKS", "image_mixture", "image_network"]

IMAGE_NETWORKS: Mapping[str, Callable[[int], ImageClassifier]] = MappingProxyType(
    {"cnn": SmallCNN, "resnet18": ResNet18, "mobilenetv2": MobileNetV2}
)


def image_network(name: str, num_classes: int) -> ImageClassifier:
    """Returns a network by name, initialised from torch's default generator.

    >>> type(image_network("resnet18", 10)).__name__
    'ResNet18'
    """
    check_positive("image_network", num_classes=num_classes)
    return IMAGE_NETWORKS[check_choice("image_network", "name", name, IMAGE_NETWORKS)](num_classes)


def image_mixture(name: str, num_classes: int, experts: int = 4) -> SampleMoE:
    """Returns a mixture whose experts are such networks, each with its own initial weights (Section 6.2).

    The router is linear in the sum of the image's 4×4 patches, starts at zero, and sends each image to one expert.

    >>> import torch
    >>> image_mixture("cnn", num_classes=2)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 2])
    """
    check_positive("image_mixture", experts=experts)
    networks = [image_network(name, num_classes) for _ in range(experts)]
    return SampleMoE(SampleRouter(3, experts, patch_size=4), networks, noise="uniform", gate="softmax")

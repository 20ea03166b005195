"""The networks of Chen et al. 2022 for images: a CNN, ResNet18 or MobileNetV2, alone or as the experts of a mixture.

A mixture is as printed (`image_mixture`), or as in the authors' code (`released_image_mixture`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] # torch's only name for all

from moesaic.argument_checks import check_choice, check_positive
from moesaic.layers import SampleMoE
from moesaic.models.image_classifier import ImageClassifier
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.resnet import ResNet18
from moesaic.models.small_cnn import SmallCNN
from moesaic.routing import SampleRouter
from moesaic.routing.router import stable_topk
from moesaic.routing_record import Routing

__all__ = ["IMAGE_NETWORKS", "BlackImageMoE", "image_mixture", "image_network", "released_image_mixture"]

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


class BlackImageMoE(SampleMoE):
    """The mixture of the authors' code, as far as it differs from print.

    - The gate is the winner's softmax(h + noise), and the scores of its `Routing`, from which the balance loss is
      computed, have the noise.
    - In training every expert runs on the whole batch, with black images in the place of those of other experts. Their
      outputs are not used, but BatchNorm has them in its statistics. In eval mode they would change nothing, so an
      expert runs on its own images only. Black is 0 after normalization.
    - The output is a softmax, of which the loss takes a second one.

    Args:
        router: Module from images to scores (B, E).
        experts: Networks from images to logits.
        black_images: Whether experts get black images; without, they run on their own images only.
    """

    def __init__(self, router: nn.Module, experts: Iterable[nn.Module], *, black_images: bool = True) -> None:
        super().__init__(router, experts, noise="uniform", gate="softmax")
        self.black_images = black_images

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.black_images):
            return super().forward(x).softmax(-1)
        routing = self._call_routing_hooks(self.route(x))
        own, gates = routing.mask[:, 0], routing.weights[:, 0]
        outputs = [
            gates[:, e : e + 1] * expert(torch.where(own[:, e, None, None, None], x, 0))
            for e, expert in enumerate(self.experts.children())
        ]
        return torch.stack(outputs).sum(0).softmax(-1)

    def choose(self, scores: Tensor) -> Routing:
        noisy = self._add_noise(scores.to(torch.promote_types(scores.dtype, torch.float32)).unsqueeze(1))
        index = stable_topk(noisy, self.top_k)
        return Routing("sample", noisy, index, noisy.softmax(-1).gather(-1, index), chooser="unit", may_drop=False)


def released_image_mixture(
    name: str, num_classes: int, experts: int = 4, *, black_images: bool = True
) -> BlackImageMoE:
    """Returns a mixture as in the authors' code, whose router has a bias.

    Experts that are ResNet18 run twice per step there, so that BatchNorm averages each batch twice. Here they run once
    with the momentum that has the same effect.

    >>> import torch
    >>> mixture = released_image_mixture("cnn", num_classes=2)
    >>> torch.allclose(mixture(torch.zeros(5, 3, 32, 32)).sum(1), torch.ones(5))
    True
    """
    check_positive("released_image_mixture", experts=experts)
    networks = [image_network(name, num_classes) for _ in range(experts)]
    if name == "resnet18":
        for network in networks:
            _average_twice(network)
    return BlackImageMoE(SampleRouter(3, experts, patch_size=4, bias=True), networks, black_images=black_images)


def _average_twice(network: nn.Module) -> None:
    """Sets the momenta of BatchNorm so that one update of the running statistics does what two did."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.momentum is not None:
            module.momentum = 1 - (1 - module.momentum) ** 2

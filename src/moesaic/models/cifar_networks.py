"""Networks for images of 32×32 pixels: a small CNN, ResNet18 and MobileNetV2, alone or as the experts of a mixture.

The deep ones are the ImageNet networks of He et al. 2016 and Sandler et al. 2018 in the form that is usual
for CIFAR: a 3×3 stem at stride 1 and no max-pooling, since a small image has no pixels to give away.
Every network has `features`, the vector its last linear layer reads, as the image's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.checks import at_least_one, one_of
from moesaic.layers import SampleMoE
from moesaic.models.backbone import GlobalMean, VectorNetwork
from moesaic.models.resnet import ResNet, conv_norm
from moesaic.routing import SampleRouter

__all__ = ["CIFAR_NETWORKS", "MobileNetV2", "ResNet18", "SmallCNN", "cifar_mixture", "cifar_network"]


class SmallCNN(VectorNetwork):
    """Two 3×3 convolutions with ReLU, each followed by 2×2 max-pooling, and a linear layer (Chen et al., A.3).

    >>> import torch
    >>> SmallCNN(classes=10)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    def __init__(self, classes: int, filters: tuple[int, int] = (64, 128), side: int = 32) -> None:
        first, second = filters
        body = nn.Sequential(
            nn.Conv2d(3, first, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        left = ((side - 2) // 2 - 2) // 2
        super().__init__(body, second * left * left, classes)


class ResNet18(ResNet):
    """Four stages of two residual blocks, 64 to 512 channels.

    >>> sum(weight.numel() for weight in ResNet18(classes=10).parameters())
    11173962
    """

    def __init__(self, classes: int) -> None:
        super().__init__(18, classes)


class MobileNetV2(VectorNetwork):
    """Seventeen inverted residual blocks between two convolutions; 32×32 pixels shrink to 4×4.

    >>> sum(weight.numel() for weight in MobileNetV2(classes=10).parameters())
    2296922
    """

    def __init__(self, classes: int) -> None:
        layers: list[nn.Module] = [conv_norm(3, 32, 3), nn.ReLU()]
        before = 32
        # expansion, channels, blocks, stride of the first: Table 2 of Sandler et al., less two of its strides
        stages = (
            (1, 16, 1, 1),
            (6, 24, 2, 1),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        for expansion, channels, blocks, stride in stages:
            for number in range(blocks):
                layers.append(_InvertedResidual(before, channels, expansion, stride if number == 0 else 1))
                before = channels
        layers += [conv_norm(before, 1280, 1), nn.ReLU(), GlobalMean()]
        super().__init__(nn.Sequential(*layers), 1280, classes)


CIFAR_NETWORKS: Mapping[str, Callable[[int], VectorNetwork]] = MappingProxyType(
    {"cnn": SmallCNN, "resnet18": ResNet18, "mobilenetv2": MobileNetV2}
)


def cifar_network(name: str, classes: int) -> VectorNetwork:
    """A network by name, freshly initialised from torch's generator.

    >>> type(cifar_network("resnet18", 10)).__name__
    'ResNet18'
    """
    return CIFAR_NETWORKS[one_of("cifar_network", "name", name, CIFAR_NETWORKS)](classes)


def cifar_mixture(name: str, classes: int, experts: int = 4) -> SampleMoE:
    """A mixture whose experts are such networks, each initialised on its own (Chen et al. 2022, Section 6.2).

    The router is linear in the sum of the image's 4×4 patches, starts at zero, and sends each image to one expert.

    >>> import torch
    >>> cifar_mixture("cnn", classes=2)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 2])
    """
    at_least_one("cifar_mixture", experts=experts)
    networks = [cifar_network(name, classes) for _ in range(experts)]
    return SampleMoE(SampleRouter(3, experts, patch_size=4), networks, noise="uniform", gate="softmax")


class _InvertedResidual(nn.Module):
    """Widen by 1×1, filter each channel by 3×3, narrow by 1×1; the last without ReLU, so that nothing is lost.

    With stride 1 the input is added, through a 1×1 convolution where the channels change: of the CIFAR form.
    """

    def __init__(self, before: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = before * expansion
        self.widen = conv_norm(before, wide, 1)
        self.filter = conv_norm(wide, wide, 3, stride, groups=wide)
        self.narrow = conv_norm(wide, channels, 1)
        self.shortcut: nn.Module | None = None
        if stride == 1:
            self.shortcut = nn.Identity() if before == channels else conv_norm(before, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(F.relu(self.filter(F.relu(self.widen(x)))))
        return y if self.shortcut is None else y + self.shortcut(x)

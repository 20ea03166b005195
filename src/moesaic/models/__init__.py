"""Networks of the papers."""

from moesaic.models.cifar import CIFAR_NETWORKS, MobileNetV2, ResNet18, SmallCNN, cifar_mixture, cifar_network
from moesaic.models.mixtures import Mixture, Mixtures
from moesaic.models.two_layer import Networks, TwoLayer

__all__ = [
    "CIFAR_NETWORKS",
    "Mixture",
    "Mixtures",
    "MobileNetV2",
    "Networks",
    "ResNet18",
    "SmallCNN",
    "TwoLayer",
    "cifar_mixture",
    "cifar_network",
]

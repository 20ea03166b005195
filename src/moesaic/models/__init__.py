"""Networks: of the papers, by name, and other people's with a routed layer in place of a convolution."""

from moesaic.models.cifar import CIFAR_NETWORKS, MobileNetV2, ResNet18, SmallCNN, cifar_mixture, cifar_network
from moesaic.models.conv_chain import Link, conv_chain, links_to_gate
from moesaic.models.convert import conversions_of, convert
from moesaic.models.convertible import convertible
from moesaic.models.count import Count, count
from moesaic.models.deepmoe import Answer, DeepMoE, deepmoe
from moesaic.models.embedding_network import EmbeddingNetwork
from moesaic.models.mixtures import Mixture, Mixtures
from moesaic.models.registry import ModelSpec, create_model, list_models, model_options
from moesaic.models.resnet import ResNet
from moesaic.models.timm_registry import register_with_timm
from moesaic.models.two_layer import Networks, TwoLayer
from moesaic.models.vector_network import VectorNetwork
from moesaic.models.vgg import VGG16
from moesaic.models.vgg_widths import WIDENINGS, Widening
from moesaic.models.wide_resnet import WideResNet, WideResNetPMoE

__all__ = [
    "CIFAR_NETWORKS",
    "VGG16",
    "WIDENINGS",
    "Answer",
    "Count",
    "DeepMoE",
    "EmbeddingNetwork",
    "Link",
    "Mixture",
    "Mixtures",
    "MobileNetV2",
    "ModelSpec",
    "Networks",
    "ResNet",
    "ResNet18",
    "SmallCNN",
    "TwoLayer",
    "VectorNetwork",
    "WideResNet",
    "WideResNetPMoE",
    "Widening",
    "cifar_mixture",
    "cifar_network",
    "conv_chain",
    "conversions_of",
    "convert",
    "convertible",
    "count",
    "create_model",
    "deepmoe",
    "links_to_gate",
    "list_models",
    "model_options",
    "register_with_timm",
]

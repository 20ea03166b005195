"""Architectures, by name and from other libraries; conversion to mixtures of experts; counting."""

from moesaic.models.backbone import VectorNetwork
from moesaic.models.channel_graph import Link, conv_chain, links_to_gate
from moesaic.models.cifar_networks import CIFAR_NETWORKS, MobileNetV2, ResNet18, SmallCNN, cifar_mixture, cifar_network
from moesaic.models.convert import conversions_of, convert
from moesaic.models.convert_candidates import convertible
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.network import Answer, DeepMoE, deepmoe
from moesaic.models.model_cost import ModelCost, count_macs
from moesaic.models.registry import ModelSpec, create_model, list_models, model_options
from moesaic.models.resnet import ResNet
from moesaic.models.timm_registry import register_with_timm
from moesaic.models.vgg import VGG16
from moesaic.models.vgg_widths import WIDENINGS, Widening
from moesaic.models.wide_resnet.network import WideResNet, WideResNetPMoE

__all__ = [
    "CIFAR_NETWORKS",
    "VGG16",
    "WIDENINGS",
    "Answer",
    "DeepMoE",
    "EmbeddingNetwork",
    "Link",
    "MobileNetV2",
    "ModelCost",
    "ModelSpec",
    "ResNet",
    "ResNet18",
    "SmallCNN",
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
    "count_macs",
    "create_model",
    "deepmoe",
    "links_to_gate",
    "list_models",
    "model_options",
    "register_with_timm",
]

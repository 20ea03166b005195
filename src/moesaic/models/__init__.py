"""Architectures, a registry of them (timm's included), conversion to mixtures of experts, and model cost."""

from moesaic.models.channel_graph import ConvNode, build_channel_graph, nodes_to_gate
from moesaic.models.conversion_receipt import ConversionReceipt, conversion_receipt
from moesaic.models.convert import applied_conversions, convert
from moesaic.models.convert_candidates import convertible_layers
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.frozen import FrozenDeepMoE, freeze
from moesaic.models.deepmoe.network import DeepMoE, DeepMoEOutput, deepmoe
from moesaic.models.feature_maps import FeatureInfo, FeatureMaps
from moesaic.models.headed_network import HeadedNetwork
from moesaic.models.image_classifier import ImageClassifier, ImageNetwork
from moesaic.models.layer_groups import layer_groups
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.model_cost import ModelCost, count_macs
from moesaic.models.pretrained import PretrainedConfig, load_pretrained
from moesaic.models.registry import ModelSpec, create_model, list_models, model_options
from moesaic.models.resnet import ResNet, ResNet18
from moesaic.models.skip import applied_skips, skip
from moesaic.models.small_cnn import SmallCNN
from moesaic.models.timm_registry import register_with_timm
from moesaic.models.vgg import VGG16
from moesaic.models.vit import ViT, ViTMoE, ViTSkip
from moesaic.models.weight_decay import undecayed_parameters
from moesaic.models.wide_resnet.network import WideResNet, WideResNetPMoE

__all__ = [
    "VGG16",
    "ConvNode",
    "ConversionReceipt",
    "DeepMoE",
    "DeepMoEOutput",
    "EmbeddingNetwork",
    "FeatureInfo",
    "FeatureMaps",
    "FrozenDeepMoE",
    "HeadedNetwork",
    "ImageClassifier",
    "ImageNetwork",
    "MobileNetV2",
    "ModelCost",
    "ModelSpec",
    "PretrainedConfig",
    "ResNet",
    "ResNet18",
    "SmallCNN",
    "ViT",
    "ViTMoE",
    "ViTSkip",
    "WideResNet",
    "WideResNetPMoE",
    "applied_conversions",
    "applied_skips",
    "build_channel_graph",
    "conversion_receipt",
    "convert",
    "convertible_layers",
    "count_macs",
    "create_model",
    "deepmoe",
    "freeze",
    "layer_groups",
    "list_models",
    "load_pretrained",
    "model_options",
    "nodes_to_gate",
    "register_with_timm",
    "skip",
    "undecayed_parameters",
]

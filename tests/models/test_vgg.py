"""VGG-16: its sizes as published, in both forms, and of other widths."""

import pytest
import torch
from torch import nn

from moesaic.models.model_cost import count_macs
from moesaic.models.vgg import VGG16, VGG16_WIDENINGS, VGG16_WIDTHS
from moesaic.papers.wang2019.vgg_widths import WIDENINGS, conv_macs, conv_parameters


def made(**options) -> VGG16:
    with torch.device("meta"):
        return VGG16(**{"num_classes": 10, **options})


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_parameters_and_macs_for_imagenet_are_as_published_without_conv_biases():
    network = made(num_classes=1000, image_size=224)
    channels = sum(VGG16_WIDTHS)
    assert parameters(network) == 138_357_544 - channels + 2 * channels
    assert count_macs(network, (3, 224, 224)).macs == 15_346_630_656 + 25_088 * 4096 + 4096 * 4096 + 4096 * 1000


def test_the_head_for_small_images_is_one_linear_layer():
    network = made()
    assert parameters(network) == 14_710_464 + 2 * sum(VGG16_WIDTHS) + 5130
    assert [name for name, each in network.named_modules() if isinstance(each, nn.Linear)] == ["head"]
    assert count_macs(network, (3, 32, 32)).macs == 313_196_544 + 5120


@pytest.mark.parametrize("name", WIDENINGS)
@pytest.mark.parametrize("size", [32, 224])
def test_conv_parameters_and_conv_macs_equal_those_of_the_network(name, size):
    widening = WIDENINGS[name]
    network = made(widths=widening.widths, image_size=size)
    convs = [each for each in network.modules() if isinstance(each, nn.Conv2d)]
    assert sum(conv.weight.numel() for conv in convs) == widening.conv_parameters == conv_parameters(widening.widths)
    layers = count_macs(network, (3, size, size)).layers
    assert sum(layer.macs for layer in layers if layer.kind == "Conv2d") == conv_macs(widening.widths, size)


def test_both_forms_run_on_other_sizes_and_channels():
    small = VGG16(5, width=0.05, in_channels=1).eval()
    large = VGG16(5, width=0.02, image_size=160).eval()
    with torch.no_grad():
        assert small(torch.rand(2, 1, 48, 40)).shape == (2, 5)
        assert large(torch.rand(1, 3, 96, 128)).shape == (1, 5)


def test_every_convolution_is_followed_by_its_batchnorm_and_relu():
    layers = [(name, type(layer)) for name, layer in made().body.named_children() if "pool" not in name]
    expected = [
        (f"{name}{number}", kind)
        for number in range(1, 14)
        for name, kind in (("conv", nn.Conv2d), ("norm", nn.BatchNorm2d), ("relu", nn.ReLU))
    ]
    assert layers[:-1] == expected


def test_the_width_multiplier_scales_all_layers():
    convs = [each for each in made(widths=range(10, 23), width=1.5).modules() if isinstance(each, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [round(1.5 * channels) for channels in range(10, 23)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": [64] * 12}, "got 12 widths; give 13"),
        ({"widths": [64] * 12 + [0]}, r"widths\[12\]=0; it must be at least 1"),
        ({"image_size": 31}, "image_size=31; it pools 5 times, so image_size must be at least 32"),
        ({"width": -1.0}, "width=-1.0; it must be above 0"),
        ({"width": float("nan")}, "width=nan; it must be above 0"),
    ],
)
def test_invalid_arguments_are_refused_with_the_limit(options, message):
    with pytest.raises(ValueError, match=message):
        VGG16(2, **options)


def test_widenings_have_the_printed_widths():
    assert VGG16_WIDENINGS == {
        "w1_high": (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 2565),
        "w1_mid": (64, 64, 128, 128, 2990, 256, 256, 512, 512, 512, 512, 512, 512),
        "w4_low": (512, 512, 615, 615, 256, 256, 256, 512, 512, 512, 512, 512, 512),
        "w13_all": (128, 128, 256, 256, 405, 405, 405, 615, 615, 615, 615, 615, 615),
    }

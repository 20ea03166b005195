"""Residual networks: their sizes as published, and the one for CIFAR as it always was."""

import copy
import hashlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.models.model_cost import count_macs
from moesaic.models.resnet import ResNet, ResNet18, scale_width


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_initial_weights_of_resnet18_are_unchanged():
    # The experiments of Chen et al. rest on them. Names, shapes and signs: processors round values differently.
    torch.manual_seed(0)
    checksum = hashlib.sha256()
    for name, value in ResNet18(num_classes=10).state_dict().items():
        checksum.update(f"{name} {tuple(value.shape)}".encode())
        checksum.update((value > 0).numpy().tobytes())
    assert checksum.hexdigest() == "40e7f2085e076b247d5110ed1022d3a86df6ed016d1167b80eb7a950874e0cf8"


@pytest.mark.parametrize(
    ("depth", "expected", "gigamacs"),
    [(18, 11_689_512, 1.814), (34, 21_797_672, 3.664), (50, 25_557_032, 4.089)],
)
def test_parameters_and_macs_for_imagenet(depth, expected, gigamacs):
    with torch.device("meta"):
        network = ResNet(depth, 1000, image_size=224)
    assert parameters(network) == expected
    assert count_macs(network, (3, 224, 224)).macs / 1e9 == pytest.approx(gigamacs, abs=5e-4)


@pytest.mark.parametrize(
    ("depth", "expected", "megamacs"),
    [(18, 11_173_962, 555.4), (34, 21_282_122, 1159.4), (50, 23_520_842, 1297.8), (56, 853_018 + 2_752, 125.75)],
)
def test_parameters_and_macs_for_small_images(depth, expected, megamacs):
    # ResNet-56 in print pads its shortcuts; the two 1×1 convolutions with their BatchNorm have 2 752 parameters
    with torch.device("meta"):
        network = ResNet(depth, 10)
    assert parameters(network) == expected
    assert count_macs(network, (3, 32, 32)).macs / 1e6 == pytest.approx(megamacs, abs=0.1)


@pytest.mark.parametrize(("depth", "size", "side"), [(18, 32, 4), (56, 32, 8), (50, 64, 8), (34, 224, 7), (50, 224, 7)])
def test_size_of_the_last_map(depth, size, side):
    with torch.device("meta"):
        x = torch.zeros(1, 3, size, size)
        for layer in ResNet(depth, 2, image_size=size).eval().body[:-1]:
            x = layer(x)
    assert x.shape[2:] == (side, side)


def test_depth_is_the_number_of_layers_with_weights_without_shortcuts():
    for depth in (18, 34, 50, 56):
        with torch.device("meta"):
            modules = dict(ResNet(depth, 2).named_modules())
        layers = [name for name, each in modules.items() if isinstance(each, (nn.Conv2d, nn.Linear))]
        assert len([name for name in layers if "shortcut" not in name]) == depth


def test_a_block_adds_its_input_if_the_shape_is_unchanged():
    network = ResNet(18, 2, width=0.1).eval()
    block = network.body[3]
    nn.init.zeros_(block.second[1].weight)
    x = torch.rand(2, 6, 8, 8)
    assert torch.equal(block(x), x)


def test_width_multiplies_every_channel():
    with torch.device("meta"):
        whole, half = (ResNet(50, 10, width=width) for width in (1.0, 0.5))
    for name, layer in whole.named_modules():
        if isinstance(layer, nn.Conv2d):
            narrow = half.get_submodule(name)
            assert narrow.out_channels * 2 == layer.out_channels
            assert name == "body.0.0" or narrow.in_channels * 2 == layer.in_channels
    assert scale_width("ResNet", 64, 0.001) == 1


def test_images_of_one_channel_are_accepted():
    assert ResNet(56, 3, in_channels=1, width=0.25).eval()(torch.zeros(2, 1, 28, 28)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 20}, "depth=20 is unknown; use 18, 34, 50 or 56"),
        (
            {"depth": 56, "image_size": 224},
            "depth=56 is for small images, got image_size=224; use a side below 128",
        ),
        ({"depth": 18, "width": 0.0}, "width=0.0; it must be above 0"),
        ({"depth": 18, "in_channels": 0}, "in_channels=0; it must be at least 1"),
        ({"depth": 18, "num_classes": -1}, "ResNet: num_classes=-1"),
    ],
)
def test_invalid_arguments_are_refused_with_the_limit(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResNet(**{"num_classes": 2, **arguments})


NARROW = """
import torch
from moesaic.models.resnet import ResNet

torch.set_num_threads(2)
torch.manual_seed(0)
model = ResNet(18, 4, width=0.125).to(memory_format=torch.channels_last)
x = torch.randn(3, 3, 32, 32).contiguous(memory_format=torch.channels_last)
for _ in range(5):
    model(x).sum().backward()
"""


def test_narrow_networks_train_in_channels_last():
    """Without `_subsampled_conv` the process ends in most runs, so that it has to be another one."""
    run = subprocess.run([sys.executable, "-c", NARROW], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_narrow_shortcuts_compute_the_strided_convolution():
    model = ResNet(18, 4, width=0.125).double()
    narrow = {name: conv for name, conv in model.named_modules() if "_conv_forward" in vars(conv)}
    assert [conv.in_channels for conv in narrow.values()] == [8]  # 16 and 32 in the stages behind
    for conv in (*narrow.values(), *copy.deepcopy(narrow).values()):
        assert type(conv) is nn.Conv2d
        x = torch.randn(2, 8, 7, 6, dtype=torch.float64)
        torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight, stride=2), rtol=1e-12, atol=1e-12)
    assert not any("_conv_forward" in vars(conv) for conv in ResNet(18, 4).modules())


def test_a_width_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="ResNet: width='wide' is a str; it must be a number"):
        ResNet(18, 2, width="wide")

"""Which convolutions kernels replace, and that they never run where they do not fit; no GPU is needed to tell."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.models.wide_resnet import network, thin_conv
from moesaic.models.wide_resnet.network import WideResNetPMoE
from moesaic.models.wide_resnet.pooled_head import kernels_fit
from moesaic.models.wide_resnet.thin_conv import fits_thin, fits_thin_add, plus_thin_conv2d, thin_conv2d
from moesaic.ops import ConvWeights, PatchSpec
from moesaic.routing_record import Routing


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({}, True),
        ({"in_channels": 17}, False),
        ({"bias": True}, False),
        ({"stride": 2}, False),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
        ({"padding_mode": "circular"}, False),
        ({"kernel_size": 5}, False),
        ({"kernel_size": (3, 5)}, False),
        ({"padding": 0}, False),
        ({"padding": (1, 2)}, False),
    ],
)
def test_a_plain_convolution_of_at_most_16_channels_can_be_replaced(options: dict, fits: bool):
    plain = {"in_channels": 16, "out_channels": 32, "bias": False}
    assert fits_thin(nn.Conv2d(**{**plain, "kernel_size": 3, "padding": 1, **options})) == fits
    if "kernel_size" not in options:
        padding = {"padding": 1} if "padding" in options else {}
        assert fits_thin_add(nn.Conv2d(**{**plain, "kernel_size": 1, **options, **padding})) == fits


def test_a_sum_needs_a_convolution_of_one_pixel_and_the_other_one_of_nine():
    one, nine = nn.Conv2d(4, 16, 1, bias=False), nn.Conv2d(4, 16, 3, padding=1, bias=False)
    assert [(fits_thin(each), fits_thin_add(each)) for each in (one, nine)] == [(False, True), (True, False)]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were called; they compute what torch does."""
    names: list[str] = []

    def replace(module: str, name: str, compute) -> None:
        fake = ModuleType(module)
        setattr(fake, name, lambda *given: names.append(name) or compute(*given))
        monkeypatch.setitem(sys.modules, f"moesaic.models.wide_resnet.triton.{module}", fake)

    replace("thin_conv", "thin_conv", lambda x, weight: F.conv2d(x, weight, padding=1))
    replace("shortcut", "thin_add", lambda y, x, weight: y + F.conv2d(x, weight))
    monkeypatch.setattr(thin_conv, "kernels_available", lambda x: True)
    monkeypatch.setattr(network, "kernels_available", lambda x: True)
    return names


def maps(B=1, C=16, O=32, side=3, dtype=torch.bfloat16, last=torch.channels_last):
    x = torch.randn(B, C, 4, 5).to(dtype).contiguous(memory_format=last)
    return x, torch.randn(O, C, side, side).to(dtype), torch.randn(B, O, 4, 5).to(dtype).contiguous(memory_format=last)


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"C": 17}, False),
        ({"O": 24}, False),
        ({"O": 16}, True),
        ({"B": 0}, False),
        ({"last": torch.contiguous_format}, False),
    ],
)
def test_kernels_run_for_narrow_maps_in_channels_last(options: dict, runs: bool, called: list[str]):
    x, weight, _ = maps(**options)
    torch.testing.assert_close(thin_conv2d(x, weight), F.conv2d(x, weight, padding=1))
    x, weight, y = maps(side=1, **options)
    torch.testing.assert_close(plus_thin_conv2d(y, x, weight), y + F.conv2d(x, weight))
    assert called == (["thin_conv", "thin_add"] if runs else [])


def test_kernels_take_weights_that_are_wider_or_alone_in_channels_last(called: list[str]):
    x, weight, _ = maps()
    with torch.autocast("cpu", torch.bfloat16):
        assert thin_conv2d(x.float(), weight.float()).dtype == torch.bfloat16
    thin_conv2d(x.contiguous(), weight.contiguous(memory_format=torch.channels_last))
    assert called == ["thin_conv"] * 2
    with pytest.raises(RuntimeError, match="type"):  # torch's own refusal of two types
        thin_conv2d(x, weight.half())
    with pytest.raises(RuntimeError, match="channels"):
        thin_conv2d(x, torch.randn(32, 8, 3, 3).to(x))
    unbatched = x[0]
    torch.testing.assert_close(thin_conv2d(unbatched, weight), F.conv2d(unbatched, weight, padding=1))
    assert called == ["thin_conv"] * 2


def test_a_sum_takes_at_most_320_channels_of_the_same_type_and_shape(called: list[str]):
    for O in (320, 336):
        x, weight, y = maps(O=O, side=1)
        plus_thin_conv2d(y, x, weight)
        assert called == ["thin_add"]
    x, weight, y = maps(side=1)
    assert plus_thin_conv2d(y.float(), x, weight).dtype == torch.float32
    plus_thin_conv2d(y.contiguous(), x, weight)
    plus_thin_conv2d(y[:, :1], x, weight)  # broadcast
    assert called == ["thin_add"]


def test_a_module_with_hooks_is_called(called: list[str]):
    conv, x = nn.Conv2d(16, 32, 3, padding=1, bias=False).bfloat16(), maps()[0]
    expected = conv(x)
    torch.testing.assert_close(network._apply_module(conv, x), expected)
    assert called == ["thin_conv"]
    hooked: list[int] = []
    conv.register_forward_hook(lambda *_: hooked.append(1))
    network._apply_module(conv, x)
    assert (called, hooked) == (["thin_conv"], [1])
    shortcut, y = nn.Conv2d(16, 32, 1, bias=False).bfloat16(), maps()[2]
    network._add_shortcut(y, shortcut, x)
    assert called == ["thin_conv", "thin_add"]
    shortcut.register_forward_hook(lambda *_: hooked.append(2))
    network._add_shortcut(y, shortcut, x)
    assert (called, hooked) == (["thin_conv", "thin_add"], [1, 2])


def spec(**options) -> PatchSpec:
    return SimpleNamespace(combine="concat", gate_on="output", context="map", patch_size=4, **options)  # type: ignore[return-value]


def fits(x: torch.Tensor, patches: int, **options) -> bool:
    index = torch.zeros(len(x), 2, patches, dtype=torch.int64)
    routing = Routing("patch", torch.zeros(len(x), 4, 2), index, torch.ones(index.shape), "expert", grid=(2, 2))
    weights = ConvWeights(torch.zeros(2, 3, 4, 3, 3), None)
    made = spec()
    made.__dict__.update(options)
    return kernels_fit(x, routing, weights, made)


def test_the_pooled_head_runs_where_patches_with_their_halos_are_no_larger_than_the_map():
    x = torch.zeros(1, 4, 8, 8)
    assert [fits(x, patches) for patches in (4, 5)] == [True, False]
    assert [fits(torch.zeros(1, 4, 9, 8), patches, patch_size=6, gate_on="output") for patches in (2, 3)] == [
        True,
        False,
    ]
    # with a halo of one pixel on each side, a patch of 4 × 4 covers 6 × 6
    assert [fits(x, patches, gate_on="input") for patches in (1, 2)] == [True, False]
    assert fits(x, 2, gate_on="input", context="patch")
    assert not fits(x, 1, combine="sum")
    assert not fits(torch.zeros(1, 4, 1, 1), 1, patch_size=1)
    assert fits(torch.zeros(2, 4, 1, 1), 1, patch_size=1)


def test_the_end_of_a_network_is_pooled_unless_its_parts_are_changed_or_have_hooks():
    def can_pool(change=lambda body: None, **options) -> bool:
        model = WideResNetPMoE(10, 1, 2, image_size=16, **options)
        change(model.body)
        return network._can_pool(model.body)

    def hook(name: str):
        return lambda body: body.get_submodule(name).register_forward_hook(lambda *_: None)

    assert can_pool(residual=False)
    assert not can_pool(residual=True)
    assert not can_pool(lambda body: setattr(body, "norm", nn.Identity()), residual=False)
    assert not can_pool(lambda body: setattr(body, "relu", nn.GELU()), residual=False)
    assert not can_pool(lambda body: setattr(body, "mean", nn.Identity()), residual=False)
    for name in ("", "group3", "group3.0", "group3.0.moe", "group3.0.moe.experts", "norm", "relu", "mean"):
        assert not can_pool(hook(name), residual=False), name

"""Convolutions of few channels by kernels, against torch's in float64: outputs and both gradients."""

import pytest
import torch
from torch.nn import functional as F

import moesaic
from moesaic.models.wide_resnet import network as wide_resnet
from moesaic.models.wide_resnet import thin_conv
from moesaic.models.wide_resnet.thin_conv import fits_thin, plus_thin_conv2d, thin_conv2d
from moesaic.ops import tile_sizes

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    GPU_TYPES,
    ONE_TYPE,
    TYPES,
    assert_captured,
    assert_near,
    in_float64,
    maps_made,
    numbers,
    poison,
    run_anywhere,
    with_gradients,
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In float32 as well, and in the interpreter in float64."""
    run_anywhere(monkeypatch)
    poison(monkeypatch, "moesaic.models.wide_resnet.triton.thin_conv", "moesaic.ops.triton.launch")
    monkeypatch.setattr(thin_conv, "_DTYPES", (torch.bfloat16, torch.float16, torch.float32, torch.float64))


def make(B, C, O, H, W, device, dtype, last=True):
    x = numbers(B, C, H, W, seed=1, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = numbers(O, C, 3, 3, seed=2, device=device, dtype=dtype, scale=(9 * C) ** -0.5)
    if last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    grad = numbers(B, O, H, W, seed=3, device=device, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), grad


def convolved(x, weight):
    return F.conv2d(x, weight, padding=1)


CASES = [
    (1, 1, 16, 5, 3),
    (3, 3, 16, 7, 13),
    (2, 4, 48, 6, 8),
    (1, 8, 32, 4, 5),
    (1, 16, 160, 9, 11),
    (3, 16, 48, 8, 7),
    (2, 16, 176, 1, 9),
    (1, 3, 160, 16, 16),
]


@pytest.mark.parametrize("where", TYPES)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_as_torch(shape, where):
    device, dtype = where
    leaves = make(*shape, device, dtype)
    found = with_gradients(thin_conv2d, *leaves)
    assert found[0].dtype == dtype
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert_near(found, in_float64(convolved, *leaves), dtype)


@pytest.mark.parametrize("where", TYPES)
@pytest.mark.parametrize(
    ("forward", "weights"),
    [
        ((64, 9, 32, 4, 2), (32, 3, 64, 4, 2, 7)),
        ((256, 9, 160, 8, 2), (64, 3, 32, 4, 4, 64)),
        ((64, 1, 32, 4, 3), (64, 1, 16, 8, 2, 3)),
    ],
)  # fmt: skip
def test_other_tiles(forward, weights, where, monkeypatch):
    device, dtype = where
    chosen = {"thin_conv": forward, "thin_conv_weight": weights}
    from moesaic.models.wide_resnet.triton import thin_conv as kernels

    monkeypatch.setattr(kernels, "tile", lambda kernel, rule, *sizes: chosen.get(kernel, rule))
    leaves = make(2, 16, 160, 10, 9, device, dtype)
    assert_near(with_gradients(thin_conv2d, *leaves), in_float64(convolved, *leaves), dtype)


@pytest.mark.parametrize("where", ONE_TYPE)
def test_weights_as_torch_makes_them(where):
    """Not channels_last; their gradient has their layout."""
    leaves = make(1, 16, 32, 5, 6, *where, last=False)
    found = with_gradients(thin_conv2d, *leaves)
    assert found[2].is_contiguous()
    assert_near(found, in_float64(convolved, *leaves), where[1])


@pytest.mark.parametrize("where", ONE_TYPE)
def test_only_needed_gradients_are_computed(where):
    x, weight, grad = make(1, 3, 16, 4, 4, *where)
    y = thin_conv2d(x.detach(), weight)
    (alone,) = torch.autograd.grad(y, weight, grad)
    torch.testing.assert_close(alone, with_gradients(thin_conv2d, x, weight, grad)[2], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 17, 16, 4, 4), (1, 4, 20, 4, 4), (0, 4, 16, 4, 4)], ids=str)
def test_other_shapes_run_in_torch(shape):
    x, weight, _ = make(*shape, "cpu", torch.float32)
    torch.testing.assert_close(thin_conv2d(x, weight), convolved(x, weight), rtol=0, atol=0)


@pytest.mark.parametrize("where", ONE_TYPE)
def test_the_operator_passes_opcheck(where):
    from moesaic.models.wide_resnet.triton.thin_conv import thin_conv

    x, weight, _ = make(1, 4, 16, 3, 4, *where)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(thin_conv.operator, (x, weight), test_utils=checks)


@pytest.mark.parametrize("where", GPU_TYPES)
def test_compiled_and_captured(where):
    x, weight, grad = make(4, 16, 160, 32, 32, *where)
    compiled = torch.compile(thin_conv2d, fullgraph=True)
    expected = with_gradients(thin_conv2d, x, weight, grad)
    for mine, theirs in zip(with_gradients(compiled, x, weight, grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert_captured(lambda: with_gradients(thin_conv2d, x, weight, grad), x.data, rtol=0, atol=0)


@pytest.mark.parametrize("where", ONE_TYPE)
def test_compiled_between_others_nothing_is_copied(where):
    """Inductor allocates only the maps it needs, in channels_last."""
    device, dtype = where
    x, weight, _ = make(1, 16, 32, 4, 5, *where)
    after = numbers(96, 32, 3, 3, seed=4, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    beside = numbers(96, 16, 1, 1, seed=5, device=device, dtype=dtype)
    scale = numbers(16, 1, 1, seed=6, device=device, dtype=dtype)

    @torch.compile(fullgraph=True)
    def run(x, weight):
        first = F.relu(x * scale)
        y = F.relu(thin_conv2d(first, weight) * scale.mean())
        return plus_thin_conv2d(F.conv2d(y, after, padding=1), first, beside).square().mean()

    made = maps_made(lambda: torch.autograd.grad(run(x, weight), (x, weight)))
    assert len(made) == 2
    assert made[0]
    for maps in made:
        assert len(maps) == len({channels for _, channels, *_ in maps})
        for _, C, H, W, *strides in maps:
            assert C in (16, 32, 96)
            assert strides == [C * H * W, 1, W * C, C]


def test_tiles_to_time_are_ones_that_fit():
    assert all(len(each) == 5 and each[1] == 9 for each in tile_sizes.CANDIDATES["thin_conv"])
    assert all(len(each) == 6 and each[1] in (1, 3) for each in tile_sizes.CANDIDATES["thin_conv_weight"])


def test_a_convolution_that_fits():
    def conv(ins=16, outs=32, kernel=3, **options):
        return torch.nn.Conv2d(ins, outs, kernel, **{"padding": 1, "bias": False} | options)

    assert fits_thin(conv())
    assert fits_thin(conv(3))
    others = (conv(32), conv(bias=True), conv(stride=2), conv(padding=0), conv(kernel=1), conv(groups=2))
    assert not any(fits_thin(each) for each in (*others, conv(dilation=2), conv(padding_mode="circular")))


@pytest.mark.parametrize("where", ONE_TYPE)
@pytest.mark.parametrize("hooked", [False, True])
def test_in_a_network(where, hooked, monkeypatch):
    """The stem and the convolution after it take the kernels, unless they have hooks; scores are the same."""
    device, dtype = where
    calls = []
    monkeypatch.setattr(wide_resnet, "thin_conv2d", lambda *args: calls.append(args) or thin_conv2d(*args))
    torch.manual_seed(0)
    network = wide_resnet.WideResNet(10, 1, num_classes=2).to(device, dtype, memory_format=torch.channels_last)
    x = numbers(2, 3, 8, 8, seed=1, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    heard = []
    if hooked:
        for module in (network.body.stem, network.body.group1[0].conv1):
            module.register_forward_hook(lambda *_: heard.append(1))
    found = network(x)
    with moesaic.backend("torch"):
        torch.testing.assert_close(found, network(x), rtol=1e-3, atol=1e-3)
    assert (len(calls), len(heard)) == ((0, 4) if hooked else (2, 0))

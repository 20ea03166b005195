"""A map plus a 1×1 convolution of few channels by kernels, against torch's in float64: outputs and all gradients."""

import pytest
import torch
from torch.nn import functional as F

import moesaic
from moesaic.models.wide_resnet import network as wide_resnet
from moesaic.models.wide_resnet import thin_conv
from moesaic.models.wide_resnet.thin_conv import fits_thin_add, plus_thin_conv2d
from moesaic.ops import tile_sizes

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    GPU_TYPES,
    ONE_TYPE,
    TYPES,
    assert_captured,
    assert_near,
    in_float64,
    numbers,
    poison,
    run_anywhere,
    with_gradients,
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In float32 as well, and in the interpreter in float64."""
    run_anywhere(monkeypatch)
    poison(monkeypatch, "moesaic.models.wide_resnet.triton.shortcut", "moesaic.ops.triton.launch")
    monkeypatch.setattr(thin_conv, "_DTYPES", (torch.bfloat16, torch.float16, torch.float32, torch.float64))


@pytest.fixture
def kernel_calls(monkeypatch):
    """Shapes of maps that the kernels added."""
    from moesaic.models.wide_resnet.triton import shortcut as triton_shortcut

    calls, add = [], triton_shortcut.thin_add
    monkeypatch.setattr(triton_shortcut, "thin_add", lambda *args: calls.append(args) or add(*args))
    return calls


def make(B, C, O, H, W, device, dtype):
    def maps(channels, seed):
        made = numbers(B, channels, H, W, seed=seed, device=device, dtype=dtype)
        return made.contiguous(memory_format=torch.channels_last)

    y, x, grad = maps(O, 1), maps(C, 2), maps(O, 3)
    weight = numbers(O, C, 1, 1, seed=4, device=device, dtype=dtype, scale=C**-0.5)
    return y.requires_grad_(), x.requires_grad_(), weight.requires_grad_(), grad


def added(y, x, weight):
    return y + F.conv2d(x, weight)


CASES = [
    (1, 1, 16, 5, 3),
    (3, 3, 48, 7, 13),
    (2, 8, 32, 6, 8),
    (1, 16, 160, 9, 11),
    (2, 16, 176, 1, 9),
    (1, 12, 320, 4, 5),
    (3, 16, 160, 16, 16),
]


@pytest.mark.parametrize("where", TYPES)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_as_torch(shape, where, kernel_calls):
    dtype = where[1]
    leaves = make(*shape, *where)
    found = with_gradients(plus_thin_conv2d, *leaves)
    assert len(kernel_calls) == 1
    assert all(each.dtype == dtype for each in found)
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in found[:3])
    assert_near(found, in_float64(added, *leaves), dtype)


@pytest.mark.parametrize("where", TYPES)
@pytest.mark.parametrize(
    ("forward", "back"), [((128, 160, 8), (64, 4, 3, 528)), ((64, 32, 4), (128, 8, 2, 3)), ((32, 64, 4), (32, 4, 4, 1))]
)
def test_other_tiles(forward, back, where, monkeypatch):
    from moesaic.models.wide_resnet.triton import shortcut as triton_shortcut

    chosen = {"thin_add": forward, "thin_add_backward": back}
    monkeypatch.setattr(triton_shortcut, "tile", lambda kernel, rule, *sizes: chosen.get(kernel, rule))
    leaves = make(2, 16, 160, 10, 9, *where)
    assert_near(with_gradients(plus_thin_conv2d, *leaves), in_float64(added, *leaves), where[1])


@pytest.mark.parametrize("where", ONE_TYPE)
def test_the_gradient_of_the_sum_is_passed_on(where):
    """That of the map which is added to is not copied."""
    from moesaic.models.wide_resnet.triton import shortcut as triton_shortcut

    *_, grad = make(1, 4, 16, 3, 4, *where)
    context = type("Context", (), {"needs_input_grad": (True, False, False)})
    assert triton_shortcut._backward(context, grad)[0] is grad


@pytest.mark.parametrize("where", ONE_TYPE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_gradients_of_weights_have_their_layout(layout, where):
    y, x, weight, grad = make(2, 4, 16, 3, 5, *where)
    if layout == "channels_last":
        weight = weight.detach().to(memory_format=torch.channels_last)
    if layout == "transposed":
        weight = weight.detach().transpose(0, 1).contiguous().transpose(0, 1)
    found = with_gradients(plus_thin_conv2d, y, x, weight.detach().requires_grad_(), grad)
    assert found[3].stride() == ((4, 1, 1, 1) if layout == "transposed" else weight.stride())
    assert_near(found, in_float64(added, y, x, weight, grad), where[1])


@pytest.mark.parametrize("where", ONE_TYPE)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_needed_gradients_are_computed(which, where):
    *leaves, grad = make(1, 3, 16, 4, 4, *where)
    expected = with_gradients(plus_thin_conv2d, *leaves, grad)[1 + which]
    alone = [leaf.detach().requires_grad_(i == which) for i, leaf in enumerate(leaves)]
    (found,) = torch.autograd.grad(plus_thin_conv2d(*alone), alone[which], grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "shape", [(1, 17, 16, 4, 4), (1, 4, 20, 4, 4), (1, 4, 336, 4, 4), (0, 4, 16, 4, 4)], ids=str
)  # fmt: skip
def test_other_shapes_run_in_torch(shape, kernel_calls):
    y, x, weight, _ = make(*shape, "cpu", torch.float32)
    torch.testing.assert_close(plus_thin_conv2d(y, x, weight), added(y, x, weight), rtol=0, atol=0)
    assert not kernel_calls


def test_other_layouts_and_dtypes_run_in_torch(kernel_calls):
    y, x, weight, _ = make(2, 4, 16, 4, 4, "cpu", torch.float32)
    for other in (y.contiguous(), y.double(), y[:1, :, :1, :1]):
        torch.testing.assert_close(plus_thin_conv2d(other, x, weight), added(other, x, weight), rtol=0, atol=0)
    assert not kernel_calls


@pytest.mark.parametrize("where", ONE_TYPE)
def test_the_operator_passes_opcheck(where):
    from moesaic.models.wide_resnet.triton.shortcut import thin_add

    *leaves, _ = make(1, 4, 16, 3, 4, *where)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(thin_add.operator, leaves, test_utils=checks)


@pytest.mark.parametrize("where", GPU_TYPES)
def test_compiled_and_captured(where):
    leaves = make(4, 16, 160, 32, 32, *where)
    torch.compiler.reset()
    compiled = torch.compile(plus_thin_conv2d, fullgraph=True)
    expected = with_gradients(plus_thin_conv2d, *leaves)
    for mine, theirs in zip(with_gradients(compiled, *leaves), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert_captured(lambda: with_gradients(plus_thin_conv2d, *leaves), leaves[1].data, rtol=0, atol=0)


def test_tiles_to_time_are_ones_that_fit():
    assert all(len(each) == 3 for each in tile_sizes.CANDIDATES["thin_add"])
    assert all(len(each) == 4 for each in tile_sizes.CANDIDATES["thin_add_backward"])


def test_a_convolution_that_fits():
    def conv(ins=16, outs=32, kernel=1, **options):
        return torch.nn.Conv2d(ins, outs, kernel, **{"bias": False} | options)

    assert fits_thin_add(conv())
    others = (conv(32), conv(bias=True), conv(stride=2), conv(padding=1), conv(kernel=3, padding=1), conv(groups=2))
    assert not any(fits_thin_add(each) for each in others)


@pytest.mark.parametrize("where", ONE_TYPE)
@pytest.mark.parametrize("hooked", [False, True])
def test_in_a_network(where, hooked, kernel_calls):
    """The first group's shortcut takes the kernel, unless it has hooks; scores and gradients are the same."""
    device, dtype = where
    torch.manual_seed(0)
    network = wide_resnet.WideResNet(10, 2, num_classes=2).to(device, dtype, memory_format=torch.channels_last)
    x = numbers(2, 3, 8, 8, seed=1, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    heard = []
    if hooked:
        network.body.group1[0].shortcut.register_forward_hook(lambda *_: heard.append(1))

    def step():
        scores = network(x)
        return scores, *torch.autograd.grad(scores.square().sum(), list(network.parameters()))

    found = step()
    with moesaic.backend("torch"):
        for mine, theirs in zip(found, step(), strict=True):
            assert (mine - theirs).norm() < 1e-2 * theirs.norm() + 1e-3
    assert (len(kernel_calls), len(heard)) == ((0, 2) if hooked else (1, 0))

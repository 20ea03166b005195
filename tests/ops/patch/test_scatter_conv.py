import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import vmap

import moesaic
from moesaic.ops.dispatch import PatchSpec
from moesaic.ops.patch import scatter_conv
from moesaic.ops.patch.gather import RoutedPixels
from moesaic.ops.patch.scatter_conv import bn_relu_minus_background, scatter_conv_with_background
from moesaic.ops.weight_layout import to_taps_first

E, O, C, L = 2, 3, 4, 2


def weights(kernel, layout, seed=0):
    weight = torch.randn(E * O, C, kernel, kernel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if layout == "channels last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    weight = weight.view(E, O, C, kernel, kernel)
    return (to_taps_first(weight) if layout == "taps first" else weight).requires_grad_()


def scatter_index(kernel, on, context, p=2, batch=1):
    x = torch.zeros(batch, C, 3 * p, 2 * p)
    routing = moesaic.ExpertChoice(C, E, L, p).choose(torch.randn(batch, 6, E), grid=(3, 2))
    pixels = RoutedPixels.from_routing(routing, x, PatchSpec(p, "output", context, "concat"))
    return (pixels.scatter_to_pixels if on == "pixels" else pixels.scatter_to_map)(kernel, background=True)


def values(index):
    rows = index.row_Rk.shape[0] // E
    return torch.randn(E, rows, C, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("p", [1, 2])  # few pixels, for which products are transposed, and many
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "taps first"])
@pytest.mark.parametrize("context", ["map", "patch"])
@pytest.mark.parametrize("on", ["pixels", "map"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("batch", [0, 1])
def test_sums_and_gradients_equal_those_of_torch_operations(batch, kernel, on, context, layout, p, monkeypatch):
    torch.manual_seed(0)
    index, weight = scatter_index(kernel, on, context, p, batch), weights(kernel, layout)
    value = values(index)

    def outputs_and_gradients():
        results = scatter_conv_with_background(value, weight, index)
        upstream = [torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)) for y in results]
        return *results, *torch.autograd.grad(results, (value, weight), upstream)

    found = outputs_and_gradients()
    monkeypatch.setattr(scatter_conv, "is_eager_cpu", lambda *tensors: False)
    for ours, plain in zip(found, outputs_and_gradients(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives_pass_gradcheck():
    torch.manual_seed(0)
    index, weight = scatter_index(3, "pixels", "map", p=1), weights(3, "channels last")
    value = values(index)
    assert gradcheck(lambda v, w: scatter_conv_with_background(v, w, index), (value, weight), fast_mode=True)
    assert gradgradcheck(lambda v, w: scatter_conv_with_background(v, w, index), (value, weight), fast_mode=True)


@pytest.mark.parametrize("layout", ["channels last", "taps first"])
def test_weight_gradients_have_the_layout_of_the_weights(layout):
    index, weight = scatter_index(3, "pixels", "map", p=1), weights(3, layout)
    value = values(index)
    assert value.shape[1] < C  # few enough to transpose the products
    (gradient,) = torch.autograd.grad(scatter_conv_with_background(value, weight, index)[0].sum(), weight)
    assert gradient.stride() == weight.stride()


@pytest.mark.parametrize("trained", ["values", "weight"])
def test_gradients_that_are_not_required_are_not_computed(trained, monkeypatch):
    index, weight = scatter_index(3, "map", "map"), weights(3, "contiguous")
    value = values(index)
    weight.requires_grad_(trained == "weight")
    value.requires_grad_(trained == "values")
    y = scatter_conv_with_background(value, weight, index)[0]
    products: list[object] = []
    bmm = scatter_conv.expert_bmm
    monkeypatch.setattr(scatter_conv, "expert_bmm", lambda *given: products.append(1) or bmm(*given))
    y.sum().backward()
    assert len(products) == 1
    assert (weight.grad is None) == (trained == "values")
    assert (value.grad is None) == (trained == "weight")


def test_the_gradient_at_zero_is_that_of_relu():
    # where scale · value + shift is zero, and where shift is
    value = torch.tensor([[[0.0, -1.0, 2.0, 0.0], [1.0, -1.0, -2.0, 3.0]]], dtype=torch.float64, requires_grad=True)
    scale = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    shift = torch.tensor([[0.0, 1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    upstream = torch.arange(1.0, 13.0, dtype=torch.float64).view(1, 3, 4)
    ours = torch.autograd.grad(bn_relu_minus_background(value, scale, shift), (value, scale, shift), upstream)
    plain = torch.autograd.grad(
        scatter_conv._bn_relu_minus_background_autograd(value, scale, shift), (value, scale, shift), upstream
    )
    for our, its in zip(ours, plain, strict=True):
        torch.testing.assert_close(our, its)


def test_deviations_have_second_derivatives():
    torch.manual_seed(0)
    given = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (2, 4), (2, 4)))
    assert gradcheck(bn_relu_minus_background, given, fast_mode=True)
    assert gradgradcheck(bn_relu_minus_background, given, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # which torch's forward mode uses
def test_vmap_and_forward_mode_work():
    index, weight = scatter_index(3, "pixels", "map"), weights(3, "contiguous").detach()
    value = values(index).detach()
    several = torch.stack([weight, 2 * weight])
    together = vmap(lambda w: scatter_conv_with_background(value, w, index)[0])(several)
    torch.testing.assert_close(together[1], scatter_conv_with_background(value, several[1], index)[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        tangent = forward_ad.unpack_dual(scatter_conv_with_background(dual, weight, index)[0]).tangent
    torch.testing.assert_close(tangent, scatter_conv_with_background(torch.ones_like(value), weight, index)[0])


def test_a_default_device_does_not_reach_the_gradients():
    torch.manual_seed(0)
    layer = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=2, patch_size=2, kernel_size=3, context="patch")
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    with torch.device("meta"):
        found = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    torch.testing.assert_close(found, expected)

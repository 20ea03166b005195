import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import vmap

import moesaic
from moesaic.ops.dispatch import PatchSpec
from moesaic.ops.patch import scatter_conv
from moesaic.ops.patch.gather import Pixels
from moesaic.ops.patch.scatter_conv import deviations, land_with_rest
from moesaic.ops.weight_layout import put_taps_first

E, O, C, L = 2, 3, 4, 2


def weights(kernel, lie, seed=0):
    weight = torch.randn(E * O, C, kernel, kernel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if lie == "channels last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    weight = weight.view(E, O, C, kernel, kernel)
    return (put_taps_first(weight) if lie == "taps first" else weight).requires_grad_()


def landing(kernel, on, context, p=2, batch=1):
    x = torch.zeros(batch, C, 3 * p, 2 * p)
    routing = moesaic.ExpertChoice(C, E, L, p).choose(torch.randn(batch, 6, E), grid=(3, 2))
    pixels = Pixels.chosen(routing, x, PatchSpec(p, "output", context, "concat"))
    return (pixels.landing_on_pixels if on == "pixels" else pixels.landing_on_map)(kernel, rest=True)


def values(kernel_landing):
    rows = kernel_landing.at_Rk.shape[0] // E
    return torch.randn(E, rows, C, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("p", [1, 2])  # few pixels, for which weights are taken as they lie, and many
@pytest.mark.parametrize("lie", ["contiguous", "channels last", "taps first"])
@pytest.mark.parametrize("context", ["map", "patch"])
@pytest.mark.parametrize("on", ["pixels", "map"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("batch", [0, 1])
def test_sums_and_their_gradients_are_those_of_plain_operations(batch, kernel, on, context, lie, p, monkeypatch):
    torch.manual_seed(0)
    at, weight = landing(kernel, on, context, p, batch), weights(kernel, lie)
    value = values(at)

    def all_of():
        results = land_with_rest(value, weight, at)
        upstream = [torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)) for y in results]
        return *results, *torch.autograd.grad(results, (value, weight), upstream)

    found = all_of()
    monkeypatch.setattr(scatter_conv, "by_hand", lambda *tensors: False)
    for ours, plain in zip(found, all_of(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_gradients_and_theirs_are_right_numerically():
    torch.manual_seed(0)
    at, weight = landing(3, "pixels", "map", p=1), weights(3, "channels last")
    value = values(at)
    assert gradcheck(lambda v, w: land_with_rest(v, w, at), (value, weight), fast_mode=True)
    assert gradgradcheck(lambda v, w: land_with_rest(v, w, at), (value, weight), fast_mode=True)


@pytest.mark.parametrize("lie", ["channels last", "taps first"])
def test_gradients_of_weights_lie_as_the_weights_do(lie):
    at, weight = landing(3, "pixels", "map", p=1), weights(3, lie)
    value = values(at)
    assert value.shape[1] < C  # few enough to take weights as they lie
    (gradient,) = torch.autograd.grad(land_with_rest(value, weight, at)[0].sum(), weight)
    assert gradient.stride() == weight.stride()


@pytest.mark.parametrize("learns", ["values", "weight"])
def test_a_gradient_that_nobody_needs_is_not_computed(learns, monkeypatch):
    at, weight = landing(3, "map", "map"), weights(3, "contiguous")
    value = values(at)
    weight.requires_grad_(learns == "weight")
    value.requires_grad_(learns == "values")
    y = land_with_rest(value, weight, at)[0]
    products: list[object] = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *given: products.append(1) or bmm(*given))
    y.sum().backward()
    assert len(products) == 1
    assert (weight.grad is None) == (learns == "values")
    assert (value.grad is None) == (learns == "weight")


def test_values_that_rest_at_zero_get_the_gradient_of_relu():
    # where scale · value + shift is zero, and where shift is
    value = torch.tensor([[[0.0, -1.0, 2.0, 0.0], [1.0, -1.0, -2.0, 3.0]]], dtype=torch.float64, requires_grad=True)
    scale = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    shift = torch.tensor([[0.0, 1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    upstream = torch.arange(1.0, 13.0, dtype=torch.float64).view(1, 3, 4)
    ours = torch.autograd.grad(deviations(value, scale, shift), (value, scale, shift), upstream)
    plain = torch.autograd.grad(scatter_conv._deviations_plain(value, scale, shift), (value, scale, shift), upstream)
    for our, its in zip(ours, plain, strict=True):
        torch.testing.assert_close(our, its)


def test_deviations_have_second_derivatives():
    torch.manual_seed(0)
    given = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (2, 4), (2, 4)))
    assert gradcheck(deviations, given, fast_mode=True)
    assert gradgradcheck(deviations, given, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # which torch's forward mode uses
def test_transforms_see_operations_that_they_know():
    at, weight = landing(3, "pixels", "map"), weights(3, "contiguous").detach()
    value = values(at).detach()
    several = torch.stack([weight, 2 * weight])
    together = vmap(lambda w: land_with_rest(value, w, at)[0])(several)
    torch.testing.assert_close(together[1], land_with_rest(value, several[1], at)[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        tangent = forward_ad.unpack_dual(land_with_rest(dual, weight, at)[0]).tangent
    torch.testing.assert_close(tangent, land_with_rest(torch.ones_like(value), weight, at)[0])

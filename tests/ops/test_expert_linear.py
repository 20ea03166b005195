"""Linear maps of experts: the values of a loop, and gradients that need no copy."""

import pytest
import torch

from moesaic.experts import MLPExperts
from moesaic.layers import PatchMoE, TokenMoE
from moesaic.ops.expert_linear import expert_linear
from moesaic.routing import TokenChoice

ENDS = [torch.tensor(ends) for ends in ([2, 2, 7], [0, 7, 7], [7, 7, 7])]


def loop(values, weight, ends=None):
    """One matmul per expert."""
    if ends is None:
        return torch.stack([each @ matrix.T for each, matrix in zip(values, weight, strict=True)])
    starts = [0, *ends.tolist()]
    return torch.cat([values[a:b] @ matrix.T for a, b, matrix in zip(starts, starts[1:], weight, strict=False)])


@pytest.mark.parametrize("ends", [None, *ENDS], ids=str)
def test_outputs_and_gradients_are_those_of_a_loop(ends):
    shape = (3, 4, 5) if ends is None else (7, 5)
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    found, expected = expert_linear(values, weight, ends), loop(values, weight, ends)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (values, weight), cotangent),
        torch.autograd.grad(expected, (values, weight), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(lambda *inputs: expert_linear(*inputs, ends), (values, weight))


@pytest.mark.parametrize("router", [None, TokenChoice(6, 3)], ids=["expert choice", "token choice"])
def test_gradients_of_experts_have_the_layout_of_their_weights(router):
    layer = TokenMoE(6, experts=MLPExperts(3, 6, 4, 6), capacity=None if router else 1.0, router=router)
    weights = (layer.experts.weight_in, layer.experts.weight_out)
    grads = torch.autograd.grad(layer(torch.randn(2, 9, 6)).square().sum(), weights)
    assert [grad.stride() for grad in grads] == [weight.stride() for weight in weights]


def test_a_gradient_of_1x1_convolutions_has_the_layout_of_their_weights():
    layer = PatchMoE(4, 6, experts=2, patches_per_expert=2, patch_size=2)
    (grad,) = torch.autograd.grad(layer(torch.randn(2, 4, 4, 4)).square().sum(), layer.experts.weight)
    assert grad.stride() == layer.experts.weight.stride()  # DistributedDataParallel warns of any other

import pytest
import torch

import moesaic
from moesaic.experts import LinearExperts, MLPExperts, PatchNetExperts, SampleExperts
from moesaic.routing import SampleRouter


def test_linear_experts_are_initialised_like_nn_linear():
    experts = LinearExperts(4, 16, 8)
    for tensor in (experts.weight, experts.bias):
        assert 0.8 * 16**-0.5 < tensor.abs().max() <= 16**-0.5


def test_patch_nets_are_initialised_with_init_std_reproducibly():
    experts = PatchNetExperts(8, 50, 16, bias=True, init_std=0.1)
    experts.reset_parameters(torch.Generator().manual_seed(0))
    assert experts.weight.std().item() == pytest.approx(0.1, rel=0.05)
    first = experts.weight.clone()
    experts.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(experts.weight, first)


def test_repr_has_the_sizes_and_whether_there_is_a_bias():
    experts = PatchNetExperts(3, 5, 8, outputs=2)
    assert experts.extra_repr() == "3 × (5 → 8 → 2), activation='cubic', bias=False"
    experts = PatchNetExperts(3, 5, 8, outputs=2, bias=True)
    assert experts.extra_repr().endswith("bias=True")


def test_two_outputs_use_half_of_the_filters_each():
    experts = PatchNetExperts(1, 2, 4, outputs=2, activation="identity", bias=True)
    with torch.no_grad():
        experts.weight.copy_(torch.tensor([[[1.0, 0], [2, 0], [0, 10], [0, 20]]]))
        experts.bias.copy_(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    layer = moesaic.SampleMoE(SampleRouter(2, 1), experts)
    y = layer(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]))  # the patches add up to (2, 2)
    torch.testing.assert_close(y, torch.tensor([[2 * 3 + 3 * 0.3, 2 * 30 + 3 * 0.7]]))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast_applies_to_experts_and_not_to_routing(backend):
    layer = moesaic.SampleMoE(SampleRouter(8, 4), PatchNetExperts(4, 8, 4, init_std=1.0), noise=None)
    with torch.no_grad():
        layer.router.weight.normal_()
    x = torch.randn(20, 3, 8)
    plain = layer.route(x)
    with moesaic.backend(backend):
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16), moesaic.record_routing(layer) as low:
            y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(low[""].scores, plain.scores)
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.02 * expected.abs().max().item())
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


class Doubled(SampleExperts):
    """Custom experts: two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__(3, "tanh")
        self.weight = torch.nn.Parameter(torch.randn(3, 4, 4))

    def expert_forward(self, values, samples):
        return samples.linear(self._activate(samples.linear(values, self.weight)), self.weight)


def test_custom_experts_implement_expert_forward_alone():
    layer, x = moesaic.SampleMoE(torch.nn.Linear(4, 3), Doubled(), top_k=2, noise=None), torch.randn(9, 4)
    with moesaic.backend("reference"):
        expected = layer(x)
    torch.testing.assert_close(layer(x), expected)
    assert expected.abs().sum() > 0
    with pytest.raises(TypeError, match=r"SampleExperts does not implement expert_forward\(values, samples\)"):
        moesaic.SampleMoE(torch.nn.Linear(4, 3), SampleExperts(3, "tanh"))(x)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: PatchNetExperts(2, 3, 5, outputs=2), "filters=5 cannot be shared by outputs=2; use filters=4 or 6"),
        (lambda: PatchNetExperts(2, 3, 1, outputs=2), "filters=1 cannot be shared by outputs=2; use filters=2"),
        (lambda: PatchNetExperts(2, 0, 4), "PatchNetExperts: dim=0; it must be at least 1"),
        (lambda: PatchNetExperts(0, 3, 4), "PatchNetExperts: experts=0; it must be at least 1"),
        (lambda: PatchNetExperts(2, 3, 4, init_std=-1), "init_std=-1; it must be 0 or more"),
        (lambda: PatchNetExperts(2, 3, 4, activation="cube"), "activation='cube' is unknown; use 'identity', 'cubic'"),
        (lambda: LinearExperts(2, 3, 0), "LinearExperts: out_features=0; it must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(build, says):
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize(
    ("experts", "x", "error", "says"),
    [
        (PatchNetExperts(2, 3, 4), torch.zeros(5, 3), ValueError, r"takes samples \(B, P, 3\), got \(5, 3\)"),
        (LinearExperts(2, 3, 4), torch.zeros(5, 2), ValueError, r"takes samples \(B, 3\), got \(5, 2\)"),
        (MLPExperts(2, 3, 4, 2), torch.zeros(5, 2), ValueError, r"takes samples \(B, …, 3\), got \(5, 2\)"),
        (MLPExperts(2, 3, 4, 2, norm=True), torch.zeros(5, 3), ValueError, "norm=True normalises masked maps"),
        (LinearExperts(2, 3, 4), torch.zeros(5, 3).double(), TypeError, "samples are torch.float64, the weights are"),
    ],
)
def test_samples_of_wrong_shape_or_dtype_are_refused(experts, x, error, says):
    layer = moesaic.SampleMoE(torch.nn.Identity(), experts)
    routing = layer.choose(torch.zeros(5, 2))
    with pytest.raises(error, match=says):
        layer.experts(x, routing)

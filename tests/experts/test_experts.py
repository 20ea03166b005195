import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moesaic
from moesaic.experts import ConvExperts, MLPExperts


def test_convolutions_are_initialised_like_nn_conv2d():
    torch.manual_seed(0)
    ours, theirs = ConvExperts(4, 64, 32, 3), nn.Conv2d(64, 32, 3)
    bound = (64 * 9) ** -0.5
    for tensor in (ours.weight, ours.bias, theirs.weight, theirs.bias):
        assert tensor.abs().max() <= bound
        assert tensor.abs().max() > 0.9 * bound


def test_mlp_layers_are_initialised_like_nn_linear():
    experts = MLPExperts(4, 16, 64, 8)
    assert experts.weight_in.abs().max() <= 16**-0.5
    assert experts.weight_out.abs().max() <= 64**-0.5
    assert experts.weight_in.abs().max() > 0.9 * 16**-0.5


@pytest.mark.parametrize(("name", "function"), [("gelu", F.gelu), ("relu", F.relu), ("silu", F.silu)])
def test_each_activation_equals_its_function(name, function):
    layer = moesaic.PatchMoE(
        3, 2, experts=MLPExperts(1, 3, 5, 2, activation=name, bias=False), patches_per_expert=4, gate="one", bias=False
    )
    x = torch.randn(1, 3, 2, 2)
    weight_in, weight_out = layer.experts.weight_in[0], layer.experts.weight_out[0]
    expected = torch.einsum("oj,jbhw->bohw", weight_out, function(torch.einsum("jc,bchw->jbhw", weight_in, x)))
    torch.testing.assert_close(layer(x), expected)


def test_expert_norm_resets_parameters_and_statistics():
    norm = ConvExperts(2, 3, 4, norm=True, device="meta").norm.to_empty(device="cpu")
    norm.reset_parameters()
    assert [t.unique().item() for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)] == [1, 0, 0, 1]


def test_expert_norm_has_the_default_momentum_and_eps_of_torch():
    ours, theirs = ConvExperts(2, 3, 4, norm=True).norm, nn.BatchNorm2d(3)
    assert (ours.momentum, ours.eps) == (theirs.momentum, theirs.eps)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_momentum_and_eps_act_as_in_nn_batchnorm2d(backend):
    layer = moesaic.PatchMoE(3, 4, experts=1, patches_per_expert=4, patch_size=2, expert_norm=True, gate="one")
    layer.experts.norm.momentum, layer.experts.norm.eps = 0.01, 1e-3
    norm = nn.BatchNorm2d(3, momentum=0.01, eps=1e-3)
    conv = nn.Conv2d(3, 4, 1)
    with torch.no_grad():
        conv.weight.copy_(layer.experts.weight[0])
        conv.bias.copy_(layer.experts.bias[0])
    for _ in range(3):
        x = torch.randn(5, 3, 4, 4) * 3 + 1
        with moesaic.backend(backend):
            y = layer(x)
        torch.testing.assert_close(y, conv(norm(x).relu()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.experts.norm.running_mean[0], norm.running_mean)
    torch.testing.assert_close(layer.experts.norm.running_var[0], norm.running_var)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: ConvExperts(2, 3, 4, kernel_size=2), "kernel_size=2 has no centre pixel; use an odd size, 1 or 3"),
        (lambda: ConvExperts(2, 0, 4), "ConvExperts: in_channels=0; it must be at least 1"),
        (lambda: MLPExperts(2, 3, 0, 4), "MLPExperts: hidden_channels=0; it must be at least 1"),
        (
            lambda: MLPExperts(2, 3, 5, 4, activation="tanh"),
            r"activation='tanh' is unknown; .* or 'quick_gelu' \(did you mean 'gelu_tanh'\?\)",
        ),
    ],
)
def test_invalid_arguments_are_refused(build, says):
    with pytest.raises(ValueError, match=says):
        build()

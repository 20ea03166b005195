"""find_mlps: MLPs of every family are found as units, and what computes something else is refused with its reason."""

import copy

import pytest
import torch
from mlp_networks import FunctionalMLP, build
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from moesaic import SampleMoE
from moesaic.models.mlp_candidates import find_mlps, why_not_mlp

UNITS = {
    "vit": ("blocks.1.mlp", 2, (12, 48, 12)),
    "deit": ("blocks.0.mlp", 2, (12, 48, 12)),
    "swin": ("layers.1.blocks.0.mlp", 2, (16, 64, 16)),
    "beit": ("blocks.1.mlp", 2, (12, 48, 12)),
    "mixer": ("blocks.1.mlp_tokens", 4, (16, 6, 16)),
    "convnext": ("stages.2.blocks.0.mlp", 4, (12, 48, 12)),
    "convnext of convolutions": ("stages.2.blocks.0.mlp", 4, (12, 48, 12)),
    "pairs": ("layer.1.intermediate", 2, (12, 24, 12)),
    "sequential": ("mlp", 3, (12, 24, 12)),
}


@pytest.mark.parametrize("family", UNITS)
def test_the_mlps_of_a_family_are_found_with_their_sizes(timm, family):
    name, count, sizes = UNITS[family]
    model = build(timm, family)
    found = find_mlps(model)
    unit = found[name]
    assert len(found) == count
    assert (unit.in_dim, unit.hidden_dim, unit.out_dim) == sizes
    assert unit.channels_first == (family == "convnext of convolutions")
    assert model.get_submodule(unit.fc1_name) is unit.fc1
    assert model.get_submodule(unit.fc2_name) is unit.fc2
    assert unit.parameters == sum(map(torch.numel, (*unit.fc1.parameters(), *unit.fc2.parameters())))


def test_dropouts_are_told_apart_by_their_place():
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(8, 4), nn.Dropout(0.1)
    unit = find_mlps(nn.Sequential(nn.Sequential(*layers)))["0"]
    assert unit.hidden_dropout == pytest.approx(0.6)
    assert unit.dropout == pytest.approx(0.1)


def test_a_pair_of_modules_is_a_unit_with_its_residual(timm):
    unit = find_mlps(build(timm, "pairs"))["layer.0.intermediate"]
    assert unit.output_name == "layer.0.output"
    assert unit.adds_residual
    assert unit.dropout == 0.25


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (QuickGELU(), "quick_gelu"),
        (nn.SiLU(inplace=True), "silu"),
        (nn.ReLU(), "relu"),
    ],
)
def test_activations_are_found_by_what_they_compute(module, name):
    assert find_mlps(nn.Sequential(nn.Sequential(nn.Linear(4, 8), module, nn.Linear(8, 4))))["0"].activation == name
    assert find_mlps(nn.Sequential(FunctionalMLP(copy.deepcopy(module))))["0"].activation == name
    unit = find_mlps(nn.Sequential(FunctionalMLP(lambda x: module(x.clone()))))["0"]
    assert unit.activation == name


def test_mlps_are_found_on_the_meta_device_and_for_weights_of_zero():
    with torch.device("meta"):
        model = nn.Sequential(FunctionalMLP(), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        assert [unit.activation for unit in find_mlps(model).values()] == ["silu", "gelu"]
    model = nn.Sequential(FunctionalMLP(F.relu))
    nn.init.zeros_(model[0].down.weight)
    assert find_mlps(model)["0"].activation == "relu"


def test_looking_for_mlps_changes_nothing():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))).train()
    model[0][2].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    find_mlps(model)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model[0].training
    assert not model[0][2].training
    assert not any(module._forward_hooks for module in model.modules())


class Odd(nn.Module):
    """An MLP of which one thing is odd."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
        if kind == "weight":
            self.gamma = nn.Parameter(torch.ones(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x, *sizes):
        if self.kind == "size" and not sizes:
            raise TypeError("H is missing")
        if self.kind == "drop":
            x = self.drop(x)
        y = self.fc2(self.act(self.fc1(x)))
        if self.kind == "twice":
            y = self.fc2(self.act(self.fc1(y)))
        if self.kind == "noise" and self.training:
            y = y * 2
        if self.kind == "dropout" and self.training:
            y = F.dropout(y, 0.5)
        return y + x if self.kind == "residual" else y


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def hooked(module: nn.Module, which: str) -> nn.Module:
    module.get_submodule(which).register_forward_hook(lambda *_: None)
    return module


def with_shared_weights() -> nn.Module:
    module = mlp(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (mlp(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), r"has a LayerNorm \('0.1'\) inside"),
        (mlp(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4)), r"has a PReLU \('0.1'\) inside"),
        (mlp(nn.Linear(4, 8), nn.Mish(), nn.Linear(8, 4)), r"has the activation Mish \('0.1'\), and experts have gelu"),
        (mlp(nn.Linear(4, 8), nn.GELU(), nn.Tanh(), nn.Linear(8, 4)), r"has GELU .* and Tanh .* an activation alone"),
        (mlp(nn.Linear(4, 8), nn.Linear(8, 4)), "does not compute fc2"),
        (mlp(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 4)), "has 8 hidden neurons .* and 4 .* as gated MLPs"),
        (mlp(nn.Linear(4, 8), nn.GELU(), nn.Conv2d(8, 4, 1)), "a Linear and a Conv2d"),
        (mlp(nn.Conv2d(4, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 1)), "'0.0', which is no plain 1×1"),
        (mlp(*(nn.Linear(4, 4) for _ in range(3))), "3 Linear or Conv2d layers .* gated"),
        (mlp(*(nn.Linear(4, 4) for _ in range(4))), "4 Linear or Conv2d layers of its own; an MLP has two"),
        (mlp(*(nn.Conv2d(4, 4, 1) for _ in range(3))), "3 Linear or Conv2d layers of its own; an MLP has two"),
        (mlp(spectral_norm(nn.Linear(4, 8)), nn.GELU(), nn.Linear(8, 4)), "'0.0', which has a parametrised weight"),
        (with_shared_weights(), "which shares its weights"),
        (hooked(mlp(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), "1"), "has '0.1', which has forward hooks"),
        (hooked(mlp(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), ""), "^has forward hooks"),
        (Odd("weight"), "has gamma besides its two layers"),
        (Odd("size"), r"does not run on tokens alone \(H is missing\)"),
        (Odd("twice"), "which runs its layers in the order"),
        (Odd("noise"), "computes something else in training"),
        (Odd("dropout"), "computes something else in training"),
        (Odd("residual"), "does not compute fc2"),
        (Odd("drop"), "drops its inputs"),
    ],
)
def test_what_computes_something_else_is_refused_with_its_reason(module, reason):
    model = nn.Sequential(module)
    found = why_not_mlp(model, "0")
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)
    assert "0" not in find_mlps(model)


def test_the_model_itself_and_experts_of_routed_layers_are_no_units():
    experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
    model = nn.Sequential(SampleMoE(nn.Linear(4, 2), experts))
    assert find_mlps(model) == {}
    assert find_mlps(experts[0]) == {}
    assert "is the model itself" in why_not_mlp(experts[0], "")
    assert "routed already" in why_not_mlp(model, "0")


def test_gated_and_normed_mlps_of_timm_are_refused(timm):
    layers = timm.layers
    assert "as gated MLPs" in why_not_mlp(nn.Sequential(layers.GluMlp(4, 8)), "0")
    assert "as gated MLPs" in why_not_mlp(nn.Sequential(layers.SwiGLU(4, 8)), "0")
    assert "GlobalResponseNorm" in why_not_mlp(nn.Sequential(layers.GlobalResponseNormMlp(4, 8)), "0")
    assert "LayerNorm" in why_not_mlp(nn.Sequential(layers.Mlp(4, 8, norm_layer=nn.LayerNorm)), "0")
    assert find_mlps(nn.Sequential(layers.ConvMlp(4, 8, drop=0.5)))["0"].hidden_dropout == 0.5

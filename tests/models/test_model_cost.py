"""Parameters and multiply-adds against closed forms and against torch's FLOP counter."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from moesaic import ChannelGate, ChannelMoE, PatchMoE, SampleMoE, SoftRouter, TokenChoice
from moesaic.experts import LinearExperts, MLPExperts, PatchNetExperts
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import create_model
from moesaic.models.resnet import ResNet18
from moesaic.routing import SampleRouter


def by_torch(model: nn.Module, shape: tuple[int, int, int]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *shape))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("network", [ResNet18, MobileNetV2])
def test_macs_of_dense_networks_equal_those_of_torchs_flop_counter(network):
    model = network(num_classes=10)
    counted = count_macs(model, (3, 32, 32))
    assert counted.macs == counted.dense_macs == by_torch(model, (3, 32, 32))
    assert counted.parameters == sum(weight.numel() for weight in model.parameters())
    assert counted.routed_parameters == counted.routed_macs == counted.routed_dense_macs == counted.routed_share == 0


@pytest.mark.parametrize(
    ("layer", "macs"),
    [
        (nn.Conv2d(6, 4, 3, padding=1), 16 * 16 * 4 * 6 * 9),
        (nn.Conv2d(6, 4, (1, 5), stride=2, padding=(0, 2), groups=2), 8 * 8 * 4 * 3 * 5),
        (nn.Conv2d(6, 4, 3, dilation=2), 12 * 12 * 4 * 6 * 9),
        (nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), 16 * 16 * 6 * 2 * 4),
        (nn.Linear(16, 5), 6 * 16 * 16 * 5),
    ],
    ids=str,
)
def test_macs_of_single_layers_equal_closed_forms(layer, macs):
    (row,) = count_macs(layer, (6, 16, 16)).layers
    assert row.macs == row.dense_macs == macs == by_torch(layer, (6, 16, 16))
    assert row.parameters == sum(weight.numel() for weight in layer.parameters())
    assert row.kind == type(layer).__name__


def test_experts_on_2_of_16_patches_cost_an_eighth_plus_the_router():
    layer = PatchMoE(8, 12, experts=4, patches_per_expert=2, patch_size=4, kernel_size=3)
    counted = count_macs(nn.Sequential(nn.Conv2d(3, 8, 1), layer), (3, 16, 16))
    dense, router = 16 * 16 * 8 * 12 * 9, 16 * 16 * 8 * 4
    assert counted.routed_dense_macs == dense
    assert counted.routed_macs == dense // 8 + router
    assert counted.macs == counted.routed_macs + 16 * 16 * 3 * 8
    assert counted.dense_macs == dense + 16 * 16 * 3 * 8
    assert counted.routed_parameters == 12 * 8 * 9 + 12 + 4 * 8 * 16
    assert counted.routed_share == dense / (dense + 16 * 16 * 3 * 8)


def test_a_router_on_its_own_costs_its_scores_of_all_patches():
    (row,) = count_macs(TokenChoice(8, 5, top_k=1, patch_size=4), (8, 12, 16)).layers
    assert row.macs == row.dense_macs == 3 * 4 * 5 * (8 * 4 * 4)


def test_experts_on_all_patches_cost_the_convolution_plus_the_router():
    layer = PatchMoE(8, 12, experts=4, patches_per_expert=16, patch_size=4, kernel_size=3)
    convolution = count_macs(nn.Conv2d(8, 12, 3, padding=1), (8, 16, 16))
    assert count_macs(layer, (8, 16, 16)).dense_macs == convolution.macs
    assert count_macs(layer, (8, 16, 16)).macs == convolution.macs + 16 * 16 * 8 * 4


def test_macs_equal_those_of_the_torch_backend():
    # but for the router, whose rows and columns are padded to sixteens
    layer = PatchMoE(64, 64, experts=16, patches_per_expert=2, patch_size=4, kernel_size=1)
    assert count_macs(layer, (64, 16, 16)).macs == by_torch(layer, (64, 16, 16))


def test_top_1_token_choice_costs_one_expert():
    experts = MLPExperts(4, 8, 10, 6)
    layer = PatchMoE(8, 6, experts=experts, router=TokenChoice(8, 4, top_k=1), combine="sum")
    counted = count_macs(layer, (8, 4, 4))
    assert counted.routed_dense_macs == 16 * 4 * (8 * 10 + 10 * 6)
    assert counted.routed_macs == 16 * (8 * 10 + 10 * 6) + 16 * 8 * 4


def test_soft_routing_costs_its_slots_dispatch_and_combine():
    router = SoftRouter(8, 4, slots_per_expert=3, patch_size=2)
    layer = PatchMoE(8, 12, experts=4, patch_size=2, router=router)
    counted = count_macs(layer, (8, 4, 4))
    slots, N, p2 = 12, 4, 4
    mixing = slots * N * p2 * (8 + 3)
    assert counted.routed_dense_macs == 16 * 8 * 12
    assert counted.routed_macs == slots * p2 * 8 * 3 + mixing + 16 * 8 * slots


def test_a_sample_costs_its_top_k_experts():
    experts = [nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.ReLU(), nn.Linear(width, 5)) for width in (6, 10)]
    counted = count_macs(SampleMoE(SampleRouter(3, experts=2, patch_size=2), experts), (3, 4, 4))
    dense = sum(48 * width + width * 5 for width in (6, 10))
    assert counted.routed_dense_macs == counted.dense_macs == dense
    assert counted.routed_macs == counted.macs == dense // 2 + 2 * 3 * 4
    assert counted.routed_parameters == counted.parameters
    assert [layer.name for layer in counted.layers] == ["router", *(f"experts.{e}.{i}" for e in (0, 1) for i in (1, 3))]


@pytest.mark.parametrize(
    ("experts", "dense"),
    [
        (LinearExperts(4, 8, 2), 4 * 8 * 2),
        (MLPExperts(4, 8, 10, 2), 4 * (8 * 10 + 10 * 2)),
        (PatchNetExperts(4, 8, 6), 4 * 8 * 6),
        (PatchNetExperts(4, 8, 6, activation="identity"), 4 * 8),
    ],
    ids=lambda value: getattr(value, "activation", None),
)
def test_stacked_experts_of_samples(experts, dense):
    flat = nn.Flatten(2 if isinstance(experts, PatchNetExperts) else 1)
    model = nn.Sequential(flat, SampleMoE(SampleRouter(8, 4), experts, top_k=2))
    counted = count_macs(model, (1, 2, 4))
    assert counted.routed_dense_macs == dense
    assert counted.routed_macs == dense // 2 + 4 * 8


def test_a_shared_layer_adds_macs_per_run_and_parameters_once():
    layer = nn.Conv2d(3, 3, 1)
    counted = count_macs(nn.Sequential(nn.Sequential(layer), nn.ReLU(), nn.Sequential(layer)), (3, 4, 4))
    assert counted.macs == 2 * 9 * 16
    assert counted.parameters == sum(row.parameters for row in counted.layers) == 12


def test_counting_does_not_change_the_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count_macs(model, (3, 8, 8))
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_on_the_meta_device_is_counted():
    layer = PatchMoE(8, 12, experts=4, patches_per_expert=2, patch_size=4, kernel_size=3)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer)
    counted = count_macs(model, (3, 16, 16))
    assert count_macs(model.to("meta"), (3, 16, 16)) == counted


def test_a_layer_that_is_called_by_keyword_is_counted():
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=x)

    assert count_macs(Caller(), (3, 4, 4)).macs == 3 * 4 * 4 * 2


def test_the_table_has_a_row_per_layer_and_totals():
    model = nn.Sequential(nn.Conv2d(3, 1024, 3), PatchMoE(1024, 4, experts=2, patches_per_expert=1))
    lines = str(count_macs(model, (3, 4, 4))).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "0", "1", "all", "routed"]
    assert "28 672" in lines[1]
    assert "100 %" in lines[1]


def test_invalid_shapes_are_refused():
    with pytest.raises(ValueError, match=r"shape=\(32, 32\) is not an image shape; give \(C, H, W\)"):
        count_macs(nn.Conv2d(3, 3, 1), (32, 32))
    with pytest.raises(ValueError, match="H=0; it must be at least 1"):
        count_macs(nn.Conv2d(3, 3, 1), (3, 0, 4))


def test_errors_of_the_forward_pass_name_the_shape():
    with pytest.raises(RuntimeError) as raised:
        count_macs(nn.Conv2d(3, 3, 1), (4, 8, 8))
    assert "an image of shape (4, 8, 8)" in raised.value.__notes__[0]


class TwoGated(nn.Module):
    """Two gated convolutions; of 8 and 6 channels, in blocks of 3, one block and two blocks are open."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([ChannelGate(3, 8, block=3, mode="topk", keep=1), ChannelGate(3, 6, block=3)])
        self.first = ChannelMoE(3, 8, 3, block=3)
        self.second = ChannelMoE(8, 6, 3, stride=2, block=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (gate(x.mean((2, 3))) for gate in self.gates)
        return self.second(self.first(x, first), gate_in=first, gate_out=second)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gated_convolutions_cost_their_open_channels_and_the_gates(device):
    torch.manual_seed(0)
    model = TwoGated().to(device)
    if device == "cpu":
        nn.init.zeros_(model.gates[0].weight)  # ties: the first block, which is whole, is open
    counted = count_macs(model, (3, 8, 8))
    rows = {row.name: row for row in counted.layers}
    assert (rows["first"].macs, rows["first"].dense_macs) == (64 * 9 * 3 * 3, 64 * 9 * 3 * 8)
    assert (rows["second"].macs, rows["second"].dense_macs) == (16 * 9 * 3 * 6, 16 * 9 * 8 * 6)
    assert (rows["gates.0"].macs, rows["gates.0"].dense_macs) == (3 * 3, 0)
    assert all(row.routed for row in counted.layers)
    assert counted.parameters == counted.routed_parameters == sum(weight.numel() for weight in model.parameters())
    assert counted.macs == counted.routed_macs == 64 * 9 * 9 + 16 * 9 * 18 + 3 * 3 + 3 * 2


def test_dense_macs_of_a_gated_network_equal_those_of_the_plain_one():
    model = create_model("resnet50_deepmoe", num_classes=4, width=0.05)
    counted = count_macs(model, (3, 32, 32))
    plain = count_macs(create_model("resnet50", num_classes=4, width=0.05), (3, 32, 32))
    assert counted.dense_macs == plain.macs == model.dense_macs
    assert counted.macs == plain.macs + model.gate_macs  # all gates start open
    rows = {row.name: row for row in counted.layers}
    assert rows["embedding.body.0"].dense_macs == rows["embedding.head"].dense_macs == 0
    assert rows["backbone.body.2.first.0"].routed
    assert rows["backbone.body.2.third.0"].routed  # it reads gated channels
    assert not rows["backbone.body.2.shortcut.0"].routed
    assert not rows["backbone.body.0.0"].routed


def test_experts_of_tokens_run_on_each_and_experts_of_samples_once():
    model = nn.Sequential(nn.Flatten(2), SampleMoE(SampleRouter(8, 4), MLPExperts(4, 8, 10, 2)))
    assert count_macs(model, (3, 2, 4)).routed_dense_macs == 3 * 4 * (8 * 10 + 10 * 2)


class CrossAttention(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, stride=4)
        self.attention = nn.MultiheadAttention(16, 2, kdim=8, vdim=4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        query, key, value = tokens[:, :5], tokens[..., :8], tokens[..., :4]
        if not self.attention.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        return self.attention(query, key, value=value)[0]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_of_torch_costs_its_projections_and_matmuls(batch_first, device):
    model = CrossAttention(batch_first=batch_first).to(device)
    (row,) = count_macs(model, (3, 16, 16)).within(["attention"])
    projections = 2 * 5 * 16 * 16 + 16 * (8 + 4) * 16
    assert row.macs == row.dense_macs == projections + 2 * 5 * 16 * 16
    assert row.parameters == sum(weight.numel() for weight in model.attention.parameters())


def test_attention_inside_a_transformer_layer_of_torch_is_counted_once():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.Flatten(2), nn.Linear(16, 16), layer)
    rows = count_macs(model, (3, 16, 16)).within(["3"])
    assert [(row.name, row.macs) for row in rows] == [
        ("3.self_attn", 4 * 16**3 + 2 * 16**3),
        ("3.linear1", 16 * 16 * 32),
        ("3.linear2", 16 * 16 * 32),
    ]

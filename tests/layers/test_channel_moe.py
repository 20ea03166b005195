import pytest
import torch
from torch import nn

import moesaic
from moesaic import insight
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing_record import Routing


class TwoLayers(nn.Module):
    """An embedding gates both layers."""

    def __init__(self, **gate) -> None:
        super().__init__()
        self.gates = nn.ModuleList([ChannelGate(3, 8, **gate), ChannelGate(3, 6, **gate)])
        block = gate.get("block", 1)
        self.first = ChannelMoE(3, 8, 3, block=block)
        self.second = ChannelMoE(8, 6, 3, block=block, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedding = x.mean((2, 3))
        first, second = (gate(embedding) for gate in self.gates)
        return self.second(self.first(x, first), second, first)


def test_record_routing_sees_the_gates_of_every_layer():
    model, x = TwoLayers(block=2), torch.randn(5, 3, 8, 8)
    with moesaic.record_routing(model) as routing:
        y = model(x)
    assert y.shape == (5, 6, 4, 4)
    assert {name: record.weights.shape for name, record in routing.items()} == {
        "first": (5, 1, 4),
        "second": (5, 1, 3),
    }
    assert routing["first"].gate.requires_grad


def test_passes_over_a_data_set_join_into_one_record():
    model = TwoLayers(mode="topk", keep=2)
    with moesaic.record_routing(model, keep="all") as routing:
        for _ in range(3):
            model(torch.randn(4, 3, 8, 8))
    assert routing["second"].load.sum() == 3 * 4 * 2


def test_the_alarm_names_channels_that_died():
    model = TwoLayers()
    with torch.no_grad():
        model.gates[0].bias[5] = -9
    dead = pytest.warns(insight.CollapseWarning, match="layer 'first'.*1 of 8 experts are dead: 5")
    with dead, insight.CollapseAlarm(model, every=1):
        model(torch.randn(4, 3, 8, 8))


def test_a_network_gives_the_same_with_frozen_layers_and_in_inference_mode():
    model, x = TwoLayers(block=2, mode="topk", keep=1).double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model(x)  # statistics
    model.eval()
    with_gradients = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), with_gradients.detach(), rtol=1e-10, atol=1e-10)
    model.first, model.second = moesaic.freeze(model.first), moesaic.freeze(model.second)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), with_gradients.detach(), rtol=1e-10, atol=1e-10)
    with moesaic.record_routing(model) as routing:
        assert not model(x).requires_grad
    assert list(routing) == ["first", "second"]


def test_a_frozen_layer_keeps_its_weights_and_describes_itself():
    layer, x, gate = ChannelMoE(3, 4, 3, block=2).eval(), torch.randn(2, 3, 8, 8), gates(2, 4, block=2)
    frozen = moesaic.freeze(layer)
    before = frozen(x, gate)
    with torch.no_grad():
        layer.conv.weight.zero_()
    assert torch.equal(frozen(x, gate), before)
    assert frozen.macs(8, 8, gate).tolist() == layer.macs(8, 8, gate).tolist()
    assert frozen.map_size(8, 8) == (8, 8)
    assert repr(frozen) == "FrozenChannelMoE(3, 4, activation='relu', block=2)"
    with pytest.raises(RuntimeError, match="FrozenChannelMoE: a frozen module cannot be trained"):
        frozen.train()


def test_a_layer_in_training_is_not_frozen():
    with pytest.raises(ValueError, match=r"freeze: the model is in training mode; call model.eval\(\) first"):
        moesaic.freeze(ChannelMoE(3, 4, 3))


def test_gates_and_weights_learn():
    model = TwoLayers()
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_network_runs_on_the_meta_device():
    model = TwoLayers().to("meta").eval()
    with torch.no_grad():
        assert model(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 6, 4, 4)


def test_same_padding_keeps_the_map_and_stride_halves_it():
    assert ChannelMoE(3, 4, 5).map_size(9, 7) == (9, 7)
    assert ChannelMoE(3, 4, 3, stride=2).map_size(9, 8) == (5, 4)
    assert ChannelMoE(3, 4, 2, padding=0).map_size(9, 8) == (8, 7)


def test_multiply_adds_are_counted_for_each_sample():
    layer = ChannelMoE(10, 7, 3, stride=2, block=3, block_in=4)
    gate_out = ChannelGate(1, 7, block=3).choose(torch.tensor([[1.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0] * 3]))
    gate_in = ChannelGate(1, 10, block=4).choose(torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [1.0] * 3]))
    assert layer.macs(8, 8, gate_out, gate_in).tolist() == [10 * 7 * 9 * 16, 6 * 4 * 9 * 16, 0]
    assert layer.macs(8, 8, gate_out).tolist() == [10 * 7 * 9 * 16, 10 * 4 * 9 * 16, 0]


def test_weights_have_names_that_stay():
    assert list(ChannelMoE(3, 4, 3, bias=True).state_dict()) == [
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def gates(batch: int, channels: int, **options) -> Routing:
    return ChannelGate(2, channels, **options)(torch.zeros(batch, 2))


@pytest.mark.parametrize("make", [lambda layer: layer, moesaic.freeze])
def test_input_that_does_not_fit(make):
    layer, x = make(ChannelMoE(3, 4, 3).eval()), torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueError, match="gate_out has 5 gates, but 4 channels in blocks of 1 need 4"):
        layer(x, gates(2, 5))
    with pytest.raises(ValueError, match=r"gate_in has 2 gates, but 3 channels .* \(block_in=1 here\)"):
        layer(x, gates(2, 4), gates(2, 3, block=2))
    with pytest.raises(ValueError, match="gate_out has gates for 3 samples, the map has 2"):
        layer(x, gates(3, 4))
    with pytest.raises(ValueError, match=r"in_channels=3, got a map of 4|takes \(B, 3, H, W\), got \(2, 4, 8, 8\)"):
        layer(torch.zeros(2, 4, 8, 8), gates(2, 4))
    with pytest.raises(TypeError, match=r"torch\.float64, .*torch\.float32"):
        layer(x.double(), gates(2, 4))
    by_sample = Routing("sample", torch.zeros(2, 1, 4), torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1), "unit")
    with pytest.raises(ValueError, match="gate_out routes by sample; give what a ChannelGate returns"):
        layer(x, by_sample)
    with pytest.raises(ValueError, match="smaller than kernel_size=5; use padding=2 or more"):
        make(ChannelMoE(3, 4, 5, padding=0).eval())(torch.zeros(2, 3, 2, 2), gates(2, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 2}, "cannot centre kernel_size=2"),
        ({"kernel_size": 3, "padding": "valid"}, "padding='valid' is unknown"),
        ({"kernel_size": 3, "padding": -1}, "it must be 'same' or a whole number from 0 on"),
        ({"kernel_size": 3, "activation": "gelu"}, "use 'relu' or 'identity'"),
        ({"kernel_size": 3, "block_in": 0}, "block_in=0; it must be at least 1"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        ChannelMoE(3, 4, **options)


@torch.no_grad()
def test_a_frozen_layer_does_not_follow_the_default_device():
    torch.manual_seed(0)
    gate = ChannelGate(4, channels=8, block=2, mode="topk", keep=2)
    made, x, routing = moesaic.ChannelMoE(3, 8, 3, block=2).eval(), torch.randn(3, 3, 6, 6), gate(torch.randn(3, 4))
    frozen = moesaic.freeze(made)
    with torch.device("meta"):
        y = frozen(x, routing)
    torch.testing.assert_close(y, made(x, routing))

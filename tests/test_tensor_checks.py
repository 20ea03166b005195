"""What layers and routers refuse, in one line that says what to do."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.argument_checks import check_choice
from moesaic.layers.heads import AttentionHead, PooledHead
from moesaic.routing import SampleRouter


def channel_moe(frozen: bool) -> Callable[[Any], Tensor]:
    layer: Any = moesaic.ChannelMoE(3, 4, 3).eval()
    layer = moesaic.freeze(layer) if frozen else layer
    routing = moesaic.ChannelGate(8, 4)(torch.randn(2, 8))
    return lambda x: layer(x, routing)


def sample_moe() -> nn.Module:
    return moesaic.SampleMoE(SampleRouter(3, 2, patch_size=4), [nn.Conv2d(3, 4, 3) for _ in range(2)])


LAYERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "PatchMoE": lambda: moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1),
    "SampleMoE": sample_moe,
    "ChannelMoE": lambda: channel_moe(frozen=False),
    "FrozenChannelMoE": lambda: channel_moe(frozen=True),
    "FrozenDeepMoE": lambda: moesaic.freeze(moesaic.create_model("vgg16_deepmoe", num_classes=3, width=0.1).eval()),
    "RoutedHead": lambda: moesaic.RoutedHead(3, 4, experts=2, patches_per_expert=1),
    "PooledHead": lambda: PooledHead(3, 4),
    "AttentionHead": lambda: AttentionHead(3, 4),
    "ExpertChoice": lambda: moesaic.ExpertChoice(3, 2, 1),
    "TokenChoice": lambda: moesaic.TokenChoice(3, 2),
    "SoftRouter": lambda: moesaic.SoftRouter(3, 2),
    "SampleRouter": lambda: SampleRouter(3, 2, patch_size=4),
    "SampleRouter of vectors": lambda: SampleRouter(3, 2),
    "ChannelGate": lambda: moesaic.ChannelGate(3, 2),
}
MAP = np.zeros((2, 3, 8, 8), np.float32)
NO_TENSORS: dict[str, tuple[Any, str]] = {
    "list": ([torch.zeros(3, 8, 8)], "got a list; join tensors with torch.stack(x)"),
    "array": (MAP, "got a numpy array; convert it with torch.from_numpy(x)"),
    "none": (None, "got None; return a tensor from the layer before"),
    "name of a file": ("image.png", "got a str; convert it to a tensor first"),
}


def refusal(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("given", NO_TENSORS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_no_tensor_is_refused(name, given):
    x, says = NO_TENSORS[given]
    layer = LAYERS[name]()
    message = refusal(lambda: layer(x), TypeError)
    assert message.startswith(f"{name.split()[0]}: takes ")
    assert says in message


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_on_another_device_than_the_weights_is_refused(name):
    shape = (2, 3) if name in ("ChannelGate", "SampleRouter of vectors") else (2, 3, 8, 8)
    layer = LAYERS[name]()
    message = refusal(lambda: layer(torch.zeros(shape, device="meta")), ValueError)
    assert "the input is on meta" in message
    assert "to('cpu')" in message


@pytest.mark.parametrize("shape", [(), (8,), (2, 3, 4, 5, 8), (2, 5, 8, 8)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_other_axes_and_channels_are_refused(name, shape):
    layer = LAYERS[name]()
    message = refusal(lambda: layer(torch.zeros(shape)), ValueError)
    assert re.search(r"takes|in_channels=3, got", message)


@pytest.mark.parametrize("name", LAYERS)
def test_integers_are_refused(name):
    shape = (2, 3) if name in ("ChannelGate", "SampleRouter of vectors") else (2, 3, 8, 8)
    layer = LAYERS[name]()
    message = refusal(lambda: layer(torch.zeros(shape, dtype=torch.int32)), TypeError)
    assert "torch.int32" in message
    assert "convert" in message


def test_weights_without_memory_are_refused():
    layer = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, device="meta")
    message = refusal(lambda: layer(torch.zeros(1, 3, 2, 2)), ValueError)
    assert "the input is on cpu, the weights are on meta" in message
    assert layer(torch.zeros(1, 3, 2, 2, device="meta")).is_meta


def test_gates_that_are_no_routing_or_elsewhere_are_refused():
    layer, x = moesaic.ChannelMoE(3, 4, 3), torch.zeros(2, 3, 8, 8)
    message = refusal(lambda: layer(x, torch.ones(2, 4)), TypeError)
    assert message == "ChannelMoE: gate_out is a Tensor; give what a ChannelGate returns, a Routing"
    elsewhere = moesaic.ChannelGate(8, 4, device="meta")(torch.zeros(2, 8, device="meta"))
    message = refusal(lambda: layer(x, elsewhere), ValueError)
    assert message.startswith("ChannelMoE: gate_out is on meta, the map is on cpu; move the ChannelGate")


def test_a_layer_inside_of_a_traced_network_reports_its_control_flow():
    """torch.fx calls it with a proxy, which stands for a tensor and is not taken for a wrong input."""
    network = nn.Sequential(moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1))
    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        torch.fx.symbolic_trace(network)


def test_the_nearest_of_many_names_comes_before_the_list():
    names = [f"network{i}" for i in range(20)]
    with pytest.raises(ValueError, match=r"name='netwrk7' is unknown; did you mean 'network7'\? It may be 'net"):
        check_choice("create_model", "name", "netwrk7", names)
    with pytest.raises(ValueError, match=r"name='x' is unknown; use 'network0', "):
        check_choice("create_model", "name", "x", names)

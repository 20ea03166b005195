"""Gradients of closed gates, in each mode of `ChannelGate`, through a layer and through whole networks."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.layers import ChannelMoE
from moesaic.models import create_model
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.vgg import VGG16
from moesaic.routing.channel_gate import ChannelGate

MODES = {
    "relu": {},
    "topk": {"mode": "topk", "keep": 3},
    "straight through": {"mode": "topk", "keep": 3, "straight_through": True},
    "hard": {"mode": "hard"},
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize("mode", MODES)
def test_closed_gates_of_a_layer_have_the_gradients_that_their_mode_states(mode: str, activation, backend: str):
    torch.manual_seed(0)
    layer = ChannelMoE(3, 10, 3, block=2, activation=activation).double()
    gate = ChannelGate(4, channels=10, block=2, **MODES[mode]).double()  # pyright: ignore[reportArgumentType]
    scores = torch.tensor([[2.0, -1.0, 0.5, -0.5, -2.0], [-1.0, 1.0, -3.0, 2.0, 1.5]]).double().requires_grad_()
    x, pull = torch.randn(2, 3, 5, 5).double(), torch.randn(2, 10, 5, 5).double()
    routing = gate.choose(scores)
    with moesaic.backend(backend):
        y = layer(x, routing)
    (y * pull).sum().backward()

    before = layer.norm(layer.conv(x))  # type: ignore[misc]
    before = before.relu() if activation == "relu" else before
    per_gate = (before * pull).sum((2, 3)).view(2, 5, 2).sum(2).detach()
    open_, known = routing.mask[:, 0], scores.detach()
    slope = {
        "relu": open_.double(),
        "topk": known.sigmoid() * open_,
        "straight through": known.sigmoid(),
        "hard": known.sigmoid() * (1 - known.sigmoid()),
    }[mode]
    torch.testing.assert_close(scores.grad, per_gate * slope)
    assert (y.flatten(2) != 0).any(2).view(2, 5, 2).any(2).equal(open_), "closed channels are exactly zero"


class Plain(nn.Module):
    """Convolutions without BatchNorm, a ReLU after each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


NETWORKS = {
    "vgg": lambda: VGG16(num_classes=4, width=0.08),
    "resnet18": lambda: create_model("resnet18", num_classes=4, width=0.1),
    "resnet50": lambda: create_model("resnet50", num_classes=4, width=0.12),
    "without BatchNorm": Plain,
}


def gated(network: str, mode: str) -> DeepMoE:
    torch.manual_seed(1)
    options = {"mode": "topk", "keep": 0.5} if mode == "straight through" else {"mode": mode}
    model = deepmoe(NETWORKS[network](), num_classes=4, image_size=32, **options).double().eval()
    for head in heads(model):
        nn.init.normal_(head.weight)
        nn.init.zeros_(head.bias)
        head.straight_through = mode == "straight through"
        head.train()
    return model


def heads(model: DeepMoE) -> list[ChannelGate]:
    return [module for module in model.modules() if isinstance(module, ChannelGate)]


def closed_with_gradient(model: DeepMoE, x: Tensor) -> tuple[int, int, list[str]]:
    """Closed gates of one image that have a gradient, all closed gates, and layers of which none has one."""
    output = model.forward_with_routing(x)
    output.logits.square().sum().backward()
    found = total = 0
    without: list[str] = []
    for head, (name, routing) in zip(heads(model), output.routing.items(), strict=True):
        closed = ~routing.mask[0, 0]
        some = int((closed & (head.bias.grad != 0)).sum())
        found, total = found + some, total + int(closed.sum())
        without += [name] if closed.any() and not some else []
    return found, total, without


@pytest.mark.parametrize(
    ("network", "mode"),
    [
        ("vgg", "hard"),
        ("resnet18", "straight through"),
        ("resnet50", "hard"),
        ("without BatchNorm", "hard"),
        ("without BatchNorm", "straight through"),
    ],
)
def test_estimates_reach_the_closed_gates_of_every_layer_of_a_network(network: str, mode: str):
    found, total, without = closed_with_gradient(gated(network, mode), torch.randn(1, 3, 32, 32).double())
    assert not without
    assert found > 0.8 * total, "the others are of channels that ReLU closes everywhere"


def test_closed_relu_gates_of_a_network_have_none():
    found, total, _ = closed_with_gradient(gated("vgg", "relu"), torch.randn(1, 3, 32, 32).double())
    assert found == 0
    assert total > 10


def test_a_compiled_network_has_the_gradients_of_closed_gates():
    model = gated("without BatchNorm", "hard").train()
    twin, x = copy.deepcopy(model), torch.randn(3, 3, 32, 32).double()
    y, expected = torch.compile(twin, fullgraph=True, backend="eager")(x), model(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_relu_gates_have_the_same_bits_as_if_they_came_before_relu():
    torch.manual_seed(0)
    layer, gate = ChannelMoE(3, 6, 3), ChannelGate(4, channels=6)
    scores, x, pull = torch.randn(4, 6, requires_grad=True), torch.randn(4, 3, 5, 5), torch.randn(4, 6, 5, 5)
    weights = [scores, *layer.parameters()]
    y = layer(x, gate.choose(scores))
    assert layer.norm is not None
    before = F.relu(layer.norm(layer.conv(x)) * gate.choose(scores).weights[:, 0, :, None, None])
    assert torch.equal(y, before)
    found, expected = (torch.autograd.grad((each * pull).sum(), weights) for each in (y, before))
    assert all(map(torch.equal, found, expected))

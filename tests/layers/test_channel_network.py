import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moesaic
from moesaic.layers.channel_chain import Chain
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.layers.channel_network import GatedLayers
from moesaic.ops.channel import narrow_conv
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.channel_heads import ChannelHeads

FREE = narrow_conv.Prices(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=0.0, group=0.0)


@pytest.fixture(params=["gathered", "dense", "as it comes"])
def way(request, monkeypatch) -> str:
    prices = {
        "gathered": FREE,
        "dense": narrow_conv.Prices(1.0, 1.0, 1e30, 0.0, 1e30, 0.0, 0.0),
        "as it comes": narrow_conv.PRICES["cpu"],
    }
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", prices[request.param])
    return request.param


class Finding(ChannelMoE):
    """Finds its gates by itself."""

    running: dict[str, moesaic.Routing]
    name: str
    source: str | None

    def forward(self, x: Tensor, gate_out=None, gate_in=None) -> Tensor:
        gates = self.running["gates"]
        return super().forward(x, gates[self.name], None if self.source is None else gates[self.source])


class Network(nn.Module):
    """Three gated convolutions in a row, with a halving of the map, and a linear layer."""

    def __init__(
        self, block: int = 1, mode: str = "relu", widths: tuple[int, ...] = (3, 8, 7, 6), size: int = 12
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.running: dict[str, dict[str, moesaic.Routing]] = {}
        parts: list[nn.Module] = []
        for number in range(3):
            blocks = (min(block, widths[number + 1]), min(block, widths[number]))
            layer = Finding(
                widths[number],
                widths[number + 1],
                3,
                activation="relu" if number == 2 else "identity",
                stride=2 if number == 1 else 1,
                norm=number != 1,
                bias=number == 1,
                block=blocks[0],
                block_in=blocks[1],
            )
            layer.running, layer.name = self.running, f"body.{len(parts)}"
            layer.source = None if number == 0 else self.names[-1]
            parts += [
                layer,
                nn.ReLU() if number < 2 else nn.Identity(),
                nn.MaxPool2d(2) if number == 0 else nn.Identity(),
            ]
            self.names = [*(self.names if number else []), layer.name]
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(widths[-1], 4)
        keep = {"keep": 1} if mode == "topk" else {}
        self.gates = nn.ModuleList(
            ChannelGate(5, width, block=min(block, width), mode=mode, **keep) for width in widths[1:]
        )
        for gate in self.gates:
            nn.init.normal_(gate.weight)
            nn.init.zeros_(gate.bias)
        for layer in self.layers().values():
            if layer.norm is not None:
                for values in (layer.norm.weight, layer.norm.bias, layer.norm.running_mean):
                    nn.init.normal_(values)
        self.double().eval()
        pixels = dict(zip(self.names, (size**2, (size // 4) ** 2, (size // 4) ** 2), strict=True))
        sources = {name: layer.source for name, layer in self.layers().items()}
        self.gated = GatedLayers(self.layers(), sources, hand_on=self.names[:2], pixels=pixels, network=self)
        self.heads = ChannelHeads(dict(zip(self.names, self.gates, strict=True)))

    def layers(self) -> dict[str, Finding]:
        return {name: self.get_submodule(name) for name in self.names}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))

    def network(self, x: Tensor, gates) -> Tensor:
        self.running["gates"] = gates
        return self(x)

    def run(self, x: Tensor, embedding: Tensor, backend: str = "torch", joint: bool = True) -> Tensor:
        gates = self.heads(embedding)
        with moesaic.backend(backend):
            return self.gated.run(self.network, x, gates if joint else dict(gates))


def images(number: int, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(number, 3, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randn(number, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("mode", ["relu", "topk"])
@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2, 5])
@torch.no_grad()
def test_a_network_gives_what_masks_give(batch, block, mode, joint, way):
    network, (x, embedding) = Network(block, mode), images(batch)
    y = network.run(x, embedding, joint=joint)
    torch.testing.assert_close(y, network.run(x, embedding, "reference"), rtol=1e-10, atol=1e-10)
    single, low = network.float(), (x.float(), embedding.float())
    torch.testing.assert_close(single.run(*low, joint=joint), y.float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.5, 2.0]), min_size=21, max_size=21),
    closed=st.sets(st.sampled_from([0, 1, 2])),
    joint=st.booleans(),
)
@torch.no_grad()
def test_every_pattern_gives_what_masks_give_also_when_layers_are_closed(scores, closed, joint):
    network, (x, _) = Network(), images(1)
    for number, gate in enumerate(network.gates):
        start = sum(each.channels for each in network.gates[:number])
        values = torch.tensor(scores[start : start + gate.channels], dtype=torch.float64)
        gate.weight.zero_()
        gate.bias.copy_(-torch.ones_like(values) if number in closed else values)
    embedding = torch.zeros(1, 5, dtype=torch.float64)
    real = narrow_conv.PRICES["cpu"]
    narrow_conv.PRICES["cpu"] = FREE
    try:
        y = network.run(x, embedding, joint=joint)
    finally:
        narrow_conv.PRICES["cpu"] = real
    torch.testing.assert_close(y, network.run(x, embedding, "reference"), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_layers_hand_on_open_channels_alone(monkeypatch):
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", FREE)
    network, (x, embedding) = Network(), images(1)
    seen: list[int] = []
    network.body[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    gates = network.heads(embedding)
    network.run(x, embedding)
    network.run(x, embedding, joint=False)
    network.run(x, embedding, "reference")
    opened = int(gates["body.0"].mask.sum())
    assert 0 < opened < 8
    assert seen == [opened, opened, 8]


@torch.no_grad()
def test_whoever_listens_to_a_layer_is_heard(monkeypatch):
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", FREE)
    network, (x, embedding) = Network(), images(1)
    heard: list[str] = []
    network.body[1].register_forward_hook(lambda module, args, y: heard.append("relu"))
    expected = network.run(x, embedding, "reference")
    assert heard == ["relu"]
    torch.testing.assert_close(network.run(x, embedding), expected, rtol=1e-10, atol=1e-10)
    assert heard == ["relu"] * 2
    with moesaic.record_routing(network) as routing:
        network.run(x, embedding)
    assert list(routing) == network.names


@pytest.mark.parametrize("name", ["", "body", "head", "body.2", "body.0.norm"])
@torch.no_grad()
def test_the_short_way_is_not_taken_while_somebody_listens_to_any_module(name):
    network, (x, embedding) = Network(16, widths=(3, 32, 16, 16)), images(1)
    chain = network.gated.chain
    expected = network.run(x, embedding)
    assert chain is not None
    assert chain.ready(x) is not None
    heard: list[str] = []
    hook = network.get_submodule(name).register_forward_hook(lambda module, args, y: heard.append(name))
    assert chain.ready(x) is None
    torch.testing.assert_close(network.run(x, embedding), expected, rtol=1e-10, atol=1e-10)
    assert heard == ([] if name == "body.0.norm" else [name])  # a gated layer is its own norm's reader
    hook.remove()
    assert chain.ready(x) is not None


@pytest.mark.parametrize("mode", ["relu", "topk"])
@torch.no_grad()
def test_blocks_that_are_multiplied_as_blocks_give_what_masks_give(mode, way):
    for block, widths in ((16, (3, 32, 48, 32)), (8, (3, 16, 20, 8)), (8, (3, 20, 16, 24))):
        network = Network(block, mode, widths)
        for number in range(1, 4):
            x, embedding = (each[-1:] for each in images(number))
            y = network.run(x, embedding)
            torch.testing.assert_close(y, network.run(x, embedding, "reference"), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_what_comes_out_of_the_short_way_can_be_learned_from():
    network, (x, embedding) = Network(), images(1)
    y = network.run(x, embedding)
    with torch.enable_grad():
        scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
        (scale * y).sum().backward()
    assert scale.grad is not None
    assert torch.equal(scale.grad, y.sum().view(1))


@torch.no_grad()
def test_whoever_observes_layers_sees_the_whole_batch(monkeypatch):
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", FREE)
    network, (x, embedding) = Network(), images(5)
    with moesaic.record_routing(network) as routing:
        y = network.run(x, embedding)
    assert {record.batch for record in routing.values()} == {5}
    torch.testing.assert_close(y, network.run(x, embedding), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_batch_is_cut_where_samples_open_different_channels(monkeypatch):
    network, (x, embedding) = Network(), images(3)
    embedding[2] = embedding[0]
    gates = network.heads(embedding)
    convs = [layer.weights() for layer in network.layers().values()]
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", FREE)
    assert network.gated._groups(x, convs, gates) == [[0, 2], [1]]
    dear = narrow_conv.Prices(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=1e30, group=0.0)
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", dear)
    assert network.gated._groups(x, convs, gates) == []


def test_with_gradients_a_network_runs_as_it_is():
    network, (x, embedding) = Network(), images(2)
    y = network.run(x, embedding)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    with torch.no_grad():
        torch.testing.assert_close(network.run(x, embedding), y.detach(), rtol=1e-10, atol=1e-10)


def step(network: Network) -> None:
    network.train()
    with torch.enable_grad():
        x, embedding = images(3)
        network.run(x, embedding).square().sum().backward()
        torch.optim.SGD(network.parameters(), lr=0.1).step()
    network.eval()


def recalibrate(network: Network) -> None:
    network.train()
    network.run(*images(3))
    network.eval()


def edit(network: Network) -> None:
    network.body[0].norm.bias += 1
    network.body[0].conv.weight *= 2


CHANGES = {
    "a step of training": step,
    "batches without a step": recalibrate,
    "load_state_dict": lambda network: network.load_state_dict({k: v + 1 for k, v in network.state_dict().items()}),
    "there and back": lambda network: network.half().double(),
    "an edit in place": edit,
    "statistics": lambda network: network.body[0].norm.running_var.mul_(2),
    "another parameter": lambda network: setattr(
        network.body[0].conv, "weight", nn.Parameter(-network.body[0].conv.weight)
    ),
}


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_is_kept_of_the_weights_follows_them_through(change, joint, monkeypatch):
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", FREE)
    network, (x, embedding) = Network(), images(1)
    before = network.run(x, embedding, joint=joint)
    CHANGES[change](network)
    after = network.run(x, embedding, joint=joint)
    torch.testing.assert_close(after, network.run(x, embedding, "reference"), rtol=1e-10, atol=1e-10)
    assert not torch.equal(before, after)


@torch.no_grad()
def test_a_copy_has_a_life_of_its_own():
    network, (x, embedding) = Network(), images(1)
    expected = network.run(x, embedding)
    other = copy.deepcopy(network)
    edit(other)
    assert not torch.allclose(other.run(x, embedding), expected)
    torch.testing.assert_close(other.run(x, embedding), other.run(x, embedding, "reference"))
    assert torch.equal(network.run(x, embedding), expected)


@torch.no_grad()
def test_memory_format_and_autocast_change_nothing_but_rounding(way):
    network, (x, embedding) = Network(2), images(1)
    expected = network.run(x, embedding, "reference")
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network.run(last, embedding), expected, rtol=1e-10, atol=1e-10)
    network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(network.run(last, embedding), expected, rtol=1e-10, atol=1e-10)
    with torch.inference_mode():
        torch.testing.assert_close(network.run(x, embedding), expected, rtol=1e-10, atol=1e-10)
    network.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = network.run(x.float(), embedding.float())
    torch.testing.assert_close(y.double(), expected, rtol=0.1, atol=0.1)


def test_a_network_with_a_shortcut_is_no_chain():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = ChannelMoE(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    network = Residual()
    assert Chain.of(network, {"conv": network.conv}, {"conv": None}, frozenset()) is None
    straight = Network()
    assert straight.gated.chain is not None
    assert Chain.of(straight, straight.layers(), {**straight.gated.sources, "body.6": "body.0"}, frozenset()) is None


def test_a_network_can_be_pickled():
    network, (x, embedding) = Network(), images(1)
    with torch.no_grad():
        expected = network.run(x, embedding)
        other = pickle.loads(pickle.dumps(network))
        assert torch.equal(other.run(x, embedding), expected)
        heard: list[str] = []
        other.body[1].register_forward_hook(Hearing(heard))
        other.run(x, embedding)
    assert heard == ["heard"]


class Hearing:
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def __call__(self, *args: object) -> None:
        self.heard.append("heard")

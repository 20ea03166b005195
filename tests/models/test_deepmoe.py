"""DeepMoE: the backbone with channels closed by the gates of each image, masked and frozen."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from strategies import BACKENDS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import moesaic
from moesaic.layers import ChannelMoE
from moesaic.models.channel_graph import build_channel_graph, nodes_to_gate
from moesaic.models.deepmoe import gated_conv
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.gated_conv import ConsumerConv
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.model_cost import count_macs
from moesaic.models.resnet import ResNet
from moesaic.models.vgg import VGG16
from moesaic.models.wide_resnet.network import WideResNet
from moesaic.ops.channel import costs

CLASSES = 6
FREE = costs.UnitCosts(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=0.0)
"""Unit costs under which a frozen network never computes closed channels."""

NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vgg": (lambda: VGG16(CLASSES, width=0.08), {}),
    "vgg in blocks": (lambda: VGG16(CLASSES, width=0.08), {"block": 4}),
    "vgg top-k": (lambda: VGG16(CLASSES, width=0.08), {"mode": "topk", "keep": 0.4}),
    "basic blocks": (lambda: ResNet(18, CLASSES, width=0.08), {}),
    "bottleneck a": (lambda: ResNet(50, CLASSES, width=0.05), {"bottleneck": "a", "block": 2}),
    "bottleneck b": (lambda: ResNet(50, CLASSES, width=0.05), {"bottleneck": "b"}),
}


def small() -> nn.Sequential:
    """Two gated convolutions, the second without BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, CLASSES),
    )


def lived_in(network: nn.Module) -> nn.Module:
    """A network in float64 whose BatchNorms have weights and statistics of their own."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return network.double()


def images(batch: int, size: int = 32) -> Tensor:
    """Images that differ, so that they open different channels."""
    x = torch.randn(batch, 3, size, size, dtype=torch.float64)
    return x * torch.rand(batch, 3, 1, 1, dtype=torch.float64) * 2 + torch.randn(batch, 3, 1, 1, dtype=torch.float64)


def build(name: str, seed: int = 0) -> tuple[nn.Module, DeepMoE]:
    """A backbone, and the DeepMoE of a copy of it in which about half of the gates are closed."""
    torch.manual_seed(seed)
    make, options = NETWORKS[name]
    plain = lived_in(make()).eval()
    model = deepmoe(copy.deepcopy(plain), num_classes=CLASSES, **options)
    lived_in(model.embedding)
    for gate in model.gates.values():
        nn.init.normal_(gate.weight)
        nn.init.zeros_(gate.bias)
    return plain, model


def close_first_sample(model: DeepMoE, name: str, x: Tensor) -> None:
    """Close a layer for sample 0 and open it for sample 1, where there is one."""
    gate = model.gates[name.replace(".", "_")]
    with torch.no_grad():
        embedding, _ = model.embedding(x)
        if len(x) == 1:
            gate.weight.zero_()
            gate.bias.fill_(-1)
        else:
            along = embedding[1] - embedding[0]
            gate.weight.copy_(along / along.norm() ** 2)
            gate.bias.fill_(float(-(gate.weight[0] @ (embedding[0] + embedding[1]) / 2)))


def masked(plain: nn.Module, model: DeepMoE, x: Tensor) -> Tensor:
    """The definition: the plain backbone, with gates multiplied onto what BatchNorm gives."""
    routing = model.forward_with_routing(x).routing
    nodes = {node.conv: node for node in build_channel_graph(plain)}
    hooks = []
    for name in model.gated:
        layer = plain.get_submodule(nodes[name].norm or name)
        gates = routing[name].weights[:, 0].to(x.dtype).repeat_interleave(model.backbone.get_submodule(name).block, 1)

        def multiply(layer: nn.Module, args: Any, y: Tensor, gates: Tensor = gates) -> Tensor:
            return y * gates[:, : y.shape[1], None, None]

        hooks.append(layer.register_forward_hook(multiply))
    try:
        return plain(x)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", [*NETWORKS, "pre-activation", "small"])
def test_with_all_gates_one_it_computes_what_the_backbone_did_with_the_same_tensors(name):
    torch.manual_seed(0)
    others = {"pre-activation": (lambda: WideResNet(10, 1, CLASSES), {}), "small": (small, {})}
    make, options = (NETWORKS | others)[name]
    plain = lived_in(make()).eval()
    weights = {id(weight) for weight in plain.parameters()}
    x = images(2)
    with torch.no_grad():
        expected = plain(x)
        model = deepmoe(plain, num_classes=CLASSES, **{**options, "mode": "relu", "keep": None})
        for gate in model.gates.values():
            gate.weight.zero_()
        output = model.forward_with_routing(x)
    assert all(routing.weights.eq(1).all() for routing in output.routing.values())
    torch.testing.assert_close(output.logits, expected, rtol=1e-10, atol=1e-10)
    assert weights == {id(weight) for weight in model.backbone.parameters()}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_dropping_closed_channels_changes_nothing(name, batch, monkeypatch):
    plain, model = build(name)
    x = images(batch)
    if name != "vgg top-k":
        close_first_sample(model, model.gated[len(model.gated) // 2], x)
    with torch.no_grad():
        expected = masked(plain, model, x)
        routing = model.forward_with_routing(x).routing
        closed = [int((~each.mask[0]).sum()) for each in routing.values()]
        assert sum(closed) > sum(each.experts for each in routing.values()) / 4
        if name != "vgg top-k":
            assert closed[len(closed) // 2] == routing[model.gated[len(closed) // 2]].experts
        if batch > 1:
            assert any(not torch.equal(each.mask[0], each.mask[1]) for each in routing.values())
        for backend in BACKENDS:
            with moesaic.backend(backend):
                torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
        frozen, single = moesaic.freeze(model), moesaic.freeze(copy.deepcopy(model).float())
        for unit_costs in (costs.CPU_COSTS, FREE):
            monkeypatch.setattr(costs, "CPU_COSTS", unit_costs)
            torch.testing.assert_close(frozen(x), expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(single(x.float()), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vgg in blocks", "bottleneck a"])
def test_in_training_gradients_are_those_of_gates_behind_batch_norm(name):
    plain, model = build(name)
    x = images(3)
    plain.train()
    model.train()
    model.embedding.eval()
    towards = torch.randn(3, CLASSES, dtype=torch.float64)
    names = [weight for weight, _ in plain.named_parameters()]
    expected = torch.autograd.grad((masked(plain, model, x) * towards).sum(), list(plain.parameters()))
    # weights of the gated layers are one level deeper, in the same order but for BatchNorm's
    found = torch.autograd.grad((model(x) * towards).sum(), list(model.backbone.parameters()))
    where = {id(weight): gradient for weight, gradient in zip(model.backbone.parameters(), found, strict=True)}
    nodes = {node.conv: node for node in build_channel_graph(plain)}
    norms = {nodes[gated].norm: gated for gated in model.gated}
    for weight, gradient in zip(names, expected, strict=True):
        layer, _, kind = weight.rpartition(".")
        if layer in model.gated:
            layer += ".conv"
        elif layer in norms:
            layer = f"{norms[layer]}.norm"
        mine = getattr(model.backbone.get_submodule(layer), kind)
        torch.testing.assert_close(where[id(mine)], gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_an_image_costs_is_what_the_counter_says_and_what_is_multiplied(name, monkeypatch):
    plain, model = build(name)
    for gate in model.gates.values():  # of a layer that is all closed, one channel may be computed
        nn.init.constant_(gate.bias[:1], 100)
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    shape = (3, 32, 32)
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        routing = model.forward_with_routing(x).routing
    counted = count_macs(model, shape)
    assert model.macs(routing).tolist() == [counted.macs]
    assert counted.macs < model.dense_macs
    assert counted.dense_macs == model.dense_macs == count_macs(plain, shape).macs
    frozen = moesaic.freeze(model)
    with FlopCounterMode(display=False) as counter:
        frozen(torch.cat([x, x]))
    multiplied = sum(counter.get_flop_counts()["FrozenDeepMoE.backbone"].values()) // 2
    assert multiplied == 2 * sum(row.macs for row in counted.layers if row.name.startswith("backbone."))


def test_costs_are_of_each_image_and_follow_its_gates():
    _, model = build("bottleneck a")
    x = images(3)
    with torch.no_grad():
        together = model.forward_with_routing(x).routing
        assert model.macs(together).tolist() == [
            int(model.macs(model.forward_with_routing(image[None]).routing)) for image in x
        ]
        for gate in model.gates.values():
            gate.weight.zero_()
            gate.bias.fill_(1)
        opened = model.macs(model.forward_with_routing(x).routing)
        for gate in model.gates.values():
            gate.bias.fill_(-1)
        closed = model.macs(model.forward_with_routing(x).routing)
    assert opened.tolist() == 3 * [model.dense_macs + model.gate_macs]
    assert closed.tolist() == 3 * [model.fixed_macs]


def test_costs_of_gates_under_other_names_are_refused():
    _, model = build("vgg")
    with moesaic.record_routing(model) as routing:
        model(images(1))
    with pytest.raises(ValueError, match=r"the routing of body.conv1 is missing \(got backbone.body.conv1, "):
        model.macs(routing)


@pytest.mark.parametrize("name", ["vgg", "bottleneck b"])
def test_routing_is_recorded_once_for_each_gated_layer(name):
    _, model = build(name)
    with moesaic.record_routing(model) as recorded:
        output = model.forward_with_routing(images(2))
    assert list(recorded) == [f"backbone.{layer}" for layer in model.gated]
    assert list(output.routing) == list(model.gated)
    for layer in model.gated:
        assert recorded[f"backbone.{layer}"] is output.routing[layer]
        assert isinstance(model.backbone.get_submodule(layer), ChannelMoE)


def test_gates_are_those_that_links_to_gate_names_and_whoever_reads_them_is_cut():
    for form in ("a", "b"):
        plain = ResNet(50, CLASSES, width=0.05)
        wanted = tuple(node.conv for node in nodes_to_gate(build_channel_graph(plain), form))
        model = deepmoe(plain, num_classes=CLASSES, bottleneck=form)
        assert model.gated == wanted
        block = model.backbone.get_submodule("body.3")
        assert block.get_submodule("second.0").producer == ("body.3.first.0" if form == "a" else None)
        assert isinstance(block.get_submodule("third.0"), ConsumerConv)
        assert not isinstance(block.get_submodule("first.0"), ConsumerConv)
        assert model.ungated["body.3.third.0"] == f"is not gated in bottlenecks of form {form!r}"
        assert model.ungated["body.2.shortcut.0"] == "is a shortcut"
        assert not set(model.ungated) & set(model.gated)


def test_gate_parameters_are_all_that_decide_which_channels_are_open():
    _, model = build("vgg")
    output = model.forward_with_routing(images(2))
    sum(each.gate.sum() for each in output.routing.values()).backward()
    touched = {id(weight) for weight in model.parameters() if weight.grad is not None}
    deciding = {id(weight) for weight in model.gate_parameters()}
    classifier = {id(weight) for weight in model.embedding.head.parameters()}
    assert touched == deciding - classifier
    assert deciding.isdisjoint({id(weight) for weight in model.backbone.parameters()})


@pytest.mark.parametrize("options", [{}, {"mode": "topk", "keep": 0.5}], ids=["relu", "topk"])
def test_it_compiles_whole_in_training(options):
    torch.manual_seed(0)
    model = deepmoe(small(), num_classes=CLASSES, image_size=16, **options).train()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 16, 16)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        y, expected = compiled(x), twin(x)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        expected.sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_threads_have_their_own_gates_in_a_compiled_network_with_a_graph_break():
    torch.compiler.reset()
    model = deepmoe(small(), num_classes=CLASSES, image_size=16).eval()
    for gate in model.gates.values():
        nn.init.normal_(gate.weight, std=10)
    inputs = torch.randn(2, 1, 3, 16, 16)
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    assert not torch.allclose(*expected, rtol=1e-2)
    inside = threading.Barrier(2, timeout=60)

    @torch.compiler.disable
    def meet(*_: object) -> None:
        inside.wait()

    model.backbone.get_submodule(model.gated[1]).register_forward_pre_hook(meet)
    compiled = torch.compile(model, backend="eager")

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return compiled(x)

    with ThreadPoolExecutor(2) as threads:
        torch.testing.assert_close(list(threads.map(run, inputs)), expected)


def test_a_network_may_call_itself():
    """As with a teacher in a hook: the inner call must not take the gates of the outer one with it."""
    _, model = build("vgg")
    outer, inner = images(1), images(1)
    with torch.no_grad():
        expected = model(outer)
        calls = []

        def call(*_: object) -> None:
            if not calls:
                calls.append(inner)
                calls.append(model(inner))

        hook = model.backbone.get_submodule(model.gated[2]).register_forward_pre_hook(call)
        torch.testing.assert_close(model(outer), expected)
        hook.remove()
        torch.testing.assert_close(calls[1], model(inner))


@pytest.mark.parametrize("name", ["vgg", "basic blocks"])
def test_copies_and_state_dicts_carry_everything(name):
    plain, model = build(name)
    x = images(2)
    with torch.no_grad():
        expected = model(x)
        twin = copy.deepcopy(model)
        for weight in model.parameters():
            weight.zero_()
        torch.testing.assert_close(twin(x), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(pickle.loads(pickle.dumps(twin))(x), expected, rtol=1e-10, atol=1e-10)
        model.load_state_dict(twin.state_dict())
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    layer = model.gated[0]
    names = {f"backbone.{layer}.conv.weight", f"backbone.{layer}.norm.bias", f"gates.{layer.replace('.', '_')}.bias"}
    assert names <= model.state_dict().keys()
    assert sum(weight.numel() for weight in model.backbone.parameters()) == sum(
        weight.numel() for weight in plain.parameters()
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_evaluation_between_training_steps_uses_the_current_weights(batch):
    _, model = build("vgg")
    x, optimizer = images(batch), torch.optim.SGD(model.parameters(), lr=0.01)
    outputs: list[Tensor] = []
    for _ in range(3):
        with torch.no_grad():
            outputs.append(model.eval()(x))
            fresh = copy.deepcopy(model)(x)
        torch.testing.assert_close(outputs[-1], fresh, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model(x), fresh, rtol=1e-8, atol=1e-8)  # with gradients
        torch.testing.assert_close(moesaic.freeze(model)(x), fresh, rtol=1e-8, atol=1e-8)
        F.cross_entropy(model.train()(images(4)), torch.arange(4)).backward()
        optimizer.step()
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])


def test_an_error_inside_leaves_no_gates_behind():
    _, model = build("vgg")
    with pytest.raises(RuntimeError):
        model(images(1, size=16))  # too small for five halvings
    with pytest.raises(RuntimeError, match=r"body\.conv1 has no gates outside of its DeepMoE"):
        model.backbone(images(1))
    copy.deepcopy(model)


def test_under_topk_a_share_of_every_layer_is_open():
    model = deepmoe(VGG16(CLASSES, width=0.1), num_classes=CLASSES, mode="topk", keep=0.25, block=2)
    for routing in model.forward_with_routing(torch.randn(3, 3, 32, 32)).routing.values():
        assert routing.mask.sum(2).flatten().tolist() == 3 * [max(round(routing.experts / 4), 1)]


def test_layers_narrower_than_a_block_have_one_gate():
    model = deepmoe(VGG16(CLASSES, width=0.1), num_classes=CLASSES, block=16)
    experts = [routing.experts for routing in model.forward_with_routing(torch.randn(1, 3, 32, 32)).routing.values()]
    assert experts == [1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("depth", "size", "share"), [(None, 32, 0.02), (None, 32, 0.05), (None, 224, 0.02), (18, 32, 0.02), (56, 32, 0.02)]
)
def test_the_embedding_costs_the_share_that_was_asked_for(depth, size, share):
    with torch.device("meta"):
        network = VGG16(10, image_size=size) if depth is None else ResNet(depth, 10, image_size=size)
        model = deepmoe(network, num_classes=10, image_size=size, embedding_share=share)
    assert 0.9 * share < model.gate_macs / model.dense_macs <= share
    counted = count_macs(model.embedding, (3, size, size)).macs + sum(
        gate.weight.numel() for gate in model.gates.values()
    )
    assert model.gate_macs == counted
    convs = [layer for layer in model.embedding.body if isinstance(layer, nn.Conv2d)]
    assert len(convs) == (4 if size < 128 else 5)


def test_the_embedding_has_eight_channels_at_least():
    model = deepmoe(small(), num_classes=CLASSES)
    assert model.embedding.body[0].out_channels == 8
    assert model.gate_macs > 0.02 * model.dense_macs


def test_an_embedding_network_without_convolutions_is_refused():
    with pytest.raises(ValueError, match="widths is empty"):
        EmbeddingNetwork(3, (), 10)


def test_a_network_of_which_only_some_convolutions_can_be_paired_is_gated_there():
    model = deepmoe(MobileNetV2(CLASSES), num_classes=CLASSES)
    assert "body.19.0" in model.gated
    assert model.ungated["body.4.filter.0"] == "is grouped (groups=144)"


class Sums(nn.Module):
    """A convolution whose channels an elementwise function other than ReLU reads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, **options)
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).sigmoid().mean((2, 3)))


def classifier(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (Sums(), "no convolution of Sums can drop channels: conv is read by sigmoid"),
        (classifier(nn.Conv2d(3, 6, 3, groups=3)), r"0 is grouped \(groups=3\)"),
        (classifier(nn.Conv2d(3, 6, (1, 3))), r"0 has kernel_size=\(1, 3\), which is not square"),
        (classifier(nn.Conv2d(3, 6, 3, padding="same")), "0 has padding='same'; it must be a number"),
        (classifier(nn.Conv2d(3, 6, 3, dilation=2)), r"0 has dilation=\(2, 2\); it must be 1"),
        (classifier(nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular")), "0 has padding_mode='circular'"),
        (classifier(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6)), "0 has other layers before its BatchNorm 2"),
        (classifier(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)), "0 has a BatchNorm without weights"),
        (classifier(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=None)), "0 has a BatchNorm with momentum=None"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, CLASSES)), "Sequential has no convolution to gate"),
    ],
)
def test_a_network_in_which_nothing_can_be_paired_is_refused_with_the_reason(network, why):
    before = str(network)
    with pytest.raises(ValueError, match=why):
        deepmoe(network, num_classes=CLASSES)
    assert str(network) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "topk"}, TypeError, "keep is missing"),
        ({"mode": "topk", "keep": 0.0}, ValueError, "keep=0.0; it must be a fraction .* above 0 and up to 1"),
        ({"mode": "topk", "keep": 1.5}, ValueError, "keep=1.5"),
        ({"keep": 0.5}, ValueError, "keep=0.5 has no meaning under mode='relu'"),
        ({"embedding_share": -0.1}, ValueError, "embedding_share=-0.1; .* from 0 to below 1"),
        ({"embedding_share": 0, "center_embedding": True}, ValueError, "nothing to center with embedding_share=0"),
        ({"mode": "hard", "keep": 0.5}, ValueError, "keep=0.5 has no meaning under mode='hard'"),
        ({"image_size": 8}, ValueError, "image_size=8; 4 convolutions halve the map 4 times, .* at least 16"),
        ({"num_classes": 7}, ValueError, r"returns \(1, 6\) for one image, not logits \(1, 7\)"),
        ({"bottleneck": "c"}, ValueError, "bottleneck='c' is unknown"),
        ({"mode": "soft"}, ValueError, "mode='soft' is unknown"),
        ({"block": 0}, ValueError, "block=0; it must be at least 1"),
        ({"mode": "topk", "keep": "half"}, TypeError, "keep='half' is a str; it must be a number"),
        ({"embedding_share": "2 %"}, TypeError, "embedding_share='2 %' is a str; it must be a number"),
        ({"bias": "1"}, TypeError, "bias='1' is a str; it must be a number"),
    ],
)
def test_options_out_of_range_are_refused_and_the_network_stays_as_it_was(options, error, message):
    network = small()
    before = str(network)
    with pytest.raises(error, match=message):
        deepmoe(network, **{"num_classes": CLASSES, **options})
    assert str(network) == before


@pytest.mark.parametrize(
    ("convs", "named", "more"), [(2, 2, ""), (3, 3, ""), (4, 3, "; and 1 more"), (5, 3, "; and 2 more")]
)
def test_of_convolutions_that_cannot_be_gated_three_are_named(convs: int, named: int, more: str):
    layers = [nn.Conv2d(4, 4, 3, padding=1, groups=2) for _ in range(convs)]
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match="no convolution of Sequential can drop channels: ") as refused:
        deepmoe(backbone, num_classes=CLASSES, in_channels=4)
    reasons = str(refused.value).split("can drop channels: ")[1].split(". It can")[0]
    assert reasons.endswith(more)
    assert len(reasons.removesuffix(more).split("; ")) == named


def test_a_centred_embedding_has_mean_0_and_variance_1_for_the_heads_alone():
    torch.manual_seed(0)
    plain = deepmoe(VGG16(num_classes=4, width=0.1), num_classes=4)
    torch.manual_seed(0)
    model = deepmoe(VGG16(num_classes=4, width=0.1), num_classes=4, center_embedding=True)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert added == {f"embedding.center.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    model.load_state_dict(plain.state_dict(), strict=False)
    x = torch.rand(16, 3, 32, 32)
    (embedding, logits), (_, expected) = model.embedding(x), plain.embedding(x)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(embedding.mean(0), torch.zeros(model.embedding.dimension), rtol=0, atol=1e-5)
    assert ((embedding.std(0, correction=0) - 1).abs() < 0.1).float().mean() > 0.5  # up to the norm's eps
    assert model.gate_macs == plain.gate_macs


def test_a_constant_embedding_costs_its_heads_and_gives_every_image_the_same_gates():
    model = deepmoe(VGG16(num_classes=4, width=0.1), num_classes=4, embedding_share=0)
    output = model.forward_with_routing(torch.rand(3, 3, 32, 32))
    for routing in output.routing.values():
        assert torch.equal(routing.weights[:1].expand_as(routing.weights), routing.weights)
    assert model.gate_macs == sum(head.blocks for head in model.heads().values())
    counted = count_macs(model.eval(), (3, 32, 32)).macs
    assert counted == int(model.macs(model.forward_with_routing(torch.zeros(1, 3, 32, 32)).routing))
    model.reset_classifier(7)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert model.forward_with_routing(torch.rand(2, 3, 32, 32)).embedding_logits.shape == (2, 7)


def test_expected_costs_count_short_blocks_and_refuse_missing_layers():
    model = deepmoe(VGG16(num_classes=4, width=0.1), num_classes=4, mode="hard", block=4, bias=100.0).eval()
    routing = model.forward_with_routing(torch.zeros(1, 3, 32, 32)).routing
    assert model.expected_macs(routing).item() == pytest.approx(int(model.macs(routing)), rel=1e-5)
    with pytest.raises(ValueError, match=r"DeepMoE\.expected_macs: the routing of body\.conv1 is missing"):
        model.expected_macs({})


@pytest.mark.parametrize("options", [{}, {"mode": "topk", "keep": 0.5}, {"block": 4}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_relu_inside_of_gated_convolutions_changes_nothing(options, training, monkeypatch):
    """As where GPU kernels may run, here with torch's operators in their place."""
    torch.manual_seed(0)
    model = deepmoe(lived_in(VGG16(CLASSES, width=0.08)), num_classes=CLASSES, **options).train(training)
    lived_in(model.embedding)
    x, found = images(3), []
    for rectified in (False, True):
        monkeypatch.setattr(gated_conv, "kernels_available", lambda x, rectified=rectified: rectified)
        twin, outputs = copy.deepcopy(model), []
        rectify = gated_conv.GatedConv._rectified
        monkeypatch.setattr(
            gated_conv.GatedConv,
            "_rectified",
            lambda self, x, rectify=rectify, outputs=outputs: outputs.append(rectify(self, x)) or outputs[-1],
        )
        logits = twin(x)
        monkeypatch.setattr(gated_conv.GatedConv, "_rectified", rectify)
        assert sum(each is not None for each in outputs) == 13 * rectified
        logits.square().sum().backward()
        gradients = {name: weight.grad for name, weight in twin.named_parameters()}
        found.append({"logits": logits.detach()} | gradients | dict(twin.named_buffers()))
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("wrong", ["batch", "dtype"])
def test_wrong_maps_are_refused_where_kernels_may_run(wrong, monkeypatch):
    monkeypatch.setattr(gated_conv, "kernels_available", lambda x: True)
    model = deepmoe(VGG16(CLASSES, width=0.08), num_classes=CLASSES)
    output = model.forward_with_routing(torch.randn(3, 3, 32, 32))
    x = torch.randn(2 if wrong == "batch" else 3, 3, 32, 32, dtype=torch.float64 if wrong == "dtype" else None)
    with model._gated_by(output.routing), pytest.raises((ValueError, TypeError), match="ChannelMoE: "):
        model.backbone(x)


class Scaled(nn.Module):
    """The second convolution reads gated channels; its own are not gated, as they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.second(self.relu(self.first(x))) * 2).mean((2, 3)))


@pytest.mark.parametrize("change", ["spectral norm", "hook"])
def test_a_consumer_with_a_parametrised_weight_or_hooks_is_left_as_it_is(change):
    network, calls = Scaled().double(), []
    if change == "hook":
        network.second.register_forward_hook(lambda *_: calls.append(1))
    else:
        nn.utils.parametrizations.spectral_norm(network.second)
    second = network.second
    calls.clear()
    model = deepmoe(network, num_classes=CLASSES)
    assert model.gated == ("first",)
    assert model.backbone.second is second
    calls.clear()
    model(images(2)).sum().backward()
    assert len(calls) == (change == "hook")
    assert all(weight.grad is not None for weight in second.parameters())
    if change == "spectral norm":
        x = images(2)
        torch.testing.assert_close(moesaic.freeze(model.eval())(x), model(x), rtol=1e-10, atol=1e-10)

"""Frozen networks equal the masked ones: one image and batches, sequential networks and those with shortcuts."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepmoe_cases import CLASSES, FORMS, NETWORKS, build, gate, images, small
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moesaic
from moesaic.models.deepmoe.embedding_network import EmbeddingNetwork
from moesaic.models.deepmoe.frozen import FrozenDeepMoE
from moesaic.models.deepmoe.frozen_embedding import FrozenEmbedding
from moesaic.models.deepmoe.gated_conv import ConsumerConv
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.wide_resnet.network import WideResNet
from moesaic.ops.channel import costs
from moesaic.ops.channel.workspace import Workspace

FREE = costs.UnitCosts(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=0.0)
UNIT_COSTS = {"gathered": FREE, "dense": replace(FREE, copy=1e30, column=1e30), "measured": costs.CPU_COSTS}
"""Unit costs under which open channels are always gathered, or never; and the real ones."""


@pytest.fixture(params=list(UNIT_COSTS))
def execution(request, monkeypatch) -> str:
    monkeypatch.setattr(costs, "CPU_COSTS", UNIT_COSTS[request.param])
    return request.param


@torch.no_grad()
def assert_frozen_equals_masked(frozen: FrozenDeepMoE, model: DeepMoE, x: Tensor) -> None:
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_frozen_network_equals_the_masked_one(name, batch, execution):
    model = build(name)
    frozen = moesaic.freeze(model)
    assert (frozen._sequence is None) == (name in ("shortcuts", "bottlenecks"))
    for seed, size in ((0, 32), (1, 32), (2, 40), (3, 32)):  # memory is reused from image to image
        assert_frozen_equals_masked(frozen, model, images(batch, seed, size))


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_every_form_of_gates_equals_the_masked_network(options, monkeypatch):
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    model = gate(small(), image_size=16, **options)
    frozen = moesaic.freeze(model)
    opened = [
        routing.mask.float().mean() for routing in model.forward_with_routing(images(3, size=16)).routing.values()
    ]
    assert all(0 < share < 1 for share in opened)
    for batch in (0, 1, 3):
        assert_frozen_equals_masked(frozen, model, images(batch, size=16))


@pytest.mark.parametrize("name", ["blocks", "shortcuts"])
@torch.no_grad()
def test_a_network_in_float32_is_frozen_in_float32(name):
    model = build(name)
    x = images(2)
    expected = model(x)
    frozen = moesaic.freeze(model.float())
    for part, logits in ((x, expected), (x[:1], expected[:1])):
        y = frozen(part.float())
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, logits.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("widths", [(32, 48, 32), (16, 20, 8), (20, 16, 24)])
def test_blocks_of_every_size_equal_the_masked_network(block, widths, execution):
    model = gate(small(widths), block=block, image_size=16)
    frozen = moesaic.freeze(model)
    for batch in (1, 3):
        assert_frozen_equals_masked(frozen, model, images(batch, size=16))


@settings(max_examples=30)
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.5, 2.0]), min_size=21, max_size=21),
    closed=st.sets(st.sampled_from([0, 1, 2])),
    batch=st.sampled_from([1, 2]),
)
def test_every_pattern_equals_the_masked_network_also_when_layers_are_closed(scores, closed, batch):
    model = build("small")
    start = 0
    with torch.no_grad():
        for number, head in enumerate(model.heads().values()):
            values = torch.tensor(scores[start : start + head.channels], dtype=torch.float64)
            head.weight.zero_()
            head.bias.copy_(-torch.ones_like(values) if number in closed else values)
            start += head.channels
    measured = costs.CPU_COSTS
    costs.CPU_COSTS = FREE
    try:
        assert_frozen_equals_masked(moesaic.freeze(model), model, images(batch, size=16))
    finally:
        costs.CPU_COSTS = measured


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_closed_layers_in_the_middle_equal_the_masked_network(batch):
    model = build("single channels")
    for name in ("body.conv1", "body.conv5", "body.conv13"):
        model.heads()[name].weight.zero_()
        model.heads()[name].bias.fill_(-1)
    assert_frozen_equals_masked(moesaic.freeze(model), model, images(batch))


@torch.no_grad()
def test_layers_pass_only_open_channels_to_their_consumers(monkeypatch):
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    model = build("small")
    frozen, x = moesaic.freeze(model), images(2, size=16)
    seen: list[int] = []
    frozen.backbone.get_submodule("3").register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    with moesaic.record_routing(frozen) as routing:
        frozen(torch.cat([x[:1], x[:1]]))
    opened = int(routing["backbone.0"].mask[0].sum())
    assert 0 < opened < 8
    assert seen == [opened]


class Recorder:
    """Records the batch sizes of the backbone's runs."""

    def __init__(self, frozen: FrozenDeepMoE) -> None:
        self.batches: list[int] = []
        frozen.backbone.register_forward_pre_hook(lambda module, args: self.batches.append(len(args[0])))


@torch.no_grad()
def test_samples_that_open_the_same_channels_run_together_where_that_is_cheaper(monkeypatch):
    model = build("small")
    frozen, x = moesaic.freeze(model), images(3, size=16)
    x[2] = x[0]
    recorder = Recorder(frozen)
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    assert_frozen_equals_masked(frozen, model, x)
    assert recorder.batches == [2, 1]
    monkeypatch.setattr(costs, "CPU_COSTS", replace(FREE, call=1e30))
    assert_frozen_equals_masked(frozen, model, x)
    assert recorder.batches == [2, 1, 3]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["single channels", "blocks", "shortcuts"])
@torch.no_grad()
def test_routing_is_recorded_as_that_of_the_masked_network(name, batch, monkeypatch):
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)  # the batch runs in parts, but is recorded as one
    model = build(name)
    frozen, x = moesaic.freeze(model), images(batch)
    with moesaic.record_routing(frozen) as found:
        y = frozen(x)
    with moesaic.record_routing(model) as expected:
        model(x)
    assert list(found) == list(expected) == [f"backbone.{layer}" for layer in model.gated]
    for layer, routing in expected.items():
        assert torch.equal(found[layer].mask, routing.mask)
        torch.testing.assert_close(found[layer].weights, routing.weights)
        assert not found[layer].gate.is_inference()
    assert torch.equal(frozen(x), y)


@torch.no_grad()
def test_memory_format_changes_nothing(execution):
    for name in ("short blocks", "shortcuts"):
        model = build(name)
        last = images(2).contiguous(memory_format=torch.channels_last)
        frozen = moesaic.freeze(model)
        for x in (last, last[:1].contiguous(memory_format=torch.channels_last)):
            assert_frozen_equals_masked(frozen, model, x)
        assert_frozen_equals_masked(moesaic.freeze(model.to(memory_format=torch.channels_last)), model, last)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_output_is_a_normal_tensor_without_a_graph(batch):
    frozen = moesaic.freeze(build())
    y = frozen(images(batch).requires_grad_())
    assert not y.requires_grad
    assert not y.is_inference()
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (scale * y).sum().backward()
    assert torch.equal(scale.grad, y.sum().view(1))


@torch.no_grad()
def test_an_output_stays_the_same_when_the_next_image_runs():
    frozen = moesaic.freeze(build())
    first = frozen(images(1, seed=0))
    copied = first.clone()
    frozen(images(1, seed=1))
    assert torch.equal(first, copied)


@torch.no_grad()
def test_autocast_and_backends_do_not_matter():
    frozen = moesaic.freeze(build().float())
    for x in (images(1).float(), images(2).float()):
        expected = frozen(x)
        with torch.autocast("cpu", torch.bfloat16), moesaic.backend("reference"):
            assert torch.equal(frozen(x), expected)
        with torch.inference_mode():
            assert torch.equal(frozen(x), expected)


@pytest.mark.parametrize("name", ["single channels", "shortcuts"])
@torch.no_grad()
def test_threads_that_run_at_once_do_not_share_memory(name):
    frozen = moesaic.freeze(build(name))
    inputs = [images(1 + number % 2, seed=number) for number in range(4)]
    expected = [frozen(x) for x in inputs]

    def run(number: int) -> list[Tensor]:
        return [frozen(inputs[(number + step) % 4]) for step in range(12)]

    with ThreadPoolExecutor(4) as threads:
        for number, found in enumerate(threads.map(run, range(4))):
            for step, y in enumerate(found):
                torch.testing.assert_close(y, expected[(number + step) % 4], rtol=1e-12, atol=1e-12)


def train(model: DeepMoE) -> None:
    model.train()
    model(images(3)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()


@torch.no_grad()
def update_statistics(model: DeepMoE) -> None:
    model.train()(images(3))
    model.eval()


@torch.no_grad()
def open_all(model: DeepMoE) -> None:
    for head in model.heads().values():
        head.keep = head.blocks


def zero(tensor_of: Callable[[DeepMoE], Tensor]) -> Callable[[DeepMoE], None]:
    def change(model: DeepMoE) -> None:
        with torch.no_grad():
            tensor_of(model).add_(1)

    return change


CHANGES = {
    "a training step": train,
    "statistics of BatchNorm": update_statistics,
    "load_state_dict": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "a weight of the embedding": zero(lambda model: model.embedding.body[0].weight),
    "statistics of the embedding": zero(lambda model: model.embedding.body[1].running_mean),
    "a head": zero(lambda model: model.heads()["body.conv4"].bias),
    "a weight of a layer": zero(lambda model: model.backbone.get_submodule("body.conv4").conv.weight),
    "a weight of an ungated layer": zero(lambda model: model.backbone.head.weight),
    "the number of open blocks": open_all,
    "the dtype": lambda model: model.half(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_later_changes_to_the_model_have_no_effect_until_it_is_frozen_again(change):
    model = build()
    frozen, inputs = moesaic.freeze(model), (images(1), images(2))
    before = [frozen(x) for x in inputs]
    CHANGES[change](model)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(frozen(x), y)
    again = moesaic.freeze(model.double())
    for x, y in zip(inputs, before, strict=True):
        assert_frozen_equals_masked(again, model, x)
        if change != "the dtype":
            assert not torch.equal(again(x), y)


@pytest.mark.parametrize("name", ["blocks", "shortcuts"])
def test_freezing_leaves_the_model_as_it_was(name):
    model = build(name)
    before, text = copy.deepcopy(model.state_dict()), str(model)
    moesaic.freeze(model)
    assert str(model) == text
    assert all(torch.equal(values, before[key]) for key, values in model.state_dict().items())
    model.train()(images(2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.backbone.parameters())


@pytest.mark.parametrize("name", ["blocks", "shortcuts"])
def test_copies_and_pickles_give_the_same_output_and_record_routing(name):
    frozen = moesaic.freeze(build(name))
    for x in (images(1), images(2)):
        expected = frozen(x)
        for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
            with moesaic.record_routing(other) as routing:
                assert torch.equal(other(x), expected)
            assert routing


def hook_on(name: str) -> Callable[[DeepMoE], Any]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda *args: None)


UNFREEZABLE: dict[str, tuple[Callable[[DeepMoE], Any], str]] = {
    "training": (lambda model: model.train(), r"the model is in training mode; call model.eval\(\) first"),
    "BatchNorm in training": (
        lambda model: model.backbone.get_submodule("body.conv3").norm.train(),
        r"module 'backbone.body.conv3.norm' is in training mode; call model.eval\(\) first",
    ),
    "a head in training": (
        lambda model: model.heads()["body.conv3"].train(),
        "module 'gates.body_conv3' is in",
    ),
    "a hook on the model": (hook_on(""), "the model has a hook, which a frozen module would not call; remove"),
    "a hook on the backbone": (hook_on("backbone"), "module 'backbone' has a hook"),
    "a hook on a layer": (hook_on("backbone.body.conv2"), "module 'backbone.body.conv2' has a hook"),
    "a hook on a norm": (hook_on("backbone.body.conv2.norm"), "module 'backbone.body.conv2.norm' has a hook"),
    "a hook on the embedding": (hook_on("embedding.body.1"), "module 'embedding.body.1' has a hook"),
    "a hook on a head": (hook_on("gates.body_conv2"), "module 'gates.body_conv2' has a hook"),
    "a pre-hook": (
        lambda model: model.backbone.head.register_forward_pre_hook(lambda *args: None),
        "module 'backbone.head' has a hook",
    ),
    "another device": (lambda model: model.to("meta"), r"the model is on meta, .* call model.to\('cpu'\) first"),
    "another dtype": (lambda model: model.bfloat16(), r"the weights are torch.bfloat16; call model.float\(\) or"),
    "two dtypes": (lambda model: model.backbone.float(), r"the weights are torch.float32, torch.float64; call"),
}


@pytest.mark.parametrize("reason", UNFREEZABLE)
def test_a_model_that_cannot_be_frozen_is_refused_with_what_to_do(reason):
    model = build()
    change, message = UNFREEZABLE[reason]
    change(model)
    with pytest.raises(ValueError, match=f"^freeze: {message}"):
        moesaic.freeze(model)


def test_a_model_is_frozen_again_once_its_hook_is_removed():
    model = build()
    handle = hook_on("backbone.body.conv2")(model)
    handle.remove()
    assert_frozen_equals_masked(moesaic.freeze(model), model, images(1))


@pytest.mark.parametrize("make", [lambda: WideResNet(10, 1, 2), lambda: nn.Sequential(nn.Conv2d(3, 4, 1))])
def test_a_network_without_channel_gates_is_refused(make):
    with pytest.raises(TypeError, match=r"freeze: \w+ has no channel gates to freeze; it takes a DeepMoE network"):
        moesaic.freeze(make().eval())


def test_a_frozen_network_cannot_be_trained_moved_or_loaded():
    frozen = moesaic.freeze(build())
    assert not frozen.training
    assert frozen.eval() is frozen
    with pytest.raises(RuntimeError, match="a frozen module cannot be trained; train the original model"):
        frozen.train()
    for convert in (lambda: frozen.to("meta"), lambda: frozen.float(), lambda: frozen.half()):
        with pytest.raises(RuntimeError, match=r"stays on the CPU and in torch.float64; convert the original model"):
            convert()
    assert frozen.to("cpu", torch.float64) is frozen
    with pytest.raises(RuntimeError, match="has no state_dict; save that of the original model"):
        frozen.state_dict()
    with pytest.raises(RuntimeError, match="load weights into the original model, and freeze it again"):
        frozen.load_state_dict({})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (images(1)[0], ValueError, r"takes \(B, 3, H, W\), got \(3, 32, 32\)"),
        (images(1)[:, :2], ValueError, r"takes \(B, 3, H, W\), got \(1, 2, 32, 32\)"),
        (images(1).float(), TypeError, r"the input is torch.float32, but the module was frozen in torch.float64"),
        (images(1).to("meta"), ValueError, r"runs on the CPU, the input is on meta"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, error, message):
    with pytest.raises(error, match=f"FrozenDeepMoE: {message}"):
        moesaic.freeze(build())(x)


def test_an_image_too_small_for_the_network_is_an_error_and_the_next_one_runs():
    model = build()
    frozen = moesaic.freeze(model)
    for batch in (1, 2):
        with pytest.raises(RuntimeError):
            frozen(images(batch, size=16))
        assert_frozen_equals_masked(frozen, model, images(batch))


def test_a_sequential_network_with_an_ungated_consumer_equals_the_masked_one():
    network = small()
    network[7] = nn.BatchNorm2d(6, momentum=None)  # which keeps the third convolution from being gated
    model = gate(network, image_size=16)
    assert isinstance(model.backbone.get_submodule("6"), ConsumerConv)
    frozen = moesaic.freeze(model)
    for batch in (1, 2):
        assert_frozen_equals_masked(frozen, model, images(batch, size=16))


def test_activations_with_a_weight_per_channel_get_all_channels():
    network = small()
    network[2] = nn.PReLU(8)
    model = gate(network, image_size=16)
    frozen = moesaic.freeze(model)
    for batch in (1, 2):
        assert_frozen_equals_masked(frozen, model, images(batch, size=16))


class Functional(nn.Module):
    """Calls functions and methods, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.linear, self.scale = nn.Linear(6, CLASSES), nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(self.first(x).relu(), 2)
        y = nn.functional.gelu(self.second(y)).mean((2, 3))
        return self.linear(y) * self.scale.sum()


def test_functions_methods_and_parameters_of_the_network_are_frozen_with_it():
    model = gate(Functional(), image_size=16)
    frozen = moesaic.freeze(model)
    for batch in (1, 2):
        assert_frozen_equals_masked(frozen, model, images(batch, size=16))
    before = frozen(images(1, size=16))
    with torch.no_grad():
        model.backbone.scale.zero_()
    assert torch.equal(frozen(images(1, size=16)), before)


@pytest.mark.parametrize("widths", [(5, 6, 4), (16, 32), (24, 20)])
@pytest.mark.parametrize("size", [(40, 40), (16, 16), (7, 3), (1, 1)])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_a_frozen_embedding_equals_the_embedding_network(batch, size, widths):
    network = EmbeddingNetwork(3, widths, num_classes=2).double()
    for _ in range(3):
        network.train()(torch.randn(4, 3, 16, 16, dtype=torch.float64))  # statistics
    frozen = FrozenEmbedding(network.eval())
    workspace = Workspace(torch.float64) if batch == 1 else None
    for seed in range(2):
        x = torch.randn(batch, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(frozen.run(x, workspace), network(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_device_has_no_effect(name):
    model = build(name)
    with torch.device("meta"):
        frozen = moesaic.freeze(model)
    for batch in (1, 3):
        x = images(batch)
        with torch.device("meta"):
            y = frozen(x)
        torch.testing.assert_close(y, model(x).detach(), rtol=1e-10, atol=1e-10)

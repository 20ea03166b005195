"""Experts of one architecture run as one network, and are what a loop over them is; other experts are not grouped."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NoHostSync, assert_same, no_cuda_sync, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moesaic
from moesaic.layers import sample_moe
from moesaic.layers.grouped_experts import GroupedExperts
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.resnet import ResNet
from moesaic.ops import sample_groups
from moesaic.ops.sample_groups import SampleGroup, capacity_groups

CPU = torch.device("cpu")


class Chosen(nn.Module):
    """Scores that the first pixels of a sample give: whoever makes the samples chooses their experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, : len(self.weight)] @ self.weight


def samples_for(loads: list[int], shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random samples, of which expert e is the first choice of ``loads[e]``, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    expert = torch.repeat_interleave(torch.arange(len(loads)), torch.tensor(loads))
    expert = expert[torch.randperm(len(expert), generator=generator)]
    x = torch.randn(len(expert), *shape, generator=generator, dtype=torch.float64)
    x.flatten(1)[torch.arange(len(expert)), expert] += 20
    return x


class Block(nn.Module):
    """A residual block with a gate on its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.gate = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu(x + 0.5 * y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))))


class Viewed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.dropout(x, 0.5, training=False), 2)
        return self.layer(y.view(y.size(0), -1))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(), Block()
    ),
    "pooled": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)),
    "viewed": lambda: Viewed(nn.Sequential(nn.Linear(27, 5, bias=False), nn.BatchNorm1d(5, affine=False), nn.Tanh())),
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm((6, 6)), nn.Linear(6, 3), nn.LayerNorm(3), nn.Dropout(0.0)),
    "untracked": lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Identity()),
}


def layer_of(make: Callable[[], nn.Module], experts: int = 4, **options: Any) -> moesaic.SampleMoE:
    torch.manual_seed(0)
    options = {"noise": None, "grouped": True} | options
    layer = moesaic.SampleMoE(Chosen(experts), [make() for _ in range(experts)], **options).double()
    with torch.no_grad():
        for name, each in [*layer.experts.named_parameters(), *layer.experts.named_buffers()]:
            if not name.endswith("tracked"):
                each.add_(0.3 * torch.rand_like(each))
    return layer


def one_by_one(layer: moesaic.SampleMoE) -> moesaic.SampleMoE:
    other = copy.deepcopy(layer)
    other.grouped = False
    return other


def assert_equal_to_the_loop(layer: moesaic.SampleMoE, x: Tensor) -> None:
    assert_same(run(layer, x, "torch", steps=2), run(one_by_one(layer), x, "torch", steps=2), tolerance=1e-10)


@pytest.mark.parametrize("kind", IMAGES)
@settings(max_examples=5)
@given(
    loads=st.lists(st.sampled_from([0, 2, 3, 4, 9]), min_size=4, max_size=4).filter(any),
    top_k=st.sampled_from([1, 2]),
    training=st.booleans(),
)
def test_grouped_experts_are_the_loop_over_experts(kind, loads, top_k, training):
    layer = layer_of(IMAGES[kind], top_k=top_k).train(training)
    x = samples_for(loads, (3, 6, 6))
    second = layer.route(x).load
    if training and (second == 1).any():
        x = torch.cat([x, x])  # a norm of vectors needs two
    assert_equal_to_the_loop(layer, x)


@pytest.mark.parametrize(
    "make", [lambda: ResNet(18, 3, width=0.05), lambda: MobileNetV2(3)], ids=["resnet18", "mobilenetv2"]
)
def test_networks_of_the_library_are_one_network(make):
    network = GroupedExperts([make().eval() for _ in range(2)])
    assert len(network._steps) > 50


def test_a_resnet_trains_as_in_the_loop():
    layer = layer_of(lambda: ResNet(18, 3, width=0.05), 3)
    assert_equal_to_the_loop(layer, samples_for([5, 0, 3], (3, 16, 16)))


def test_an_expert_without_samples_has_no_gradient_and_the_statistics_it_had():
    layer = layer_of(IMAGES["residual"])
    before = copy.deepcopy(layer.experts[1].state_dict())
    layer(samples_for([3, 0, 2, 4], (3, 6, 6))).sum().backward()
    assert [all(p.grad is None for p in expert.parameters()) for expert in layer.experts] == [False, True, False, False]
    assert all(torch.equal(each, before[name]) for name, each in layer.experts[1].state_dict().items())


def test_batchnorm_on_one_sample_names_the_expert():
    layer = layer_of(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)))
    x = samples_for([3, 2, 1, 2], (3, 2, 2))
    before = copy.deepcopy(layer.state_dict())
    for each in (layer, one_by_one(layer)):
        with pytest.raises(ValueError, match="expert 2 got 1 sample of the batch, too few for its BatchNorm"):
            each(x)
    assert all(torch.equal(each, before[name]) for name, each in layer.state_dict().items())
    assert layer.eval()(x).shape == (8, 12)


@pytest.mark.parametrize("top_k", [1, 2])
def test_channels_last_is_preserved(top_k):
    layer = layer_of(IMAGES["residual"], top_k=top_k).to(memory_format=torch.channels_last)
    x = samples_for([3, 3, 2, 4], (3, 6, 6)).contiguous(memory_format=torch.channels_last)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()
    torch.testing.assert_close(y, one_by_one(layer)(x))


def test_autocast_and_low_precision_are_within_their_rounding():
    x = samples_for([3, 4, 2, 4], (3, 6, 6)).float().requires_grad_()
    layer = layer_of(IMAGES["residual"]).float()
    found = []
    for each in (layer, one_by_one(layer)):
        with torch.autocast("cpu", torch.bfloat16):
            y = each(x)
        (grad,) = torch.autograd.grad(y.float().square().sum(), x)
        found.append((y, grad, each.experts[0][1].running_var))
    assert found[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0.1)
    half = copy.deepcopy(layer).bfloat16()
    y, expected = half(x.bfloat16()), one_by_one(half)(x.bfloat16())
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)


def test_gradients_of_gradients_are_those_of_the_loop():
    layer = layer_of(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Tanh()), 2)
    x = samples_for([3, 5], (3, 4, 4))

    def penalty(each: nn.Module) -> list[Tensor]:
        images = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(each(images).square().sum(), images, create_graph=True)
        inputs = [images, *each.experts.parameters()]
        return list(torch.autograd.grad(grad.square().sum(), inputs, allow_unused=True))

    torch.testing.assert_close(penalty(layer), penalty(one_by_one(layer)), rtol=1e-9, atol=1e-9)


def test_checkpointed_layers_have_the_same_gradients():
    layer = layer_of(IMAGES["residual"])
    x = samples_for([3, 3, 2, 4], (3, 6, 6)).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (found,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_pass_waits_for_the_device_once(monkeypatch):
    layer, x = layer_of(IMAGES["residual"]), samples_for([3, 3, 2, 4], (3, 6, 6))
    waits = []

    def sizes(ends_E: Tensor) -> list[int]:
        waits.append(ends_E)
        return [3, 3, 2, 4]

    monkeypatch.setattr(sample_groups, "group_sizes", sizes)
    with NoHostSync():
        layer(x).sum().backward()
    assert len(waits) == 1


@given(st.lists(st.integers(0, 200), min_size=2, max_size=9).filter(any))
def test_capacities_hold_all_samples_and_cost_at_most_half_as_many_again(sizes):
    groups = capacity_groups(sizes, CPU)
    found = {
        e: (count, group.capacity) for group in groups for e, count in zip(group.experts, group.counts, strict=True)
    }
    assert {e: count for e, (count, _) in found.items()} == {e: size for e, size in enumerate(sizes) if size}
    assert all(count <= capacity for count, capacity in found.values())
    step = -(-sum(sizes) // (4 * len(sizes)))
    assert sum(capacity for _, capacity in found.values()) <= max(1.5 * sum(sizes), sum(sizes) + len(found) * step)


def test_balanced_loads_of_a_training_run_need_few_capacities():
    generator = torch.Generator().manual_seed(0)
    loads = [torch.randint(4, (512,), generator=generator).bincount().tolist() for _ in range(200)]
    assert len({tuple(load) for load in loads}) > 190
    assert len({tuple(group.capacity for group in capacity_groups(load, CPU)) for load in loads}) <= 2


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return 2 * x


class Lucky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Sized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)


class Branched(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[:, :1]


def hooked() -> nn.Module:
    expert = nn.Identity()
    expert.register_forward_hook(lambda *_: None)
    return expert


SHARED = nn.BatchNorm2d(3)
STRIDES = iter((1, 2, 1, 2))
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "state": (Counting, "Counting has a state"),
    "random": (Lucky, "Lucky draws random numbers"),
    "dropout": (lambda: nn.Dropout(0.5), "a Dropout draws random numbers"),
    "batch size": (Sized, "truediv with these arguments runs one expert at a time"),
    "channels": (Rolled, "roll runs one expert at a time"),
    "branch": (Branched, "Branched cannot be traced"),
    "index": (Spread, "getitem with these arguments runs one expert at a time"),
    "hook": (hooked, "a Identity has hooks"),
    "shared": (lambda: nn.Sequential(SHARED), "experts 0 and 1 share a BatchNorm2d"),
    "differing": (lambda: nn.Conv2d(3, 2, 1, next(STRIDES)), r"experts 0 and 1 differ: Conv2d\(3, 2.* and Conv2d\(3"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 1), "a ConvTranspose2d runs one expert at a time"),
    "padding": (lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), "a Conv2d has padding_mode='circular'"),
    "averages": (lambda: nn.BatchNorm2d(3, momentum=None), "a BatchNorm2d has momentum=None"),
    "routed": (lambda: moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=2), "a PatchMoE routes"),
    "axes": (lambda: nn.MaxPool1d(2), "a layer for 1 axes and channels gets samples of 3 axes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_experts_run_one_by_one(kind):
    make, reason = REFUSED[kind]
    layer, x = layer_of(make, 2), samples_for([3, 4], (3, 4, 4))
    python, torchs = random.getstate(), torch.get_rng_state()
    for _ in range(2):  # the second time from the stored reason
        with pytest.raises(ValueError, match=f"SampleMoE: grouped=True, but {reason}.*; use grouped=None"):
            layer(x)
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), torchs)
    if kind == "state":
        assert [expert.calls for expert in layer.experts] == [[0], [0]]
    if kind not in ("differing", "axes"):
        assert len(one_by_one(layer)(x)) == 7


def test_a_norm_that_runs_twice_is_not_grouped():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x))

    with pytest.raises(ValueError, match="a BatchNorm runs more than once"):
        layer_of(Twice, 2)(samples_for([3, 4], (3, 4, 4)))


@pytest.mark.parametrize(
    "change",
    [
        lambda expert: setattr(expert[1], "momentum", 0.5),
        lambda expert: expert[1].eval(),
        lambda expert: setattr(expert, "2", nn.Tanh()),
        lambda expert: setattr(expert[3], "scale", 3.0),
    ],
    ids=["momentum", "mode", "layer", "attribute"],
)
def test_experts_that_change_are_run_as_they_are_now(change):
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    layer = layer_of(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), Scaled()), 2)
    x = samples_for([3, 4], (3, 4, 4))
    layer(x)
    for expert in layer.experts:
        change(expert)
    other = one_by_one(layer)
    torch.testing.assert_close(layer(x), other(x))
    torch.testing.assert_close(layer.state_dict(), other.state_dict())


def test_hooks_that_are_added_later_are_called():
    layer, x = layer_of(IMAGES["pooled"], grouped=True), samples_for([3, 4, 2, 2], (3, 6, 6))
    layer(x)
    called = []
    layer.experts[1][0].register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match="has hooks"):
        layer(x)
    layer.grouped = None
    layer(x)
    assert called == [1]


def test_on_a_cpu_experts_run_one_by_one_unless_told(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("grouped")

    monkeypatch.setattr(sample_moe, "run_grouped", refuse)
    x = samples_for([3, 4, 2, 2], (3, 6, 6))
    layer_of(IMAGES["pooled"], grouped=None)(x)
    layer = layer_of(IMAGES["pooled"])
    with pytest.raises(AssertionError, match="grouped"):
        layer(x)
    with moesaic.backend("reference"):
        layer(x)
    torch.vmap(layer.eval())(x[:, None])
    assert layer(x[:0]).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gpu_that_benchmarks_groups_experts_by_default_and_waits_once(memory_format, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return sample_groups.run_grouped(*args)

    monkeypatch.setattr(sample_moe, "run_grouped", counted)
    layer = layer_of(IMAGES["residual"], grouped=None).to("cuda", memory_format=memory_format)
    x = samples_for([3, 0, 2, 4], (3, 6, 6)).to("cuda", memory_format=memory_format)
    assert_equal_to_the_loop(layer, x)
    assert len(calls) == 2
    layer, x = layer.float(), x.float()
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = layer(x), one_by_one(layer)(x)
    assert y.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)
    monkeypatch.setattr(sample_groups, "group_sizes", lambda _: [3, 0, 2, 4])
    with no_cuda_sync():
        layer(x).sum().backward()


def test_copies_and_weights_know_nothing_of_the_grouping():
    layer, x = layer_of(IMAGES["pooled"]), samples_for([3, 4, 2, 2], (3, 6, 6))
    names = list(one_by_one(layer).state_dict())
    y = layer(x)
    assert list(layer.state_dict()) == names
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.experts[0][0].weight.zero_()
    assert not torch.allclose(copied(x), y)
    torch.testing.assert_close(layer(x), y)
    assert pickle.loads(pickle.dumps(layer._grouping))._found is None


def test_a_group_without_some_experts_has_their_layers_alone():
    experts = [nn.Linear(2, 2) for _ in range(3)]
    x = torch.randn(4, 2 * 2)
    y = GroupedExperts(experts)(SampleGroup((0, 2), (4, 3), 4, CPU), x)
    torch.testing.assert_close(y, torch.cat([experts[0](x[:, :2]), experts[2](x[:, 2:])], 1))

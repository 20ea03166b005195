"""Experts on samples that fill up repeated sizes are what they are on these samples alone."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers.padded_layers import IMAGES, layer_of, one_by_one, samples_for
from strategies import NoHostSync, assert_same, no_cuda_sync, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moesaic
from moesaic.layers import padded_expert, sample_moe
from moesaic.layers.padded_expert import PaddedExpert
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.resnet import ResNet
from moesaic.ops import padded_samples
from moesaic.ops.padded_samples import padded_size
from moesaic.ops.per_sample_functions import NotPerSampleError


def assert_equal_to_the_loop(layer: moesaic.SampleMoE, x: Tensor) -> None:
    assert_same(run(layer, x, "torch", steps=2), run(one_by_one(layer), x, "torch", steps=2), tolerance=1e-10)


@pytest.mark.parametrize("kind", IMAGES)
@settings(max_examples=5)
@given(
    loads=st.lists(st.sampled_from([0, 2, 3, 7, 19]), min_size=4, max_size=4).filter(any),
    top_k=st.sampled_from([1, 2]),
    training=st.booleans(),
)
def test_padded_experts_are_the_loop_over_experts(kind, loads, top_k, training):
    layer = layer_of(IMAGES[kind], top_k=top_k).train(training)
    x = samples_for(loads, (3, 6, 6))
    second = layer.route(x).load
    if training and (second == 1).any():
        x = torch.cat([x, x])  # a norm of vectors needs two
    assert_equal_to_the_loop(layer, x)


class Function(nn.Module):
    """A function of the samples, as an expert calls it in its forward."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.flatten(input=x, start_dim=1),
        lambda x: torch.cat(tensors=[x, 2 * x], dim=1),
        lambda x: torch.mean(input=x, dim=1),
        lambda x: torch.softmax(input=x, dim=1),
        lambda x: x.view(size=(x.size(dim=0), -1)),
        lambda x: x.reshape(shape=(x.shape[0], -1)),
    ],
    ids=["flatten", "cat", "mean", "softmax", "view", "reshape"],
)
def test_functions_may_get_their_arguments_by_name(function):
    layer = layer_of(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Function(function)), 2)
    assert_equal_to_the_loop(layer, samples_for([19, 5], (3, 6, 6)))


def test_only_the_first_axis_has_the_size_of_the_batch():
    """A map of as many channels as samples would otherwise be taken apart along either."""
    expert = PaddedExpert(Function(lambda x: x.view(x.size(dim=1), -1)))
    with pytest.raises(NotPerSampleError, match="size with these arguments"):
        expert.run(torch.ones(4, 4, 2), 3)


def test_experts_need_not_have_one_architecture():
    layer = layer_of(IMAGES["pooled"])
    layer.experts[1] = nn.Sequential(nn.Flatten(), nn.Linear(108, 2), nn.BatchNorm1d(2)).double()
    layer.experts[2] = nn.Sequential(nn.Conv2d(3, 2, 6), nn.BatchNorm2d(2), nn.Flatten()).double()
    assert_equal_to_the_loop(layer, samples_for([5, 9, 7, 19], (3, 6, 6)))


@pytest.mark.parametrize(
    "make", [lambda: ResNet(18, 3, width=0.05), lambda: MobileNetV2(3)], ids=["resnet18", "mobilenetv2"]
)
def test_networks_of_the_library_can_be_filled_up(make):
    assert len(PaddedExpert(make().eval()).operations) > 50


def test_a_resnet_trains_as_in_the_loop():
    layer = layer_of(lambda: ResNet(18, 3, width=0.05), 3)
    assert_equal_to_the_loop(layer, samples_for([11, 0, 7], (3, 16, 16)))


def test_an_expert_that_cannot_be_filled_up_runs_beside_others_that_can():
    layer = layer_of(IMAGES["pooled"], 2, pad=None)
    layer.experts[0] = nn.Sequential(layer.experts[0], nn.Dropout(0.5))
    x, seen = samples_for([19, 5], (3, 6, 6)), []
    layer.experts[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    layer._may_pad = lambda *_: True
    layer(x)
    assert seen == [19]


def test_an_expert_without_samples_has_no_gradient_and_the_statistics_it_had():
    layer = layer_of(IMAGES["residual"])
    before = copy.deepcopy(layer.experts[1].state_dict())
    layer(samples_for([3, 0, 2, 4], (3, 6, 6))).sum().backward()
    assert [all(p.grad is None for p in expert.parameters()) for expert in layer.experts] == [False, True, False, False]
    assert all(torch.equal(each, before[name]) for name, each in layer.experts[1].state_dict().items())


def test_batchnorm_on_one_sample_names_the_expert():
    layer = layer_of(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)))
    x = samples_for([9, 9, 1, 13], (3, 2, 2))
    for each in (layer, one_by_one(layer)):
        with pytest.raises(ValueError, match="expert 2 got 1 sample of the batch, too few for its BatchNorm"):
            each(x)
    assert layer.eval()(x).shape == (32, 12)


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
    layer, x = layer_of(IMAGES["residual"]), samples_for([3, 3, 7, 14], (3, 6, 6))
    waits = []

    def sizes(ends_E: Tensor) -> list[int]:
        waits.append(ends_E)
        return [3, 3, 7, 14]

    monkeypatch.setattr(padded_samples, "group_sizes", sizes)
    with NoHostSync():
        layer(x).sum().backward()
    assert len(waits) == 1


@given(st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(any))
def test_sizes_hold_all_samples_and_cost_at_most_a_quarter_more(loads):
    sizes = [padded_size(load, sum(loads), len(loads)) for load in loads]
    assert all(load <= size for load, size in zip(loads, sizes, strict=True))
    assert all(size == 0 for load, size in zip(loads, sizes, strict=True) if load == 0)
    step = -(-sum(loads) // (4 * len(loads)))
    assert sum(sizes) <= sum(loads) + len(loads) * (step - 1)
    assert {size % step for size in sizes} == {0}


class ConvShapes(TorchDispatchMode):
    """The convolutions that a library would plan, by the shapes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.overloadpacket.__name__:
            tensors = [each.shape for each in args if isinstance(each, Tensor)]
            self.shapes.add((func, *tensors))
        return func(*args, **kwargs or {})


def test_balanced_loads_of_a_training_run_need_few_convolutions():
    layer = layer_of(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten()))
    generator = torch.Generator().manual_seed(0)
    found = []
    for each in (layer, one_by_one(layer)):
        with ConvShapes() as mode:
            for step in range(20):
                loads = torch.randint(4, (256,), generator=generator).bincount().tolist()
                each(samples_for(loads, (3, 4, 4), seed=step)).sum().backward()
        found.append(len(mode.shapes))
    assert found[0] <= 2 * 3
    assert found[1] > 2 * 20


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


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


class Reshaped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, x.shape[0])


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


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "state": (Counting, "Counting has a state"),
    "random": (Lucky, "Lucky draws random numbers"),
    "dropout": (lambda: nn.Dropout(0.5), "a Dropout draws random numbers"),
    "dropout function": (Dropped, "dropout with these arguments is not known"),
    "batch size": (Sized, "truediv with these arguments is not known to leave samples apart"),
    "mean": (Centred, "mean with these arguments is not known to leave samples apart"),
    "shape": (Reshaped, "view with these arguments is not known to leave samples apart"),
    "roll": (Rolled, "roll is not known to leave samples apart"),
    "branch": (Branched, "Branched cannot be traced"),
    "index": (Spread, "getitem with these arguments is not known to leave samples apart"),
    "hook": (hooked, "a Identity has hooks"),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2), "a TransformerEncoderLayer is not known to"),
    "batch norm": (lambda: nn.LayerNorm((7, 3, 4, 4)), "a LayerNorm works on the batch"),
    "routed": (lambda: moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=2), "a PatchMoE routes"),
    "axes": (lambda: nn.MaxPool1d(2), "a layer for 1 axes and channels gets samples of 3 axes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_experts_get_their_samples_alone(kind):
    make, reason = REFUSED[kind]
    layer, x = layer_of(make, 2), samples_for([3, 4], (3, 4, 4))
    python, torchs = random.getstate(), torch.get_rng_state()
    for _ in range(2):  # the second time from the stored reason
        with pytest.raises(ValueError, match=f"SampleMoE: pad=True, but in expert 0 {reason}.*; use pad=None"):
            layer(x)
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), torchs)
    if kind == "state":
        assert [expert.calls for expert in layer.experts] == [[0], [0]]


def test_a_pass_that_was_begun_in_vain_leaves_no_trace():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return y - y.mean(0, keepdim=True)

    layer = layer_of(Late, 2)
    layer.pad = None
    x, other = samples_for([3, 9], (3, 4, 4)), one_by_one(layer)
    layer._may_pad = lambda *_: True
    for _ in range(2):
        torch.testing.assert_close(layer(x), other(x))
    torch.testing.assert_close(layer.state_dict(), other.state_dict())


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
    layer, x = layer_of(IMAGES["pooled"]), samples_for([3, 4, 2, 2], (3, 6, 6))
    layer(x)
    called = []
    layer.experts[1][0].register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match="has hooks"):
        layer(x)
    layer.pad = None
    layer(x)
    assert called == [1]


def test_on_a_cpu_samples_are_filled_up_only_on_demand(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("padded")

    monkeypatch.setattr(sample_moe, "run_padded", refuse)
    x = samples_for([3, 4, 2, 2], (3, 6, 6))
    layer_of(IMAGES["pooled"], pad=None)(x)
    layer = layer_of(IMAGES["pooled"])
    with pytest.raises(AssertionError, match="padded"):
        layer(x)
    with moesaic.backend("reference"):
        layer(x)
    torch.vmap(layer.eval())(x[:, None])
    assert layer(x[:0]).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gpu_that_benchmarks_fills_up_samples_and_waits_once(memory_format, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    sizes = []
    norm = padded_expert.batch_norm_of_first

    def counted(x: Tensor, *args: Any) -> Tensor:
        sizes.append(len(x))
        return norm(x, *args)

    monkeypatch.setattr(padded_expert, "batch_norm_of_first", counted)
    layer = layer_of(IMAGES["residual"], pad=None).to("cuda", memory_format=memory_format)
    x = samples_for([3, 0, 7, 14], (3, 6, 6)).to("cuda", memory_format=memory_format)
    assert_equal_to_the_loop(layer, x)
    assert set(sizes) == {4, 8}
    layer, x = layer.float(), x.float()
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = layer(x), one_by_one(layer)(x)
    assert y.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)
    monkeypatch.setattr(padded_samples, "group_sizes", lambda _: [3, 0, 7, 14])
    with no_cuda_sync():
        layer(x).sum().backward()


def test_copies_and_weights_know_nothing_of_the_padding():
    layer, x = layer_of(IMAGES["pooled"]), samples_for([3, 4, 2, 2], (3, 6, 6))
    names = list(one_by_one(layer).state_dict())
    y = layer(x)
    assert list(layer.state_dict()) == names
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.experts[0][0].weight.zero_()
    assert not torch.allclose(copied(x), y)
    torch.testing.assert_close(layer(x), y)
    assert pickle.loads(pickle.dumps(layer._padded))._forms == {}


@pytest.mark.parametrize("shape", [(3,), (3, 8), (3, 4, 4)], ids=str)
def test_gradients_of_repeated_samples_are_zero(shape):
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape) - 1]
    expert = PaddedExpert(nn.Sequential(kind(3), nn.Tanh()).double())
    rows = torch.randn(5, *shape, dtype=torch.float64)
    rows[3:] = rows[2]
    rows.requires_grad_()
    expert.run(rows, 3).square().sum().backward()
    assert rows.grad is not None
    assert rows.grad[3:].eq(0).all()
    assert rows.grad[:3].abs().max() > 0

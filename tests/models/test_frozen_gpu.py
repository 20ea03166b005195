"""Networks frozen for a GPU equal the masked ones: with masks on a CPU, by kernels on a GPU or in the interpreter."""

import copy
import pickle
from collections import OrderedDict
from importlib.util import find_spec

import pytest
import torch
from deepmoe_cases import FORMS, NETWORKS, build, gate, images, small
from torch import nn
from triton_interpreter import INTERPRETED

import moesaic
from moesaic.models.deepmoe import frozen_gpu
from moesaic.models.deepmoe.frozen_gpu import FrozenGPUDeepMoE
from moesaic.models.deepmoe.fused_conv import FusedConv
from moesaic.ops import triton_backend

TRITON = find_spec("triton") is not None
PLACES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not (TRITON and INTERPRETED), reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def calls(frozen: FrozenGPUDeepMoE) -> list[str]:
    """What a frozen network calls besides fused convolutions, by the name of the module's class or the function."""
    found: list[str] = []
    for node in frozen.backbone.graph.nodes:
        if node.op == "call_module":
            found.append(type(frozen.backbone.get_submodule(node.target)).__name__)
        elif node.op in ("call_function", "call_method"):
            found.append(getattr(node.target, "__name__", str(node.target)))
    return [name for name in found if name != "FusedConv"]


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_without_kernels_it_equals_the_masked_network(name, batch):
    model = build(name)
    x = images(batch)
    frozen = FrozenGPUDeepMoE(model)
    assert not frozen.uses_kernels
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_without_kernels_it_equals_every_form_of_gates(options):
    model, x = gate(small(), image_size=16, **options), images(3, size=16)
    torch.testing.assert_close(FrozenGPUDeepMoE(model)(x), model(x), rtol=1e-10, atol=1e-10)


def test_what_follows_a_convolution_is_fused_into_it():
    assert calls(FrozenGPUDeepMoE(build("blocks"))) == ["mean", "Linear"]
    assert calls(FrozenGPUDeepMoE(build("small"))) == ["AdaptiveAvgPool2d", "Flatten", "Linear"]
    for name in ("shortcuts", "bottlenecks"):
        assert not {"add", "BatchNorm2d"} & set(calls(FrozenGPUDeepMoE(build(name))))


class Residual(nn.Module):
    """A residual block with a strided shortcut, then a bottleneck, whose last convolution has no gates in form "a"."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = nn.Conv2d(8, 24, 3, stride=2, padding=1), nn.Conv2d(24, 16, 3, padding=1)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(24), nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2)
        self.narrow, self.middle, self.wide = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 16, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = (self.norm2(self.second(self.norm1(self.first(x)).relu())) + self.shortcut(x)).relu()
        y = self.norm3(self.wide(self.middle(self.narrow(x).relu()).relu()))
        return self.head((x + y).relu().mean((2, 3)))


@pytest.mark.parametrize(
    "followers",
    [
        [nn.ReLU(), nn.MaxPool2d(3, 2, 1)],
        [nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)],
        [nn.MaxPool2d(2), nn.Tanh(), nn.MaxPool2d(2)],
        [nn.MaxPool2d(2), nn.MaxPool2d(2), nn.ReLU()],
        [nn.PReLU(), nn.MaxPool2d(2, 1)],
    ],
    ids=str,
)
@torch.no_grad()
def test_what_cannot_be_fused_runs_behind_the_convolution(followers):
    convs = (nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = gate(nn.Sequential(convs[0], *followers, convs[1], *end), block=4, image_size=17)
    x = images(2, size=17)
    torch.testing.assert_close(FrozenGPUDeepMoE(model)(x), model(x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_module_is_taken_for_what_it_is_whatever_its_name():
    layers = {"conv": nn.Conv2d(3, 8, 3, padding=1), "relu": nn.PReLU(), "next": nn.Conv2d(8, 8, 3, padding=1)}
    end = {"mean": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(8, 4)}
    model = gate(nn.Sequential(OrderedDict({**layers, **end})), block=4, image_size=16)
    x = images(2, size=16)
    torch.testing.assert_close(FrozenGPUDeepMoE(model)(x), model(x), rtol=1e-10, atol=1e-10)


class InPlace(nn.Module):
    """The ReLU between a convolution and the addition to its output changes the convolution's input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.second(self.first(x).relu())
        z = y + self.relu(x)
        return self.head(z.mean((2, 3)))


@torch.no_grad()
def test_a_convolution_does_not_move_behind_a_change_of_its_input():
    model = gate(InPlace(), block=8, image_size=16)
    x = images(2, size=16)
    torch.testing.assert_close(FrozenGPUDeepMoE(model)(x), model(x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_gates_are_recorded_and_copies_give_the_same():
    model = build("blocks")
    frozen, x = FrozenGPUDeepMoE(model), images(3)
    with moesaic.record_routing(model) as expected:
        model(x)
    for other in (frozen, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        with moesaic.record_routing(other) as found:
            y = other(x)
        assert torch.equal(y, frozen(x))
        assert not y.is_inference()
        assert {name: routing.load.tolist() for name, routing in found.items()} == {
            name: routing.load.tolist() for name, routing in expected.items()
        }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_by_kernels_a_sequential_network_equals_the_masked_one(batch, place, monkeypatch):
    run_on(place, monkeypatch)
    assert_kernels_equal_masked(gate(small((16, 20, 24)), block=8, image_size=16), images(batch, size=16), place)


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_by_kernels_closed_layers_equal_the_masked_ones(place, monkeypatch):
    run_on(place, monkeypatch)
    model = gate(small((16, 20, 24)), block=8, image_size=16)
    heads = list(model.heads().values())
    for head in (heads[0], heads[2]):
        head.weight.zero_()
        head.bias.fill_(-1)
    assert_kernels_equal_masked(model, images(2, size=16), place)


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_by_kernels_a_residual_network_equals_the_masked_one(place, monkeypatch):
    run_on(place, monkeypatch)
    for options in ({"mode": "topk", "keep": 0.5}, {"bottleneck": "b"}):
        assert_kernels_equal_masked(gate(Residual(), block=8, image_size=16, **options), images(2, size=16), place)


@pytest.mark.gpu
@torch.no_grad()
def test_freeze_takes_the_kernels_on_a_gpu_and_is_captured_in_a_graph():
    from triton_cases import assert_captured

    frozen = moesaic.freeze(build("blocks").float().cuda())
    assert isinstance(frozen, FrozenGPUDeepMoE)
    assert frozen.uses_kernels
    x = images(3).float().cuda()
    assert_captured(lambda: [frozen(x)], x)


def run_on(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "cpu":
        monkeypatch.setattr(triton_backend, "kernel_refusal", lambda x: None)
    from moesaic.ops.triton import channel_conv

    monkeypatch.setattr(channel_conv, "_precision", lambda: "ieee")


def assert_kernels_equal_masked(model, x, place: str) -> None:
    expected = model(x)
    dtype, tolerance = (torch.float64, 1e-10) if place == "cpu" else (torch.float32, 1e-4)
    frozen = FrozenGPUDeepMoE(copy.deepcopy(model).to(place, dtype))
    assert frozen.uses_kernels
    assert frozen_gpu.LEAST_BLOCK <= 8
    assert any(isinstance(module, FusedConv) for module in frozen.backbone.modules())
    torch.testing.assert_close(frozen(x.to(place, dtype)).cpu().double(), expected, rtol=tolerance, atol=tolerance)

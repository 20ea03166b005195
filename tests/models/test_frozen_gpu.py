"""Networks frozen for a GPU equal the masked ones: with masks on a CPU, by kernels on a GPU or in the interpreter."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from deepmoe_cases import FORMS, NETWORKS, build, gate, images, small
from torch import nn
from triton_interpreter import INTERPRETED

import moesaic
from moesaic.layers import inference_graphs
from moesaic.layers.inference_graphs import CudaInference, InferenceGraphs
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
    model = gate(nn.Sequential(convs[0], *copy.deepcopy(followers), convs[1], *end), block=4, image_size=17)
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


class InPlaceBehindNorm(nn.Module):
    """A BatchNorm, and the ReLU that changes the convolution's input, between a convolution and the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu, self.head = nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.conv(x))
        return self.head((y + self.relu(x)).mean((2, 3)))


@torch.no_grad()
def test_a_convolution_with_a_fused_norm_does_not_move_behind_a_change_of_its_input():
    model = gate(InPlaceBehindNorm(), block=8, image_size=16)
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


def on_gpu(name: str = "blocks", dtype: torch.dtype = torch.float32) -> tuple[FrozenGPUDeepMoE, FrozenGPUDeepMoE]:
    """A frozen network that runs from graphs, and the same one that runs eagerly."""
    frozen = moesaic.freeze(build(name).to("cuda", dtype))
    assert isinstance(frozen, FrozenGPUDeepMoE)
    eager = copy.deepcopy(frozen)
    eager.graphs = None
    return frozen, eager


def graphs_of(frozen: FrozenGPUDeepMoE) -> InferenceGraphs:
    assert frozen.graphs is not None
    assert frozen.graphs.problem == ""
    return frozen.graphs


@pytest.mark.gpu
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["blocks", "shortcuts", "bottlenecks"])
def test_calls_from_cuda_graphs_equal_eager_ones_bit_for_bit(name, dtype, context, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    frozen, eager = on_gpu(name, dtype)
    found, expected = [], []
    with context():
        for seed in range(5):
            for batch, size in ((1, 32), (3, 32), (8, 40)):
                x = images(batch, seed, size).to("cuda", dtype)
                for each in (x, x.contiguous(memory_format=torch.channels_last)):
                    found.append(frozen(each))
                    expected.append(eager(each))
    assert all(map(torch.equal, found, expected))
    assert len(graphs_of(frozen)._graphs) == 6
    frozen.to("cuda")
    assert torch.equal(frozen(x), eager(x))


@pytest.mark.gpu
@pytest.mark.parametrize("streams", ["one", "own"])
def test_threads_share_cuda_graphs_or_have_those_of_their_streams(streams):
    frozen, eager = on_gpu()
    inputs = [images(1 + seed % 2, seed).float().cuda() for seed in range(4)]
    with torch.no_grad():
        expected = [eager(x) for x in inputs]
    torch.cuda.synchronize()

    def run(thread: int) -> bool:
        stream = torch.cuda.Stream() if streams == "own" else torch.cuda.current_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            found = [frozen(inputs[(thread + call) % 4]) for call in range(40)]
            stream.synchronize()
            return all(torch.equal(y, expected[(thread + call) % 4]) for call, y in enumerate(found))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))
    assert len(graphs_of(frozen)._graphs) == (8 if streams == "own" else 2)


@pytest.mark.gpu
@torch.no_grad()
def test_many_batch_sizes_do_not_fill_the_memory():
    frozen, eager = on_gpu()
    reserved = []
    for _ in range(3):
        for batch in range(1, 41):
            x = images(batch).float().cuda()
            for _ in range(3):
                assert torch.equal(frozen(x), eager(x))
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert len(graphs_of(frozen)._graphs) == inference_graphs._MAX_GRAPHS
    assert reserved[2] <= reserved[1] * 1.1


@pytest.mark.gpu
@torch.no_grad()
def test_released_cuda_graphs_are_captured_again():
    frozen, eager = on_gpu()
    x = images(2).float().cuda()
    for _ in range(3):
        for _ in range(4):
            assert torch.equal(frozen(x), eager(x))
        assert len(graphs_of(frozen)._graphs) == 1
        frozen.graphs.release()


@pytest.mark.gpu
@torch.no_grad()
def test_hooks_and_records_see_calls_after_a_capture():
    frozen, eager = on_gpu()
    x = images(2).float().cuda()
    for _ in range(3):
        frozen(x)
    with moesaic.record_routing(frozen) as found, moesaic.record_routing(eager) as expected:
        frozen(x)
        eager(x)
    assert found
    assert all(torch.equal(found[name].gate, routing.gate) for name, routing in expected.items())
    seen: list[int] = []
    inner = next(module for module in frozen.modules() if isinstance(module, nn.Linear))
    handle = inner.register_forward_hook(lambda *_: seen.append(1))
    frozen(x)
    handle.remove()
    frozen(x)
    assert seen == [1]


def captured_work(
    work: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[InferenceGraphs, Callable[[torch.Tensor], Any]]:
    graphs, module = InferenceGraphs(CudaInference(torch.device("cuda", 0))), nn.Identity().eval()
    return graphs, lambda x: graphs.run(module, work, x)


@pytest.mark.gpu
@torch.no_grad()
def test_a_capture_that_fails_leaves_nothing_in_a_capturing_state():
    graphs, call = captured_work(lambda x: torch.rand_like(x) * 0 + x * x.sum().item())
    x = torch.randn(64, 64, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(4):
        torch.testing.assert_close(call(x), x * x.sum())
    assert graphs.problem
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(5, device="cuda").isfinite().all()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    frozen, eager = on_gpu()
    x = images(2).float().cuda()
    for _ in range(4):
        assert torch.equal(frozen(x), eager(x))
    assert len(graphs_of(frozen)._graphs) == 1


@pytest.mark.gpu
@torch.no_grad()
def test_random_numbers_of_a_replay_are_those_of_the_generator():
    graphs, call = captured_work(lambda x: x + torch.rand_like(x))
    x = torch.zeros(100, device="cuda")
    for _ in range(2):
        call(x)
    torch.cuda.manual_seed(3)
    expected = [torch.rand_like(x) for _ in range(3)]
    torch.cuda.manual_seed(3)
    found = [call(x) for _ in range(3)]
    assert graphs.problem == ""
    assert len(graphs._graphs) == 1
    assert all(map(torch.equal, found, expected))


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

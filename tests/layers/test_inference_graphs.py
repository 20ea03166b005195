"""Calls that are replayed from graphs return what eager calls return, bit for bit; all others run eagerly.

On a CPU the graphs are recorded operators (`recorded_graphs`); tests/models/test_frozen_gpu.py has CUDA graphs.
"""

import copy
import pickle
import sys
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from deepmoe_cases import build, images
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from training.recorded_graphs import FailingGraphs, RecordedGraphs

import moesaic
from moesaic.layers import inference_graphs
from moesaic.layers.inference_graphs import CudaInference, InferenceGraphs
from moesaic.models.deepmoe.frozen_gpu import FrozenGPUDeepMoE
from moesaic.ops.graph_capture import DeviceGraph


class Recorded:
    """A device whose graphs are recorded operators."""

    def __init__(self, graphs: type[RecordedGraphs] = RecordedGraphs) -> None:
        self.graphs = graphs()
        self.stream: Hashable = "stream"

    def state(self) -> Hashable:
        return self.stream

    def capture(self, work: Callable[[], Any]) -> tuple[DeviceGraph, Any]:
        return self.graphs.capture(work, [])


def frozen(name: str = "small", device: Recorded | None = None) -> tuple[FrozenGPUDeepMoE, RecordedGraphs]:
    """A frozen network with graphs, and what counts them."""
    device = device or Recorded()
    module = FrozenGPUDeepMoE(build(name))
    module.graphs = InferenceGraphs(device)
    return module, device.graphs


def small(batch: int = 2, seed: int = 0) -> Tensor:
    return images(batch, seed, size=16)


def eager(module: FrozenGPUDeepMoE) -> FrozenGPUDeepMoE:
    other = copy.deepcopy(module)
    other.graphs = None
    return other


@pytest.mark.parametrize("name", ["blocks", "shortcuts"])
@torch.no_grad()
def test_replayed_calls_equal_eager_ones(name):
    module, graphs = frozen(name)
    plain = eager(module)
    for seed in range(4):
        for batch in (1, 3):
            x = images(batch, seed)
            assert torch.equal(module(x), plain(x))
    assert (graphs.captured, graphs.replays) == (2, 4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_are_tensors_of_their_own_and_inputs_stay(context):
    module, graphs = frozen()
    with context():
        inputs = [small(seed=seed) for seed in range(5)]
        before = [x.clone() for x in inputs]
        outputs = [module(x) for x in inputs]
        expected = [eager(module)(x) for x in inputs]
    assert graphs.replays == 3
    for output, right in zip(outputs, expected, strict=True):
        assert torch.equal(output, right)
        assert output.is_inference() == right.is_inference()
        assert not output.requires_grad
    assert all(torch.equal(x, same) for x, same in zip(inputs, before, strict=True))


@torch.no_grad()
def test_each_layout_and_stream_has_a_graph_of_its_own():
    device = Recorded()
    module, graphs = frozen(device=device)
    plain = eager(module)
    wide = images(4, size=32)
    layouts = {
        "plain": small(),
        "last": small().contiguous(memory_format=torch.channels_last),
        "batch": small(3),
        "size": images(2, size=20),
        "sliced": wide[::2, :, 3:19, 5:21],
        "expanded": small(1).expand(2, -1, -1, -1),
    }
    for number, x in enumerate(layouts.values(), 1):
        for _ in range(4):
            assert torch.equal(module(x), plain(x))
        assert (graphs.captured, graphs.replays) == (number, 2 * number)
    device.stream = "another"
    for _ in range(4):
        module(small())
    assert graphs.captured == len(layouts) + 1


def test_settings_of_torch_are_part_of_the_state_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    device = CudaInference(torch.device("cuda", 0))
    states = [device.state()]
    for owner, setting in (
        (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (torch.backends.cudnn, "deterministic"),
    ):
        before = getattr(owner, setting)
        setattr(owner, setting, not before)
        states.append(device.state())
        setattr(owner, setting, before)
    assert len(set(states)) == len(states)


@pytest.fixture
def warm() -> tuple[FrozenGPUDeepMoE, RecordedGraphs]:
    """A frozen network that would replay the next call."""
    module, graphs = frozen()
    with torch.no_grad():
        for _ in range(2):
            module(small())
    assert graphs.captured == 1
    return module, graphs


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_hooks_are_called(warm):
    module, graphs = warm
    calls: list[str] = []

    def note(*_: Any) -> None:
        calls.append("hook")

    inner = module.backbone.get_submodule("11")
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        inner.register_forward_hook,
        inner.register_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
    ):
        before = len(calls)
        handle = register(note)
        module(small())
        handle.remove()
        assert len(calls) > before
    assert graphs.replays == 0
    module(small())
    assert graphs.replays == 1


@torch.no_grad()
def test_routing_is_recorded(warm):
    module, graphs = warm
    with moesaic.record_routing(module) as routing:
        module(small(seed=1))
    assert graphs.replays == 0
    assert list(routing) == ["backbone.0", "backbone.4", "backbone.6"]
    with moesaic.record_routing(eager(module).backbone):  # of another network
        module(small())
    assert graphs.replays == 1


@torch.no_grad()
def test_what_a_replay_would_hide_runs_eagerly(warm):
    module, graphs = warm
    with FlopCounterMode(display=False) as counter:
        module(small())
    assert counter.get_total_flops() > 0
    with Seen() as seen:
        module(small())
    assert "conv2d" in seen.names
    with torch.enable_grad():
        module(small().requires_grad_())
    assert module(small(0)).shape == (0, 4)
    torch.vmap(module)(small()[None])
    module.graphs._device.stream = None
    module(small())
    assert graphs.replays == 0


@torch.no_grad()
def test_a_default_device_changes_nothing(warm):
    module, graphs = warm
    with torch.device("cpu"):
        module(small())
    assert graphs.replays == 1


@torch.no_grad()
def test_submodules_in_training_mode_run_eagerly(warm):
    module, graphs = warm
    inner = module.backbone.get_submodule("11")
    inner.train()
    module(small())
    assert graphs.replays == 0
    inner.eval()
    module(small())
    assert graphs.replays == 1


@torch.no_grad()
def test_a_capture_that_fails_leaves_eager_calls():
    module, graphs = frozen(device=Recorded(FailingGraphs))
    plain = eager(module)
    for seed in range(4):
        assert torch.equal(module(small(seed=seed)), plain(small(seed=seed)))
    assert module.graphs.problem.startswith("operation not permitted when stream is capturing (recorded_graphs.py")
    assert graphs.replays == 0


@torch.no_grad()
def test_an_interrupted_capture_is_tried_again():
    class Interrupted(RecordedGraphs):
        def capture(self, work, generators):
            if not self.captured:
                self.captured += 1
                raise KeyboardInterrupt
            return super().capture(work, generators)

    module, graphs = frozen(device=Recorded(Interrupted))
    module(small())
    with pytest.raises(KeyboardInterrupt):
        module(small())
    for seed in range(2):
        assert torch.equal(module(small(seed=seed)), eager(module)(small(seed=seed)))
    assert (graphs.replays, module.graphs.problem) == (1, "")


@torch.no_grad()
def test_the_least_recently_used_graph_goes(monkeypatch):
    monkeypatch.setattr(inference_graphs, "_MAX_GRAPHS", 2)
    module, graphs = frozen()

    def call(batch: int, times: int) -> None:
        for _ in range(times):
            module(small(batch))

    call(1, 2)
    call(2, 2)
    call(1, 1)
    call(3, 2)
    assert (graphs.captured, graphs.replays) == (3, 1)
    call(1, 1)
    call(3, 1)
    assert (graphs.captured, graphs.replays) == (3, 3)
    call(2, 2)  # after one eviction it takes a call more
    assert (graphs.captured, graphs.replays) == (3, 3)
    call(2, 2)
    assert (graphs.captured, graphs.replays) == (4, 4)


@torch.no_grad()
def test_kinds_that_take_turns_are_not_recorded_all_the_time(monkeypatch):
    monkeypatch.setattr(inference_graphs, "_MAX_GRAPHS", 2)
    monkeypatch.setattr(inference_graphs, "_MAX_COUNTED_KEYS", 4)
    module, graphs = frozen()
    for _ in range(10):
        for batch in range(1, 5):
            module(small(batch))
    assert graphs.captured <= 8
    for _ in range(3):  # never seen twice among so many others
        for batch in range(1, 9):
            module(small(batch))
    assert graphs.captured <= 8
    assert len(module.graphs._calls) == 4


@torch.no_grad()
def test_changed_weights_are_seen():
    module, graphs = frozen()
    head = module.backbone.get_submodule("11")

    def check(captured: int) -> None:
        for seed in range(4):
            assert torch.equal(module(small(seed=seed)), module._run(small(seed=seed)))
        assert graphs.captured == captured

    check(1)
    head.weight.mul_(2)
    check(1)
    head.load_state_dict({"weight": head.weight + 1, "bias": head.bias - 1})
    check(1)
    head.weight = nn.Parameter(head.weight * 2)
    check(2)
    head.weight.data = head.weight * 2
    check(3)
    head.bias = None
    check(4)
    head.register_buffer("unused", torch.zeros(1))
    check(5)
    module.backbone.add_module("11", nn.Linear(6, 4).double().eval())
    check(6)
    module.backbone.add_module("11", nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4)).double().eval())
    check(7)


@torch.no_grad()
def test_copies_have_graphs_of_their_own(warm):
    module, graphs = warm
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not other.graphs._graphs
        for seed in range(4):
            assert torch.equal(other(small(seed=seed)), module(small(seed=seed)))
        assert len(other.graphs._graphs) == 1
        assert other.graphs._device.graphs.replays == 2
    assert graphs.replays == 8


@torch.no_grad()
def test_released_graphs_are_recorded_again(warm):
    module, graphs = warm
    module.graphs.release()
    for _ in range(3):
        module(small())
    assert (graphs.captured, graphs.replays) == (2, 1)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_get_the_outputs_of_their_own_inputs():
    module, graphs = frozen()
    inputs = [small(1 + seed % 2, seed) for seed in range(4)]
    with torch.no_grad():
        expected = [eager(module)(x) for x in inputs]

    def run(thread: int) -> bool:
        with torch.no_grad():
            return all(
                torch.equal(module(inputs[(thread + call) % 4]), expected[(thread + call) % 4]) for call in range(12)
            )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))
    assert graphs.captured == 2
    assert graphs.replays > 20

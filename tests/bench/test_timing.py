"""Timing in turns, graphs and memory; what needs a GPU is tried on a stand-in that notes what it is asked."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

from moesaic.bench import timing
from moesaic.bench.timing import (
    Memory,
    Roofline,
    capture_cuda_graph,
    measure_roofline,
    peak_memory,
    quartiles,
    time_interleaved,
)


def test_candidates_take_turns_and_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch):
    turns: list[str] = []
    clock = iter([9.0, 9.0, 1.0, 10.0, 2.0, 20.0, 3.0, 30.0])  # a warm-up, then three rounds

    def milliseconds(run: timing.Run) -> float:
        run()
        return next(clock)

    monkeypatch.setattr(timing, "_host_milliseconds", milliseconds)
    found = time_interleaved({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, repetitions=3, warm_up=1)
    assert "".join(turns) == "abababab"
    assert [(each.median, each.low, each.high) for each in found.values()] == [(2.0, 1.5, 2.5), (20.0, 15.0, 25.0)]


def test_one_repetition_is_its_own_quartiles():
    assert quartiles([4.0]) == (4.0, 4.0)


def test_no_repetitions_are_refused():
    with pytest.raises(ValueError, match=r"time_interleaved: repetitions=0; it must be at least 1"):
        time_interleaved({}, 0)


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    machine = Roofline(bytes_per_second=1e12, flops_per_second=1e14)
    assert machine.min_milliseconds(flops=1e11, bytes=4e9) == pytest.approx(4.0)
    assert machine.min_milliseconds(flops=8e11, bytes=4e9) == pytest.approx(8.0)


def test_ceilings_count_what_was_copied_and_multiplied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "_host_milliseconds", lambda run: 1.0)
    found = measure_roofline("cpu", torch.float32, repetitions=1)
    assert found == Roofline(bytes_per_second=2 * 2**25 * 1e3, flops_per_second=2 * 2048**3 * 1e3)


class Gpu:
    """Notes what is asked of it, and has memory that runs take and give back."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.allocated = 100
        self.most = 0

    def take(self, amount: int) -> None:
        self.allocated += amount
        self.most = max(self.most, self.allocated)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Stream:
        def __init__(self, name: str = "beside") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            gpu.said.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            gpu.said.append("replay")

    @contextmanager
    def stream(which: Stream) -> Generator[None]:
        gpu.said.append(f"on {which.name}")
        yield

    @contextmanager
    def graph(which: Graph, stream: Stream) -> Generator[None]:
        gpu.said.append(f"capture on {stream.name}")
        yield
        gpu.said.append("captured")

    class Event:
        count = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.count += 1.0
            self.at = Event.count

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    def reset() -> None:
        gpu.most = gpu.allocated

    for name, stand_in in {
        "Stream": Stream,
        "current_stream": lambda: Stream("default"),
        "stream": stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "Event": Event,
        "synchronize": lambda: None,
        "memory_allocated": lambda: gpu.allocated,
        "max_memory_allocated": lambda: gpu.most,
        "reset_peak_memory_stats": reset,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return gpu


def test_a_graph_is_captured_after_a_warm_up_on_the_same_stream(gpu: Gpu):
    replay = capture_cuda_graph(lambda: gpu.said.append("run"), warm_up=2)
    replay()
    assert gpu.said == [
        "beside waits for default",
        *["on beside", "run", "run"],
        *["capture on beside", "run", "captured"],
        "replay",
    ]


def test_the_gpus_clock_takes_the_time_between_events(gpu: Gpu):
    assert time_interleaved({"nothing": lambda: None}, 2, gpu_clock=True)["nothing"].median == 1.0


def test_peak_memory_leaves_out_what_earlier_runs_left_behind(gpu: Gpu):
    left_behind = 0

    def clear() -> None:
        nonlocal left_behind
        gpu.take(-left_behind)
        left_behind = 0

    def run() -> None:
        nonlocal left_behind
        clear()
        gpu.take(50)
        gpu.take(-30)
        left_behind = 20

    assert peak_memory(run, clear) == Memory(held=100, peak=150)

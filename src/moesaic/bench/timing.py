"""How long things take, and how much memory: medians in turns, CUDA graphs, and what the machine can do at most.

All times are milliseconds. Candidates are timed in turns, so that whatever else the machine does falls on all of
them, and ratios are taken within one such run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moesaic.checks import check_positive

__all__ = [
    "Ceilings",
    "Memory",
    "Timing",
    "captured",
    "ceilings",
    "in_turns",
    "peak_memory",
    "quartiles",
    "synchronize",
]

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median over repetitions, and the middle half around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU while something runs."""

    held: int
    """What was there before, such as inputs and weights."""
    peak: int
    """The most that was there at a time, ``held`` included."""


@dataclass(frozen=True)
class Ceilings:
    """What a machine does at most, as measured on it."""

    bytes_per_second: float
    """Of a copy, read and written bytes together."""
    flops_per_second: float
    """Of a large product of matrices; a multiply-add is two."""

    def floor(self, flops: float, bytes: float) -> float:
        """Milliseconds that so much work takes at least.

        >>> Ceilings(bytes_per_second=1e12, flops_per_second=1e14).floor(flops=2e11, bytes=1e9)
        2.0
        """
        return 1e3 * max(flops / self.flops_per_second, bytes / self.bytes_per_second)


def in_turns(
    candidates: Mapping[str, Run], repetitions: int, warm_up: int = 3, *, gpu_clock: bool = False
) -> dict[str, Timing]:
    """Time all candidates alternately.

    By default on the host's clock, waiting for the GPU where there is one. With ``gpu_clock`` by events on the
    current stream, which leaves out what launching costs where the GPU has not run dry: for graphs.

    >>> timings = in_turns({"sum": lambda: sum(range(100))}, repetitions=5)
    >>> timings["sum"].low <= timings["sum"].median <= timings["sum"].high
    True
    """
    check_positive("in_turns", repetitions=repetitions)
    clock = _gpu_milliseconds if gpu_clock else _host_milliseconds
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-warm_up, repetitions):
        for name, candidate in candidates.items():
            spent = clock(candidate)
            if repetition >= 0:
                times[name].append(spent)
    return {name: Timing(statistics.median(spent), *quartiles(spent)) for name, spent in times.items()}


def _host_milliseconds(run: Run) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def _gpu_milliseconds(run: Run) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def quartiles(values: list[float]) -> tuple[float, float]:
    """The ends of the middle half.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 9.0])
    (2.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def synchronize() -> None:
    """Wait until the GPU, where there is one, has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(run: Run, warm_up: int = 3) -> Run:
    """What ``run`` does on the GPU, as a CUDA graph: replayed in one launch, without Python between the kernels.

    Tensors that ``run`` makes lie in the graph's own memory; its inputs must stay where they are.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # on the stream of the warm-up: gradients are accumulated on the stream that first saw them
    with torch.cuda.graph(graph, stream=stream):
        run()
    torch.cuda.synchronize()
    return graph.replay


def peak_memory(run: Run, clear: Run, warm_up: int = 2) -> Memory:
    """The most memory on the GPU while ``run`` runs, after warming up; ``clear`` drops what it leaves behind."""
    for _ in range(warm_up):  # what is chosen or set up once is not what a run needs
        run()
    clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return Memory(held, torch.cuda.max_memory_allocated())


def ceilings(device: str, dtype: torch.dtype, repetitions: int = 10) -> Ceilings:
    """Measure how fast this machine copies, and how fast it multiplies matrices of ``dtype``.

    On a GPU with sizes far beyond its cache, on a CPU with smaller ones.
    """
    gpu = torch.device(device).type == "cuda"
    here, there = (torch.empty(2**29 if gpu else 2**25, dtype=torch.uint8, device=device) for _ in range(2))
    here.random_()
    size = 8192 if gpu else 2048
    # random numbers: on zeros a chip draws less power and may run faster than it ever will
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty(size, size, device=device, dtype=dtype)
    timings = in_turns(
        {"copy": lambda: there.copy_(here), "product": lambda: torch.mm(left, right, out=result)},
        repetitions,
        gpu_clock=gpu,
    )
    return Ceilings(
        bytes_per_second=2 * here.numel() / (1e-3 * timings["copy"].median),
        flops_per_second=2 * size**3 / (1e-3 * timings["product"].median),
    )

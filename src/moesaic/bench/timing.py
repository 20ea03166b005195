"""Timing and memory measurement: interleaved medians, CUDA graphs, peak memory, and the roofline of the machine.

All times are in milliseconds. Candidates are timed alternately, so that other load affects all of them alike; compare
times of the same call only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moesaic.argument_checks import check_positive

__all__ = [
    "Memory",
    "Roofline",
    "Run",
    "Timing",
    "capture_cuda_graph",
    "measure_roofline",
    "peak_memory",
    "quartiles",
    "synchronize",
    "time_interleaved",
]

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Median and quartiles in milliseconds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """Allocated bytes on a GPU."""

    held: int
    """Allocated before the run, such as inputs and weights."""
    peak: int
    """Peak during the run, ``held`` included."""


@dataclass(frozen=True)
class Roofline:
    """Measured peak bandwidth and compute of a machine."""

    bytes_per_second: float
    """Bandwidth of a copy, reads plus writes."""
    flops_per_second: float
    """Throughput of a large matmul; a multiply-add counts as two."""

    def min_milliseconds(self, flops: float, bytes: float) -> float:
        """Lower bound of the time for so much work.

        >>> Roofline(bytes_per_second=1e12, flops_per_second=1e14).min_milliseconds(flops=2e11, bytes=1e9)
        2.0
        """
        return 1e3 * max(flops / self.flops_per_second, bytes / self.bytes_per_second)


def time_interleaved(
    candidates: Mapping[str, Run], repetitions: int, warm_up: int = 3, *, gpu_clock: bool = False
) -> dict[str, Timing]:
    """Times all candidates alternately.

    By default with the host's clock and synchronisation. ``gpu_clock`` uses CUDA events on the current stream, which
    exclude launch overhead as long as the GPU is busy: for CUDA graphs.

    >>> timings = time_interleaved({"sum": lambda: sum(range(100))}, repetitions=5)
    >>> timings["sum"].low <= timings["sum"].median <= timings["sum"].high
    True
    """
    check_positive("time_interleaved", repetitions=repetitions)
    clock = _gpu_milliseconds if gpu_clock else _host_milliseconds
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-warm_up, repetitions):
        for name, candidate in candidates.items():
            elapsed = clock(candidate)
            if repetition >= 0:
                times[name].append(elapsed)
    return {name: Timing(statistics.median(each), *quartiles(each)) for name, each in times.items()}


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
    """The first and the third quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 9.0])
    (2.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def synchronize() -> None:
    """Synchronises with the GPU if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def capture_cuda_graph(run: Run, warm_up: int = 3) -> Run:
    """Captures ``run`` in a CUDA graph and returns its replay function.

    Tensors that ``run`` allocates are in the memory of the graph; its inputs must keep their addresses.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # on the stream of the warm-up: autograd accumulates gradients on the stream that created them
    with torch.cuda.graph(graph, stream=stream):
        run()
    torch.cuda.synchronize()
    return graph.replay


def peak_memory(run: Run, clear: Run, warm_up: int = 2) -> Memory:
    """Peak memory of ``run`` on the GPU after a warm-up; ``clear`` releases what the warm-up leaves behind."""
    for _ in range(warm_up):  # one-time allocations are not counted
        run()
    clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return Memory(held, torch.cuda.max_memory_allocated())


def measure_roofline(device: str, dtype: torch.dtype, repetitions: int = 10) -> Roofline:
    """Measures the bandwidth of a copy and the throughput of a matmul of ``dtype``.

    Sizes are far beyond the cache of a GPU, and smaller on a CPU.
    """
    gpu = torch.device(device).type == "cuda"
    here, there = (torch.empty(2**29 if gpu else 2**25, dtype=torch.uint8, device=device) for _ in range(2))
    here.random_()
    size = 8192 if gpu else 2048
    # random values: on zeros a GPU draws less power and clocks higher
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty(size, size, device=device, dtype=dtype)
    timings = time_interleaved(
        {"copy": lambda: there.copy_(here), "matmul": lambda: torch.mm(left, right, out=result)},
        repetitions,
        gpu_clock=gpu,
    )
    return Roofline(
        bytes_per_second=2 * here.numel() / (1e-3 * timings["copy"].median),
        flops_per_second=2 * size**3 / (1e-3 * timings["matmul"].median),
    )

"""Capture of CUDA graphs, for training steps, experts and inference.

A capture that fails leaves random generators, the allocator and the current stream as they were.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

__all__ = ["CudaGraphs", "DeviceGraph", "capture", "capture_failure", "matmul_settings"]

T = TypeVar("T")

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch's own functions take a microsecond each
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: they must live on, as the allocator still calls the stream filters of their captures."""


class DeviceGraph(Protocol):
    """A captured graph of a device's work."""

    def replay(self) -> None:
        """Runs the captured work."""
        ...


def capture(
    work: Callable[[], T], pool: tuple[int, int], stream: torch.cuda.Stream, generators: Sequence[torch.Generator] = ()
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures ``work`` without running it; returns its graph and its outputs, to which replays write.

    Nothing is synchronised, and other threads may use the GPU meanwhile. If the capture fails, its error is raised, and
    random generators, the allocator and the current stream are as before.

    Args:
        work: the work to capture.
        pool: the memory pool of the graph.
        stream: a stream other than the device's default one, on which ``work`` runs.
        generators: random generators of this GPU that ``work`` uses besides the default one.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        cast("Any", graph).register_generator_state(generator)
    # a failed capture leaves generators in capture mode, in which they raise errors outside of captures
    default = torch.cuda.default_generators[stream.device_index]
    own = [default, *(cast("Any", each) for each in generators if each is not default)]
    spare = [generator.clone_state() for generator in own]
    ended = False
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(cast("Any", pool), capture_error_mode="thread_local")
            try:
                outputs = work()
            finally:
                graph.capture_end()
                ended = True
    except BaseException:
        if not ended:
            _failed.append(graph)
            for generator, state in zip(own, spare, strict=True):
                generator.graphsafe_set_state(state)
            with suppress(RuntimeError):  # if the capture has ended, and its instantiation failed
                _C._cuda_endAllocateToPool(stream.device_index, pool)
                _C._cuda_releasePool(stream.device_index, pool)
        raise
    return graph, outputs


def capture_failure(error: BaseException) -> str:
    """Returns the first line of the original error, and the line outside of torch that raised it."""
    while error.__context__ is not None:  # ending a capture that has failed raises another error
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if "torch" not in Path(frame.filename).parts), None)
    return lines[0] if own is None else f"{lines[0]} ({Path(own.filename).name}, line {own.lineno})"


def matmul_settings() -> tuple[Hashable, ...]:
    """Returns the settings of torch that determine how cuBLAS multiplies matrices, which a graph cannot change."""
    return (
        _C._get_fp32_precision_getter("cuda", "matmul"),
        _C._get_cublas_allow_bf16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_accumulation(),
        _C._get_blas_preferred_backend(),
    )


class CudaGraphs:
    """CUDA graphs of a training run. They share a memory pool, as only one of them is replayed at a time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def generators(self) -> list[torch.Generator]:
        """Returns the GPU's generator; and the CPU's, whose random numbers a graph would repeat in every step."""
        return [torch.cuda.default_generators[self._stream.device_index], torch.default_generator]

    @contextmanager
    def stream(self) -> Generator[None]:
        """Runs the block on the stream of captures: autograd accumulates gradients on the stream of the first step."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    @contextmanager
    def no_waiting(self) -> Generator[None]:
        """Makes operations that wait for the GPU raise an error; in a capture they would leave a broken graph."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    def capture(self, work: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[DeviceGraph, T]:
        """Captures ``work`` without running it; returns its graph and its outputs, to which replays write."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a graph cannot use the memory that the allocator caches for eager steps
        own = [generator for generator in generators if generator.device.type == "cuda"]
        return capture(work, self._pool, self._stream, own)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)

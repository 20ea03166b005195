"""CUDA graphs of training steps: what `step_graphs` needs of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from moesaic.ops.graph_capture import DeviceGraph, capture

__all__ = ["CudaGraphs"]

T = TypeVar("T")


class CudaGraphs:
    """Graphs of one run on a GPU, which share their memory: they are never replayed at the same time.

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
        """Inside, work runs on the stream of captures, on which autograd then accumulates gradients in both."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    @contextmanager
    def no_waiting(self) -> Generator[None]:
        """Inside, an operation that waits for the GPU raises an error; in a capture it would leave a broken graph."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    def capture(self, work: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[DeviceGraph, T]:
        """Records ``work`` without running it; returns its graph and what it returns, which a replay fills."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a graph cannot use what the allocator keeps for eager steps
        own = [generator for generator in generators if generator.device.type == "cuda"]
        return capture(work, self._pool, self._stream, own)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)

"""CUDA graphs: recording one, and what a recording that fails leaves behind. For training steps and for inference."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

__all__ = ["DeviceGraph", "capture", "capture_failure"]

T = TypeVar("T")

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocator goes on asking them which streams are theirs."""


class DeviceGraph(Protocol):
    """Recorded work of a device."""

    def replay(self) -> None:
        """Do the work again."""
        ...


def capture(
    work: Callable[[], T], pool: tuple[int, int], stream: torch.cuda.Stream, generators: Sequence[torch.Generator] = ()
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Records ``work`` without running it; returns its graph and what it returns, which a replay fills.

    Nothing is synchronised, and other threads may use the GPU meanwhile. If it fails, the error is raised, and random
    generators, the allocator and the current stream are as before.

    Args:
        work: what to record.
        pool: the memory pool of the graph.
        stream: a stream other than the device's default one, on which ``work`` runs.
        generators: further generators of this GPU that ``work`` uses; its default one always is.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        cast("Any", graph).register_generator_state(generator)
    # a failed capture leaves generators in the state of one, in which they give no random numbers outside of it
    default = torch.cuda.default_generators[stream.device_index]
    own = [default, *(cast("Any", each) for each in generators if each is not default)]
    spare = [generator.clone_state() for generator in own]
    ended = False
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(cast("Any", pool), capture_error_mode="thread_local")
            try:
                found = work()
            finally:
                graph.capture_end()
                ended = True
    except BaseException:
        if not ended:
            _failed.append(graph)
            for generator, state in zip(own, spare, strict=True):
                generator.graphsafe_set_state(state)
            with suppress(RuntimeError):  # where the capture ended, and it was the instantiation that failed
                _C._cuda_endAllocateToPool(stream.device_index, pool)
                _C._cuda_releasePool(stream.device_index, pool)
        raise
    return graph, found


def capture_failure(error: BaseException) -> str:
    """Returns the first line of the error that came first, and where outside of torch it was raised."""
    while error.__context__ is not None:  # ending a capture that has failed raises another one
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if "torch" not in Path(frame.filename).parts), None)
    return lines[0] if own is None else f"{lines[0]} ({Path(own.filename).name}, line {own.lineno})"

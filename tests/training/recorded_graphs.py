"""Graphs on a CPU that behave as CUDA graphs do: operators are recorded with their numbers, and run again on the same
memory, without any Python of the step. What would wait for a GPU raises an error."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"_local_scalar_dense", "nonzero", "equal", "_unique2", "masked_select", "is_nonzero", "bincount"}


def tensors_in(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def storages(values: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tensors_in(values)}


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in WAITING:
            raise RuntimeError(f"{func._schema.name} waits for the device")
        return func(*args, **(kwargs or {}))


class Recording(NoWaiting):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, found))
        return found


class RecordedGraph:
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self.calls = [call for call in calls if not is_view(*call)]
        tensors = {id(each): each for each in tensors_in(self.calls) if not each.is_inference()}
        self.tensors = tuple(tensors.values())

    def replay(self) -> None:
        with torch.autograd._unsafe_preserve_version_counter(self.tensors):  # which no graph on a device raises
            self.run()

    @torch.no_grad()
    def run(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            again = tensors_in(func(*args, **kwargs))
            given = storages((args, kwargs))
            for output, value in zip(tensors_in(outputs), again, strict=True):
                if output.untyped_storage()._cdata not in given:
                    output.copy_(value)


def is_view(func: Any, args: Any, kwargs: Any, outputs: Any) -> bool:
    """Whether an operator does nothing but show its input in another shape."""
    return bool(storages(outputs)) and storages(outputs) <= storages((args, kwargs)) and not func._schema.is_mutable


class RecordedGraphs:
    """Counts what it has recorded."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.captured = 0
        self.replays = 0

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def stream(self):
        return nullcontext()

    def no_waiting(self):
        return NoWaiting()

    def capture(self, work: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Any]:
        self.captured += 1
        with Recording() as recording:
            found = work()
        graph, graphs = RecordedGraph(recording.calls), self

        class Counted:
            def replay(self) -> None:
                graphs.replays += 1
                graph.replay()

        return Counted(), found


class WrongGraphs(RecordedGraphs):
    """Replays forget the last operators of a step."""

    def capture(self, work, generators):
        with Recording() as recording:
            found = work()
        return RecordedGraph(recording.calls[:-40]), found


class FailingGraphs(RecordedGraphs):
    """A capture fails, after some of the work."""

    def capture(self, work, generators):
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

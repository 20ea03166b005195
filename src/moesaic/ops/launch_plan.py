"""Launch plans: what an operator does on the device, recorded once per shape and replayed without its Python code.

An operator of ours computes grids, tiles, strides and sizes of workspaces in Python, from the metadata of its arguments
alone. In eager mode that takes the host several times as long as the GPU needs for the kernels. The first call of a
kind is recorded (`moesaic.ops.launch_recorder`): allocations, launches of kernels, and the torch operators between
them. Views are not: they are offsets in the addresses of launches. Later calls of that kind (`moesaic.ops.plan_cache`)
replay the list with other addresses. Workspaces are released after their last use, so that memory is that of the
recorded call or less.

On the default stream of a GPU, a plan that is called with the same addresses again becomes a CUDA graph
(`moesaic.ops.operator_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.ops.operator_graphs import CapturedOperator

__all__ = ["Place", "Plan", "Step"]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch.cuda's own functions take three times as long

Step = Callable[[list[Any], list[int], int], None]
"""``step(slots, addresses, stream)``: does a part of the work of a plan on the memory in its slots."""


class Place(NamedTuple):
    """Where a tensor lies: in the memory of a slot."""

    slot: int
    byte: int
    """From the start of the slot's tensor."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool
    """Whether it is the slot's tensor itself."""

    def tensor(self, slots: list[Any]) -> Tensor:
        """Returns the tensor."""
        return self.of(slots[self.slot])

    def of(self, base: Tensor) -> Tensor:
        """Returns the tensor, given that of its slot."""
        return base if self.whole else base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class Plan:
    """The recorded work of an operator."""

    def __init__(
        self,
        steps: list[Step],
        slots: int,
        outputs: list[Place],
        single: bool,
        aliases: list[tuple[int, int]],
        captured: CapturedOperator | None,
    ) -> None:
        self.captured = captured
        """The same for CUDA graphs, if it can be captured."""
        self._returned: list[tuple[int, Place | None]] | None = None
        self._steps = steps
        self._slots = slots
        self._outputs = outputs
        self._single = single
        self._aliases = aliases

    def fits(self, addresses: list[int]) -> bool:
        """Whether the inputs that were one tensor are one again."""
        for a, b in self._aliases:  # noqa: SIM110  all() takes longer
            if addresses[a] != addresses[b]:
                return False
        return True

    def run(self, inputs: list[Tensor], addresses: list[int]) -> Any:
        """Does the work on other inputs of the same kind, which lie at these addresses."""
        device = inputs[0].get_device()
        stream = _C._cuda_getCurrentRawStream(device) if device >= 0 else 0
        captured = self.captured
        if stream == 0 and captured is not None and captured.is_on:
            outputs = captured.run(inputs, addresses)
            if outputs is not None:
                return self.result(inputs, outputs)
        slots: list[Any] = [*inputs, *[None] * (self._slots - len(inputs))]
        addresses = [*addresses, *[0] * (self._slots - len(inputs))]
        for step in self._steps:
            step(slots, addresses, stream)
        return self._result(slots)

    def result(self, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        """What the operator returns, given the memory of its outputs as `CapturedOperator` has it."""
        if self._returned is None:
            assert self.captured is not None
            known = {slot: len(inputs) + number for number, slot in enumerate(self.captured.output_slots)}
            ready = {each.slot for each in self.captured.outputs if each.is_view}
            self._returned = [
                (known.get(each.slot, each.slot), None if each.whole or each.slot in ready else each)
                for each in self._outputs
            ]
        memory = [*inputs, *outputs]
        found = tuple([memory[n] if place is None else place.of(memory[n]) for n, place in self._returned])
        return found[0] if self._single else found

    def _result(self, slots: list[Any]) -> Any:
        if self._single:
            return self._outputs[0].tensor(slots)
        return tuple([each.tensor(slots) for each in self._outputs])

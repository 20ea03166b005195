"""Launch plans: the device work of an operator, recorded once per kind of arguments and replayed without its Python.

An operator's Python code computes grids, tiles, strides and sizes of workspaces from the metadata of its arguments
alone. In eager mode that takes the host several times as long as the kernels take the GPU. The first call with
arguments of a kind (`moesaic.ops.plan_cache`) is recorded (`moesaic.ops.launch_recorder`): allocations, kernel
launches, and the torch operators between them. Views are recorded as offsets of addresses. Later calls replay these
steps on other addresses. Workspaces are released after their last use, so that a replay needs no more memory than the
recorded call.

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
"""``step(slots, addresses, stream)`` runs one step of a plan. A slot holds a tensor, or None for a part of an arena."""


class Place(NamedTuple):
    """The position of a tensor in the memory of a slot."""

    slot: int
    byte: int
    """Bytes from the start of the slot's tensor."""
    offset: int
    """Elements from the start of the slot's tensor."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool
    """Whether the tensor is the slot's tensor itself, and no view of it."""

    def tensor(self, slots: list[Any]) -> Tensor:
        """Returns the tensor, given all slots."""
        return self.of(slots[self.slot])

    def of(self, base: Tensor) -> Tensor:
        """Returns the tensor, given the tensor of its slot."""
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
        """The operator's work in CUDA graphs; None if it cannot be captured."""
        self._returned: list[tuple[int, Place | None]] | None = None
        self._steps = steps
        self._slots = slots
        self._outputs = outputs
        self._single = single
        self._aliases = aliases

    def fits(self, addresses: list[int]) -> bool:
        """Whether inputs that had one address in the recorded call have one address again."""
        for a, b in self._aliases:  # noqa: SIM110  all() takes longer
            if addresses[a] != addresses[b]:
                return False
        return True

    def run(self, inputs: list[Tensor], addresses: list[int]) -> Any:
        """Runs the operator's work on other inputs of the recorded kind, at these addresses."""
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
        """Returns the operator's outputs as views of the memory that `CapturedOperator` allocates for them."""
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

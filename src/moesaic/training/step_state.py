"""Copies of the tensors and random states that a training step changes: to undo steps, and to compare two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["StepState"]

_ROUNDINGS = 4
"""Units in the last place by which stored values may differ."""
_NOISE_FACTOR = 10
"""Allowed distance, as a factor of that between two repetitions of the same eager steps."""


class StepState:
    """The values of named tensors, and the states of random generators, at one time.

    >>> weight = torch.ones(2)
    >>> before = StepState({"weight": weight}, [])
    >>> _ = weight.add_(1)
    >>> before.restore({"weight": weight})
    >>> weight.tolist()
    [1.0, 1.0]
    """

    def __init__(self, tensors: Mapping[str, Tensor], generators: Sequence[torch.Generator]) -> None:
        self._values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self._generators = generators
        self._random = [generator.get_state() for generator in generators]

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the stored values into the tensors.

        Tensors without a stored value get zeros, with which optimizers and counters begin.
        """
        for name, tensor in tensors.items():
            value = self._values.get(name)
            if value is None:
                tensor.zero_()
            elif not torch.equal(tensor, value):  # tensors that no step changes may share memory with themselves
                tensor.copy_(value)
        for generator, state in zip(self._generators, self._random, strict=True):
            generator.set_state(state)

    def replaced(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Returns the name of a tensor whose address has changed, or None."""
        common = [name for name in self._addresses if name in tensors]
        return next((name for name in common if tensors[name].data_ptr() != self._addresses[name]), None)

    def distances(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns the norm of the difference between each tensor and its stored value."""
        return {name: _distance(tensor, self._values.get(name)) for name, tensor in tensors.items()}

    def difference(
        self, start: StepState, tensors: Mapping[str, Tensor], noise: Mapping[str, float], tolerance: float
    ) -> str:
        """Returns how tensors and generators differ from this state by more than rounding; empty if they do not.

        Args:
            start: the state before the steps.
            tensors: the tensors after the steps to be compared.
            noise: the `distances` after a repetition of the steps of this state.
            tolerance: allowed distance, as a fraction of the change since ``start``.
        """
        for name, distance in self.distances(tensors).items():
            value = self._values.get(name)
            change = _distance(value, start._values.get(name)) if value is not None else 0.0
            rounding = 0.0 if value is None else _ROUNDINGS * _epsilon(value) * _distance(value, None)
            allowed = tolerance * change + rounding + _NOISE_FACTOR * noise.get(name, 0.0)
            if not distance <= allowed:
                return f"{name} differs by {distance:.1e} where {allowed:.1e} is rounding"
        states = zip(self._generators, self._random, strict=True)
        if any(not torch.equal(generator.get_state(), state) for generator, state in states):
            return "its random numbers do not advance as in eager steps"
        return ""


@torch.no_grad()
def _distance(tensor: Tensor, other: Tensor | None) -> float:
    """The norm of a difference, or of a tensor; two values that are both not a number do not differ."""
    if other is not None and torch.equal(tensor, other):
        return 0.0
    value = tensor.double().nan_to_num()
    if other is not None:
        value = value - other.double().nan_to_num()
    return value.square().sum().sqrt().item()


def _epsilon(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0

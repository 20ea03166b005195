"""A value computed from weights, cached until the weights change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["CachedValue"]

T = TypeVar("T")

_address, _version = methodcaller("data_ptr"), attrgetter("_version")


class CachedValue(Generic[T]):
    """A value computed from tensors, and recomputed when one of them has changed.

    A change is detected by the tensor's address and by torch's version counter: optimizer steps, ``load_state_dict``,
    ``to`` and edits under ``no_grad`` are noticed. Edits of ``tensor.data`` are not, since torch does not count them.
    Nothing is cached for tensors created in inference mode, which have no version counter.

    >>> weight, cached = torch.ones(2), CachedValue[Tensor]()
    >>> cached.get([weight], lambda: 2 * weight)
    tensor([2., 2.])
    >>> weight += 1
    >>> cached.get([weight], lambda: 2 * weight)
    tensor([4., 4.])
    """

    def __init__(self) -> None:
        self._value: tuple[T] | None = None
        self._key: list[int] = []
        self._tensors: list[Tensor] = []

    def get(self, tensors: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """Returns the cached value, or that of ``compute()`` if one of the tensors has changed."""
        try:
            key = [*map(_address, tensors), *map(_version, tensors)]
        except RuntimeError:  # inference tensors have no version counter
            return compute()
        if self._value is None or key != self._key:
            with torch.inference_mode(False), torch.no_grad():
                self._value = (compute(),)
            self._key = key
            # while these references live, no other tensor can get the same address
            self._tensors = [tensor.detach() for tensor in tensors]
        return self._value[0]

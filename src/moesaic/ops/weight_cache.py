"""Values that are made of weights once and kept until the weights change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["CachedValue", "TensorRefs"]

T = TypeVar("T")

_place, _changes = methodcaller("data_ptr"), attrgetter("_version")


class CachedValue(Generic[T]):
    """A value that is made of tensors, and made anew when one of them has changed.

    A change is told by where a tensor lies and by torch's count of its changes in place: steps of an optimizer,
    ``load_state_dict``, ``to`` and edits under ``no_grad`` are noticed. Edits of ``tensor.data`` are not counted by
    torch; call `forget` behind them. Nor are BatchNorm's of its running statistics: give its ``num_batches_tracked``
    along with them. Nothing is kept of tensors that were made in inference mode, which count nothing.

    A copy of what holds it starts with nothing kept.

    >>> weight, kept = torch.ones(2), CachedValue[Tensor]()
    >>> kept.of([weight], lambda: 2 * weight)
    tensor([2., 2.])
    >>> weight += 1
    >>> kept.of([weight], lambda: 2 * weight)
    tensor([4., 4.])
    """

    def __init__(self) -> None:
        self._value: tuple[T] | None = None
        self._stamp: list[int] = []
        self._held: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        try:
            stamp = [*map(_place, tensors), *map(_changes, tensors)]
        except RuntimeError:  # of tensors of inference mode, which count nothing
            return make()
        if self._value is None or stamp != self._stamp:
            with torch.inference_mode(False), torch.no_grad():
                self._value = (make(),)
            self._stamp = stamp
            # while these live, no other tensor can come to lie where they do
            self._held = [tensor.detach() for tensor in tensors]
        return self._value[0]

    def forget(self) -> None:
        self._value, self._stamp, self._held = None, [], []

    def __deepcopy__(self, memo: object) -> CachedValue[T]:
        return CachedValue()

    def __reduce__(self) -> tuple[type[CachedValue[T]], tuple[()]]:
        return CachedValue, ()


class TensorRefs:
    """The tensors of modules as they are now: parameters and buffers, found without asking the modules.

    >>> layer = torch.nn.Linear(2, 3)
    >>> held = TensorRefs([layer])
    >>> layer.bias = torch.nn.Parameter(torch.ones(3))
    >>> held.now()[1] is layer.bias
    True
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[dict[str, Tensor | None]] = []
        for module in modules:
            self._places += [vars(module)["_parameters"], vars(module)["_buffers"]]

    def now(self) -> list[Tensor]:
        return [tensor for places in self._places for tensor in places.values() if tensor is not None]

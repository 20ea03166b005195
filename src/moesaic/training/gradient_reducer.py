"""Sums gradients over ranks, bucket by bucket, each as soon as the backward pass has filled it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.training.batches import split
from moesaic.training.ranks import Ranks

__all__ = ["GradientReducer"]

_BUCKET_BYTES = 25 * 1024**2
"""Size of a bucket, at most, as in DistributedDataParallel."""

_dist: Any = torch.distributed  # torch types it in part


class _Bucket:
    """Gradients that are summed in one message."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.waiting = 0
        """Gradients that the backward pass has not computed yet."""
        self.values: Tensor | None = None
        self.work: Any = None

    def begin(self) -> None:
        self.waiting, self.values, self.work = len(self.parameters), None, None

    def send(self, group: Any) -> None:
        gradients = [_gradient(parameter) for parameter in self.parameters]
        self.values = torch.cat([gradient.detach().contiguous().view(-1) for gradient in gradients])
        self.work = _dist.all_reduce(self.values, group=group, async_op=True)

    def receive(self, has_gradient: Iterable[bool]) -> None:
        assert self.values is not None
        self.work.wait()
        parts = split(self.values, [parameter.numel() for parameter in self.parameters])
        for parameter, part, has_one in zip(self.parameters, parts, has_gradient, strict=True):
            if not has_one:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view(parameter.shape))
        self.values = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class GradientReducer:
    """Sums the gradients of parameters over ranks, in buckets that are sent as the backward pass fills them.

    Buckets are sent in one order on all ranks; those with a gradient that this rank does not have wait for the end of
    the backward pass.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        # hooks need parameters that require gradients; reversed: about the order in which gradients are computed
        self._parameters = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        self._trained: tuple[bool, ...] = ()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._sent = 0
        self._active = False
        with ExitStack() as stack:
            for parameter in self._parameters:
                hook = cast("Any", parameter).register_post_accumulate_grad_hook(self._computed)
                stack.callback(hook.remove)
            self._hooks = stack.pop_all()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self._hooks.close()

    def begin(self) -> None:
        """Called before the last backward pass of a step, in which gradients are summed."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        if trained != self._trained:
            self._trained, self._buckets = trained, _make_buckets(self._parameters)
            self._bucket_of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        for bucket in self._buckets:
            bucket.begin()
        self._sent, self._active = 0, True

    def _computed(self, parameter: Tensor) -> None:
        if not self._active:
            return
        self._bucket_of[id(parameter)].waiting -= 1
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send_next()

    def finish(self) -> None:
        """Wait for the sums, and make them the gradients."""
        self._active = False
        has_gradient = [parameter.grad is not None for bucket in self._buckets for parameter in bucket.parameters]
        while self._sent < len(self._buckets):
            self._send_next()
        flags = iter(self._ranks.any(*has_gradient))
        for bucket in self._buckets:
            bucket.receive([next(flags) for _ in bucket.parameters])

    def _send_next(self) -> None:
        self._buckets[self._sent].send(self._ranks.gradients)
        self._sent += 1


def _make_buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Buckets of neighbouring parameters that are trained, each of one dtype and of a limited size."""
    buckets: list[_Bucket] = []
    size, dtype = 0, None
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        length = parameter.numel() * parameter.element_size()
        if not buckets or parameter.dtype != dtype or size + length > _BUCKET_BYTES:
            buckets.append(_Bucket([]))
            size, dtype = 0, parameter.dtype
        buckets[-1].parameters.append(parameter)
        size += length
    return buckets

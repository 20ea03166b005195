"""Layers for batches that are spread over ranks: BatchNorm, norms of experts, noisy routers and dropout.

The class of a module is replaced by a subclass whose ``forward`` exchanges statistics, as ``fully_shard`` replaces it:
parameters, buffers, hooks and names in the state dict stay. Layers of moesaic have an attribute ``global_batch`` in
place of a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from moesaic.ops.dispatch import Norm
from moesaic.ops.global_batch import GlobalBatch
from moesaic.ops.global_batch_norm import global_batch_norm

__all__ = ["spread_batch", "sync_batch_norm"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MULTIPLIES = ("DropPath", "StochasticDepth")
"""Names of layers of timm and torchvision that multiply samples by random numbers."""


@contextmanager
def spread_batch(model: nn.Module, batch: GlobalBatch) -> Generator[None]:
    """Inside, layers of the model compute for the whole batch: norms, routers, dropout."""
    before = [(module, type(module), vars(module).get("global_batch")) for module in model.modules()]
    _bind(model, batch, random=True)
    try:
        yield
    finally:
        for module, kind, previous in before:
            if type(module) is not kind:
                module.__class__ = kind
            vars(module).pop("global_batch", None)
            if previous is not None:  # of sync_batch_norm
                cast("Any", module).global_batch = previous


def sync_batch_norm(model: nn.Module, group: Any = None) -> nn.Module:
    """Makes norms of a model use the statistics of the batch on all ranks of a process group; returns the model.

    Call it in training loops of your own, before the model is wrapped in DistributedDataParallel or sharded; `fit` does
    not need it. Unlike ``nn.SyncBatchNorm.convert_sync_batchnorm`` it runs on every device, weights unequal parts by
    their samples, and includes the norms of experts and of gated channels. Names in the state dict stay as they are.

    Args:
        model: the model, which is changed in place.
        group: the process group; None: the default one.

    >>> import torch
    >>> from torch import distributed
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> model = sync_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> model(torch.randn(4, 3, 8, 8)).mean().abs() < 1e-6
    tensor(True)
    >>> distributed.destroy_process_group()
    """
    return _bind(model, GlobalBatch(group), random=False)


def _bind(model: nn.Module, batch: GlobalBatch, *, random: bool) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage] # of all axes
            if not isinstance(module, nn.SyncBatchNorm):
                cast("Any", module).__class__ = _global_class(type(module), _batch_norm_forward)
        elif random and (type(module) in _DROPOUTS or type(module).__name__ in _MULTIPLIES):
            cast("Any", module).__class__ = _global_class(type(module), _dropout_forward)
        if hasattr(type(module), "global_batch"):
            cast("Any", module).global_batch = batch
    return model


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _global_class(plain: type[nn.Module], forward: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    """Returns a subclass with another ``forward``."""
    if hasattr(plain, "_plain_class"):
        return plain
    known = any(plain.forward is layer.forward for layer in (*_NORMS, *_DROPOUTS))
    if not known and plain.__name__ not in ("BatchNormAct2d", *_MULTIPLIES):
        raise ValueError(
            f"fit: {plain.__name__} has a BatchNorm of its own, whose statistics several processes cannot share; use "
            "nn.BatchNorm2d or a norm without batch statistics, or train in one process"
        )
    if plain not in _classes:
        content = {"forward": forward, "global_batch": None, "_plain_class": plain}
        _classes[plain] = type(plain.__name__, (plain,), content)
    return _classes[plain]


def _batch_norm_forward(self: Any, x: Tensor) -> Tensor:
    if not self.training and self.running_mean is not None:
        return self._plain_class.forward(self, x)
    self._check_input_dim(x)
    momentum: float = 0.0 if self.momentum is None else self.momentum
    running: tuple[Any, Any] = self.running_mean, self.running_var
    if self.training and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1 / int(self.num_batches_tracked)
    y = global_batch_norm(x, Norm(self.weight, self.bias, *running, momentum, self.eps, True, self.global_batch))
    return self.act(self.drop(y)) if hasattr(self, "act") and hasattr(self, "drop") else y  # timm's BatchNormAct2d


def _dropout_forward(self: Any, x: Tensor) -> Tensor:
    probability: float = self.drop_prob if hasattr(self, "drop_prob") else self.p
    if not (self.training and probability):
        return x
    batch: GlobalBatch = self.global_batch

    def mask(ones: Tensor) -> Tensor:
        return self._plain_class.forward(self, ones)

    return x * batch.draw(x, mask)

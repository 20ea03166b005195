"""Layers of equal experts as one: values are stacked along the channels, (S, E·C, …), weights along their outputs.

A convolution of E experts is a grouped convolution with E times as many groups, a linear layer a batched matmul: both
read values where they lie, and torch issues one of the expensive operators, with its autocast and its gradients, where
a loop over experts issues E. BatchNorm over each expert's own samples takes more, but small ones. `torch.func.vmap`
over stacked weights arrives at the same convolutions, but has no BatchNorm that leaves samples out; a loop over experts
inside of each layer would need copies to and from every convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.ops.masked_batch_norm import masked_batch_norm
from moesaic.ops.sample_groups import SampleGroup, by_expert
from moesaic.ops.stacked_functions import UngroupableError, check_axes

__all__ = ["StackedPass", "too_few_samples"]

_torch: Any = torch  # its operators on lists of tensors, as optimizers use them, are not typed
_CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class _Moments:
    """What a BatchNorm found in a pass."""

    norm: Any
    mean_C: Tensor
    var_C: Tensor
    correction: float
    """Unbiased over biased variance."""


@dataclass
class StackedPass:
    """One pass of a group of experts; running statistics change in `update_statistics`, after the pass."""

    group: SampleGroup
    _moments: list[_Moments] = field(default_factory=list, init=False)
    _stacked: dict[tuple[int, str], Tensor] = field(default_factory=dict, init=False)
    """Tensors of norms, by the first expert's norm and their name."""

    @property
    def experts(self) -> int:
        return len(self.group.experts)

    def stack_norms(self, norms: Sequence[Sequence[Any]]) -> None:
        """Concatenates what all BatchNorms have, in one launch for each name rather than for each norm."""
        names = ["weight", "bias"]
        if norms and not norms[0][0].training:
            names += ["running_mean", "running_var"]
        for name in names:
            tensors = [_tensors(norm, name) for norm in norms if getattr(norm[0], name) is not None]
            joined = [each for norm in tensors for each in norm]
            if len({each.dtype for each in joined}) != 1:
                continue
            sizes = [sum(map(len, norm)) for norm in tensors]
            parts = cast("tuple[Tensor, ...]", torch.cat(joined).split(sizes))
            owners = [id(norm[0]) for norm in norms if getattr(norm[0], name) is not None]
            self._stacked |= {(owner, name): part for owner, part in zip(owners, parts, strict=True)}

    def conv(self, modules: Sequence[Any], x: Tensor) -> Tensor:
        first = modules[0]
        axes = len(first.kernel_size)
        check_axes(x, axes)
        return cast("Any", _CONVS[axes])(
            x,
            self.stack(modules, "weight"),
            self.stack(modules, "bias"),
            first.stride,
            first.padding,
            first.dilation,
            first.groups * self.experts,
        )

    def linear(self, modules: Sequence[Any], x: Tensor) -> Tensor:
        """Batched matmul over the last axis of samples (S, E·C) or (S, E·N, …, C)."""
        values = by_expert(x, self.experts)
        if x.ndim == 2:
            values = values.unsqueeze(2)
        S, E, *between, C = values.shape
        rows = values.transpose(0, 1).reshape(E, -1, C)
        weight_ECO = self._stack_apart(modules, "weight").transpose(1, 2)
        if modules[0].bias is None:
            y = torch.bmm(rows, weight_ECO)
        else:
            y = torch.baddbmm(self._stack_apart(modules, "bias").unsqueeze(1), rows, weight_ECO)
        y = y.view(E, S, *between, -1).transpose(0, 1)
        return y.flatten(1) if x.ndim == 2 else y.flatten(1, 2)

    def group_norm(self, modules: Sequence[Any], x: Tensor) -> Tensor:
        first = modules[0]
        weight, bias = self.stack(modules, "weight"), self.stack(modules, "bias")
        return F.group_norm(x, first.num_groups * self.experts, weight, bias, first.eps)

    def layer_norm(self, modules: Sequence[Any], x: Tensor) -> Tensor:
        first = modules[0]
        values = by_expert(x, self.experts)
        normalized: tuple[int, ...] = tuple(first.normalized_shape)
        if len(normalized) > values.ndim - 2:
            raise UngroupableError("a LayerNorm normalises over the batch")
        y = F.layer_norm(values, normalized, eps=first.eps)
        if first.weight is not None:
            between = [1] * (y.ndim - 2 - len(normalized))
            y = y * self._stack_apart(modules, "weight").view(self.experts, *between, *normalized)
            if first.bias is not None:
                y = y + self._stack_apart(modules, "bias").view(self.experts, *between, *normalized)
        return y.flatten(1, 2)

    def batch_norm(self, modules: Sequence[Any], x: Tensor) -> Tensor:
        first = modules[0]
        first._check_input_dim(x)
        weight, bias = self.stack(modules, "weight"), self.stack(modules, "bias")
        tracked = first.running_mean is not None
        if tracked and not first.training:
            mean, var = self.stack(modules, "running_mean"), self.stack(modules, "running_var")
            return F.batch_norm(x, mean, var, weight, bias, False, 0.0, first.eps)
        values = x.shape[2:].numel()
        for e, count in zip(self.group.experts, self.group.counts, strict=True):
            if count * values <= 1:
                raise too_few_samples(e, count)
        weight, bias = (None if each is None else each.view(self.experts, -1) for each in (weight, bias))
        share_SE = self.group.share_SE(torch.promote_types(x.dtype, torch.float32))
        y, mean, var = masked_batch_norm(x, weight, bias, self.group.used_SE(x.dtype), share_SE, first.eps)
        if tracked:
            for norm, mean_C, var_C, count in zip(modules, mean, var, self.group.counts, strict=True):
                number = count * values
                self._moments.append(_Moments(norm, mean_C, var_C, number / (number - 1)))
        return y

    def stack(self, modules: Sequence[nn.Module], name: str) -> Tensor | None:
        """Concatenates a parameter or buffer of all experts along its first axis."""
        if getattr(modules[0], name) is None:
            return None
        known = self._stacked.get((id(modules[0]), name))
        return torch.cat(_tensors(modules, name)) if known is None else known

    @torch.no_grad()
    def update_statistics(self) -> None:
        """Moves the running statistics of all BatchNorms, in few launches for many small tensors."""
        if not self._moments:
            return
        _torch._foreach_add_([each.norm.num_batches_tracked for each in self._moments], 1)
        unbiased = _torch._foreach_mul(
            [each.var_C for each in self._moments], [each.correction for each in self._moments]
        )
        for momentum in {each.norm.momentum for each in self._moments}:
            running: list[Tensor] = []
            values: list[Tensor] = []
            for each, var_C in zip(self._moments, unbiased, strict=True):
                if each.norm.momentum == momentum:
                    running += [each.norm.running_mean, each.norm.running_var]
                    values += [each.mean_C, var_C]
            same = (value.to(each.dtype) for value, each in zip(values, running, strict=True))
            _torch._foreach_lerp_(running, list(same), momentum)

    def _stack_apart(self, modules: Sequence[nn.Module], name: str) -> Tensor:
        """Stacks a parameter of all experts, (E, …)."""
        return torch.stack(_tensors(modules, name))


def too_few_samples(expert: int, samples: int) -> ValueError:
    """The error of an expert whose BatchNorm cannot train on its samples."""
    return ValueError(
        f"SampleMoE: expert {expert} got {samples} sample{'s' * (samples != 1)} of the batch, too few for its "
        "BatchNorm to train on; use larger batches (and drop a last one that is small), a balance loss, or GroupNorm"
    )


def _tensors(modules: Sequence[nn.Module], name: str) -> list[Tensor]:
    found: list[Tensor] = [getattr(module, name) for module in modules]
    for tensor in found:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise UngroupableError(f"a {name} is a {type(tensor).__name__}")
    return found

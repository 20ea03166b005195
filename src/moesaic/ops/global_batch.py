"""Batches whose samples are spread over processes: statistics, sums and random numbers of the whole batch.

With the samples of rank r as one part of a batch, BatchNorm needs the moments of all parts. Every rank computes count,
mean and squared deviations of its own part; the parts are gathered and merged (Chan et al. 1979):

    n = Σ n_r,   mean = Σ n_r mean_r / n,   M2 = Σ M2_r + Σ n_r (mean_r − mean)²

so that the result is that of one process, for parts of any sizes, empty ones included. torch's SyncBatchNorm is for
GPUs only, and knows neither the norms of experts nor those of gated channels.

Random numbers are drawn for the whole batch by every rank, which then uses its own rows: ranks whose generators are in
the same state use the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moesaic.ops.dispatch import Norm

__all__ = ["GlobalBatch", "global_batch_norm", "global_moments", "grad_sync_expected", "with_zero_gradients"]

_dist: Any = torch.distributed  # torch types it in part


class GlobalBatch:
    """A batch that is spread over the ranks of a process group, and the part of this rank.

    Norms, routers and dropout that have one as ``global_batch`` compute for the whole batch
    (`moesaic.training.distributed.global_batch`). All ranks must run the same layers in the same order.

    Args:
        group: the process group; None: the default one.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank: int = _dist.get_rank(group)
        self.ranks: int = _dist.get_world_size(group)
        self._part: tuple[int, int, int] | None = None

    @property
    def has_part(self) -> bool:
        """Whether the part of this rank is known, as in `fit`, which keeps gradients of None."""
        return self._part is not None

    @property
    def size(self) -> int:
        """Samples of the whole batch, inside of `part`."""
        assert self._part is not None
        return self._part[2]

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalBatch:
        return self  # a process group cannot be copied, and copies of a model belong to the same one

    @contextmanager
    def part(self, first: int, samples: int, total: int) -> Generator[None]:
        """Inside, this rank has ``samples`` samples of a batch of ``total``, from number ``first`` on."""
        before, self._part = self._part, (first, samples, total)
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def subset(self) -> Generator[None]:
        """Inside, samples are some of those of this rank, such as the samples of an expert."""
        before, self._part = self._part, None
        try:
            yield
        finally:
            self._part = before

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all ranks, without gradients."""
        values = values.detach().clone()
        _dist.all_reduce(values, group=self.group)
        return values

    def gather(self, samples: Tensor) -> Tensor:
        """Returns the samples (B, …) of all ranks, in the order of ranks, without gradients."""
        sizes = cast("list[int]", self.stack(torch.tensor(len(samples), device=samples.device)).tolist())
        padded = samples.new_zeros(max(sizes), *samples.shape[1:])
        padded[: len(samples)] = samples.detach()
        parts = self.stack(padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def stack(self, values: Tensor) -> Tensor:
        """Returns the values of all ranks, (ranks, …), without gradients."""
        stacked = values.new_empty(self.ranks, *values.shape)
        _dist.all_gather(list(stacked.unbind()), values.detach().contiguous(), group=self.group)
        return stacked

    def own(self, batch: Tensor) -> Tensor:
        """Returns the samples of this rank from those of the whole batch."""
        assert self._part is not None
        first, samples, _ = self._part
        return batch[first : first + samples]

    def draw(self, like: Tensor, random: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns random numbers for samples (B, …): ``random`` gets a tensor in the shape of the whole batch.

        For other samples than those of the current part, such as the samples of one expert, each rank has numbers of
        its own: they are random, but not those of one process.
        """
        if self._part is not None and self._part[1] == len(like):
            whole = torch.ones(self._part[2], *like.shape[1:], dtype=like.dtype, device=like.device)
            if like.ndim == 4 and not like.is_contiguous():  # the order in which numbers fill the memory
                whole = whole.contiguous(memory_format=torch.channels_last)
            return self.own(random(whole))
        # one number of the common generator, so that generators of ranks stay in the same state
        seed = int(torch.randint(1 << 62, ()))
        devices = [like.device] if like.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed + self.rank)
            return random(torch.ones_like(like))


def global_moments(
    count: Tensor, mean: Tensor, squares: Tensor, positions: int, batch: GlobalBatch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merges the moments of all ranks; gradients flow back to those of every rank.

    Args:
        count: number of values, broadcastable to ``mean``.
        mean: their mean, 0 where there are none.
        squares: the sum of squared deviations from the mean.
        positions: a number to be summed with them.
        batch: the batch.

    Returns:
        Count, mean, the sum of squared deviations and of positions over all ranks.
    """
    parts = torch.stack([count.to(mean.dtype).expand(mean.shape), mean, squares, torch.full_like(mean, positions)])
    gathered = cast("Tensor", _Gather.apply(parts, batch))
    return *_merge(gathered[:, :3]), gathered[:, 3].detach().sum(0)


def global_batch_norm(x: Tensor, norm: Norm) -> Tensor:
    """BatchNorm of maps (B, C, …) with the statistics of the whole batch; updates the running ones."""
    assert norm.batch is not None
    y, mean, var, count = cast(
        "tuple[Tensor, Tensor, Tensor, Tensor]",
        _BatchNorm.apply(x, norm.weight, norm.bias, norm.eps, norm.batch),
    )
    if x.device.type == "cpu" and int(count) == 1:  # elsewhere the host would wait for the device
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if norm.running_mean is not None:  # pyright: ignore[reportUnnecessaryComparison] # of a module without statistics
        with torch.no_grad():
            any_values = count.clamp_max(1)  # no value anywhere changes nothing
            unbiased = var * (count / (count - 1).clamp_min(1))
            for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                running.lerp_(value.to(running.dtype), (norm.momentum * any_values).to(running.dtype))
    return y


def with_zero_gradients(y: Tensor, others: list[Tensor]) -> Tensor:
    """Returns ``y``; the other tensors get gradients of zero.

    DistributedDataParallel and fully_shard expect a gradient of every parameter on every rank.

    >>> weight, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    >>> with_zero_gradients(2 * weight, [unused]).sum().backward()
    >>> weight.grad, unused.grad
    (tensor([2., 2.]), tensor([0., 0., 0.]))
    """
    return cast("Tensor", _ZeroGradients.apply(y, *others)) if others else y


def grad_sync_expected(module: nn.Module) -> bool:
    """Whether gradients of a module in training may be summed over ranks by a wrapper that expects all of them."""
    if not (module.training and torch.is_grad_enabled() and _dist.is_available() and _dist.is_initialized()):
        return False
    return _dist.get_world_size() > 1


class _Gather(torch.autograd.Function):
    """Stacks a tensor of every rank, (ranks, …); the gradient of a part is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: GlobalBatch) -> Tensor:
        ctx.batch = batch
        return batch.stack(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.sum(grads[0].contiguous())[ctx.batch.rank], None


class _BatchNorm(torch.autograd.Function):
    """(x − mean) / √(var + eps) · weight + bias over the whole batch; weights get the gradient of this rank's part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch: GlobalBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        channels = x.shape[1]
        number = x.numel() // max(channels, 1)
        own_mean = x.sum(_reduced(x), dtype=dtype) / max(number, 1)
        y = x - _per_channel(own_mean, x)  # of the dtype of the statistics
        squares = (y * y).sum(_reduced(x))
        total, mean, squares = _merge(batch.stack(torch.stack([torch.full_like(squares, number), own_mean, squares])))
        var = squares / total.clamp_min(1)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.batch = batch
        scale = inverse if weight is None else inverse * weight.to(dtype)
        # in place, as the map is large: every further pass over it costs as much as a part of the convolution
        y.add_(_per_channel(own_mean - mean, x)).mul_(_per_channel(scale, x))
        if bias is not None:
            y.add_(_per_channel(bias.to(dtype), x))
        total = total[0].clone() if channels else total.sum()
        ctx.mark_non_differentiable(mean, var, total)
        return y.to(x.dtype), mean, var, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        grad = grads[0].to(mean.dtype)
        centred = x - _per_channel(mean, x)
        own = torch.stack([grad.sum(_reduced(x)), inverse * (grad * centred).sum(_reduced(x))])
        offset, slope = ctx.batch.sum(own) / total.clamp_min(1)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        # scale · (grad − offset − centred · inverse · slope)
        grad_x = centred.mul_(_per_channel(-inverse * slope, x)).add_(grad).sub_(_per_channel(offset, x))
        grad_x.mul_(_per_channel(scale, x))
        grad_weight = None if weight is None else own[1].to(weight.dtype)
        return grad_x.to(x.dtype), grad_weight, None if weight is None else own[0].to(weight.dtype), None, None


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return y.clone()  # a view, changed in place, would lose the hooks of fully_shard

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *(torch.zeros_like(each) for each in ctx.saved_tensors)


def _merge(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squared deviations of all ranks together, from parts (ranks, 3, …)."""
    count_R, mean_R, squares_R = parts.unbind(1)
    total = count_R.sum(0)
    mean = (count_R * mean_R).sum(0) / total.clamp_min(1)
    return total, mean, squares_R.sum(0) + (count_R * (mean_R - mean).square()).sum(0)


def _reduced(x: Tensor) -> list[int]:
    """The axes over which statistics are taken."""
    return [0, *range(2, x.ndim)]


def _per_channel(values_C: Tensor, x: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (x.ndim - 2))

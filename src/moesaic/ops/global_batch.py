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

__all__ = ["GlobalBatch", "global_moments", "grad_sync_expected", "merge_moments", "with_zero_gradients"]

_dist: Any = torch.distributed  # torch types it in part


class GlobalBatch:
    """A batch that is spread over the ranks of a process group, and the part of this rank.

    Norms, routers and dropout that have one as ``global_batch`` compute for the whole batch
    (`moesaic.training.data_parallel.global_batch`). All ranks must run the same layers in the same order.

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
        """Whether the part of this rank is known, as in `fit`, which preserves gradients of None."""
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
        """Context in which this rank has ``samples`` samples of a batch of ``total``, from number ``first`` on."""
        before, self._part = self._part, (first, samples, total)
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def subset(self) -> Generator[None]:
        """Context for some of this rank's samples, such as the samples of an expert."""
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
    return *merge_moments(gathered[:, :3]), gathered[:, 3].detach().sum(0)


def merge_moments(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squared deviations of all ranks together, from parts (ranks, 3, …)."""
    count_R, mean_R, squares_R = parts.unbind(1)
    total = count_R.sum(0)
    mean = (count_R * mean_R).sum(0) / total.clamp_min(1)
    return total, mean, squares_R.sum(0) + (count_R * (mean_R - mean).square()).sum(0)


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
    """Whether a wrapper that expects all gradients of a module in training may sum them over ranks, or over one."""
    return module.training and torch.is_grad_enabled() and _dist.is_available() and _dist.is_initialized()


class _Gather(torch.autograd.Function):
    """Stacks a tensor of every rank, (ranks, …); the gradient of a part is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: GlobalBatch) -> Tensor:
        ctx.batch = batch
        return batch.stack(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.sum(grads[0].contiguous())[ctx.batch.rank], None


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return y.clone()  # a view, changed in place, would lose the hooks of fully_shard

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *(torch.zeros_like(each) for each in ctx.saved_tensors)

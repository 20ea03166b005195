"""Grouped GEMM: rows sorted by expert times their expert's matrix, for groups of unequal size.

    y[r] = rows[r] · weight[e]        for the rows r of expert e

Rows are (R, …, C), weights (E, C, O). Four implementations: ``F.grouped_mm`` for bfloat16, on every device and without
a host sync; a loop of matmuls on a CPU, which has no sync to wait for; padded blocks of static shape for other dtypes
on a GPU, under a compiler and in a trace, where no shape may depend on the group sizes; and under ``torch.vmap``, where
group sizes differ from sample to sample, the matmuls of all rows with all experts.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.eager_conditions import has_host_values, in_vmap

__all__ = ["group_ends", "group_sizes", "grouped_matmul"]


def grouped_matmul(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies rows (R, …, C), sorted by expert, by their expert's matrix: (R, …, O).

    The rows of expert e end before row ``ends_E[e]``; an expert may have none.

    >>> rows, weight = torch.ones(3, 2), torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1).expand(3, 2, 1)
    >>> grouped_matmul(rows, weight, torch.tensor([1, 1, 3])).flatten().tolist()     # expert 1 has no row
    [2.0, 200.0, 200.0]
    """
    if in_vmap():
        return _masked_matmul(rows, weight_ECO, ends_E)
    if rows.shape[0] and rows.dtype == torch.bfloat16:
        return _grouped_mm(rows, weight_ECO, ends_E)
    if rows.device.type == "cpu" and not torch.compiler.is_compiling() and has_host_values(rows):
        return _matmul_loop(rows, weight_ECO, ends_E)
    return _blocked_bmm(rows, weight_ECO, ends_E)


def group_ends(expert_R: Tensor, experts: int) -> Tensor:
    """Returns the row before which each expert's rows end, for rows that are sorted by expert.

    >>> group_ends(torch.tensor([0, 2, 2]), 3).tolist()
    [1, 1, 3]
    """
    each_expert = torch.arange(experts, device=expert_R.device)
    if in_vmap():
        return (expert_R.unsqueeze(1) <= each_expert).sum(0)
    return torch.searchsorted(expert_R, each_expert, right=True)


def group_sizes(ends_E: Tensor) -> list[int]:
    """Returns the number of rows of each expert, with a host sync.

    >>> group_sizes(torch.tensor([1, 1, 3]))
    [1, 0, 2]
    """
    return cast("list[int]", ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


def _grouped_mm(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    _, C, O = weight_ECO.shape
    inner = rows.shape[1:-1]
    flat = rows.reshape(-1, C)
    step = 16 // rows.element_size()  # grouped_mm needs rows of a multiple of 16 bytes
    if C % step or O % step:
        flat = F.pad(flat, (0, -C % step))
        weight_ECO = F.pad(weight_ECO, (0, -O % step, 0, -C % step))
    ends = (ends_E * inner.numel()).int()
    return F.grouped_mm(flat, weight_ECO, offs=ends)[:, :O].reshape(rows.shape[0], *inner, O)


def _matmul_loop(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    sizes = group_sizes(ends_E)
    # unbind rather than index: the backward of indexing would fill a gradient of all weights for every expert
    matrices: tuple[Tensor, ...] = weight_ECO.unbind()
    parts = cast("tuple[Tensor, ...]", rows.split(sizes))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _masked_matmul(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    row_R = torch.arange(rows.shape[0], device=rows.device)
    expert_R = (ends_E <= row_R.unsqueeze(1)).sum(1).view(-1, *[1] * (rows.ndim - 1))
    y = rows.new_zeros(*rows.shape[:-1], weight_ECO.shape[2])
    for e, matrix in enumerate(weight_ECO.unbind()):
        y = torch.where(expert_R == e, rows @ matrix, y)
    return y


def _blocked_bmm(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    """Pads each expert's rows to whole blocks of S rows and runs one batched matmul over the blocks.

    The number of blocks is the largest that any group sizes can need. S is half the mean group size: weights are copied
    about three times, and the rows grow by half at most.
    """
    R, (E, C, O) = rows.shape[0], weight_ECO.shape
    S = 16 * max(-(-R // (32 * E)), 1)
    blocks = (R + E * (S - 1)) // S  # the upper bound over all group sizes
    starts_E = F.pad(ends_E, (1, -1))
    blocks_E = (ends_E - starts_E + (S - 1)) // S
    block_ends_E = blocks_E.cumsum(0)
    row_R = torch.arange(R, device=rows.device)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    slot_R = row_R + ((block_ends_E - blocks_E) * S - starts_E).index_select(0, expert_R)
    expert_G = torch.searchsorted(block_ends_E, torch.arange(blocks, device=rows.device), right=True).clamp_max(E - 1)
    padded = rows.new_zeros(blocks * S, *rows.shape[1:]).index_copy(0, slot_R, rows)
    inner = rows.shape[1:-1]
    y = torch.bmm(padded.view(blocks, S * inner.numel(), C), weight_ECO.index_select(0, expert_G))
    return y.view(blocks * S, *inner, O).index_select(0, slot_R)

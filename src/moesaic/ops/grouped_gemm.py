"""Products of rows with their expert's matrix, where experts have unequally many rows.

Three ways lead to the same numbers. torch groups GEMMs in bfloat16 on every device and without a
host sync. On a CPU, which has no sync to wait for, one product after the other is as fast and
copies nothing. Everywhere else, and where a graph must not depend on the loads, rows move into
blocks of static shape that belong to one expert each.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["grouped_matmul", "loads_of"]


def grouped_matmul(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows (R, …, C) sorted by expert, times their expert's matrix: (R, …, O).

    Expert e's rows end before row ``ends_E[e]``; an expert may have none.

    >>> rows, weight = torch.ones(3, 2), torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1).expand(3, 2, 1)
    >>> grouped_matmul(rows, weight, torch.tensor([1, 1, 3])).flatten().tolist()     # expert 1 has no row
    [2.0, 200.0, 200.0]
    """
    if rows.shape[0] and rows.dtype == torch.bfloat16:
        return _by_kernel(rows, weight_ECO, ends_E)
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        return _in_turn(rows, weight_ECO, ends_E)
    return _in_blocks(rows, weight_ECO, ends_E)


def loads_of(ends_E: Tensor) -> list[int]:
    """How many rows each expert has; the host waits for the device to know.

    >>> loads_of(torch.tensor([1, 1, 3]))
    [1, 0, 2]
    """
    return cast("list[int]", ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


def _by_kernel(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    _, C, O = weight_ECO.shape
    inner = rows.shape[1:-1]
    flat = rows.reshape(-1, C)
    step = 16 // rows.element_size()  # it reads rows in steps of 16 bytes
    if C % step or O % step:
        flat = F.pad(flat, (0, -C % step))
        weight_ECO = F.pad(weight_ECO, (0, -O % step, 0, -C % step))
    ends = (ends_E * inner.numel()).int()
    return F.grouped_mm(flat, weight_ECO, offs=ends)[:, :O].reshape(rows.shape[0], *inner, O)


def _in_turn(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    loads = loads_of(ends_E)
    # unbind, and no indexing, whose backward would make a gradient of all weights for every expert
    matrices: tuple[Tensor, ...] = weight_ECO.unbind()
    parts = cast("tuple[Tensor, ...]", rows.split(loads))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _in_blocks(rows: Tensor, weight_ECO: Tensor, ends_E: Tensor) -> Tensor:
    """Pad each expert's rows to whole blocks of S: no shape depends on the loads, at most E blocks are padding.

    With S of half the mean load, weights are copied about three times and rows grow by half at most.
    """
    R, (E, C, O) = rows.shape[0], weight_ECO.shape
    S = 16 * max(-(-R // (32 * E)), 1)
    blocks = (R + E * (S - 1)) // S  # the most that any loads can need
    starts_E = F.pad(ends_E, (1, -1))
    blocks_E = (ends_E - starts_E + (S - 1)) // S
    last_E = blocks_E.cumsum(0)
    at_R = torch.arange(R, device=rows.device)
    expert_R = torch.searchsorted(ends_E, at_R, right=True)
    slot_R = at_R + ((last_E - blocks_E) * S - starts_E).index_select(0, expert_R)
    expert_G = torch.searchsorted(last_E, torch.arange(blocks, device=rows.device), right=True).clamp_max(E - 1)
    padded = rows.new_zeros(blocks * S, *rows.shape[1:]).index_copy(0, slot_R, rows)
    inner = rows.shape[1:-1]
    y = torch.bmm(padded.view(blocks, S * inner.numel(), C), weight_ECO.index_select(0, expert_G))
    return y.view(blocks * S, *inner, O).index_select(0, slot_R)

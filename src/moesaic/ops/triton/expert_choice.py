"""Kernels of expert choice: scores of patches, each expert's best, their gates; and the gradients back.

    scores_kernel           x → scores, split over the pixels of a patch
    route_kernel            both at once, where patches are single pixels and few
    choose_kernel           scores → the L best patches of each expert, best first, their gates, and slots
    owners_kernel           slots → owners of each patch
    choice_back_kernel      gradient of gates → gradient of scores
    route_back_kernel       gradient of scores → gradient of x, added to one from elsewhere
    route_weights_kernel    gradient of scores → gradient of the router's kernels, split over patches
    router_rows_kernel      the same where only chosen patches have a gradient

Scores are exact to float32: bfloat16 numbers are multiplied as they are and float32 weights in three bfloat16
pieces, added up in float32; what is float32 itself is multiplied in float32. A rounded score may choose another patch.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.launch import (
    INTERPRETED,
    Sizes,
    acc,
    ceil,
    fill,
    parts,
    pipeline,
    pixel_of_patch,
    power_of_2,
    total,
    warps,
    wide,
)
from moesaic.ops.triton_backend import GATE_KINDS
from moesaic.ops.weight_layout import channels_last

__all__ = [
    "GATE_KINDS",
    "choose",
    "gradient_of_choice",
    "map_back",
    "places",
    "router_gradient",
    "router_gradient_of_chosen",
]

_MOST_PARTS = 16
"""In which a patch's score is summed."""
_FEW_PATCHES = 128
"""One program compares all of them with each other at once."""


@triton.jit
def times(v, w, found, PIECES: tl.constexpr, ACC: tl.constexpr):
    """Found + v · w. PIECES: 0 multiplies in ACC, else in v's type, w in so many pieces."""
    if PIECES == 0:
        found = tl.dot(v.to(ACC), w.to(ACC), found, input_precision="ieee", out_dtype=ACC)
    elif PIECES == 1:
        found = tl.dot(v, w, found)
    else:
        left = w.to(tl.float32)
        for _ in tl.static_range(PIECES):
            piece = left.to(v.dtype)
            found = tl.dot(v, piece, found)
            left -= piece.to(tl.float32)
    return found


@triton.jit
def shares(score, key, live, chosen, KIND: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr):
    """Gates of an expert's patches: see `GATE_KINDS`."""
    if KIND == 2:
        weight = tl.full((BN,), 1.0, ACC)
    else:
        among = live
        if KIND == 0:
            among = chosen
        weight = tl.where(among, tl.exp(score - tl.max(tl.where(among, key, float("-inf")), 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    return weight


@triton.jit
def scores_kernel(
    x, kernels, out, rows,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, PIXELS: tl.constexpr, PIECES: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (splits, B·N, E). kernels: (E, p², C). PIECES: see `times`."""
    A: tl.constexpr = P * P
    blocks: tl.constexpr = (C + BC - 1) // BC
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    split = tl.program_id(2)
    live = r < rows
    em = e < E
    n = r % N
    base = ((r // N) * HW + (n // GW) * P * W + (n % GW) * P).to(tl.int64) * C
    total_ = tl.zeros((BM, BE), ACC)
    for i in range(PIXELS * blocks):
        a = split * PIXELS + i // blocks
        c = (i % blocks) * BC + tl.arange(0, BC)
        cm = c < C
        at = ((a // P) * W + a % P) * C + c
        v = tl.load(x + base[:, None] + at[None, :], mask=live[:, None] & cm[None, :], other=0)
        w = tl.load(kernels + (e * A + a)[None, :] * C + c[:, None], mask=cm[:, None] & em[None, :], other=0)
        total_ = times(v, w, total_, PIECES, ACC)
    to = (split * rows + r)[:, None] * E + e[None, :]
    tl.store(out + to, total_, mask=live[:, None] & em[None, :])


@triton.jit
def route_kernel(
    x, kernels, scores, index, gate, slots, L,
    E: tl.constexpr, C: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, PIECES: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One image: what `scores_kernel` and `choose_kernel` do. A pixel's place is the number of those before it."""
    b = tl.program_id(0)
    n = tl.arange(0, BN)
    live = n < N
    j = tl.arange(0, BE)
    jm = j < E
    total_ = tl.zeros((BN, BE), ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        v = tl.load(x + (b * N + n)[:, None].to(tl.int64) * C + c[None, :], mask=live[:, None] & cm[None, :], other=0)
        w = tl.load(kernels + j[None, :] * C + c[:, None], mask=cm[:, None] & jm[None, :], other=0)
        total_ = times(v, w, total_, PIECES, ACC)
    tl.store(scores + (b * N + n)[:, None] * E + j[None, :], total_, mask=live[:, None] & jm[None, :])
    for e in tl.static_range(E):
        score = tl.sum(tl.where((j == e)[None, :], total_, 0.0), 1)
        key = tl.where(live, tl.where(score != score, float("inf"), score), float("-inf"))
        before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (n[None, :] < n[:, None]))
        place = tl.sum((before & live[None, :]).to(tl.int32), 1)
        chosen = live & (place < L)
        tl.store(slots + (b * E + e) * N + n, tl.where(chosen, place, -1), mask=live)
        to = (b * E + e) * L + place
        tl.store(index + to, n.to(tl.int64), mask=chosen)
        tl.store(gate + to, shares(score, key, live, chosen, KIND, ACC, BN), mask=chosen)


@triton.jit
def choose_kernel(
    split_scores, scores, index, gate, slots, B, S, L,
    E: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One image and expert: the best patch, the best of the others, and so on; of equal ones the lower.

    What is not a number comes first, as in a sort. KEEP: the scores are written down, summed over their parts.
    """
    b = tl.program_id(0)
    e = tl.program_id(1)
    n = tl.arange(0, BN)
    live = n < N
    at = (b * N + n) * E + e
    score = tl.zeros((BN,), ACC)
    for part in range(S):
        score += tl.load(split_scores + part * (B * N * E) + at, mask=live, other=0)
    if KEEP:
        tl.store(scores + at, score, mask=live)
    key = tl.where(score != score, float("inf"), score)
    slot = tl.full((BN,), -1, tl.int32)
    for l in range(L):
        free = live & (slot < 0)
        top = tl.max(tl.where(free, key, float("-inf")), 0)
        first = tl.min(tl.where(free & (key == top), n, BN), 0)
        slot = tl.where(n == first, l, slot)
    chosen = slot >= 0
    tl.store(slots + (b * E + e) * N + n, slot, mask=live)
    to = (b * E + e) * L + slot
    tl.store(index + to, n.to(tl.int64), mask=chosen)
    tl.store(gate + to, shares(score, key, live, chosen, KIND, ACC, BN), mask=chosen)


@triton.jit
def slots_kernel(index, slots, N, L, BN: tl.constexpr):
    be = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    found = tl.full((BN,), -1, tl.int32)
    for l in range(L):
        chosen = tl.load(index + be * L + l).to(tl.int32)
        found = tl.where(n == chosen, l, found)
    tl.store(slots + be * N + n, found, mask=n < N)


@triton.jit
def owners_kernel(slots, owners, owned, rows, N, E, L, BN: tl.constexpr):
    """For each patch e·L + l of its owners, in order of e, and their number."""
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    live = r < rows
    at = (r // N) * E * N + r % N
    count = tl.zeros((BN,), tl.int32)
    for e in range(E):
        l = tl.load(slots + at + e * N, mask=live, other=-1)
        tl.store(owners + r * E + count, e * L + l, mask=l >= 0)
        count += (l >= 0).to(tl.int32)
    tl.store(owned + r, count, mask=live)


@triton.jit
def choice_back_kernel(
    dots, gate, scores, slots, out, rows, L, M,
    STEP: tl.constexpr, E: tl.constexpr, N: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, DENSE: tl.constexpr,
    BESIDE: tl.constexpr, ACC: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Dots (B, E, L, A), summed over A, are the gradient of gates. out: (B, N, E) if DENSE, else (B, E, L).

    BESIDE: the last columns of rows (E, M, STEP) get it too, a patch's in the column of the row's place.
    """
    b = tl.program_id(0)
    e = tl.program_id(1)
    l = tl.arange(0, BL)
    lm = l < L
    at = (b * E + e) * L + l
    g = tl.load(gate + at, mask=lm, other=0).to(ACC)
    grad = tl.zeros((BL,), ACC)
    for a in range(A):
        grad += tl.load(dots + at * A + a, mask=lm, other=0).to(ACC)
    inner = tl.sum(g * grad, 0)
    if not DENSE:
        found = g * (grad - inner)
        tl.store(out + at, found, mask=lm)
        if BESIDE > 0:
            column = tl.arange(0, BESIDE)
            for a in range(A):
                to = (e * M + (b * L + l) * A + a).to(tl.int64) * STEP + STEP - BESIDE
                value = tl.where((column == a)[None, :], found[:, None], 0.0)
                tl.store(rows + to[:, None] + column[None, :], value.to(rows.dtype.element_ty), mask=lm[:, None])
    else:
        n = tl.arange(0, BN)
        live = n < N
        slot = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
        has = slot >= 0
        there = (b * E + e) * L + tl.maximum(slot, 0)
        own = tl.load(gate + there, mask=has, other=0).to(ACC)
        grad_n = tl.zeros((BN,), ACC)
        for a in range(A):
            grad_n += tl.load(dots + there * A + a, mask=has, other=0).to(ACC)
        share = own
        if KIND == 1:
            score = tl.load(scores + (b * N + n) * E + e, mask=live, other=float("-inf"))
            share = tl.where(live, tl.exp(score - tl.max(score, 0)), 0.0)
            share = share / tl.sum(share, 0)
        tl.store(out + (b * N + n) * E + e, own * grad_n - share * inner, mask=live)


@triton.jit
def route_back_kernel(
    grad, kernels, base, out, rows,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_BASE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One pixel of many patches: gradient of scores (B·N, E) times kernels (E, p², C), and base from elsewhere."""
    A: tl.constexpr = P * P
    a = tl.program_id(0)
    # backwards, as what was written last may still be in the cache
    r = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM + tl.arange(0, BM)
    e = tl.arange(0, BE)
    live = r < rows
    em = e < E
    n = r % N
    at = pixel_of_patch(r // N, n, a, P, GW, HW, W).to(tl.int64) * C
    g = tl.load(grad + r[:, None] * E + e[None, :], mask=live[:, None] & em[None, :], other=0).to(ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        mask = live[:, None] & cm[None, :]
        w = tl.load(kernels + (e * A + a)[:, None] * C + c[None, :], mask=em[:, None] & cm[None, :], other=0).to(ACC)
        found = tl.dot(g, w, input_precision=PRECISION, out_dtype=ACC)
        if HAS_BASE:
            found += tl.load(base + at[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        tl.store(out + at[:, None] + c[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def route_weights_kernel(
    grad, x, out, rows, CHUNK,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Out (splits, E, p², C): over a chunk of patches, the gradient of scores times the patch's pixel."""
    A: tl.constexpr = P * P
    a = tl.program_id(1)
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    e = tl.arange(0, BE)
    cm = c < C
    em = e < E
    found = tl.zeros((BE, BC), ACC)
    end = tl.minimum((s + 1) * CHUNK, rows)
    for r0 in range(s * CHUNK, end, BM):
        r = r0 + tl.arange(0, BM)
        live = r < end
        n = r % N
        at = pixel_of_patch(r // N, n, a, P, GW, HW, W).to(tl.int64) * C
        g = tl.load(grad + r[None, :] * E + e[:, None], mask=live[None, :] & em[:, None], other=0).to(ACC)
        v = tl.load(x + at[:, None] + c[None, :], mask=live[:, None] & cm[None, :], other=0).to(ACC)
        found = tl.dot(g, v, found, input_precision=PRECISION, out_dtype=ACC)
    to = ((s * E + e) * A + a)[:, None] * C + c[None, :]
    tl.store(out + to, found, mask=em[:, None] & cm[None, :])


@triton.jit
def router_rows_kernel(
    grad, x, index, out, rows, CHUNK,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (splits, E, p², C): over a chunk of the B·L patches an expert chose, grad (B, E, L) times the pixel."""
    A: tl.constexpr = P * P
    ea = tl.program_id(1)
    e = ea // A
    a = ea % A
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cm = c < C
    found = tl.zeros((BM, BC), ACC)
    end = tl.minimum((s + 1) * CHUNK, rows)
    for r0 in range(s * CHUNK, end, BM):
        r = r0 + tl.arange(0, BM)
        b = r // L
        place = (b * E + e) * L + r % L
        n = tl.load(index + place, mask=r < end, other=-1).to(tl.int32)
        used = n >= 0
        n = tl.maximum(n, 0)
        g = tl.load(grad + place, mask=used, other=0).to(ACC)
        at = pixel_of_patch(b, n, a, P, GW, HW, W).to(tl.int64) * C
        v = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0).to(ACC)
        found += v * g[:, None]
    tl.store(out + (s * (E * A) + ea) * C + c, tl.sum(found, 0), mask=cm)


def by_pixel(weight: Tensor) -> Tensor:
    """A router's kernels (E, C, p, p) as (E, p², C)."""
    return weight.permute(0, 2, 3, 1).flatten(1, 2).contiguous()


def choose(x: Tensor, kernels: Tensor, patches: int, patch: int, kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (B, N, E) of x (B, H, W, C), each expert's best patches (B, E, L), their gates, and slots (B, E, N)."""
    B, H, W, C = x.shape
    E = kernels.shape[0]
    sizes = Sizes(B, H, W, C, E, patches, patch)
    full = wide(x.dtype)
    rows, pixels = B * sizes.N, patch**2
    # tiles and parts that do not depend on the batch: an image's scores are the same to the bit in any company
    BE, BN = 16, power_of_2(sizes.N, 16)
    if x.dtype == torch.bfloat16 and not INTERPRETED:
        BM, pieces = 64, 1 if kernels.dtype == torch.bfloat16 else 3
    else:
        BM, pieces, kernels = 32, 0, kernels.to(full)
    index = torch.empty(B, E, patches, dtype=torch.int64, device=x.device)
    gate = torch.empty(B, E, patches, dtype=full, device=x.device)
    slots = torch.empty(B, E, sizes.N, dtype=torch.int32, device=x.device)
    if pixels == 1 and E <= BE and BN <= _FEW_PATCHES:
        scores = torch.empty(B, sizes.N, E, dtype=full, device=x.device)
        BC, number, stages = tile("route", (64, 4, 4), sizes.N, C, E, x.element_size())
        BC = min(BC, power_of_2(C, 16))
        route_kernel[(B,)](
            x, kernels, scores, index, gate, slots, patches, E=E, C=C, N=sizes.N, KIND=kind, PIECES=pieces,
            ACC=acc(full), BN=BN, BE=BE, BC=BC, **pipeline(number, stages),
        )  # fmt: skip
        return scores, index, gate, slots
    splits = next(number for number in range(min(pixels, _MOST_PARTS), 0, -1) if pixels % number == 0)
    found = torch.empty(splits, B, sizes.N, E, dtype=full, device=x.device)
    constants = sizes.constants()
    del constants["L"]
    BC, number, stages = tile("scores", (64, 4, 5), C, E, patch, x.element_size())
    BC = min(BC, power_of_2(C, 16))
    scores_kernel[(ceil(rows, BM), ceil(E, BE), splits)](
        x, kernels, found, rows, C=C, N=sizes.N, PIXELS=pixels // splits, PIECES=pieces, ACC=acc(full),
        BM=BM, BE=BE, BC=BC, **constants, **pipeline(number, stages),
    )  # fmt: skip
    scores = found[0] if splits == 1 else torch.empty_like(found[0])
    BN = power_of_2(sizes.N)
    choose_kernel[(B, E)](
        found, scores, index, gate, slots, B, splits, patches, E=E, N=sizes.N, KIND=kind, KEEP=splits > 1,
        ACC=acc(full), BN=BN, **warps(1 if BN <= 512 else 4),
    )  # fmt: skip
    return scores, index, gate, slots


def places(index: Tensor, patches: int) -> Tensor:
    """Slots (B, E, N) of an index."""
    B, E, L = index.shape
    slots = torch.empty(B, E, patches, dtype=torch.int32, device=index.device)
    BN = power_of_2(patches, most=256)
    slots_kernel[(B * E, ceil(patches, BN))](index, slots, patches, L, BN=BN, **warps(1))
    return slots


def owners_of(slots: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """Owners (B, N, E) of patches and their number (B, N)."""
    B, E, N = slots.shape
    owners = torch.empty(B, N, E, dtype=torch.int32, device=slots.device)
    owned = torch.empty(B, N, dtype=torch.int32, device=slots.device)
    BN = power_of_2(B * N, most=128)
    owners_kernel[(ceil(B * N, BN),)](slots, owners, owned, B * N, N, E, L, BN=BN, **warps(4))
    return owners, owned


def gradient_of_choice(
    dots: Tensor,
    gate: Tensor,
    scores: Tensor,
    slots: Tensor,
    kind: int,
    dense: bool,
    rows: Tensor | None = None,
    beside: int = 0,
) -> Tensor:
    """Gradient of scores, (B, N, E) if ``dense`` and else of chosen patches alone (B, E, L); dots (B, E, L, …).

    The latter is written into the last ``beside`` columns of ``rows`` (E, M, …) as well; see `pointwise`.
    """
    B, E, L = gate.shape
    N = slots.shape[2]
    out = torch.empty((B, N, E) if dense else (B, E, L), dtype=wide(gate.dtype), device=gate.device)
    choice_back_kernel[(B, E)](
        dots, gate, scores, slots, out, rows, L, 0 if rows is None else rows.shape[1],
        STEP=0 if rows is None else rows.shape[2], E=E, N=N, A=dots.numel() // gate.numel(), KIND=kind, DENSE=dense,
        BESIDE=beside, ACC=acc(out.dtype), BL=power_of_2(L), BN=power_of_2(N), **warps(1 if N <= 256 else 4),
    )  # fmt: skip
    return out


def map_back(grad: Tensor, kernels: Tensor, base: Tensor | None, like: Tensor, patch: int) -> Tensor:
    """Gradient of x from that of scores (B, N, E), with ``base`` added to it; it may be base itself."""
    B, H, W, C = like.shape
    E = grad.shape[2]
    sizes = Sizes(B, H, W, C, E, 1, patch)
    rows, out = B * sizes.N, torch.empty_like(like) if base is None else base
    constants = sizes.constants()
    del constants["L"]
    BM = power_of_2(rows, 16, 32)
    route_back_kernel[(patch**2, ceil(rows, BM))](
        grad, kernels, base, out, rows, C=C, N=sizes.N, HAS_BASE=base is not None, PRECISION=_precision(like),
        ACC=acc(grad.dtype), BM=BM, BC=power_of_2(C, 16, 128), BE=power_of_2(E, 16), **constants,
    )  # fmt: skip
    return out


def router_gradient(grad: Tensor, x: Tensor, router: Tensor) -> Tensor:
    """Gradient of the router's kernels (E, C, p, p) from that of scores (B, N, E)."""
    patch = router.shape[2]
    B, H, W, C = x.shape
    E = grad.shape[2]
    sizes = Sizes(B, H, W, C, E, 1, patch)
    rows, pixels = B * sizes.N, patch**2
    constants = sizes.constants()
    del constants["L"]
    BM, BC = power_of_2(rows, 16, 64), power_of_2(C, 16, 128)
    chunk, splits = parts(rows, fill(ceil(C, BC) * pixels, ceil(rows, BM)), BM)
    sums = torch.empty(splits, E, pixels, C, dtype=grad.dtype, device=x.device)
    route_weights_kernel[(ceil(C, BC), pixels, splits)](
        grad, x, sums, rows, chunk, C=C, N=sizes.N, PRECISION=_precision(x), ACC=acc(grad.dtype),
        BM=BM, BC=BC, BE=power_of_2(E, 16), **constants,
    )  # fmt: skip
    return by_channel(total(sums, router.dtype), router)


def router_gradient_of_chosen(grad: Tensor, x: Tensor, index: Tensor, router: Tensor) -> Tensor:
    """The same from the gradient of chosen patches' scores (B, E, L)."""
    patch = router.shape[2]
    sizes = Sizes.of(x, index, patch)
    rows, pixels, C = sizes.B * sizes.L, patch**2, sizes.C
    BM, BC = power_of_2(rows, most=32), power_of_2(C, most=128)
    chunk, splits = parts(rows, fill(ceil(C, BC) * pixels * sizes.E, ceil(rows, BM)), BM)
    sums = torch.empty(splits, sizes.E, pixels, C, dtype=grad.dtype, device=x.device)
    router_rows_kernel[(ceil(C, BC), sizes.E * pixels, splits)](
        grad, x, index, sums, rows, chunk, C=C, ACC=acc(grad.dtype), BM=BM, BC=BC, **sizes.constants()
    )
    return by_channel(total(sums, router.dtype), router)


def by_channel(kernels: Tensor, like: Tensor) -> Tensor:
    """And back: (E, p², C) as (E, C, p, p), laid out as other kernels are."""
    E, C, p, _ = like.shape
    found = kernels.view(E, p, p, C).permute(0, 3, 1, 2)
    return found if channels_last(like) else found.contiguous()


def _precision(x: Tensor) -> str:
    """What is rounded to 16 bits in the end may be multiplied in TF32."""
    return "ieee" if x.dtype.itemsize > 2 else "tf32"

"""Expert choice: scores of patches, each expert's top patches, their gates; and the gradients back.

    scores[b, n, e] = ⟨router[e], patch n of x[b]⟩
    gate = softmax(scores) over the selected patches, all patches or the experts, or 1
    grad_x = Σ_e grad_scores · router[e]                grad_router[e] = Σ_b,n grad_scores · patch

Layouts: x (B, H, W, C); router by pixel (E, p², C); scores (B, N, E); index and gate (B, E, L); slots (B, E, N); owners
(B, N, E) and owner_count (B, N).

    scores_kernel                      x → scores, split over the pixels of a patch
    choose_kernel                      scores → index, gate, slots; the top patch first, ties to the lower patch
    route_kernel                       both at once, where patches are few single pixels
    slots_kernel                       index → slots
    owners_kernel                      slots → owners
    gate_backward_kernel               gradient of gates → gradient of scores, a softmax over patches
    expert_gate_backward_kernel        the same, a softmax over experts
    score_backward_kernel              gradient of scores → gradient of x, added to an existing one
    router_backward_kernel             gradient of scores → gradient of the router, in splits
    router_backward_selected_kernel    the same where only selected patches have a gradient

Scores are exact to float32, because a rounded score may select another patch: bfloat16 values are multiplied as they
are, float32 weights as three bfloat16 pieces, and everything is accumulated in float32; float32 is multiplied in
float32.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import (
    INTERPRETED,
    PatchDims,
    acc_dtype,
    ceil_div,
    num_warps,
    num_warps_and_stages,
    pixel_of_patch,
    power_of_2,
    split_rows,
    splits_to_fill,
    sum_splits,
    tl_acc,
)
from moesaic.ops.triton_backend import GATE_KINDS
from moesaic.ops.weight_layout import channels_last

__all__ = [
    "GATE_KINDS",
    "choose_patches",
    "router_gradient",
    "router_gradient_selected",
    "score_gradient",
    "scores_to_map_gradient",
    "slots_from_index",
]

_MAX_SPLITS = 16
"""Splits in which a patch's score is summed, at most: they are workspace, and `choose_kernel` reads all of them."""
_MAX_ROUTE_PATCHES = 128
"""Patches of an image up to which one program scores and ranks all of them (`route_kernel`)."""


@triton.jit
def split_dot(v, w, acc, PIECES: tl.constexpr, ACC: tl.constexpr):
    """Acc + v · w. PIECES: 0 multiplies in ACC, else in v's type with w split into that many pieces."""
    if PIECES == 0:
        acc = tl.dot(v.to(ACC), w.to(ACC), acc, input_precision="ieee", out_dtype=ACC)
    elif PIECES == 1:
        acc = tl.dot(v, w, acc)
    else:
        left = w.to(tl.float32)
        for _ in tl.static_range(PIECES):
            piece = left.to(v.dtype)
            acc = tl.dot(v, piece, acc)
            left -= piece.to(tl.float32)
    return acc


@triton.jit
def gate_values(score, key, live, selected, GATE_KIND: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr):
    """Gates of an expert's patches: see `GATE_KINDS`. Over experts the softmax was taken before the choice."""
    if GATE_KIND == 2:
        weight = tl.full((BN,), 1.0, ACC)
    elif GATE_KIND == 3:
        weight = score
    else:
        among = live
        if GATE_KIND == 0:
            among = selected
        weight = tl.where(among, tl.exp(score - tl.max(tl.where(among, key, float("-inf")), 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    return weight


@cached_launch
@triton.jit
def scores_kernel(
    x, kernels, out, rows,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, PIXELS: tl.constexpr, PIECES: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (splits, B·N, E). kernels: (E, p², C). PIECES: see `split_dot`."""
    A: tl.constexpr = P * P
    blocks: tl.constexpr = (C + BC - 1) // BC
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    split = tl.program_id(2)
    live = r < rows
    em = e < E
    n = r % N
    base = ((r // N) * HW + (n // GW) * P * W + (n % GW) * P).to(tl.int64) * C
    total = tl.zeros((BM, BE), ACC)
    for i in range(PIXELS * blocks):
        a = split * PIXELS + i // blocks
        c = (i % blocks) * BC + tl.arange(0, BC)
        cm = c < C
        at = ((a // P) * W + a % P) * C + c
        v = tl.load(x + base[:, None] + at[None, :], mask=live[:, None] & cm[None, :], other=0)
        w = tl.load(kernels + (e * A + a)[None, :] * C + c[:, None], mask=cm[:, None] & em[None, :], other=0)
        total = split_dot(v, w, total, PIECES, ACC)
    to = (split.to(tl.int64) * rows + r)[:, None] * E + e[None, :]
    tl.store(out + to, total, mask=live[:, None] & em[None, :])


@cached_launch
@triton.jit
def route_kernel(
    x, kernels, scores, index, gate, slots, L,
    E: tl.constexpr, C: tl.constexpr, N: tl.constexpr, GATE_KIND: tl.constexpr, PIECES: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One image: `scores_kernel` and `choose_kernel`. A pixel's rank is the number of pixels before it."""
    b = tl.program_id(0)
    n = tl.arange(0, BN)
    live = n < N
    j = tl.arange(0, BE)
    jm = j < E
    total = tl.zeros((BN, BE), ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        v = tl.load(x + (b * N + n)[:, None].to(tl.int64) * C + c[None, :], mask=live[:, None] & cm[None, :], other=0)
        w = tl.load(kernels + j[None, :] * C + c[:, None], mask=cm[:, None] & jm[None, :], other=0)
        total = split_dot(v, w, total, PIECES, ACC)
    tl.store(scores + (b * N + n)[:, None] * E + j[None, :], total, mask=live[:, None] & jm[None, :])
    if GATE_KIND == 3:
        total = tl.where(jm[None, :], total, float("-inf"))
        total = tl.exp(total - tl.max(total, 1)[:, None])
        total = total / tl.sum(total, 1)[:, None]
    for e in tl.static_range(E):
        score = tl.sum(tl.where((j == e)[None, :], total, 0.0), 1)
        key = tl.where(live, tl.where(score != score, float("inf"), score), float("-inf"))
        before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (n[None, :] < n[:, None]))
        place = tl.sum((before & live[None, :]).to(tl.int32), 1)
        selected = live & (place < L)
        tl.store(slots + (b * E + e) * N + n, tl.where(selected, place, -1), mask=live)
        to = (b * E + e) * L + place
        tl.store(index + to, n.to(tl.int64), mask=selected)
        tl.store(gate + to, gate_values(score, key, live, selected, GATE_KIND, ACC, BN), mask=selected)


@cached_launch
@triton.jit
def choose_kernel(
    split_scores, scores, index, gate, slots, B, S, L,
    E: tl.constexpr, N: tl.constexpr, GATE_KIND: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One image and expert: the best patch, the best of the others, and so on; of equal ones the lower.

    What is not a number comes first, as in a sort. SAVE: the scores are written down, summed over their parts.
    """
    b = tl.program_id(0)
    e = tl.program_id(1)
    n = tl.arange(0, BN)
    live = n < N
    at = (b * N + n) * E + e
    score = tl.zeros((BN,), ACC)
    step = (tl.zeros((), tl.int64) + B) * N * E  # of a split; B is no tensor where it is 1
    for part in range(S):
        score += tl.load(split_scores + part * step + at, mask=live, other=0)
    if SAVE:
        tl.store(scores + at, score, mask=live)
    if GATE_KIND == 3:  # two passes over the scores of all experts: their largest, and the sum
        top_score = score
        for j in range(E):
            other = tl.zeros((BN,), ACC)
            for part in range(S):
                other += tl.load(split_scores + part * step + at - e + j, mask=live, other=0)
            top_score = tl.maximum(top_score, other)
        total = tl.zeros((BN,), ACC)
        for j in range(E):
            other = tl.zeros((BN,), ACC)
            for part in range(S):
                other += tl.load(split_scores + part * step + at - e + j, mask=live, other=0)
            total += tl.exp(other - top_score)
        score = tl.exp(score - top_score) / total
    key = tl.where(score != score, float("inf"), score)
    slot = tl.full((BN,), -1, tl.int32)
    for l in range(L):
        free = live & (slot < 0)
        top = tl.max(tl.where(free, key, float("-inf")), 0)
        first = tl.min(tl.where(free & (key == top), n, BN), 0)
        slot = tl.where(n == first, l, slot)
    selected = slot >= 0
    tl.store(slots + (b * E + e) * N + n, slot, mask=live)
    to = (b * E + e) * L + slot
    tl.store(index + to, n.to(tl.int64), mask=selected)
    tl.store(gate + to, gate_values(score, key, live, selected, GATE_KIND, ACC, BN), mask=selected)


@cached_launch
@triton.jit
def slots_kernel(index, slots, N, L, BN: tl.constexpr):
    be = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.full((BN,), -1, tl.int32)
    for l in range(L):
        selected = tl.load(index + be * L + l).to(tl.int32)
        acc = tl.where(n == selected, l, acc)
    tl.store(slots + be * N + n, acc, mask=n < N)


@cached_launch
@triton.jit
def owners_kernel(slots, owners, owner_count, rows, N, E, L, BN: tl.constexpr):
    """For each patch e·L + l of its owners, in order of e, and how many there are."""
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    live = r < rows
    at = (r // N) * E * N + r % N
    count = tl.zeros((BN,), tl.int32)
    for e in range(E):
        l = tl.load(slots + at + e * N, mask=live, other=-1)
        tl.store(owners + r * E + count, e * L + l, mask=l >= 0)
        count += (l >= 0).to(tl.int32)
    tl.store(owner_count + r, count, mask=live)


@cached_launch
@triton.jit
def gate_backward_kernel(
    gate_dots, gate, scores, slots, out, rows, L, M,
    STEP: tl.constexpr, E: tl.constexpr, N: tl.constexpr, A: tl.constexpr, GATE_KIND: tl.constexpr, DENSE: tl.constexpr,
    ROUTER_COLUMNS: tl.constexpr, ACC: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``gate_dots`` (B, E, L, A), summed over A, are the gradient of gates. out: (B, N, E) if DENSE, else (B, E, L).

    ROUTER_COLUMNS: it is also written to the last columns of rows (E, M, STEP), to the column of a row's pixel of the
    patch; see `pointwise_experts`.
    """
    b = tl.program_id(0)
    e = tl.program_id(1)
    l = tl.arange(0, BL)
    lm = l < L
    at = (b * E + e) * L + l
    g = tl.load(gate + at, mask=lm, other=0).to(ACC)
    grad = tl.zeros((BL,), ACC)
    for a in range(A):
        grad += tl.load(gate_dots + at * A + a, mask=lm, other=0).to(ACC)
    inner = tl.sum(g * grad, 0)
    if not DENSE:
        acc = g * (grad - inner)
        tl.store(out + at, acc, mask=lm)
        if ROUTER_COLUMNS > 0:
            column = tl.arange(0, ROUTER_COLUMNS)
            for a in range(A):
                to = (e * M + (b * L + l) * A + a).to(tl.int64) * STEP + STEP - ROUTER_COLUMNS
                value = tl.where((column == a)[None, :], acc[:, None], 0.0)
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
            grad_n += tl.load(gate_dots + there * A + a, mask=has, other=0).to(ACC)
        share = own
        if GATE_KIND == 1:
            score = tl.load(scores + (b * N + n) * E + e, mask=live, other=float("-inf"))
            share = tl.where(live, tl.exp(score - tl.max(score, 0)), 0.0)
            share = share / tl.sum(share, 0)
        tl.store(out + (b * N + n) * E + e, own * grad_n - share * inner, mask=live)


@cached_launch
@triton.jit
def expert_gate_backward_kernel(
    gate_dots, gate, scores, slots, out, rows, L,
    E: tl.constexpr, N: tl.constexpr, A: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Patches of any image, all experts of a patch: out (B, N, E) from ``gate_dots`` (B, E, L, A), summed over A."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.arange(0, BE)
    live = (r < rows)[:, None] & (e < E)[None, :]
    b = r // N
    slot = tl.load(slots + (b * E * N + r % N)[:, None] + e[None, :] * N, mask=live, other=-1)
    has = slot >= 0
    there = (b[:, None] * E + e[None, :]) * L + tl.maximum(slot, 0)
    own = tl.zeros((BM, BE), ACC)
    for a in range(A):
        own += tl.load(gate_dots + there * A + a, mask=has, other=0).to(ACC)
    own *= tl.load(gate + there, mask=has, other=0).to(ACC)
    at = r[:, None] * E + e[None, :]
    score = tl.load(scores + at, mask=live, other=float("-inf")).to(ACC)
    score = tl.where((r < rows)[:, None], score, 0.0)  # rows behind the last one would be 0 / 0
    share = tl.exp(score - tl.max(score, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    tl.store(out + at, own - share * tl.sum(own, 1)[:, None], mask=live)


@cached_launch
@triton.jit
def score_backward_kernel(
    grad, kernels, base, out, rows,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_BASE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One pixel of many patches: gradient of scores (B·N, E) times kernels (E, p², C), added to base."""
    A: tl.constexpr = P * P
    # in reverse, because the rows written last may still be in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    a = A - 1 - program % A
    r = program // A * BM + tl.arange(0, BM)
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
        acc = tl.dot(g, w, input_precision=PRECISION, out_dtype=ACC)
        if HAS_BASE:
            acc += tl.load(base + at[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        tl.store(out + at[:, None] + c[None, :], acc.to(out.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit
def router_backward_kernel(
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
    acc = tl.zeros((BE, BC), ACC)
    end = tl.minimum((s + 1) * CHUNK, rows)
    for r0 in range(s * CHUNK, end, BM):
        r = r0 + tl.arange(0, BM)
        live = r < end
        n = r % N
        at = pixel_of_patch(r // N, n, a, P, GW, HW, W).to(tl.int64) * C
        g = tl.load(grad + r[None, :] * E + e[:, None], mask=live[None, :] & em[:, None], other=0).to(ACC)
        v = tl.load(x + at[:, None] + c[None, :], mask=live[:, None] & cm[None, :], other=0).to(ACC)
        acc = tl.dot(g, v, acc, input_precision=PRECISION, out_dtype=ACC)
    to = ((s * E + e) * A + a)[:, None] * C + c[None, :]
    tl.store(out + to, acc, mask=em[:, None] & cm[None, :])


@cached_launch
@triton.jit
def router_backward_selected_kernel(
    grad, x, index, out, rows, CHUNK,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (splits, E, p², C): over a chunk of the B·L patches an expert selected, grad (B, E, L) times the pixel."""
    A: tl.constexpr = P * P
    ea = tl.program_id(1)
    e = ea // A
    a = ea % A
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cm = c < C
    acc = tl.zeros((BM, BC), ACC)
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
        acc += v * g[:, None]
    tl.store(out + (s * (E * A) + ea) * C + c, tl.sum(acc, 0), mask=cm)


def router_by_pixel(weight: Tensor) -> Tensor:
    """A router's kernels (E, C, p, p) as (E, p², C)."""
    return weight.permute(0, 2, 3, 1).flatten(1, 2).contiguous()


def choose_patches(
    x: Tensor, kernels: Tensor, patches: int, patch: int, gate_kind: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (B, N, E) of x (B, H, W, C), each expert's top patches (B, E, L), their gates, and slots (B, E, N)."""
    B, H, W, C = x.shape
    E = kernels.shape[0]
    dims = PatchDims(B, H, W, C, E, patches, patch)
    acc_type = acc_dtype(x.dtype)
    rows, pixels = B * dims.N, patch**2
    # tiles and splits do not depend on the batch size, so that an image's scores are bitwise the same in any batch
    BE, BN = 16, power_of_2(dims.N, 16)
    if x.dtype == torch.bfloat16 and not INTERPRETED:
        BM, pieces = 64, 1 if kernels.dtype == torch.bfloat16 else 3
    else:
        BM, pieces, kernels = 32, 0, kernels.to(acc_type)
    index = torch.empty(B, E, patches, dtype=torch.int64, device=x.device)
    gate = torch.empty(B, E, patches, dtype=acc_type, device=x.device)
    slots = torch.empty(B, E, dims.N, dtype=torch.int32, device=x.device)
    if pixels == 1 and E <= BE and BN <= _MAX_ROUTE_PATCHES:
        scores = torch.empty(B, dims.N, E, dtype=acc_type, device=x.device)
        BC, warps, stages = tile("route", (64, 4, 4), dims.N, C, E, x.element_size())
        BC = min(BC, power_of_2(C, 16))
        route_kernel[(B,)](
            x, kernels, scores, index, gate, slots, patches, E=E, C=C, N=dims.N, GATE_KIND=gate_kind, PIECES=pieces,
            ACC=tl_acc(acc_type), BN=BN, BE=BE, BC=BC, **num_warps_and_stages(warps, stages),
        )  # fmt: skip
        return scores, index, gate, slots
    splits = next(count for count in range(min(pixels, _MAX_SPLITS), 0, -1) if pixels % count == 0)
    found = torch.empty(splits, B, dims.N, E, dtype=acc_type, device=x.device)
    constexprs = dims.constexprs()
    del constexprs["L"]
    BC, warps, stages = tile("scores", (64, 4, 5), C, E, patch, x.element_size())
    BC = min(BC, power_of_2(C, 16))
    scores_kernel[(ceil_div(rows, BM), ceil_div(E, BE), splits)](
        x, kernels, found, rows, C=C, N=dims.N, PIXELS=pixels // splits, PIECES=pieces, ACC=tl_acc(acc_type),
        BM=BM, BE=BE, BC=BC, **constexprs, **num_warps_and_stages(warps, stages),
    )  # fmt: skip
    scores = found[0] if splits == 1 else torch.empty_like(found[0])
    BN = power_of_2(dims.N)
    choose_kernel[(B, E)](
        found, scores, index, gate, slots, B, splits, patches, E=E, N=dims.N, GATE_KIND=gate_kind, SAVE=splits > 1,
        ACC=tl_acc(acc_type), BN=BN, **num_warps(1 if BN <= 512 else 4),
    )  # fmt: skip
    return scores, index, gate, slots


def slots_from_index(index: Tensor, patches: int) -> Tensor:
    """Slots (B, E, N) of an index."""
    B, E, L = index.shape
    slots = torch.empty(B, E, patches, dtype=torch.int32, device=index.device)
    BN = power_of_2(patches, most=256)
    slots_kernel[(B * E, ceil_div(patches, BN))](index, slots, patches, L, BN=BN, **num_warps(1))
    return slots


def patch_owners(slots: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """Owners (B, N, E) of patches and their number (B, N)."""
    B, E, N = slots.shape
    owners = torch.empty(B, N, E, dtype=torch.int32, device=slots.device)
    owner_count = torch.empty(B, N, dtype=torch.int32, device=slots.device)
    BN = power_of_2(B * N, most=128)
    owners_kernel[(ceil_div(B * N, BN),)](slots, owners, owner_count, B * N, N, E, L, BN=BN, **num_warps(4))
    return owners, owner_count


def score_gradient(
    gate_dots: Tensor,
    gate: Tensor,
    scores: Tensor,
    slots: Tensor,
    gate_kind: int,
    dense: bool,
    rows: Tensor | None = None,
    router_columns: int = 0,
) -> Tensor:
    """Gradient of scores (B, N, E), or unless ``dense`` of selected patches (B, E, L), from gate_dots (B, E, L, …).

    The latter is also written into the last ``router_columns`` columns of ``rows`` (E, M, …); see `pointwise_experts`.
    """
    B, E, L = gate.shape
    N = slots.shape[2]
    out = torch.empty((B, N, E) if dense else (B, E, L), dtype=acc_dtype(gate.dtype), device=gate.device)
    if gate_kind == GATE_KINDS["softmax_experts"]:
        BE = power_of_2(E)
        BM = power_of_2(B * N, most=max(1, 1024 // BE))
        expert_gate_backward_kernel[(ceil_div(B * N, BM),)](
            gate_dots, gate, scores, slots, out, B * N, L, E=E, N=N, A=gate_dots.numel() // gate.numel(),
            ACC=tl_acc(out.dtype), BM=BM, BE=BE, **num_warps(4),
        )  # fmt: skip
        return out
    gate_backward_kernel[(B, E)](
        gate_dots, gate, scores, slots, out, rows, L, 0 if rows is None else rows.shape[1],
        STEP=0 if rows is None else rows.shape[2], E=E, N=N, A=gate_dots.numel() // gate.numel(), GATE_KIND=gate_kind,
        DENSE=dense, ROUTER_COLUMNS=router_columns, ACC=tl_acc(out.dtype), BL=power_of_2(L),
        BN=power_of_2(N), **num_warps(1 if N <= 256 else 4),
    )  # fmt: skip
    return out


def scores_to_map_gradient(grad: Tensor, kernels: Tensor, base: Tensor | None, like: Tensor, patch: int) -> Tensor:
    """Gradient of x from that of scores (B, N, E), added to ``base`` in place, if given."""
    B, H, W, C = like.shape
    E = grad.shape[2]
    dims = PatchDims(B, H, W, C, E, 1, patch)
    rows, out = B * dims.N, torch.empty_like(like) if base is None else base
    constexprs = dims.constexprs()
    del constexprs["L"]
    BM = power_of_2(rows, 16, 32)
    score_backward_kernel[(patch**2 * ceil_div(rows, BM),)](
        grad, kernels, base, out, rows, C=C, N=dims.N, HAS_BASE=base is not None, PRECISION=_precision(like),
        ACC=tl_acc(grad.dtype), BM=BM, BC=power_of_2(C, 16, 128), BE=power_of_2(E, 16), **constexprs,
    )  # fmt: skip
    return out


def router_gradient(grad: Tensor, x: Tensor, router: Tensor) -> Tensor:
    """Gradient of the router's kernels (E, C, p, p) from that of scores (B, N, E)."""
    patch = router.shape[2]
    B, H, W, C = x.shape
    E = grad.shape[2]
    dims = PatchDims(B, H, W, C, E, 1, patch)
    rows, pixels = B * dims.N, patch**2
    constexprs = dims.constexprs()
    del constexprs["L"]
    BM, BC = power_of_2(rows, 16, 64), power_of_2(C, 16, 128)
    chunk, splits = split_rows(rows, splits_to_fill(ceil_div(C, BC) * pixels, ceil_div(rows, BM)), BM)
    sums = torch.empty(splits, E, pixels, C, dtype=grad.dtype, device=x.device)
    router_backward_kernel[(ceil_div(C, BC), pixels, splits)](
        grad, x, sums, rows, chunk, C=C, N=dims.N, PRECISION=_precision(x), ACC=tl_acc(grad.dtype),
        BM=BM, BC=BC, BE=power_of_2(E, 16), **constexprs,
    )  # fmt: skip
    return router_by_channel(sum_splits(sums, router.dtype), router)


def router_gradient_selected(grad: Tensor, x: Tensor, index: Tensor, router: Tensor) -> Tensor:
    """The same from the gradient of selected patches' scores (B, E, L)."""
    patch = router.shape[2]
    dims = PatchDims.of(x, index, patch)
    rows, pixels, C = dims.B * dims.L, patch**2, dims.C
    BM, BC = power_of_2(rows, most=32), power_of_2(C, most=128)
    chunk, splits = split_rows(rows, splits_to_fill(ceil_div(C, BC) * pixels * dims.E, ceil_div(rows, BM)), BM)
    sums = torch.empty(splits, dims.E, pixels, C, dtype=grad.dtype, device=x.device)
    router_backward_selected_kernel[(ceil_div(C, BC), dims.E * pixels, splits)](
        grad, x, index, sums, rows, chunk, C=C, ACC=tl_acc(grad.dtype), BM=BM, BC=BC, **dims.constexprs()
    )
    return router_by_channel(sum_splits(sums, router.dtype), router)


def router_by_channel(kernels: Tensor, like: Tensor) -> Tensor:
    """The inverse: (E, p², C) as (E, C, p, p), in the memory format of ``like``."""
    E, C, p, _ = like.shape
    found = kernels.view(E, p, p, C).permute(0, 3, 1, 2)
    return found if channels_last(like) else found.contiguous()


def _precision(x: Tensor) -> str:
    """TF32 where the result is rounded to 16 bits anyway."""
    return "ieee" if x.dtype.itemsize > 2 else "tf32"

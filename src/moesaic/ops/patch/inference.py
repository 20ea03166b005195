"""Convolutions of routed patches on a CPU where nobody learns: nothing is made twice, and nothing is copied.

What does not depend on the images is made once: where the pixels of a patch and their taps are, for a shape of batch;
weights in the order that products want, BatchNorm as scale and shift, and what an expert answers where it was given
nothing, until weights change. What is left for a batch is a gather, what BatchNorm does to its values in place, one
product per expert, and its sums, a few images at a time, so that what is between stays in the caches: fresh memory
costs a CPU more than the steps that fill it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from moesaic.ops.dispatch import ConvWeights, Norm, PatchSpec
from moesaic.ops.patch.gather import pixels_of_patches, taps_of_pixels
from moesaic.ops.patch.scatter_conv import answer_to_constant, by_hand, nobody_learns, tap_matrix
from moesaic.ops.weight_cache import CachedValue
from moesaic.routing_record import Routing

__all__ = ["conv_unlearned", "may_run_unlearned"]

_VALUES_AT_A_TIME = 2**21
"""Values of all experts, or their products: 8 MiB in float32."""

_kept = cast("MutableMapping[Tensor, dict[object, CachedValue[_Ready]]]", WeakIdKeyDictionary())


def may_run_unlearned(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None) -> bool:
    """Whether experts choose, all places are used, statistics are fixed and no gradient will be asked for."""
    if routing.chooser != "expert" or routing.may_drop or not x.numel() or (norm is not None and norm.training):
        return False
    tensors = [x, routing.gate, *_tensors(experts, norm)]
    return nobody_learns(*tensors) and by_hand(*tensors) and len({tensor.dtype for tensor in tensors}) == 1


def conv_unlearned(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
    """A map (B, C, H, W) in channels_last to (B, O', H, W)."""
    assert routing.index is not None
    (B, C, H, W), (E, O, _, ks, _), L = x.shape, experts.weight.shape, routing.index.shape[2]
    ready = _ready(experts, norm, spec, (H, W))
    each = E * L * spec.patch_size**2 * max(C, ks * ks * O)
    at_a_time = min(max(_VALUES_AT_A_TIME // each, 1), B)
    where = _where(at_a_time, E, L, (H, W), ks, spec)
    y = x.new_empty(B * where.rows_each + where.beyond, O)  # contributions that leave the map land behind it
    for start in range(0, B, at_a_time):
        part = slice(start, min(start + at_a_time, B))
        images = x[part]
        if images.shape[0] < at_a_time:
            where = _where(images.shape[0], E, L, (H, W), ks, spec)
        patch_P = routing.index[part].transpose(0, 1).reshape(-1)
        gates = routing.gate[part].transpose(0, 1).reshape(E, -1, 1, 1)
        values = images.permute(0, 2, 3, 1).reshape(-1, C).index_select(0, where.inputs(patch_P)).view(E, -1, C)
        if spec.gate_on == "input":
            values.view(E, gates.shape[1], -1, C).mul_(gates)
        if ready.norm is not None:
            ready.norm.apply_(values)
        first = start * where.rows_each
        own = y[first : first + images.shape[0] * where.rows_each]
        if spec.gate_on == "input":
            if ready.null is None:
                own.zero_()
            else:
                own.view(-1, *ready.null.shape).copy_(ready.null)
            products = torch.bmm(values, ready.matrix).view(-1, O)
            y.index_add_(0, where.landings(patch_P, first, B * where.rows_each), products)
        else:
            sums = _on_pixels(values, ready.matrix, where, patch_P).view(E, gates.shape[1], -1, O)
            if ready.null is not None:
                null = ready.null
                sums.add_(null[:, None, None] if null.ndim == 2 else where.take_by_expert(null, patch_P).view_as(sums))
            own.zero_().index_add_(0, where.outputs(patch_P), sums.mul_(gates).view(-1, O))
    return y[: B * where.rows_each].view(B, H, W, -1).permute(0, 3, 1, 2)


def _on_pixels(values: Tensor, matrix: Tensor, where: _Where, patch_P: Tensor) -> Tensor:
    """(R, O): what an expert's pixels contribute to one another."""
    (E, M, _), taps = values.shape, where.taps
    if taps == 1:
        return torch.bmm(values, matrix)
    O = matrix.shape[2] // taps
    products = values.new_empty(E * M * taps + 1, O)
    products[-1] = 0  # what comes where nothing does
    torch.bmm(values, matrix, out=products[:-1].view(E, M, taps * O))
    return F.embedding_bag(where.sources(patch_P), products, mode="sum")


class _Where:
    """Where the pixels of chosen patches are and what they contribute to, for all batches of one shape.

    Patches come as (E·B·L,), those of expert 0 first; everything is looked up in tables by their place on the grid.
    """

    def __init__(self, B: int, E: int, L: int, map_size: tuple[int, int], ks: int, spec: PatchSpec) -> None:
        (H, W), p = map_size, spec.patch_size
        area, N, lanes = H * W, (H // p) * (W // p), E if spec.combine == "concat" else 1
        self.taps = ks * ks
        self.rows_each, self.beyond = area * lanes, B * lanes
        pixel_Np = pixels_of_patches(torch.arange(N), W, p)
        there, inside, patch = taps_of_pixels(torch.arange(area), map_size, ks, p, spec.context)
        expert_P = torch.arange(E).view(E, 1, 1).expand(E, B, L).reshape(-1, 1)
        image_P = torch.arange(B).view(1, B, 1).expand(E, B, L).reshape(-1, 1)
        lane_P = expert_P if lanes > 1 else torch.zeros_like(expert_P)
        self._pixel_Np = pixel_Np
        self._first_input_P = image_P * area
        self._first_of_expert_P = expert_P * area
        self._pixel_by_lane_Np = pixel_Np * lanes
        self._first_output_P = image_P * self.rows_each + lane_P
        # past any row where a tap leaves; brought down to the rows that are there for such
        landing = torch.where(inside, there * lanes, torch.iinfo(torch.int64).max // 2)
        self._landing_Nt = landing[pixel_Np].view(N, -1)
        self._beyond_P = image_P * lanes + lane_P
        # among pixels: what arrives at a tap comes from where the opposite tap goes
        pixels = expert_P.shape[0] * p * p
        self._none = pixels * self.taps
        y, x = there // W % p, there % W % p
        from_there = (y * p + x).flip(1) * self.taps + torch.arange(self.taps)
        from_there = torch.where(inside.flip(1), from_there, self._none)
        self._numbers_P = torch.arange(expert_P.shape[0])
        self._alone = spec.context == "patch"
        self._offset_Nt = from_there[pixel_Np].view(N, -1)
        self._neighbour_Nt = patch.flip(1)[pixel_Np].view(N, -1)
        self._first_place_P = (image_P * E + expert_P) * N
        self._places = B * E * N

    def inputs(self, patch_P: Tensor) -> Tensor:
        """(R,): rows of the maps (B, H, W)."""
        return self._pixel_Np.index_select(0, patch_P).add_(self._first_input_P).view(-1)

    def outputs(self, patch_P: Tensor) -> Tensor:
        """(R,): rows of the result (B, H, W), times E under ``concat``."""
        return self._pixel_by_lane_Np.index_select(0, patch_P).add_(self._first_output_P).view(-1)

    def take_by_expert(self, maps_EHWO: Tensor, patch_P: Tensor) -> Tensor:
        """(R, O): values out of one map per expert."""
        at_R = self._pixel_Np.index_select(0, patch_P).add_(self._first_of_expert_P).view(-1)
        return maps_EHWO.flatten(0, 2).index_select(0, at_R)

    def landings(self, patch_P: Tensor, first: int, end: int) -> Tensor:
        """(R·ks²,): rows of the result where taps land, which begins at row ``first``; or behind ``end``."""
        at = self._landing_Nt.index_select(0, patch_P).add_(self._first_output_P + first)
        return torch.minimum(at, self._beyond_P + end, out=at).view(-1)

    def sources(self, patch_P: Tensor) -> Tensor:
        """(R, ks²): which contribution of R · ks² each pixel gets at each tap, R · ks² for none."""
        at = self._offset_Nt.index_select(0, patch_P)
        each = at.shape[1]
        if self._alone:
            at += (self._numbers_P * each).unsqueeze(1)
        else:
            none = self._numbers_P.shape[0]
            number_of = self._numbers_P.new_full((self._places,), none)
            number_of[self._first_place_P.view(-1) + patch_P] = self._numbers_P
            neighbour = self._neighbour_Nt.index_select(0, patch_P).add_(self._first_place_P)
            at += number_of.index_select(0, neighbour.view(-1)).view_as(at).mul_(each)
        return at.clamp_max_(self._none).view(-1, self.taps)


@lru_cache(maxsize=64)
def _where(B: int, E: int, L: int, map_size: tuple[int, int], ks: int, spec: PatchSpec) -> _Where:
    with torch.inference_mode(False):
        return _Where(B, E, L, map_size, ks, spec)


@dataclass(frozen=True)
class _ScaleAndShift:
    """ReLU ∘ BatchNorm less what it makes of zero: the larger of scale · value + min(shift, 0) and −ReLU(shift)."""

    scale: Tensor
    low: Tensor
    lowest: Tensor

    def apply_(self, values_EMC: Tensor) -> None:
        torch.addcmul(self.low, values_EMC, self.scale, out=values_EMC)
        torch.maximum(values_EMC, self.lowest, out=values_EMC)


@dataclass(frozen=True)
class _Ready:
    """All that is made of weights."""

    matrix: Tensor
    """(E, C, ks·ks·O): for few rows, products with a matrix that lies so are the fastest."""
    norm: _ScaleAndShift | None
    null: Tensor | None
    """What experts answer to nothing: under ``gate_on="input"`` of the whole map, (…, H, W, O'); else by expert."""


def _tensors(experts: ConvWeights, norm: Norm | None) -> list[Tensor]:
    found = [experts.weight] if experts.bias is None else [experts.weight, experts.bias]
    return found if norm is None else [*found, norm.weight, norm.bias, norm.running_mean, norm.running_var]


def _ready(experts: ConvWeights, norm: Norm | None, spec: PatchSpec, map_size: tuple[int, int]) -> _Ready:
    """Kept with the weights as long as they are parameters, until one of them changes."""

    def make() -> _Ready:
        return _prepare(experts, norm, spec, map_size)

    if not isinstance(experts.weight, nn.Parameter):
        return make()
    kept = _kept.setdefault(experts.weight, {})
    for_this = (spec, map_size, None if norm is None else norm.eps)
    if for_this not in kept:
        kept.clear()  # of one shape at a time
        kept[for_this] = CachedValue()
    return kept[for_this].of(_tensors(experts, norm), make)


def _prepare(experts: ConvWeights, norm: Norm | None, spec: PatchSpec, map_size: tuple[int, int]) -> _Ready:
    weight, bias = experts.weight.detach(), None if experts.bias is None else experts.bias.detach()
    E, O, _, ks, _ = weight.shape
    matrix, affine, null = tap_matrix(weight).transpose(1, 2).contiguous(), None, bias
    if norm is not None:
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = (norm.bias - norm.running_mean * scale).unsqueeze(1)
        resting = F.relu(shift)
        affine = _ScaleAndShift(scale.unsqueeze(1), shift.clamp_max(0), -resting)
        answers = torch.bmm(resting, matrix).view(E, ks, ks, O)
        null = answer_to_constant(answers, bias, map_size, spec)
    if null is not None and spec.gate_on == "input":
        null = null.movedim(0, -2)
        null = null.flatten(-2) if spec.combine == "concat" else null.sum(-2)
        null = null.expand(*map_size, null.shape[-1]).contiguous()
    return _Ready(matrix, affine, null)

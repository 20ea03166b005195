"""Inference-only patch convolution on a CPU: cached weights and index tables, no copies.

Computes what `moesaic.ops.torch_backend` computes, for expert choice without gradients:

    y = Σ_e scatter(gate ⊙ W_e · f(x at the pixels of e)) + background

Cached per batch shape: the index tables of patches, pixels and taps. Cached until a weight changes: weights as GEMM
operands, BatchNorm folded into scale and shift, and the background output. Per batch remain a gather, BatchNorm in
place, one matmul per expert and the scatter. They run over a few images at a time, so that intermediate results stay
in the CPU's caches: allocating fresh memory costs more than the steps that fill it.

Layouts: x (B, C, H, W) in channels_last, gathered values (E, M, C), y as rows (B·H·W·G, O), G = E under ``concat``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter, methodcaller
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moesaic.ops.cpu_gemm import expert_bmm, expert_bmm_parts
from moesaic.ops.dispatch import ConvWeights, Norm, PatchSpec
from moesaic.ops.eager_conditions import is_eager_cpu, no_grad_needed
from moesaic.ops.patch.gather import patch_pixels, tap_targets
from moesaic.ops.patch.scatter_conv import background_output, tap_matrix
from moesaic.routing_record import Routing

__all__ = ["CachedValue", "PreparedCache", "can_run_inference", "conv_inference"]

T = TypeVar("T")

_CHUNK_VALUES = 2**21
"""Gathered values or contributions of all experts per chunk of images: 8 MiB in float32."""

_COMPARED_VALUES = 256
"""Values of a tensor that are compared to notice edits of ``tensor.data``."""

_address, _version = methodcaller("data_ptr"), attrgetter("_version")
_shape, _strides = attrgetter("shape"), methodcaller("stride")


def can_run_inference(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None) -> bool:
    """Whether this is expert choice with all places assigned, in eval mode and without gradients, eager on a CPU."""
    if routing.chooser != "expert" or routing.may_drop or not x.numel() or (norm is not None and norm.training):
        return False
    tensors = [x, routing.gate, *_tensors(experts, norm)]
    return no_grad_needed(*tensors) and is_eager_cpu(*tensors) and len({tensor.dtype for tensor in tensors}) == 1


def conv_inference(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
    """Convolves the routed patches of a map (B, C, H, W) in channels_last: (B, O', H, W)."""
    assert routing.index is not None
    (B, C, H, W), (E, O, _, ks, _), L = x.shape, experts.weight.shape, routing.index.shape[2]
    prepared = _prepared(experts, norm, spec, (H, W))
    values_per_image = E * L * spec.patch_size**2 * max(C, ks * ks * O)
    chunk = min(max(_CHUNK_VALUES // values_per_image, 1), B)
    tables = _index_tables(chunk, E, L, (H, W), ks, spec)
    y = x.new_empty(B * tables.rows_per_image + tables.dummy_rows, O)
    for start in range(0, B, chunk):
        part = slice(start, min(start + chunk, B))
        images = x[part]
        if images.shape[0] < chunk:
            tables = _index_tables(images.shape[0], E, L, (H, W), ks, spec)
        patch_P = routing.index[part].transpose(0, 1).reshape(-1)
        gates = routing.gate[part].transpose(0, 1).reshape(E, -1, 1, 1)
        values = images.permute(0, 2, 3, 1).reshape(-1, C).index_select(0, tables.gather_rows(patch_P)).view(E, -1, C)
        if spec.gate_on == "input":
            values.view(E, gates.shape[1], -1, C).mul_(gates)
        if prepared.norm is not None:
            prepared.norm.apply_(values)
        first = start * tables.rows_per_image
        own = y[first : first + images.shape[0] * tables.rows_per_image]
        if spec.gate_on == "input":
            if prepared.background is None:
                own.zero_()
            else:
                own.view(-1, *prepared.background.shape).copy_(prepared.background)
            rows = tables.scatter_rows(patch_P, first, B * tables.rows_per_image).view(E, -1)
            for own_experts, contributions in expert_bmm_parts(values, prepared.matrix):
                y.index_add_(0, rows[own_experts].view(-1), contributions.view(-1, O))
        else:
            sums = _conv_within_pixels(values, prepared.matrix, tables, patch_P).view(E, gates.shape[1], -1, O)
            if prepared.background is not None:
                background = prepared.background
                if background.ndim == 2:
                    sums.add_(background[:, None, None])
                else:
                    sums.add_(tables.gather_by_expert(background, patch_P).view_as(sums))
            own.zero_().index_add_(0, tables.output_rows(patch_P), sums.mul_(gates).view(-1, O))
    return y[: B * tables.rows_per_image].view(B, H, W, -1).permute(0, 3, 1, 2)


def _conv_within_pixels(values: Tensor, matrix: Tensor, tables: _IndexTables, patch_P: Tensor) -> Tensor:
    """Returns the sums (R, O) of the contributions of each expert's pixels to one another."""
    (E, M, _), taps = values.shape, tables.taps
    if taps == 1:
        return expert_bmm(values, matrix)
    O = matrix.shape[2] // taps
    contributions = values.new_empty(E * M * taps + 1, O)
    contributions[-1] = 0  # what a pixel receives where no pixel contributes
    expert_bmm(values, matrix, out=contributions[:-1].view(E, M, taps * O))
    return F.embedding_bag(tables.sources(patch_P), contributions, mode="sum")


class _IndexTables:
    """Gather and scatter indices for all batches of one shape, as tables over the N patches of a map.

    Methods take the routed patches (P,), P = E·B·L, sorted by expert; t runs over the p·p·ks·ks taps of a patch.
    """

    def __init__(self, B: int, E: int, L: int, map_size: tuple[int, int], ks: int, spec: PatchSpec) -> None:
        (H, W), p = map_size, spec.patch_size
        area, N, groups = H * W, (H // p) * (W // p), E if spec.combine == "concat" else 1
        self.taps = ks * ks
        self.rows_per_image, self.dummy_rows = area * groups, B * groups
        pixel_Np = patch_pixels(torch.arange(N), W, p)
        target, inside, patch = tap_targets(torch.arange(area), map_size, ks, p, spec.context)
        expert_P = torch.arange(E).view(E, 1, 1).expand(E, B, L).reshape(-1, 1)
        image_P = torch.arange(B).view(1, B, 1).expand(E, B, L).reshape(-1, 1)
        group_P = expert_P if groups > 1 else torch.zeros_like(expert_P)
        self._pixel_Np = pixel_Np
        self._first_input_P = image_P * area
        self._first_expert_input_P = expert_P * area
        self._output_pixel_Np = pixel_Np * groups
        self._first_output_P = image_P * self.rows_per_image + group_P
        # taps outside the map get a row past all others, which `scatter_rows` clamps to a dummy row
        row_Qk = torch.where(inside, target * groups, torch.iinfo(torch.int64).max // 2)
        self._row_Nt = row_Qk[pixel_Np].view(N, -1)
        self._dummy_row_P = image_P * groups + group_P
        # a pixel receives at a tap what the pixel at the opposite tap contributes
        pixels = expert_P.shape[0] * p * p
        self._no_source = pixels * self.taps
        y, x = target // W % p, target % W % p
        source_Qk = (y * p + x).flip(1) * self.taps + torch.arange(self.taps)
        source_Qk = torch.where(inside.flip(1), source_Qk, self._no_source)
        self._patch_number_P = torch.arange(expert_P.shape[0])
        self._patch_context = spec.context == "patch"
        self._source_Nt = source_Qk[pixel_Np].view(N, -1)
        self._source_patch_Nt = patch.flip(1)[pixel_Np].view(N, -1)
        self._first_patch_id_P = (image_P * E + expert_P) * N
        self._patch_ids = B * E * N

    def gather_rows(self, patch_P: Tensor) -> Tensor:
        """Returns the rows (R,) of the maps (B·H·W, C) to gather."""
        return self._pixel_Np.index_select(0, patch_P).add_(self._first_input_P).view(-1)

    def output_rows(self, patch_P: Tensor) -> Tensor:
        """Returns the output row (R,) of each pixel itself."""
        return self._output_pixel_Np.index_select(0, patch_P).add_(self._first_output_P).view(-1)

    def gather_by_expert(self, maps_EHWO: Tensor, patch_P: Tensor) -> Tensor:
        """Gathers the pixels' values (R, O) from one map per expert."""
        position_R = self._pixel_Np.index_select(0, patch_P).add_(self._first_expert_input_P).view(-1)
        return maps_EHWO.flatten(0, 2).index_select(0, position_R)

    def scatter_rows(self, patch_P: Tensor, first: int, end: int) -> Tensor:
        """Returns the output row (R·ks²,) of each tap: in rows from ``first``, or in dummy rows from ``end``."""
        row = self._row_Nt.index_select(0, patch_P).add_(self._first_output_P + first)
        return torch.minimum(row, self._dummy_row_P + end, out=row).view(-1)

    def sources(self, patch_P: Tensor) -> Tensor:
        """Returns which of the R · ks² contributions each pixel receives at each tap (R, ks²); R · ks² for none."""
        source = self._source_Nt.index_select(0, patch_P)
        taps_per_patch = source.shape[1]
        if self._patch_context:
            source += (self._patch_number_P * taps_per_patch).unsqueeze(1)
        else:
            not_routed = self._patch_number_P.shape[0]
            number_of_id = self._patch_number_P.new_full((self._patch_ids,), not_routed)
            number_of_id[self._first_patch_id_P.view(-1) + patch_P] = self._patch_number_P
            patch_id = self._source_patch_Nt.index_select(0, patch_P).add_(self._first_patch_id_P)
            source += number_of_id.index_select(0, patch_id.view(-1)).view_as(source).mul_(taps_per_patch)
        return source.clamp_max_(self._no_source).view(-1, self.taps)


@lru_cache(maxsize=64)
def _index_tables(B: int, E: int, L: int, map_size: tuple[int, int], ks: int, spec: PatchSpec) -> _IndexTables:
    with torch.inference_mode(False), torch.device("cpu"):  # whatever the default device
        return _IndexTables(B, E, L, map_size, ks, spec)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] # runs beside compiled steps
def _count_fused_step(optimizer: Optimizer, *_: object) -> None:
    """Counts a step of a fused optimizer as a change of its parameters, which torch's fused kernels do not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([p for p in group["params"] if p.grad is not None and p.device.type == "cpu"])


@cache
def _watch_fused_steps() -> None:
    """Counts fused steps from the first cached value on; a process without any is left alone."""
    register_optimizer_step_post_hook(_count_fused_step)


class CachedValue(Generic[T]):
    """A value computed from tensors, and recomputed when one of them has changed.

    A change is detected by the tensor's address, layout and version counter: optimizer steps, ``load_state_dict``,
    ``to`` and edits under ``no_grad`` are noticed. Torch does not count edits of ``tensor.data``, such as those of many
    moving averages; they are noticed if they change one of 256 values in equal distances. Nothing is cached for tensors
    created in inference mode, which have no version counter. Threads may call it at once; those that find nothing
    compute the value each.

    >>> weight, cached = torch.ones(2), CachedValue[Tensor]()
    >>> cached.get([weight], lambda: 2 * weight)
    tensor([2., 2.])
    >>> weight += 1
    >>> cached.get([weight], lambda: 2 * weight)
    tensor([4., 4.])
    """

    def __init__(self) -> None:
        self._cached: tuple[list[object], T, list[tuple[Tensor, Tensor]]] | None = None
        """Key, value, and views of some values of each tensor with their copies.

        Set as one, so that a thread never reads the value of another key.
        """

    def get(self, tensors: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """Returns the cached value, or that of ``compute()`` if one of the tensors has changed."""
        try:
            key = [*map(_address, tensors), *map(_version, tensors), *map(_shape, tensors), *map(_strides, tensors)]
        except RuntimeError:  # inference tensors have no version counter
            return compute()
        cached = self._cached
        if cached is not None and cached[0] == key and all([torch.equal(*each) for each in cached[2]]):  # noqa: C419  faster
            return cached[1]
        _watch_fused_steps()
        with torch.inference_mode(False), torch.no_grad():
            views = [_some_values(tensor) for tensor in tensors]
            copies = [view.clone() for view in views]  # before the value, so that an edit meanwhile is noticed
            value = compute()
        # while the views live, no other tensor can get the same address
        self._cached = key, value, list(zip(views, copies, strict=True))
        return value


def _some_values(tensor: Tensor) -> Tensor:
    """Returns a view of values of a tensor in equal distances in memory; of all if they are few or have gaps."""
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    memory = tensor.detach().permute(by_stride)
    if not memory.is_contiguous():
        return memory
    memory = memory.view(-1)
    return memory[:: -(-len(memory) // _COMPARED_VALUES) or 1]


class PreparedCache:
    """The prepared weights of a layer. A copy of the cache is empty.

    It belongs to the layer: a weak reference to a weight would keep ``torch.utils.swap_tensors`` from replacing it.
    """

    def __init__(self) -> None:
        self.entries: dict[object, CachedValue[_PreparedWeights]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedCache:
        return PreparedCache()

    def __reduce__(self) -> tuple[type[PreparedCache], tuple[()]]:
        return PreparedCache, ()


@dataclass(frozen=True)
class _BatchNormReLU:
    """ReLU(BatchNorm(value)) − ReLU(BatchNorm(0)) = max(scale · value + min(shift, 0), −ReLU(shift)), in place."""

    scale: Tensor
    clamped_shift: Tensor
    lower_bound: Tensor

    def apply_(self, values_EMC: Tensor) -> None:
        torch.addcmul(self.clamped_shift, values_EMC, self.scale, out=values_EMC)
        torch.maximum(values_EMC, self.lower_bound, out=values_EMC)


@dataclass(frozen=True)
class _PreparedWeights:
    """Tensors derived from the weights alone."""

    matrix: Tensor
    """(E, C, ks·ks·O), contiguous: the fastest layout for a matmul with few rows."""
    norm: _BatchNormReLU | None
    background: Tensor | None
    """Output on zero input: (H, W, O') under ``gate_on="input"``, otherwise per expert, (E, O) or (E, H, W, O)."""


def _tensors(experts: ConvWeights, norm: Norm | None) -> list[Tensor]:
    tensors = [experts.weight] if experts.bias is None else [experts.weight, experts.bias]
    return tensors if norm is None else [*tensors, norm.weight, norm.bias, norm.running_mean, norm.running_var]


def _prepared(experts: ConvWeights, norm: Norm | None, spec: PatchSpec, map_size: tuple[int, int]) -> _PreparedWeights:
    """Returns the prepared weights, from the cache if the weights are parameters and have not changed."""

    def make() -> _PreparedWeights:
        return _prepare(experts, norm, spec, map_size)

    if experts.cache is None or not isinstance(experts.weight, nn.Parameter):
        return make()
    cache = experts.cache.entries
    key = (spec, map_size, None if norm is None else norm.eps)
    cached = cache.get(key)
    if cached is None:
        cache.clear()  # one shape at a time; another thread may do so at any moment
        cached = cache[key] = CachedValue()
    return cached.get(_tensors(experts, norm), make)


def _prepare(experts: ConvWeights, norm: Norm | None, spec: PatchSpec, map_size: tuple[int, int]) -> _PreparedWeights:
    weight, bias = experts.weight.detach(), None if experts.bias is None else experts.bias.detach()
    E, O, _, ks, _ = weight.shape
    matrix, bn_relu, background = tap_matrix(weight).transpose(1, 2).contiguous(), None, bias
    if norm is not None:
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = (norm.bias - norm.running_mean * scale).unsqueeze(1)
        background_input = F.relu(shift)
        bn_relu = _BatchNormReLU(scale.unsqueeze(1), shift.clamp_max(0), -background_input)
        taps_EkkO = expert_bmm(background_input, matrix).view(E, ks, ks, O)
        background = background_output(taps_EkkO, bias, map_size, spec)
    if background is not None and spec.gate_on == "input":
        background = background.movedim(0, -2)
        background = background.flatten(-2) if spec.combine == "concat" else background.sum(-2)
        background = background.expand(*map_size, background.shape[-1]).contiguous()
    return _PreparedWeights(matrix, bn_relu, background)

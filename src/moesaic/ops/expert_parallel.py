"""Expert parallelism: the ranks of a process group share the experts, and every rank runs those it holds.

A rank routes its own images with its own copy of the router. Then

    gather → all-to-all → experts on the patches of all ranks → all-to-all → combine

Only routed values are sent. Gates are applied by the sending rank: before the exchange under ``gate_on="input"``, and
after it under ``"output"``. A convolution returns the patches' own pixels under ``gate_on="output"``, and under
``"input"`` the patches with their halo (`moesaic.ops.patch.patch_halo`). An expert's output on zero input, its
background, is the same for all images and is gathered once.

Expert choice sends B·L patches to every expert: equal splits, and no sizes to exchange. Where units choose experts, or
places are unassigned, ranks first exchange the number of patches of every expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.ops.collectives import all_gather_rows, all_reduce_sum, all_to_all_rows, average_gradient
from moesaic.ops.dispatch import ConvWeights, MLPWeights, Norm, PatchSelection, PatchSpec, Samples
from moesaic.ops.patch.gather import RoutedPixels
from moesaic.ops.patch.patch_halo import ReceivedPixels, frame_side, frames_to_map
from moesaic.ops.patch.scatter_conv import scatter_add
from moesaic.ops.sample_dispatch import SortedSamples
from moesaic.ops.torch_backend import (
    add_background,
    combine_as_map,
    conv_background,
    conv_pixels,
    expert_inputs,
    masked_statistics,
    mlp_pixels,
)
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ExpertDispatcher"]


class ExpertDispatcher:
    """Sends routed patches and samples to the ranks that hold their experts, and outputs back.

    Rank r of G holds the experts r · E/G to (r + 1) · E/G − 1. All ranks of the mesh run every forward and backward
    pass, each on its own images.

    Args:
        mesh: the ranks; experts are sharded along ``dim`` and replicated along its other axes.
        dim: name of the axis.
        uneven_batches: whether ranks may have different numbers of images: they are then exchanged in every pass.
        reduce_gradients: whether the gradients of experts are averaged over the mesh's other axes in the backward pass.
    """

    def __init__(
        self, mesh: DeviceMesh, dim: str = "ep", *, uneven_batches: bool = False, reduce_gradients: bool = True
    ) -> None:
        names = mesh.mesh_dim_names or ()
        if dim not in names:
            raise ValueError(
                f"ExpertDispatcher: the mesh has the axes {', '.join(names) or 'without names'}, none is {dim!r}; make "
                f"it with init_device_mesh(device, shape, mesh_dim_names=(…, {dim!r}))"
            )
        others = [other for other in names if other != dim]
        self.mesh: DeviceMesh = mesh[dim] if others else mesh
        self.group = mesh.get_group(dim)
        self.ranks = self.group.size()
        self.rank = self.group.rank()
        self.replicas = tuple(group for group in map(mesh.get_group, others) if group.size() > 1)
        self.replica_count = math.prod(group.size() for group in self.replicas)
        self.uneven_batches = uneven_batches
        self.reduce_gradients = reduce_gradients

    def __deepcopy__(self, memo: object) -> ExpertDispatcher:
        return self  # process groups are the same for a copy of the model

    def conv(
        self,
        x: Tensor,
        routing: Routing,
        experts: ConvWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        """Runs sharded convolutions on the routed patches of this rank's map (B, C, H, W)."""
        weights = ConvWeights(self.local(experts.weight), self._local(experts.bias))
        kernel, dtype = weights.weight.shape[3], weights.weight.dtype
        if kernel == 1:
            spec = replace(spec, context="patch")  # equal for 1×1 kernels, and needs no neighbours
        pixels = RoutedPixels.from_routing(routing, x, spec)
        values = expert_inputs(x, pixels)
        values = values.to(dtype) if norm is None else values
        exchange = self._exchange(pixels, x, positions=(spec.gate_on, spec.context) == ("output", "map"))
        values = exchange.to_experts(values)
        norm = self._norm(norm, values, exchange, x)
        sums, taps = conv_pixels(x, values, exchange.pixels, weights, norm)
        if spec.gate_on == "output":
            background = conv_background(taps, weights.bias, exchange.pixels)
            sums = add_background(sums, background, exchange.pixels).to(dtype)
            sums = exchange.to_images(sums, spec.patch_size**2)
            return combine_as_map(sums, None, pixels, dtype)
        frames = exchange.to_images(sums, frame_side(spec, kernel) ** 2)
        background = conv_background(self._gathered(taps), self._gathered(weights.bias), pixels)
        y = scatter_add(frames.unsqueeze(1), frames_to_map(pixels, kernel))
        return combine_as_map(y, background, pixels, dtype)

    def mlp(
        self,
        x: Tensor,
        routing: Routing,
        experts: MLPWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        """Runs sharded MLPs on the routed patches of this rank's map (B, C, H, W), pixel by pixel."""
        weights = MLPWeights(
            self.local(experts.weight_in),
            self._local(experts.bias_in),
            self.local(experts.weight_out),
            self._local(experts.bias_out),
            experts.activation,
        )
        dtype = weights.weight_in.dtype
        pixels = RoutedPixels.from_routing(routing, x, spec)
        values = expert_inputs(x, pixels)
        values = values.to(dtype) if norm is None else values
        exchange = self._exchange(pixels, x, positions=False)
        values = exchange.to_experts(values)
        norm = self._norm(norm, values, exchange, x)
        y, background = mlp_pixels(x, values, exchange.pixels, weights, norm)
        y = exchange.to_images(y, spec.patch_size**2)
        if spec.gate_on == "input":
            y = scatter_add(y.unsqueeze(1), pixels.scatter_to_map(1))
        return combine_as_map(y, self._gathered(background), pixels, dtype)

    def stacked(self, x: Tensor, routing: Routing, run: Callable[[Tensor, Samples], Tensor]) -> Tensor:
        """Runs sharded experts on this rank's routed samples (B, …)."""
        samples = SortedSamples.from_routing(routing)
        splits = _RaggedSplits.exchange(self, samples.expert_R, routing.experts)
        values = samples.gather(x)
        outputs = run(splits.to_experts(values), _ReceivedSamples.of(splits, self))
        return samples.combine(splits.to_images(outputs))

    def local(self, weight: Tensor) -> Tensor:
        """Returns this rank's part of a sharded weight, to compute with.

        Its gradient is that of the mean of all ranks' losses, as DDP and FSDP2 compute it for replicated weights.
        """
        shard = cast(Tensor, cast("Any", weight).to_local())
        if not shard.requires_grad:
            return shard
        return average_gradient(shard, self.ranks, self.replicas if self.reduce_gradients else ())

    def _local(self, weight: Tensor | None) -> Tensor | None:
        return None if weight is None else self.local(weight)

    def _gathered(self, per_expert: Tensor | None) -> Tensor | None:
        """Values of all experts (E, …) from those of this rank's."""
        return None if per_expert is None else all_gather_rows(per_expert, self.group)

    def _norm(self, norm: Norm | None, values: Tensor, exchange: _PatchExchange, x: Tensor) -> Norm | None:
        """The norm of this rank's experts, with the batch's statistics in training."""
        if norm is None:
            return None
        mean, var = (cast(Tensor, cast("Any", each).to_local()) for each in (norm.running_mean, norm.running_var))
        weight, bias = self.local(norm.weight), self.local(norm.bias)
        local = Norm(weight, bias, mean, var, norm.momentum, norm.eps, norm.training)
        if not norm.training:
            return local
        count = self._batch_of_replicas(exchange.pixels.routing.batch, x) * x.shape[2] * x.shape[3]
        acc_dtype = torch.promote_types(values.dtype, torch.float32)
        mean, var = masked_statistics(values.to(acc_dtype), exchange.pixels, count, local)
        return replace(local, running_mean=mean, running_var=var, training=False)

    def _batch_of_replicas(self, batch: int, x: Tensor) -> int:
        """Number of images on all ranks of the mesh, from that of the ranks which share experts."""
        if not self.uneven_batches:
            return batch * self.replica_count
        total = torch.tensor([batch], device=x.device)
        for group in self.replicas:
            total = all_reduce_sum(total, group)
        return int(total.item())

    def _exchange(self, pixels: RoutedPixels, x: Tensor, *, positions: bool) -> _PatchExchange:
        """Prepares the exchange of the routed patches of a map; ``positions``: of where they are on it too."""
        routing = pixels.routing
        if routing.chooser == "expert" and not routing.may_drop:
            return _exchange_equal(self, pixels, x, positions)
        return _exchange_ragged(self, pixels, positions)


class _Splits(Protocol):
    """How rows are sent to the ranks of their experts and back; rows may have any number of values."""

    def to_experts(self, rows: Tensor) -> Tensor:
        """Sends rows (R, …), sorted by expert; returns those of this rank's experts, sorted by expert."""
        ...

    def to_images(self, rows: Tensor) -> Tensor:
        """Sends rows back."""
        ...


@dataclass(frozen=True)
class _PatchExchange:
    """Exchange of the routed patches of a map."""

    splits: _Splits
    patches: int
    """Routed patches of this rank's images."""
    pixels: ReceivedPixels
    """The pixels that this rank's experts receive."""

    def to_experts(self, values: Tensor) -> Tensor:
        """Sends the values of pixels, (E, M, C) or (R, C); returns those of the received pixels."""
        C = values.shape[-1]
        area = self.pixels.spec.patch_size**2
        received = self.splits.to_experts(values.reshape(self.patches, area * C))
        return self.pixels.by_expert(received.reshape(received.shape[0] * area, C))

    def to_images(self, rows: Tensor, per_patch: int) -> Tensor:
        """Sends rows (P·F, O), F = ``per_patch`` of each received patch, back to the ranks that have the images."""
        O = rows.shape[1]
        returned = self.splits.to_images(rows.reshape(self.pixels.patch_id_P.shape[0], per_patch * O))
        return returned.reshape(self.patches * per_patch, O)


@dataclass(frozen=True)
class _EqualSplits:
    """Splits of rows of which every expert gets equally many from a rank's images."""

    group: dist.ProcessGroup
    experts: int
    """Experts of this rank."""
    rows: list[int]
    """Rows of an expert that each rank has."""

    def to_experts(self, rows: Tensor) -> Tensor:
        own = [self.experts * self.rows[self.group.rank()]] * len(self.rows)
        received = all_to_all_rows(rows, own, self._received, self.group)
        parts = cast("tuple[Tensor, ...]", received.split(self._received))
        by_expert = [part.view(self.experts, n, *rows.shape[1:]) for part, n in zip(parts, self.rows, strict=True)]
        return torch.cat(by_expert, 1).flatten(0, 1)

    def to_images(self, rows: Tensor) -> Tensor:
        by_expert = rows.view(self.experts, sum(self.rows), *rows.shape[1:])
        parts = cast("tuple[Tensor, ...]", by_expert.split(self.rows, 1))
        own = [self.experts * self.rows[self.group.rank()]] * len(self.rows)
        return all_to_all_rows(torch.cat([part.flatten(0, 1) for part in parts]), self._received, own, self.group)

    @property
    def _received(self) -> list[int]:
        return [self.experts * n for n in self.rows]


@dataclass(frozen=True)
class _RaggedSplits:
    """Splits of rows of which every expert gets any number."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    """Rows that each rank gets from this one, and sends to it."""
    order_R: Tensor
    """Sorts received rows, which come rank by rank, by expert; a rank's rows stay in order."""
    expert_R: Tensor
    """This rank's expert of each sorted row, counted from its first."""
    ends_E: Tensor
    """The sorted rows of expert e end before row ``ends_E[e]``."""
    batches: list[int]
    """Number of images of each rank."""
    used: tuple[Tensor, int] | None
    """Index of the rows that are sent and number of all rows; None if all are sent."""

    @staticmethod
    def exchange(
        dispatcher: ExpertDispatcher, expert_R: Tensor, experts: int, batch: int = 0, used_R: Tensor | None = None
    ) -> _RaggedSplits:
        """Exchanges the numbers of rows, with a host sync, for rows sorted by expert."""
        group, own = dispatcher.group, experts // dispatcher.ranks
        used = None
        if used_R is not None:
            used = used_R.nonzero().flatten(), expert_R.shape[0]
            expert_R = expert_R.index_select(0, used[0])
        counts_GE = torch.bincount(expert_R, minlength=experts).view(dispatcher.ranks, own)
        sent = torch.cat([counts_GE, counts_GE.new_full((dispatcher.ranks, 1), batch)], 1)
        one_each = [1] * dispatcher.ranks
        received = all_to_all_rows(sent, one_each, one_each, group)
        received_GE, batches = received[:, :-1], cast("list[int]", received[:, -1].tolist())
        expert_R, order_R = (
            torch.arange(own, device=expert_R.device)
            .repeat(dispatcher.ranks)
            .repeat_interleave(received_GE.flatten())
            .sort(stable=True)
        )
        return _RaggedSplits(
            group=group,
            sent=cast("list[int]", counts_GE.sum(1).tolist()),
            received=cast("list[int]", received_GE.sum(1).tolist()),
            order_R=order_R,
            expert_R=expert_R,
            ends_E=received_GE.sum(0).cumsum(0),
            batches=batches,
            used=used,
        )

    def to_experts(self, rows: Tensor) -> Tensor:
        sent = rows if self.used is None else rows.index_select(0, self.used[0])
        return all_to_all_rows(sent, self.sent, self.received, self.group).index_select(0, self.order_R)

    def to_images(self, rows: Tensor) -> Tensor:
        unsorted = rows.new_zeros(rows.shape).index_copy(0, self.order_R, rows)
        returned = all_to_all_rows(unsorted, self.received, self.sent, self.group)
        if self.used is None:
            return returned
        index, count = self.used
        return returned.new_zeros(count, *returned.shape[1:]).index_copy(0, index, returned)


class _ReceivedSamples(SortedSamples):
    """Samples that a rank received for its experts, sorted by expert."""

    dispatcher: ExpertDispatcher

    @staticmethod
    def of(splits: _RaggedSplits, dispatcher: ExpertDispatcher) -> _ReceivedSamples:
        samples = _ReceivedSamples(splits.order_R, splits.expert_R, splits.ends_E, splits.order_R.unsqueeze(1))
        object.__setattr__(samples, "dispatcher", dispatcher)
        return samples

    def linear(self, values: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        local = self.dispatcher.local
        return super().linear(values, local(weight_EOC), None if bias_EO is None else local(bias_EO))


def _exchange_equal(dispatcher: ExpertDispatcher, pixels: RoutedPixels, x: Tensor, positions: bool) -> _PatchExchange:
    routing, ranks = pixels.routing, dispatcher.ranks
    assert routing.index is not None
    (B, E, L), own = routing.index.shape, routing.experts // ranks
    batches = [B] * ranks
    if dispatcher.uneven_batches:
        batches = cast("list[int]", all_gather_rows(torch.tensor([B], device=x.device), dispatcher.group).tolist())
    splits = _EqualSplits(dispatcher.group, own, [each * L for each in batches])
    total = sum(batches)
    # without neighbours, an expert need not know where its patches are: all count as patch 0
    index = routing.index.new_zeros(total, own, L)
    if positions:
        rows = splits.to_experts(routing.index.transpose(0, 1).reshape(E * B * L, 1))
        index = rows.view(own, total, L).transpose(0, 1)
    received = _received_routing(routing, index, total, own)
    return _PatchExchange(
        splits, E * B * L, ReceivedPixels.of(RoutedPixels.from_routing(received, x, pixels.spec), dispatcher.replicas)
    )


def _exchange_ragged(dispatcher: ExpertDispatcher, pixels: RoutedPixels, positions: bool) -> _PatchExchange:
    routing, area = pixels.routing, pixels.spec.patch_size**2
    first = slice(None, None, area)  # the first pixel of each patch
    expert_P, used_P = pixels.expert_R[first], None if pixels.used_R is None else pixels.used_R[first]
    splits = _RaggedSplits.exchange(dispatcher, expert_P, routing.experts, routing.batch, used_P)
    total, own = sum(splits.batches), routing.experts // dispatcher.ranks
    image_P = position_P = torch.zeros_like(splits.expert_R)
    if positions:
        sent = torch.stack([pixels.image_R[first], pixels.position_R[first]], 1)
        image_P, position_P = splits.to_experts(sent).unbind(1)
        starts = [sum(splits.batches[:rank]) for rank in range(dispatcher.ranks)]
        start_P = torch.tensor(starts, device=sent.device).repeat_interleave(
            torch.tensor(splits.received, device=sent.device)
        )
        image_P = image_P + start_P.index_select(0, splits.order_R)
    (_, W), p = pixels.map_size, pixels.spec.patch_size
    patch_P = position_P // W // p * (W // p) + position_P % W // p
    side = torch.arange(p, device=position_P.device)
    within = (side.unsqueeze(1) * W + side).flatten()

    def per_pixel(value_P: Tensor) -> Tensor:
        return value_P.unsqueeze(1).expand(-1, area).flatten()

    received = ReceivedPixels(
        routing=_received_routing(routing, None, total, own),
        spec=pixels.spec,
        map_size=pixels.map_size,
        image_R=per_pixel(image_P),
        expert_R=per_pixel(splits.expert_R),
        position_R=(position_P.unsqueeze(1) + within).flatten(),
        gate_R=routing.gate.new_ones(()).expand(splits.expert_R.shape[0] * area),
        used_R=None,
        ends_E=splits.ends_E * area,
        patch_id_P=(image_P * routing.units + patch_P) * own + splits.expert_R,
        replicas=dispatcher.replicas,
    )
    return _PatchExchange(splits, expert_P.shape[0], received)


def _received_routing(routing: Routing, index: Tensor | None, batch: int, experts: int) -> Routing:
    """The routing of the images of all ranks to this rank's experts; their gates are applied by the senders."""
    scores = routing.scores.detach().new_zeros(()).expand(batch, routing.units, experts)
    shape = (batch, experts, 0) if index is None else index.shape
    index = routing.scores.new_zeros(shape, dtype=torch.int64) if index is None else index
    gate = scores.new_ones(()).expand(shape)
    return Routing("patch", scores, index, gate, "expert", grid=routing.grid, may_drop=False)

"""Cost of a training step of routed experts on many ranks: when do sharded experts beat replicated ones?

Ranks compute the same either way; they differ in what they send. With B images and R = B·L·p² rows for every expert on
each rank, W weights in all experts, n ranks, and the experts sharded over G of them:

    replicated:  all-reduce of W gradients over n ranks
    sharded:     4 all-to-alls of the routed values over G ranks (patches and outputs, forward and backward), and
                 an all-reduce of W/G gradients over the n/G ranks that have the same experts

A collective takes latency · messages + bytes / bandwidth, on the link of the level of the machine it spans. Weights
that a rank does not hold need no optimizer step. Times are in seconds, sizes in bytes. All communication is exposed
unless ``overlap`` says otherwise: DDP can hide gradients behind the backward pass, the all-to-alls hide behind nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.argument_checks import check_positive

__all__ = [
    "H100_CLUSTER",
    "ExpertLayer",
    "Link",
    "Machine",
    "StepCost",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "break_even_images",
    "exchanged_values",
    "expert_parallel_step",
]


@dataclass(frozen=True)
class ExpertLayer:
    """Shape of a routed layer: convolutions, or MLPs with ``hidden_channels``."""

    experts: int
    in_channels: int
    out_channels: int
    """Of one expert."""
    patches_per_expert: int
    """Patches that an expert takes of an image; where units choose, on average."""
    patch_size: int = 1
    kernel_size: int = 1
    hidden_channels: int | None = None
    halo: bool = False
    """Whether outputs reach beyond the patch: ``gate_on="input"`` with ``context="map"``."""

    @property
    def weights(self) -> int:
        """Number of weights of all experts, biases aside.

        >>> ExpertLayer(8, 640, 80, patches_per_expert=2, patch_size=4, kernel_size=3).weights
        3686400
        """
        if self.hidden_channels is not None:
            return self.experts * self.hidden_channels * (self.in_channels + self.out_channels)
        return self.experts * self.in_channels * self.out_channels * self.kernel_size**2

    @property
    def flops_per_image(self) -> int:
        """Of the forward pass; a multiply-add counts as two. A training step costs three times as many."""
        return 2 * self.weights * self.patches_per_expert * self.patch_size**2

    @property
    def moved_values_per_image(self) -> int:
        """Values of an image that the forward pass reads and writes beside its GEMMs.

        A training step moves three times as many. A row is gathered; the contributions of all taps are written, read
        and added to the output. Hidden values of an MLP are written and read before and after the activation.
        """
        rows = self.experts * self.patches_per_expert * self.patch_size**2
        if self.hidden_channels is not None:
            return rows * (2 * self.in_channels + 4 * self.hidden_channels + 3 * self.out_channels)
        return rows * (2 * self.in_channels + 3 * self.kernel_size**2 * self.out_channels)


def exchanged_values(layer: ExpertLayer) -> tuple[int, int]:
    """Values of an image that are sent to experts, and that come back: E·L·p²·C and E·L·F²·O, frames F×F.

    >>> exchanged_values(ExpertLayer(8, 640, 80, patches_per_expert=2, patch_size=4, kernel_size=3, halo=True))
    (163840, 46080)
    """
    patches = layer.experts * layer.patches_per_expert
    frame = layer.patch_size + (2 * (layer.kernel_size // 2) if layer.halo else 0)
    return patches * layer.patch_size**2 * layer.in_channels, patches * frame**2 * layer.out_channels


def break_even_images(layer: ExpertLayer) -> float:
    """Images per rank below which sharded experts send fewer bytes than replicated ones, for many ranks.

    A rank sends 2 values per weight in an all-reduce, and every routed value and output twice. For MLPs with as
    many channels in as out it is where an expert gets as many rows of a rank as it has hidden neurons.

    >>> break_even_images(ExpertLayer(64, 768, 768, patches_per_expert=4, hidden_channels=3072))
    768.0
    >>> round(break_even_images(ExpertLayer(8, 640, 80, 2, patch_size=4, kernel_size=3, halo=True)), 1)
    17.6
    """
    return layer.weights / sum(exchanged_values(layer))


@dataclass(frozen=True)
class Link:
    """A connection of each rank to the others of its level."""

    bytes_per_second: float
    """In one direction."""
    latency: float
    """Seconds of a message."""


@dataclass(frozen=True)
class Machine:
    """Ranks in nodes: ``inner`` connects the ranks of a node, ``outer`` nodes."""

    flops_per_second: float
    bytes_per_second: float
    """Of memory, reads plus writes."""
    inner: Link
    outer: Link
    ranks_per_node: int
    overhead: float = 0.0
    """Seconds of a step that do not depend on its size, such as launches."""


H100_CLUSTER = Machine(400e12, 2.5e12, Link(360e9, 5e-6), Link(45e9, 15e-6), ranks_per_node=8, overhead=2e-4)
"""Round numbers from data sheets, not measured here: bfloat16 GEMMs at 40 % of the peak, NVLink at 80 % of 450 GB/s, a
400 Gb/s adapter for each GPU at 90 %, and 0.2 ms of launches."""


def all_to_all_seconds(sent: float, ranks: int, machine: Machine) -> float:
    """Seconds of an all-to-all in which every rank sends ``sent`` bytes, its own share included.

    >>> machine = Machine(1e12, 1e11, Link(1e9, 1e-3), Link(1e8, 1e-3), ranks_per_node=2)
    >>> round(all_to_all_seconds(1e6, 2, machine), 6)                            # half of it stays
    0.0015
    >>> round(all_to_all_seconds(1e6, 4, machine), 6)                            # half of it goes to the other node
    0.00825
    """
    check_positive("all_to_all_seconds", ranks=ranks)
    inside = min(ranks, machine.ranks_per_node)
    near, far = (inside - 1) / ranks * sent, (ranks - inside) / ranks * sent
    seconds = (inside - 1) * machine.inner.latency + near / machine.inner.bytes_per_second
    return seconds + (ranks - inside) * machine.outer.latency + far / machine.outer.bytes_per_second


def all_reduce_seconds(size: float, ranks: int, machine: Machine, stride: int = 1) -> float:
    """Seconds of an all-reduce of ``size`` bytes: within nodes first, then of each rank's share between nodes.

    It has the bandwidth of a ring and the latency of a tree, as NCCL's double binary trees.

    Args:
        size: bytes of the tensor.
        ranks: number of ranks.
        machine: the machine.
        stride: distance between neighbours; ranks at a distance of a node's size are all on different nodes.

    >>> machine = Machine(1e12, 1e11, Link(1e9, 1e-3), Link(1e8, 1e-3), ranks_per_node=2)
    >>> round(all_reduce_seconds(1e6, 2, machine), 6), round(all_reduce_seconds(1e6, 2, machine, stride=2), 6)
    (0.003, 0.012)
    """
    check_positive("all_reduce_seconds", ranks=ranks, stride=stride)
    inside = min(ranks, max(machine.ranks_per_node // stride, 1))
    seconds = _reduce(size, inside, machine.inner)
    return seconds + _reduce(size / inside, math.ceil(ranks / inside), machine.outer)


def _reduce(size: float, ranks: int, link: Link) -> float:
    return 2 * math.ceil(math.log2(ranks)) * link.latency + 2 * (ranks - 1) / ranks * size / link.bytes_per_second


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step of one layer."""

    compute: float
    """Forward and backward pass of the experts."""
    exchange: float
    """All-to-alls, with the copies that arrange what is sent and received."""
    gradients: float
    """All-reduce of gradients, with copies into a buffer and out of it."""
    optimizer: float

    def total(self, overlap: float = 0.0) -> float:
        """Seconds of the step; a share ``overlap`` of the gradients' all-reduce hides behind computation, at most all.

        >>> cost = StepCost(compute=3.0, exchange=1.0, gradients=2.0, optimizer=0.5)
        >>> cost.total(), cost.total(overlap=1.0)
        (6.5, 4.5)
        """
        hidden = min(overlap * self.gradients, self.compute)
        return self.compute + self.exchange + self.gradients - hidden + self.optimizer


def expert_parallel_step(
    layer: ExpertLayer, images: int, ranks: int, expert_ranks: int, machine: Machine, value_bytes: int = 2
) -> StepCost:
    """Cost of a training step with the experts sharded over groups of ``expert_ranks``; 1: replicated everywhere.

    Args:
        layer: the layer.
        images: images per rank.
        ranks: number of ranks.
        expert_ranks: ranks that share the experts, a divisor of ``ranks`` and of the number of experts.
        machine: compute and links.
        value_bytes: bytes of a value and of a weight.

    >>> layer = ExpertLayer(64, 768, 768, patches_per_expert=4, hidden_channels=3072)
    >>> replicated = expert_parallel_step(layer, 64, 64, 1, H100_CLUSTER)
    >>> sharded = expert_parallel_step(layer, 64, 64, 8, H100_CLUSTER)
    >>> round(1e3 * replicated.total(), 2), round(1e3 * sharded.total(), 2)
    (10.4, 5.87)
    """
    if ranks % expert_ranks or layer.experts % expert_ranks:
        raise ValueError(
            f"expert_parallel_step: expert_ranks={expert_ranks} must divide {ranks} ranks and {layer.experts} experts"
        )
    rows = sum(exchanged_values(layer)) * images * value_bytes
    exchange = 0.0
    if expert_ranks > 1:
        # forward and backward; what is sent and what is received is arranged by a copy, a read and a write each
        sent, returned = (each * images * value_bytes for each in exchanged_values(layer))
        exchange = 2 * sum(all_to_all_seconds(each, expert_ranks, machine) for each in (sent, returned))
        exchange += 2 * 2 * 2 * rows / machine.bytes_per_second
    own = layer.weights / expert_ranks * value_bytes
    arithmetic = 3 * images * layer.flops_per_image / machine.flops_per_second
    moved = 3 * images * layer.moved_values_per_image * value_bytes
    moved += 3 * own  # both passes read the weights, and the backward pass writes their gradient
    replicas = ranks // expert_ranks
    gradients = all_reduce_seconds(own, replicas, machine, stride=expert_ranks)
    if replicas > 1:
        gradients += 4 * own / machine.bytes_per_second  # into a buffer and out of it
    return StepCost(
        compute=machine.overhead + arithmetic + moved / machine.bytes_per_second,
        exchange=exchange,
        gradients=gradients,
        optimizer=3 * own / machine.bytes_per_second,  # reads weight and gradient, writes the weight
    )

"""A map and who chose which patches of it; and the way back to it from the gradient of what experts were given.

`Chosen` is what every operation on experts is about. `ProductGradients` goes through the products, and `Back` from
there to the map, the gates, the router and the norm.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.ops.triton import expert_choice, fused_backward
from moesaic.ops.triton.background import resting_map
from moesaic.ops.triton.expert_choice import by_pixel
from moesaic.ops.triton.gather import NormTensors, collect, collect_tile, gather
from moesaic.ops.triton.launch import Aside, Sizes, as_map, by_row, ceil, dense, map_like, wide
from moesaic.ops.triton.norm import norm_gradients
from moesaic.ops.triton.scatter import Landing, taps_of, weight_of
from moesaic.ops.weight_layout import laid_out

__all__ = ["Back", "Chosen", "ProductGradients", "chosen", "contributions_of", "like", "map_shapes", "nothing"]

GROUPED = 1 << 24
"""Bytes from which the gradient of contributions is taken in two groups of experts, so that less is alive at once."""


@dataclass(frozen=True)
class Chosen:
    """A map and who chose which patches of it."""

    x: Tensor
    """(B, H, W, C)"""
    index: Tensor
    slots: Tensor
    gate: Tensor
    scores: Tensor | None
    router: Tensor | None
    """Kernels (E, C, p, p) of the router whose gates these are, a softmax of ``scores``."""
    norm: NormTensors | None
    patch: int
    kind: int
    on_input: bool

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.x, self.index, self.patch)

    @property
    def gate_in(self) -> Tensor | None:
        return self.gate if self.on_input else None

    @property
    def gate_out(self) -> Tensor | None:
        return None if self.on_input else self.gate

    @property
    def every(self) -> bool:
        """Whether the gate of a patch depends on the scores of all."""
        return self.kind == expert_choice.GATE_KINDS["softmax_all"]

    @property
    def jointly(self) -> bool:
        """Whether the way back is that of `joint`."""
        routed = self.router is not None and self.scores is not None
        return self.norm is not None and self.on_input and routed and fused_backward.fits(self.sizes)


def chosen(
    x: Tensor, index: Tensor, slots: Tensor, gate: Tensor, scores: Tensor | None, router: Tensor | None,
    norm_weight: Tensor | None, norm_bias: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float,
    training: bool, patch: int, kind: int, on_input: bool,
) -> Chosen:  # fmt: skip
    """From what an operation is given, maps x (B, C, H, W) among it, as kernels read it."""
    norm = None
    if norm_weight is not None and norm_bias is not None and mean is not None and var is not None:
        norm = NormTensors(norm_weight, norm_bias, mean, var, eps, training)
    index, slots, gate = index.contiguous(), slots.contiguous(), gate.contiguous()
    return Chosen(by_row(x), index, slots, gate, dense(scores), router, norm, patch, kind, on_input)


def nothing(like: Tensor) -> Tensor:
    """An operation's results are tensors, each of its own."""
    return like.new_empty(0)


class Back:
    """From gradients of values, a group of experts at a time, to those of x, gate, router and norm.

    ``dots`` (B, E, L, p²) is the gradient of gates on the output. The last ``beside`` columns of ``rows`` (E, M, …) are
    filled with the gradient of chosen patches' scores; see `pointwise`.
    """

    def __init__(
        self, of: Chosen, dots: Tensor | None, *, centre: bool, rows: Tensor | None = None, beside: int = 0
    ) -> None:
        self.of, self.dots, self.centre = of, dots, centre
        self.kernels = None if of.router is None else by_pixel(of.router)
        self.owners: tuple[Tensor, Tensor] | None = None
        self.grad_x: Tensor | None = None
        self.grad_router: Tensor | None = None
        self.grad_gate = None
        if of.on_input and not of.jointly:
            # in parts, over blocks of channels; zeros: places that nobody took have no patch
            BC, _ = collect_tile(of.sizes, of.norm is not None, gate=True, x=of.x)
            shape = (*of.index.shape, ceil(of.x.shape[3], BC))
            self.grad_gate = torch.zeros(shape, dtype=wide(of.x.dtype), device=of.x.device)
        self.norm_gradients: tuple[Tensor, Tensor] | None = None
        self.grad_scores: Tensor | None = None
        self.every = of.every
        if self.kernels is not None and dots is not None and of.scores is not None:
            self.grad_scores = expert_choice.gradient_of_choice(
                dots, of.gate, of.scores, of.slots, of.kind, self.every, rows, beside
            )

    @property
    def beside(self) -> tuple[Tensor, Tensor] | None:
        """The gradient of chosen patches' scores goes along; that of all patches' takes a pass of its own."""
        if self.grad_scores is None or self.kernels is None or self.every:
            return None
        return self.grad_scores, self.kernels

    def add(self, grad_rows: Tensor, experts: range) -> None:
        """Gradients of these experts' values (…, M1, C); with a norm, of all experts at once."""
        of, folded = self.of, None
        if of.jointly:
            assert of.norm is not None and of.scores is not None and of.router is not None
            found = fused_backward.joint_gradients(
                grad_rows, of.x, of.index, of.slots, of.gate, of.scores, of.router, of.norm, of.patch, of.kind,
                centre=self.centre,
            )  # fmt: skip
            self.grad_x, self.grad_router = found.x, found.router
            self.norm_gradients = found.norm_weight, found.norm_bias
            return
        if self.owners is None:
            self.owners = expert_choice.owners_of(of.slots, of.index.shape[2])
        if of.norm is not None:
            *self.norm_gradients, folded = norm_gradients(
                grad_rows, of.x, of.index, of.gate_in, of.norm, of.patch, centre=self.centre
            )
        self.grad_x = collect(
            grad_rows, of.x, of.index, self.owners, of.gate_in, self.grad_gate, folded, self.beside, of.patch,
            experts, self.grad_x,
        )  # fmt: skip

    def finish(self, aside: Aside | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x (B, C, H, W), gate, router, norm's weight and bias; empty where there is none.

        The router's may be computed ``aside``: join before it is used.
        """
        of, grad_x = self.of, self.grad_x
        assert grad_x is not None
        grad_gate, grad_router = nothing(grad_x), self.grad_router
        grad_weight, grad_bias = self.norm_gradients or (nothing(grad_x), nothing(grad_x))
        dots, kernels = self.dots if self.grad_gate is None else self.grad_gate, self.kernels
        if of.router is None or kernels is None or of.scores is None:
            if dots is not None:
                grad_gate = dots[..., 0] if dots.shape[3] == 1 else dots.sum(3)
                grad_gate = grad_gate.to(of.gate.dtype)
        elif self.beside is not None and grad_router is None:
            grad_router = expert_choice.router_gradient_of_chosen(self.beside[0], of.x, of.index, of.router)
        elif grad_router is None:
            grad_scores = self.grad_scores
            if grad_scores is None and dots is not None:
                grad_scores = expert_choice.gradient_of_choice(dots, of.gate, of.scores, of.slots, of.kind, True)
            if grad_scores is not None:
                with aside or nullcontext():
                    grad_router = expert_choice.router_gradient(grad_scores, of.x, of.router)
                if aside is not None:
                    aside.keep(grad_scores)
                grad_x = expert_choice.map_back(grad_scores, kernels, grad_x, of.x, of.patch)
        grad_router = nothing(grad_x) if grad_router is None else grad_router
        return as_map(grad_x), grad_gate, grad_router, grad_weight, grad_bias


def map_shapes(grad, x, gate, router, norm_weight, norm_bias, need_map: bool):
    """Shapes of x's gradient and of those that come with it: gate, router, norm's weight and bias."""

    def shape(tensor: Tensor | None, wanted: bool) -> Tensor:
        return like(tensor) if tensor is not None and wanted else grad.new_empty(0)

    return (
        map_like(x, x.shape[1]) if need_map else grad.new_empty(0),
        shape(gate, need_map and router is None),
        laid_out(router) if router is not None and need_map else grad.new_empty(0),
        shape(norm_weight, need_map),
        shape(norm_bias, need_map),
    )


def like(tensor: Tensor) -> Tensor:
    """A gradient's shape."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def contributions_of(
    of: Chosen, weight: Tensor, bias: Tensor | None, landing: Landing
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What experts are given (E, M1, C), what each chosen pixel contributes by each tap (E, M1, ks²·O), a resting map.

    The last is there behind a norm, where experts answer to what they did not choose as well.
    """
    taps, aside, resting, rest = taps_of(weight), Aside(), None, of.norm is not None
    values = gather(of.x, of.index, of.gate_in, of.norm, of.patch, weight.dtype, centre=True, rest=rest)
    if of.norm is not None:
        with aside:  # and not beside the gathering, which leaves no room: a product is slow to begin
            resting = resting_map(taps, of.norm, of.sizes, bias, landing)
    contributions = torch.bmm(values, taps.transpose(1, 2))
    aside.join()
    return values, contributions, resting


class ProductGradients:
    """Gradients of the products: that of kernels, and that of values, which goes on to the map.

    Who did not keep the ``values`` (E, M1, C) gives none; they are gathered again. With a norm all of the values'
    gradient has to be there before any of it can go on. Then all that needs no gradient is done beside what comes
    before it, and the kernels' gradient beside what comes after. Else experts come in groups, so that little is alive
    at once.
    """

    def __init__(self, of: Chosen, weight: Tensor, values: Tensor, *, need_map: bool, need_weight: bool) -> None:
        self.of, self.weight, self.values, self.need_weight = of, weight, values, need_weight
        self.kept = values.numel() > 0
        self.aside = Aside()
        self.at_once = need_map and of.norm is not None
        self.grad_weight: Tensor | None = None
        if not self.at_once:
            self.taps = taps_of(weight)
            return
        with self.aside:
            self.taps = taps_of(weight)
            self.owners = None if of.jointly else expert_choice.owners_of(of.slots, of.index.shape[2])
            if need_weight and not self.kept:
                self.values = self._gathered(range(weight.shape[0]))

    def run(self, part_of: Callable[[range], Tensor], answers: Tensor | None, back: Back | None) -> None:
        """From the gradient of contributions to that of kernels, and to that of values, which ``back`` takes on.

        ``part_of`` gives the gradient of some experts' contributions (…, M1, ks²·O), ``answers`` (E, ks², O) that of
        what they answer at rest, unless ``part_of`` has it in its row M.
        """
        grad_taps = torch.empty_like(self.taps) if self.need_weight else None
        if back is not None and self.at_once:
            back.owners = self.owners
        for group in filter(len, self._groups()):
            inside = slice(group.start, group.stop)
            part = part_of(group)
            if self.of.norm is not None and answers is not None:
                part[:, self.of.sizes.M] = answers[inside].flatten(1)
            self.aside.join()
            if grad_taps is not None and not self.at_once:
                given = self.values[inside] if self.kept else self._gathered(group)
                torch.bmm(part.transpose(1, 2), given, out=grad_taps[inside])
                del given
            if back is None:
                continue
            grad_rows = torch.bmm(part, self.taps[inside])
            if grad_taps is not None and self.at_once:
                with self.aside:
                    torch.bmm(self.aside.keep(part).transpose(1, 2), self.values, out=self.aside.keep(grad_taps))
                    self.grad_weight = weight_of(grad_taps, self.weight)
            del part  # before the map's gradient is there
            back.add(grad_rows, group)
            del grad_rows  # before the next group's
        if grad_taps is not None and self.grad_weight is None:
            self.grad_weight = weight_of(grad_taps, self.weight)

    def finish(self) -> Tensor | None:
        """The kernels' gradient."""
        self.aside.join()
        return self.grad_weight

    def _groups(self) -> list[range]:
        """Three quarters of the experts, then the others: so most is alive before the map's gradient is there."""
        E, rows = self.weight.shape[0], self.of.sizes.rows(self.of.norm is not None)
        size = E * rows * self.taps.shape[1] * self.weight.element_size()
        if self.weight.shape[3] == 1 or self.at_once or E == 1 or size <= GROUPED:
            return [range(E)]
        first = -(-3 * E // 4)
        return [range(first), range(first, E)]

    def _gathered(self, group: range) -> Tensor:
        of = self.of
        return gather(
            of.x, of.index, of.gate_in, of.norm, of.patch, self.weight.dtype, centre=True, rest=of.norm is not None,
            experts=group,
        )  # fmt: skip

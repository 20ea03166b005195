"""A map and who chose which patches of it; and the way back to it from the gradient of what experts were given.

`Chosen` is what every operation on experts is about. `product_gradients` goes through the products, expert by expert,
and `Back` from there to the map, the gates, the router and the norm.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.ops.triton import choice
from moesaic.ops.triton.choice import by_pixel
from moesaic.ops.triton.launch import Aside, Sizes, dense, laid_out, wide
from moesaic.ops.triton.maps import taps_of
from moesaic.ops.triton.norm import norm_gradients
from moesaic.ops.triton.rows import NormTensors, collect, gather

__all__ = ["Back", "Chosen", "chosen", "like", "map_shapes", "nothing", "product_gradients"]

GROUPED = 1 << 24
"""Bytes from which the gradient of contributions is taken in two groups of experts, so that less is alive at once."""


@dataclass(frozen=True)
class Chosen:
    """A map and who chose which patches of it."""

    x: Tensor
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
        return self.kind == choice.KINDS["softmax_all"]


def chosen(
    x: Tensor, index: Tensor, slots: Tensor, gate: Tensor, scores: Tensor | None, router: Tensor | None,
    norm_weight: Tensor | None, norm_bias: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float,
    training: bool, patch: int, kind: int, on_input: bool,
) -> Chosen:  # fmt: skip
    """From what an operation is given, as kernels read it."""
    norm = None
    if norm_weight is not None and norm_bias is not None and mean is not None and var is not None:
        norm = NormTensors(norm_weight, norm_bias, mean, var, eps, training)
    x, index, slots, gate = x.contiguous(), index.contiguous(), slots.contiguous(), gate.contiguous()
    return Chosen(x, index, slots, gate, dense(scores), router, norm, patch, kind, on_input)


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
        # zeros: places that nobody took have no patch
        self.grad_gate = (
            torch.zeros(of.index.shape, dtype=wide(of.x.dtype), device=of.x.device) if of.on_input else None
        )
        self.norm_gradients: tuple[Tensor, Tensor] | None = None
        self.grad_scores: Tensor | None = None
        self.every = of.every
        if self.kernels is not None and dots is not None and of.scores is not None:
            self.grad_scores = choice.gradient_of_choice(
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
        if self.owners is None:
            self.owners = choice.owners_of(of.slots, of.index.shape[2])
        if of.norm is not None:
            *self.norm_gradients, folded = norm_gradients(
                grad_rows, of.x, of.index, of.gate_in, of.norm, of.patch, centre=self.centre
            )
        self.grad_x = collect(
            grad_rows, of.x, of.index, self.owners, of.gate_in, self.grad_gate, folded, self.beside, of.patch,
            experts, self.grad_x,
        )  # fmt: skip

    def finish(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x, gate, router, norm's weight and bias; empty where there is none."""
        of, grad_x = self.of, self.grad_x
        assert grad_x is not None
        grad_gate, grad_router = nothing(grad_x), self.grad_router
        grad_weight, grad_bias = self.norm_gradients or (nothing(grad_x), nothing(grad_x))
        dots, kernels = self.dots if self.grad_gate is None else self.grad_gate, self.kernels
        if of.router is None or kernels is None or of.scores is None:
            if dots is not None:
                grad_gate = dots if dots.ndim == 3 else dots[..., 0] if dots.shape[3] == 1 else dots.sum(3)
                grad_gate = grad_gate.to(of.gate.dtype)
        elif self.beside is not None and grad_router is None:
            grad_router = choice.router_gradient_of_chosen(self.beside[0], of.x, of.index, of.router)
        elif grad_router is None:
            grad_scores = self.grad_scores
            if grad_scores is None and dots is not None:
                grad_scores = choice.gradient_of_choice(dots, of.gate, of.scores, of.slots, of.kind, True)
            if grad_scores is not None:
                grad_x = choice.map_back(grad_scores, kernels, grad_x, of.x, of.patch)
                grad_router = choice.router_gradient(grad_scores, of.x, of.router)
        grad_router = nothing(grad_x) if grad_router is None else grad_router
        return grad_x, grad_gate, grad_router, grad_weight, grad_bias


def map_shapes(grad, x, gate, router, norm_weight, norm_bias, need_map: bool):
    """Shapes of x's gradient and of those that come with it: gate, router, norm's weight and bias."""

    def shape(tensor: Tensor | None, wanted: bool) -> Tensor:
        return like(tensor) if tensor is not None and wanted else grad.new_empty(0)

    return (
        shape(x, need_map),
        shape(gate, need_map and router is None),
        laid_out(router) if router is not None and need_map else grad.new_empty(0),
        shape(norm_weight, need_map),
        shape(norm_bias, need_map),
    )


def like(tensor: Tensor) -> Tensor:
    """A gradient's shape."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def product_gradients(
    of: Chosen,
    weight: Tensor,
    values: Tensor,
    part_of: Callable[[range], Tensor],
    answers: Tensor | None,
    back: Back | None,
    *,
    need_weight: bool,
) -> tuple[Tensor | None, Aside]:
    """Gradient of kernels as taps (E, ks²·O, C), and that of values, which goes on by ``back``.

    ``part_of`` gives the gradient of some experts' contributions (…, M1, ks²·O), ``answers`` (E, ks², O) that of what
    they answer at rest. 1×1 kernels have their ``values`` (E, M1, C); of others they are gathered again.

    With a norm, kernels' gradients are computed beside what follows: join before they are used.
    """
    E, _, C, ks, _ = weight.shape
    small, norm, M = ks == 1, of.norm is not None, of.sizes.M
    rows, taps = of.sizes.rows(norm), taps_of(weight)
    # three quarters of the experts, then the others: so most is alive before the map's gradient is there
    parted = not small and E > 1 and E * rows * taps.shape[1] * weight.element_size() > GROUPED
    groups = [range(-(-3 * E // 4)), range(-(-3 * E // 4), E)] if parted else [range(E)]
    grad_taps = torch.empty_like(taps) if need_weight else None
    # a norm needs all rows' gradients before any goes on to the map
    grad_rows = None
    if norm and back is not None:
        grad_rows = torch.empty(E, rows, C, dtype=weight.dtype, device=weight.device)
    aside = Aside()

    def of_taps(part: Tensor, group: range) -> None:
        assert grad_taps is not None
        given = values if small else gather(
            of.x, of.index, of.gate_in, of.norm, of.patch, weight.dtype, centre=True, rest=norm, experts=group
        )  # fmt: skip
        torch.bmm(part.transpose(1, 2), given, out=grad_taps[group.start : group.stop])

    for group in filter(len, groups):
        inside = slice(group.start, group.stop)
        part = part_of(group)
        if norm and answers is not None:
            part[:, M] = answers[inside].flatten(1)
        if grad_taps is not None and grad_rows is not None:
            with aside:
                of_taps(aside.keep(part), group)
        elif grad_taps is not None:
            of_taps(part, group)
        given = None
        if grad_rows is not None:
            torch.bmm(part, taps[inside], out=grad_rows[inside])
        elif back is not None:
            given = torch.bmm(part, taps[inside])
        del part  # before the map's gradient is there
        if back is not None and given is not None:
            back.add(given, group)
            del given
    if back is not None and grad_rows is not None:
        back.add(grad_rows, range(E))
    return grad_taps, aside

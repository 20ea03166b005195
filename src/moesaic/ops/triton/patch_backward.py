"""The backward pass from the gradient of experts' contributions to those of map, gates, router, norm and weights.

    contributions = values · tapsᵀ                      (E, M1, ks²·O) = (E, M1, C) · (E, C, ks²·O)
    grad_values = grad · taps, grad_taps = gradᵀ · values

`MatmulBackward` computes the second line, and `InputBackward` goes on from ``grad_values`` to the map (B, C, H, W), the
gates (B, E, L), the router (E, C, p, p) and the norm (E, C).
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from moesaic.ops.triton import expert_choice, fused_backward
from moesaic.ops.triton.background import resting_map
from moesaic.ops.triton.expert_choice import by_pixel
from moesaic.ops.triton.gather import collect, collect_tile, gather
from moesaic.ops.triton.launch import Aside, as_map, ceil, map_like, placeholder, wide
from moesaic.ops.triton.norm import norm_gradients
from moesaic.ops.triton.operands import InputGradients, RoutedMap
from moesaic.ops.triton.scatter import Landing, taps_of, weight_of
from moesaic.ops.weight_layout import laid_out

__all__ = [
    "InputBackward",
    "MatmulBackward",
    "contiguous_like",
    "expert_contributions",
    "fake_input_gradients",
    "no_input_gradients",
]

GROUPED = 1 << 24
"""Bytes from which the gradient of contributions is taken in two groups of experts, so that less is alive at once."""


class InputBackward:
    """From gradients of values, a group of experts at a time, to those of x, gate, router and norm.

    ``dots`` (B, E, L, p²) is the gradient of gates on the output, pixel by pixel. The last ``beside`` columns of
    ``rows`` (E, M, …) are filled with the gradient of selected patches' scores; see `pointwise`.
    """

    def __init__(
        self, routed: RoutedMap, dots: Tensor | None, *, centre: bool, rows: Tensor | None = None, beside: int = 0
    ) -> None:
        self.routed, self.dots, self.centre = routed, dots, centre
        self.fused = fused_backward.applies(routed)
        self.kernels = None if routed.router is None else by_pixel(routed.router)
        self.owners: tuple[Tensor, Tensor] | None = None
        self.grad_x: Tensor | None = None
        self.grad_router: Tensor | None = None
        self.grad_gate = None
        if routed.options.gate_on_input and not self.fused:
            # in parts, over blocks of channels; zeros, because unused slots have no patch that would write them
            BC, _ = collect_tile(routed.sizes, routed.norm is not None, gate=True, x=routed.x)
            shape = (*routed.index.shape, ceil(routed.x.shape[3], BC))
            self.grad_gate = torch.zeros(shape, dtype=wide(routed.x.dtype), device=routed.x.device)
        self.grad_norm_weight: Tensor | None = None
        self.grad_norm_bias: Tensor | None = None
        self.grad_scores: Tensor | None = None
        if self.kernels is not None and dots is not None and routed.scores is not None:
            self.grad_scores = expert_choice.gradient_of_choice(
                dots, routed.gate, routed.scores, routed.slots, routed.options.gate_kind, routed.softmax_over_all, rows,
                beside,
            )  # fmt: skip

    @property
    def selected_scores(self) -> tuple[Tensor, Tensor] | None:
        """Gradient of selected patches' scores and the router's kernels; None where all patches' scores have one.

        The former is added while the map's gradient is written; the latter takes a pass of its own.
        """
        if self.grad_scores is None or self.kernels is None or self.routed.softmax_over_all:
            return None
        return self.grad_scores, self.kernels

    def add(self, grad_rows: Tensor, experts: range) -> None:
        """Gradients of these experts' values (…, M1, C); with a norm, of all experts at once."""
        routed, terms = self.routed, None
        if self.fused:
            gradients = fused_backward.joint_gradients(grad_rows, routed, centre=self.centre)
            self.grad_x, self.grad_router = gradients.x, gradients.router
            self.grad_norm_weight, self.grad_norm_bias = gradients.norm_weight, gradients.norm_bias
            return
        if self.owners is None:
            self.owners = expert_choice.owners_of(routed.slots, routed.index.shape[2])
        if routed.norm is not None:
            norm = norm_gradients(grad_rows, routed, routed.norm, centre=self.centre)
            self.grad_norm_weight, self.grad_norm_bias, terms = norm
        self.grad_x = collect(
            grad_rows, routed, self.owners, self.grad_gate, terms, self.selected_scores, experts, self.grad_x
        )

    def finish(self, aside: Aside | None = None) -> InputGradients:
        """Gradients of x (B, C, H, W), gate, router, norm's weight and bias; empty where there is none.

        The router's may be computed on the stream ``aside``: join it before using the gradient.
        """
        routed, grad_x = self.routed, self.grad_x
        assert grad_x is not None
        grad_gate, grad_router = placeholder(grad_x), self.grad_router
        dots, kernels = self.dots if self.grad_gate is None else self.grad_gate, self.kernels
        if routed.router is None or kernels is None or routed.scores is None:
            if dots is not None:
                grad_gate = dots[..., 0] if dots.shape[3] == 1 else dots.sum(3)
                grad_gate = grad_gate.to(routed.gate.dtype)
        elif self.selected_scores is not None and grad_router is None:
            grad_scores, _ = self.selected_scores
            grad_router = expert_choice.router_gradient_of_chosen(grad_scores, routed.x, routed.index, routed.router)
        elif grad_router is None:
            grad_scores = self.grad_scores
            if grad_scores is None and dots is not None:
                grad_scores = expert_choice.gradient_of_choice(
                    dots, routed.gate, routed.scores, routed.slots, routed.options.gate_kind, True
                )
            if grad_scores is not None:
                with aside or nullcontext():
                    grad_router = expert_choice.router_gradient(grad_scores, routed.x, routed.router)
                if aside is not None:
                    aside.keep(grad_scores)
                grad_x = expert_choice.map_back(grad_scores, kernels, grad_x, routed.x, routed.options.patch_size)
        return InputGradients(
            as_map(grad_x),
            grad_gate,
            *(
                placeholder(grad_x) if gradient is None else gradient
                for gradient in (grad_router, self.grad_norm_weight, self.grad_norm_bias)
            ),
        )


def no_input_gradients(like: Tensor) -> InputGradients:
    """Empty tensors, where none of these gradients is needed."""
    return InputGradients(*(placeholder(like) for _ in InputGradients._fields))


def fake_input_gradients(grad: Tensor, inputs: Any, need_input: bool) -> InputGradients:
    """Shapes of what `InputBackward` or `no_input_gradients` returns, for tracing."""

    def shape(tensor: Tensor | None, needed: bool) -> Tensor:
        return contiguous_like(tensor) if tensor is not None and needed else grad.new_empty(0)

    router = inputs.router
    return InputGradients(
        map_like(inputs.x, inputs.x.shape[1]) if need_input else grad.new_empty(0),
        shape(inputs.gate, need_input and router is None),
        laid_out(router) if router is not None and need_input else grad.new_empty(0),
        shape(inputs.norm_weight, need_input),
        shape(inputs.norm_bias, need_input),
    )


def contiguous_like(tensor: Tensor) -> Tensor:
    """Memory for a gradient."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def expert_contributions(
    routed: RoutedMap, weight: Tensor, bias: Tensor | None, landing: Landing
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Experts' inputs (E, M1, C), selected pixels' contributions by tap (E, M1, ks²·O), background (E, H·W, O).

    The background is there behind a norm, where unselected positions are not zero for an expert.
    """
    taps, aside, resting, rest = taps_of(weight), Aside(), None, routed.norm is not None
    values = gather(routed, weight.dtype, centre=True, rest=rest)
    if routed.norm is not None:
        # concurrent with the matmul, which is slow to start; the gather before it leaves no multiprocessor idle
        with aside:
            resting = resting_map(taps, routed.norm, routed.sizes, bias, landing)
    contributions = torch.bmm(values, taps.transpose(1, 2))
    aside.join()
    return values, contributions, resting


class MatmulBackward:
    """Gradients through the matmuls: that of kernels, and that of values, which goes on to the map.

    Who did not keep the ``values`` (E, M1, C) gives none; they are gathered again. With a norm all of the values'
    gradient has to be there before any of it can go on. Then all that needs no gradient is done beside what comes
    before it, and the kernels' gradient beside what comes after. Else experts come in groups, so that little is alive
    at once.
    """

    def __init__(
        self, routed: RoutedMap, weight: Tensor, values: Tensor, *, need_input: bool, need_weight: bool
    ) -> None:
        self.routed, self.weight, self.values, self.need_weight = routed, weight, values, need_weight
        self.kept = values.numel() > 0
        self.aside = Aside()
        self.at_once = need_input and routed.norm is not None
        self.grad_weight: Tensor | None = None
        if not self.at_once:
            self.taps = taps_of(weight)
            return
        with self.aside:
            self.taps = taps_of(weight)
            fused = fused_backward.applies(routed)
            self.owners = None if fused else expert_choice.owners_of(routed.slots, routed.index.shape[2])
            if need_weight and not self.kept:
                self.values = self._gathered(range(weight.shape[0]))

    def run(self, part_of: Callable[[range], Tensor], answers: Tensor | None, back: InputBackward | None) -> None:
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
            if self.routed.norm is not None and answers is not None:
                part[:, self.routed.sizes.M] = answers[inside].flatten(1)
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
        E, rows = self.weight.shape[0], self.routed.sizes.rows(self.routed.norm is not None)
        size = E * rows * self.taps.shape[1] * self.weight.element_size()
        if self.weight.shape[3] == 1 or self.at_once or E == 1 or size <= GROUPED:
            return [range(E)]
        first = -(-3 * E // 4)
        return [range(first), range(first, E)]

    def _gathered(self, group: range) -> Tensor:
        routed = self.routed
        return gather(routed, self.weight.dtype, centre=True, rest=routed.norm is not None, experts=group)

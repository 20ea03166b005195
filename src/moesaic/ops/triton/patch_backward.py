"""The backward pass from the gradient of experts' contributions to those of map, gates, router, norm and weights.

    contributions = values · tapsᵀ                      (E, M1, ks²·O) = (E, M1, C) · (E, C, ks²·O)
    grad_values = grad · taps, grad_taps = gradᵀ · values

`MatmulBackward` computes the second line, and `InputBackward` goes on from ``grad_values`` to the map (B, C, H, W), the
gates (B, E, L), the router (E, C, p, p) and the norm (E, C).
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from moesaic.ops.triton import expert_choice, norm_router_backward
from moesaic.ops.triton.expert_background import background_map
from moesaic.ops.triton.expert_choice import router_by_pixel
from moesaic.ops.triton.gather import gather, gather_backward, gather_backward_tile
from moesaic.ops.triton.launch import SideStream, acc_dtype, ceil_div, empty_map_like, placeholder, to_nchw
from moesaic.ops.triton.norm import norm_gradients
from moesaic.ops.triton.operands import InputGradients, RoutedMap
from moesaic.ops.triton.scatter import ScatterSpec, taps_to_weight, weight_to_taps
from moesaic.ops.weight_layout import empty_weight_like

__all__ = [
    "InputBackward",
    "MatmulBackward",
    "contiguous_like",
    "expert_contributions",
    "fake_input_gradients",
    "no_input_gradients",
]

GROUP_BYTES = 1 << 24
"""Bytes from which the gradient of contributions is taken in two groups of experts, to use less memory at once."""


class InputBackward:
    """From gradients of values, a group of experts at a time, to those of x, gate, router and norm.

    ``gate_dots`` (B, E, L, p²) is the gradient of gates on the output, pixel by pixel. The last ``router_columns``
    columns of ``rows`` (E, M, …) are filled with the gradient of selected patches' scores; see `pointwise_experts`.
    """

    def __init__(
        self,
        routed: RoutedMap,
        gate_dots: Tensor | None,
        *,
        centre: bool,
        rows: Tensor | None = None,
        router_columns: int = 0,
    ) -> None:
        self.routed, self.gate_dots, self.centre = routed, gate_dots, centre
        self.fused = norm_router_backward.applies(routed)
        self.kernels = None if routed.router is None else router_by_pixel(routed.router)
        self.owners: tuple[Tensor, Tensor] | None = None
        self.grad_x: Tensor | None = None
        self.grad_router: Tensor | None = None
        self.grad_gate = None
        if routed.options.gate_on_input and not self.fused:
            # in parts, over blocks of channels; zeros, because unused slots have no patch that would write them
            BC, _ = gather_backward_tile(routed.dims, routed.norm is not None, gate=True, x=routed.x)
            shape = (*routed.index.shape, ceil_div(routed.x.shape[3], BC))
            self.grad_gate = torch.zeros(shape, dtype=acc_dtype(routed.x.dtype), device=routed.x.device)
        self.grad_norm_weight: Tensor | None = None
        self.grad_norm_bias: Tensor | None = None
        self.grad_scores: Tensor | None = None
        if self.kernels is not None and gate_dots is not None and routed.scores is not None:
            self.grad_scores = expert_choice.score_gradient(
                gate_dots, routed.gate, routed.scores, routed.slots, routed.options.gate_kind, routed.dense_scores,
                rows, router_columns,
            )  # fmt: skip

    @property
    def selected_scores(self) -> tuple[Tensor, Tensor] | None:
        """Gradient of selected patches' scores and the router's kernels; None where all patches' scores have one.

        The former is added while the map's gradient is written; the latter takes a pass of its own.
        """
        if self.grad_scores is None or self.kernels is None or self.routed.dense_scores:
            return None
        return self.grad_scores, self.kernels

    def add(self, grad_rows: Tensor, experts: range) -> None:
        """Gradients of these experts' values (…, M1, C); with a norm, of all experts at once."""
        routed, terms = self.routed, None
        if self.fused:
            gradients = norm_router_backward.fused_gradients(grad_rows, routed, centre=self.centre)
            self.grad_x, self.grad_router = gradients.x, gradients.router
            self.grad_norm_weight, self.grad_norm_bias = gradients.norm_weight, gradients.norm_bias
            return
        if self.owners is None:
            self.owners = expert_choice.patch_owners(routed.slots, routed.index.shape[2])
        if routed.norm is not None:
            norm = norm_gradients(grad_rows, routed, routed.norm, centre=self.centre)
            self.grad_norm_weight, self.grad_norm_bias, terms = norm
        self.grad_x = gather_backward(
            grad_rows, routed, self.owners, self.grad_gate, terms, self.selected_scores, experts, self.grad_x
        )

    def finish(self, side: SideStream | None = None) -> InputGradients:
        """Gradients of x (B, C, H, W), gate, router, norm's weight and bias; empty where there is none.

        The router's may be computed on the second stream ``side``: join it before using the gradient.
        """
        routed, grad_x = self.routed, self.grad_x
        assert grad_x is not None
        grad_gate, grad_router = placeholder(grad_x), self.grad_router
        gate_dots, kernels = self.gate_dots if self.grad_gate is None else self.grad_gate, self.kernels
        if routed.router is None or kernels is None or routed.scores is None:
            if gate_dots is not None:
                grad_gate = gate_dots[..., 0] if gate_dots.shape[3] == 1 else gate_dots.sum(3)
                grad_gate = grad_gate.to(routed.gate.dtype)
        elif self.selected_scores is not None and grad_router is None:
            grad_scores, _ = self.selected_scores
            grad_router = expert_choice.router_gradient_selected(grad_scores, routed.x, routed.index, routed.router)
        elif grad_router is None:
            grad_scores = self.grad_scores
            if grad_scores is None and gate_dots is not None:
                grad_scores = expert_choice.score_gradient(
                    gate_dots, routed.gate, routed.scores, routed.slots, routed.options.gate_kind, True
                )
            if grad_scores is not None:
                with side or nullcontext():
                    grad_router = expert_choice.router_gradient(grad_scores, routed.x, routed.router)
                if side is not None:
                    side.keep_alive(grad_scores)
                grad_x = expert_choice.scores_to_map_gradient(
                    grad_scores, kernels, grad_x, routed.x, routed.options.patch_size
                )
        return InputGradients(
            to_nchw(grad_x),
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
        empty_map_like(inputs.x, inputs.x.shape[1]) if need_input else grad.new_empty(0),
        shape(inputs.gate, need_input and router is None),
        empty_weight_like(router) if router is not None and need_input else grad.new_empty(0),
        shape(inputs.norm_weight, need_input),
        shape(inputs.norm_bias, need_input),
    )


def contiguous_like(tensor: Tensor) -> Tensor:
    """Memory for a gradient."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def expert_contributions(
    routed: RoutedMap, weight: Tensor, bias: Tensor | None, spec: ScatterSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Experts' inputs (E, M1, C), selected pixels' contributions by tap (E, M1, ks²·O), background (E, H·W, O).

    The background is there behind a norm, where unselected positions are not zero for an expert.
    """
    taps, side, background, background_row = weight_to_taps(weight), SideStream(), None, routed.norm is not None
    values = gather(routed, weight.dtype, centre=True, background_row=background_row)
    if routed.norm is not None:
        # concurrent with the matmul, which is slow to start; the gather before it leaves no multiprocessor idle
        with side:
            background = background_map(taps, routed.norm, routed.dims, bias, spec)
    contributions = torch.bmm(values, taps.transpose(1, 2))
    side.join()
    return values, contributions, background


class MatmulBackward:
    """Gradients through the matmuls: that of the weights, and that of values, which goes on to the map.

    Empty ``values`` were not saved and are gathered again. With a norm, the gradient of all values has to be there
    before any of it can go on: what needs no gradient then runs on a side stream before it, and the weights' gradient
    on a side stream after it. Without one, experts come in groups, so that less memory is in use at once.
    """

    def __init__(
        self, routed: RoutedMap, weight: Tensor, values: Tensor, *, need_input: bool, need_weight: bool
    ) -> None:
        self.routed, self.weight, self.values, self.need_weight = routed, weight, values, need_weight
        self.has_values = values.numel() > 0
        self.side = SideStream()
        self.at_once = need_input and routed.norm is not None
        self.grad_weight: Tensor | None = None
        if not self.at_once:
            self.taps = weight_to_taps(weight)
            return
        with self.side:
            self.taps = weight_to_taps(weight)
            fused = norm_router_backward.applies(routed)
            self.owners = None if fused else expert_choice.patch_owners(routed.slots, routed.index.shape[2])
            if need_weight and not self.has_values:
                self.values = self._gather_again(range(weight.shape[0]))

    def run(
        self, contribution_grad: Callable[[range], Tensor], tap_grad: Tensor | None, back: InputBackward | None
    ) -> None:
        """From the gradient of contributions to that of weights, and to that of values, which ``back`` takes on.

        ``contribution_grad`` returns the gradient of some experts' contributions (…, M1, ks²·O). ``tap_grad`` (E, ks²,
        O) is that of the background by tap, unless ``contribution_grad`` has it in its row M.
        """
        grad_taps = torch.empty_like(self.taps) if self.need_weight else None
        if back is not None and self.at_once:
            back.owners = self.owners
        for group in filter(len, self._groups()):
            inside = slice(group.start, group.stop)
            grad_part = contribution_grad(group)
            if self.routed.norm is not None and tap_grad is not None:
                grad_part[:, self.routed.dims.M] = tap_grad[inside].flatten(1)
            self.side.join()
            if grad_taps is not None and not self.at_once:
                given = self.values[inside] if self.has_values else self._gather_again(group)
                torch.bmm(grad_part.transpose(1, 2), given, out=grad_taps[inside])
                del given
            if back is None:
                continue
            grad_rows = torch.bmm(grad_part, self.taps[inside])
            if grad_taps is not None and self.at_once:
                with self.side:
                    torch.bmm(
                        self.side.keep_alive(grad_part).transpose(1, 2),
                        self.values,
                        out=self.side.keep_alive(grad_taps),
                    )
                    self.grad_weight = taps_to_weight(grad_taps, self.weight)
            del grad_part  # before the map's gradient is there
            back.add(grad_rows, group)
            del grad_rows  # before the next group's
        if grad_taps is not None and self.grad_weight is None:
            self.grad_weight = taps_to_weight(grad_taps, self.weight)

    def finish(self) -> Tensor | None:
        """The weights' gradient."""
        self.side.join()
        return self.grad_weight

    def _groups(self) -> list[range]:
        """Three quarters of the experts, then the others: memory peaks before the map's gradient is allocated."""
        E, rows = self.weight.shape[0], self.routed.dims.padded_rows(self.routed.norm is not None)
        size = E * rows * self.taps.shape[1] * self.weight.element_size()
        if self.weight.shape[3] == 1 or self.at_once or E == 1 or size <= GROUP_BYTES:
            return [range(E)]
        first = -(-3 * E // 4)
        return [range(first), range(first, E)]

    def _gather_again(self, group: range) -> Tensor:
        routed = self.routed
        return gather(routed, self.weight.dtype, centre=True, background_row=routed.norm is not None, experts=group)

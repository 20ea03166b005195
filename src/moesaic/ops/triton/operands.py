"""Named structures that the custom operators take and return, and their flat form at the operator boundary.

A torch operator takes tensors, lists of tensors and lists of numbers. Differentiable inputs are arguments of their own,
so that autograd follows them; everything else travels in two lists:

    constants    `Constants`: tensors without a gradient (indices, slots, scores, statistics)
    options      `PatchOptions`: integers and flags that fix what is computed

`ConvInputs` and `MLPInputs` name the differentiable inputs in the operators' order. Their gradients, and the flags that
say which gradients are needed, come in the same structures, so that no gradient is found by its position.
`RoutedMap` is what kernels work on.
"""

# Triton is installed on GPU machines alone, so its types are unknown to a type checker.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from moesaic.ops.triton.launch import PatchDims, contiguous_or_none, to_nhwc
from moesaic.ops.triton_backend import GATE_KINDS

__all__ = [
    "Constants",
    "ConvInputs",
    "InputGradients",
    "MLPInputs",
    "NormTensors",
    "PatchOperands",
    "PatchOptions",
    "RoutedMap",
    "choice_operands",
    "needed_gradients",
    "needs_input",
]


class PatchOptions(NamedTuple):
    """What an operator computes, apart from its tensors; integers and flags only."""

    patch_size: int
    gate_kind: int
    """How gates come from scores: an index of `moesaic.ops.triton_backend.GATE_KINDS`."""
    gate_on_input: bool
    isolated: bool
    """``context="patch"``: a convolution does not see across the borders of a patch."""
    sum_experts: bool
    """``combine="sum"``: experts are added up instead of concatenated."""
    batch_stats: bool
    """Whether the norm's statistics are those of this map (training), so that gradients flow through them."""
    save: bool
    """Whether intermediate results are returned for the backward pass."""
    activation: int = 0
    """Of expert MLPs: an index of `moesaic.ops.triton.activation.ACTIVATIONS`."""

    def flatten(self) -> tuple[int, ...]:
        """Integers, as an operator takes them."""
        return tuple([int(value) for value in self])

    @classmethod
    def unflatten(cls, values: Sequence[int]) -> PatchOptions:
        """The inverse of `flatten`.

        >>> options = PatchOptions(2, 1, True, False, False, True, True)
        >>> PatchOptions.unflatten(options.flatten()) == options
        True
        """
        patch_size, gate_kind, *flags, activation = values
        on_input, isolated, sum_experts, batch_stats, save = (bool(flag) for flag in flags)
        return cls(patch_size, gate_kind, on_input, isolated, sum_experts, batch_stats, save, activation)


class Constants(NamedTuple):
    """Tensors that an operator reads and that have no gradient."""

    index: Tensor
    """(B, E, L)"""
    slots: Tensor
    """(B, E, N): which of its L slots an expert gave to a patch, -1 for none."""
    scores: Tensor | None
    """(B, N, E), where gates are a softmax of these scores."""
    mean: Tensor | None
    """(E, C): statistics of the experts' norm, and ``var`` likewise."""
    var: Tensor | None
    output_mean: Tensor | None = None
    """(E·O): running statistics of a norm behind the experts, and ``output_var`` likewise."""
    output_var: Tensor | None = None

    def no_gradients(self) -> list[None] | None:
        """What autograd expects as this list's gradient: a list of None, or None if the list itself has a None."""
        return None if any(tensor is None for tensor in self) else [None] * len(self)


class ConvInputs(NamedTuple):
    """Differentiable inputs of a routed convolution; also their gradients, or which of them are needed."""

    x: Any
    """(B, C, H, W)"""
    weight: Any
    """(E, O, C, ks, ks)"""
    bias: Any
    """(E, O), or None"""
    gate: Any
    """(B, E, L)"""
    router: Any
    """(E, C, p, p), or None: kernels of the router whose softmax the gates are. The gate's gradient then goes on to the
    router and the map inside the operator, and none is returned for the gate."""
    norm_weight: Any
    """(E, C), or None, and ``norm_bias`` likewise."""
    norm_bias: Any


class MLPInputs(NamedTuple):
    """Differentiable inputs of routed MLPs; also their gradients, or which of them are needed."""

    x: Any
    weight_in: Any
    """(E, J, C)"""
    bias_in: Any
    """(E, J), or None"""
    weight_out: Any
    """(E, O, J)"""
    bias_out: Any
    """(E, O), or None"""
    gate: Any
    router: Any
    norm_weight: Any
    norm_bias: Any


class InputGradients(NamedTuple):
    """Gradients of a map and of what acts on it before the experts; empty tensors where there is none."""

    x: Tensor
    gate: Tensor
    router: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


class PatchOperands(NamedTuple):
    """What every operator over routed patches takes besides the map and the experts' weights."""

    gate: Tensor
    router: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    constants: Constants
    options: PatchOptions
    eps: float

    def flatten(self) -> tuple[Any, ...]:
        """Arguments in the operators' order."""
        return *self[:4], list(self.constants), self.options.flatten(), self.eps


def choice_operands(
    router: Tensor | None,
    choice: Sequence[Tensor],
    gate_kind: int,
    moments: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor | None, Constants]:
    """Gate, router and constants of an operator over the patches of an expert choice.

    Args:
        router: the kernels of the router.
        choice: scores, index, gate and slots, as ``patch_route`` returns them.
        gate_kind: an index of `moesaic.ops.triton_backend.GATE_KINDS`.
        moments: mean and variance of the experts' norm.
    """
    scores, index, gate, slots = choice
    if gate_kind == GATE_KINDS["one"]:  # such gates have no gradient, which the router would get otherwise
        return gate, None, Constants(index, slots, None, *moments)
    return gate, router, Constants(index, slots, scores, *moments)


def needs_input(needs: Any) -> bool:
    """Whether a gradient is needed of the map or of what acts on it before the experts."""
    return needs.x or needs.gate or needs.router or needs.norm_weight or needs.norm_bias


def needed_gradients(gradients: Iterable[Tensor], needs: Iterable[bool]) -> tuple[Tensor | None, ...]:
    """Gradients for autograd: None where none is needed, and where an operator returned an empty placeholder."""
    return tuple(
        gradient if needed and gradient.numel() else None for gradient, needed in zip(gradients, needs, strict=True)
    )


@dataclass(frozen=True)
class NormTensors:
    """BatchNorm of the experts' masked maps: tensors (E, C); the statistics are those that apply now."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    eps: float
    batch_stats: bool
    """Whether mean and var are those of this map, so that gradients flow through them."""


@dataclass(frozen=True)
class RoutedMap:
    """A map and the patches that experts selected of it, laid out as kernels read them."""

    x: Tensor
    """(B, H, W, C)"""
    index: Tensor
    slots: Tensor
    gate: Tensor
    scores: Tensor | None
    router: Tensor | None
    norm: NormTensors | None
    options: PatchOptions

    @classmethod
    def of(cls, inputs: Any, constants: Constants, options: PatchOptions, eps: float) -> RoutedMap:
        """From an operator's arguments; ``inputs`` has x, gate, router, norm_weight and norm_bias."""
        norm = None
        if inputs.norm_weight is not None and constants.mean is not None and constants.var is not None:
            norm = NormTensors(
                inputs.norm_weight, inputs.norm_bias, constants.mean, constants.var, eps, options.batch_stats
            )
        return cls(
            to_nhwc(inputs.x),
            constants.index.contiguous(),
            constants.slots.contiguous(),
            inputs.gate.contiguous(),
            contiguous_or_none(constants.scores),
            inputs.router,
            norm,
            options,
        )

    @property
    def dims(self) -> PatchDims:
        return PatchDims.of(self.x, self.index, self.options.patch_size)

    @property
    def input_gate(self) -> Tensor | None:
        """The gate where it multiplies the experts' inputs."""
        return self.gate if self.options.gate_on_input else None

    @property
    def output_gate(self) -> Tensor | None:
        """The gate where it multiplies the experts' outputs."""
        return None if self.options.gate_on_input else self.gate

    @property
    def dense_scores(self) -> bool:
        """Whether gates depend on scores of patches that their expert did not select, or on scores of other experts."""
        return self.options.gate_kind in (GATE_KINDS["softmax_all"], GATE_KINDS["softmax_experts"])

"""Stacked convolutions of any odd kernel size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.experts.stacked_experts import Experts
from moesaic.ops import ConvWeights, PatchChoice, PatchSelection, PatchSpec, run_chosen_conv, run_conv
from moesaic.ops.patch.cpu_inference import PreparedCache
from moesaic.ops.weight_layout import channels_last, is_taps_first, to_taps_first
from moesaic.routing_record import Routing

__all__ = ["ConvExperts"]


class ConvExperts(Experts):
    """E convolutions with "same" zero padding: ``weight`` (E, O, C, ks, ks), ``bias`` (E, O).

    In channels_last the memory layout of ``weight`` is (E, O, ks, ks, C) on a CPU and (E, ks, ks, O, C) on a GPU.

    >>> experts = ConvExperts(8, 640, 80, kernel_size=3)
    >>> len(experts), tuple(experts.weight.shape)
    (8, (8, 80, 640, 3, 3))
    """

    def __init__(
        self,
        experts: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        *,
        bias: bool = True,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(experts, in_channels, out_channels, norm=norm, device=device, dtype=dtype)
        check_positive("ConvExperts", kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(
                f"ConvExperts: kernel_size={kernel_size} has no centre pixel; use an odd size, "
                f"{kernel_size - 1 or 1} or {kernel_size + 1}"
            )
        self.kernel_size = kernel_size
        self.has_bias = bias
        self._prepared = PreparedCache()
        shape = (experts, out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises each expert as ``nn.Conv2d`` does: uniform in ±1/√fan_in."""
        bound = 1 / math.sqrt(self.in_channels * self.kernel_size**2)
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound, generator=generator)

    def forward(self, x: Tensor, routing: Routing, spec: PatchSpec, selection: PatchSelection | None = None) -> Tensor:
        return run_conv(x, routing, self.weights, self.norm_tensors(x), spec, selection, self.dispatcher)

    def run_chosen(self, x: Tensor, choice: PatchChoice, spec: PatchSpec) -> Tensor | None:
        return run_chosen_conv(x, choice, self.weights, spec) if self.norm is None else None

    @property
    def first_weight(self) -> Tensor:
        return self.weight  # found faster than the first of all parameters

    @property
    def weights(self) -> ConvWeights:
        """Weight and bias, as backends take them."""
        return ConvWeights(self.weight, self.bias, self._prepared)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> ConvExperts:
        # model.to(memory_format=channels_last) converts 4-D weights only, so it gets the experts' filters as one 4-D
        # tensor. On a GPU channels_last weights are then stored taps first, the layout its kernels read.
        def applied(tensor: Tensor) -> Tensor:
            if tensor.ndim != 5:
                return fn(tensor)
            convolutions = tensor.flatten(0, 1)
            if is_taps_first(tensor):
                convolutions = convolutions.contiguous(memory_format=torch.channels_last)
            moved = fn(convolutions)
            if moved is convolutions and _on_gpu(tensor):
                return tensor  # not replaced, because a CUDA graph may hold its address
            weight = moved.view(tensor.shape)
            return to_taps_first(weight) if _on_gpu(weight) and channels_last(weight) else weight

        super()._apply(applied, *args, **kwargs)
        return self

    def extra_repr(self) -> str:
        return (
            f"{len(self)} × ({self.in_channels} → {self.out_channels}), kernel_size={self.kernel_size}, "
            f"bias={self.has_bias}"
        )


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda

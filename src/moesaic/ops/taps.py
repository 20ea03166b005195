"""What each pixel contributes at every tap of its expert's kernel: one product per expert, and its gradients.

A product wants a matrix of all taps. Weights in channels_last hold it already, with an output channel's taps side by
side; scattering wants a tap's output channels side by side. Either the weights are brought into that order or the
product is: whichever is smaller. Gradients of weights come in the order in which the weights lie, so that nobody
copies them afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["tap_products"]


def tap_products(values_EMC: Tensor, weight: Tensor) -> Tensor:
    """Values (E, M, C) times the taps of convolutions (E, O, C, ks, ks): (E, M, ks·ks, O).

    >>> values, weight = torch.ones(1, 2, 3), torch.arange(9.0).view(1, 1, 1, 3, 3).expand(1, 1, 3, 3, 3)
    >>> tap_products(values, weight)[0, 0, :, 0].tolist()
    [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0]
    """
    if torch.compiler.is_compiling():  # whose graphs are for any batch, so that nothing may depend on M
        return _forward(values_EMC, weight, as_it_lies=False)
    products: Tensor = _TapProducts.apply(values_EMC, weight)  # pyright: ignore[reportAssignmentType]
    return products


class _TapProducts(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values_EMC: Tensor, weight: Tensor) -> Tensor:
        return _forward(values_EMC, weight, _taps_lie_together(values_EMC, weight))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        values, weight = ctx.saved_tensors
        E, O, C, ks, _ = weight.shape
        M = values.shape[1]
        as_it_lies = _taps_lie_together(values, weight)
        gradient = gradients[0]
        if as_it_lies:
            gradient = gradient.transpose(2, 3)
        rows = gradient.reshape(E, M, ks * ks * O)
        of_values = of_weight = None
        if ctx.needs_input_grad[0]:
            of_values = torch.bmm(rows, _matrix(weight, as_it_lies))
        if ctx.needs_input_grad[1]:
            of_weight = torch.bmm(rows.transpose(1, 2), values)
            if as_it_lies:
                of_weight = of_weight.view(E, O, ks, ks, C).permute(0, 1, 4, 2, 3)
            else:
                of_weight = of_weight.view(E, ks, ks, O, C).permute(0, 3, 4, 1, 2)
        return of_values, of_weight


def _forward(values: Tensor, weight: Tensor, as_it_lies: bool) -> Tensor:
    E, O, _, ks, _ = weight.shape
    M = values.shape[1]
    products = torch.bmm(values, _matrix(weight, as_it_lies).transpose(1, 2))
    if as_it_lies:
        return products.view(E, M, O, ks * ks).transpose(2, 3).contiguous()
    return products.view(E, M, ks * ks, O)


def _taps_lie_together(values: Tensor, weight: Tensor) -> bool:
    """Whether to take the weights as they lie: the products, which are then turned, are the smaller of the two."""
    return values.shape[1] < weight.shape[2] and weight.permute(0, 1, 3, 4, 2).is_contiguous()


def _matrix(weight: Tensor, as_it_lies: bool) -> Tensor:
    """All taps of each expert as rows: (E, ks·ks·O, C), or without a copy (E, O·ks·ks, C)."""
    return weight.permute(0, 1, 3, 4, 2).flatten(1, 3) if as_it_lies else weight.permute(0, 3, 4, 1, 2).flatten(1, 3)

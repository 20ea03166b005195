"""Convolution in scatter form, with hand-written gradients on a CPU.

    y[row_Rk[r, k]] += W_e[k] · values[r]        pixel r of expert e, tap k of the kernel

Values are (E, M, C), R = E · M; weights (E, O, C, ks, ks); sums y (rows, O). The contributions of an expert are one
matmul of its values with the matrix of all taps, (C, ks·ks·O). Weights in channels_last already are such a matrix with
the taps innermost, while the scatter wants the output channels innermost: either the weights or the contributions are
transposed, whichever are smaller. Weight gradients have the layout of the weights, and contributions are not
saved for the backward pass: allocating fresh memory costs a CPU more than the sums.

Compilation, function transforms such as vmap, double backward and other devices use differentiable torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.cpu_gemm import expert_bmm, expert_bmm_parts
from moesaic.ops.dispatch import PatchSpec
from moesaic.ops.eager_conditions import is_eager_cpu

__all__ = [
    "ScatterIndex",
    "background_output",
    "bn_relu_minus_background",
    "scatter_add",
    "scatter_conv",
    "scatter_conv_with_background",
    "tap_matmul",
    "tap_matrix",
]


def tap_matrix(weight: Tensor) -> Tensor:
    """Reshapes weights (E, O, C, ks, ks) to (E, ks·ks·O, C), output channels innermost among the rows."""
    return weight.permute(0, 3, 4, 1, 2).flatten(1, 3)


def tap_matmul(values_EMC: Tensor, weight: Tensor) -> Tensor:
    """Multiplies values (E, M, C) by every tap of weights (E, O, C, ks, ks): (E, M, ks·ks, O).

    >>> values, weight = torch.ones(1, 2, 3), torch.arange(9.0).view(1, 1, 1, 3, 3).expand(1, 1, 3, 3, 3)
    >>> tap_matmul(values, weight)[0, 0, :, 0].tolist()
    [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0]
    """
    E, O, _, ks, _ = weight.shape
    matrices = tap_matrix(weight).transpose(1, 2)
    if torch.compiler.is_exporting():
        # ONNX Runtime packs the weights of a matmul once if they are a matrix, and in every run if they are a batch
        each = [values @ matrix for values, matrix in zip(values_EMC.unbind(), matrices.unbind(), strict=True)]
        contributions = torch.stack(each)
    else:
        contributions = torch.bmm(values_EMC, matrices)
    return contributions.view(E, values_EMC.shape[1], ks * ks, O)


@dataclass(frozen=True)
class ScatterIndex:
    """The row of the sums to which each tap of each of R pixels contributes."""

    row_Rk: Tensor
    """(R, ks·ks); contributions to ``rows`` or a later row are dropped."""
    rows: int
    dummy_rows: int
    """Rows after ``rows`` for dropped contributions: several, so that threads do not wait for each other."""
    within_pixels: bool
    """Whether the rows are the R pixels themselves; contributions then come from the pixels they also go to."""

    @property
    def sources_Rk(self) -> Tensor:
        """Within pixels: the contribution r · ks² + k that each row receives at each tap; R · ks² for none."""
        R, taps = self.row_Rk.shape
        source_Rk = self.row_Rk.flip(1)
        contribution_Rk = source_Rk * taps + torch.arange(taps, device=source_Rk.device)
        return torch.where(source_Rk < R, contribution_Rk, R * taps)


def scatter_conv(values: Tensor, weight: Tensor, index: ScatterIndex) -> Tensor:
    """Returns the sums (rows, O) of the contributions of pixels with values (E, M, C).

    >>> index = ScatterIndex(torch.tensor([[0], [0]]), 1, 0, within_pixels=False)
    >>> scatter_conv(torch.tensor([[[1.0], [2.0]]]), torch.full((1, 1, 1, 1, 1), 10.0), index).tolist()
    [[30.0]]
    """
    if not index.row_Rk.numel():
        return scatter_add(tap_matmul(values, weight).flatten(0, 1), index)
    return scatter_conv_with_background(values, weight, index)[0]


def scatter_conv_with_background(values: Tensor, weight: Tensor, index: ScatterIndex) -> tuple[Tensor, Tensor]:
    """Returns the sums, and the contributions (E, ks·ks, O) of each expert's last value, its background."""
    if not is_eager_cpu(values, weight) or values.dtype != weight.dtype:
        return _scatter_conv_autograd(values, weight, index)
    return cast("tuple[Tensor, Tensor]", _ScatterConv.apply(values, weight, index))


def scatter_add(taps_RkO: Tensor, index: ScatterIndex) -> Tensor:
    """Adds contributions (R, ks·ks, O) to their rows: (rows, O)."""
    y = taps_RkO.new_zeros(index.rows + index.dummy_rows, taps_RkO.shape[2])
    y = y.index_add_(0, index.row_Rk.flatten(), taps_RkO.flatten(0, 1))
    return y[: index.rows] if index.dummy_rows else y


def bn_relu_minus_background(values: Tensor, scale_EC: Tensor, shift_EC: Tensor) -> Tensor:
    """ReLU(scale · value + shift) − ReLU(shift) of values (E, M, C), with ReLU(shift) appended: (E, M + 1, C).

    ReLU(shift) is the background: the value of pixels outside the expert's patches, which are zero before BatchNorm.

    >>> values, scale, shift = torch.tensor([[[3.0], [-3.0]]]), torch.tensor([[2.0]]), torch.tensor([[1.0]])
    >>> bn_relu_minus_background(values, scale, shift).flatten().tolist()
    [6.0, -1.0, 1.0]
    """
    if not is_eager_cpu(values, scale_EC, shift_EC):
        return _bn_relu_minus_background_autograd(values, scale_EC, shift_EC)
    return cast(Tensor, _BNReLUMinusBackground.apply(values, scale_EC, shift_EC))


def background_output(taps_EkkO: Tensor, bias: Tensor | None, map_size: tuple[int, int], spec: PatchSpec) -> Tensor:
    """Output of each convolution on a constant map, given the contribution of the constant at each tap.

    Returns (E, O) for 1×1 kernels, otherwise (E, H, W, O): taps on the zero padding contribute nothing.
    """
    ks = taps_EkkO.shape[1]
    if ks == 1:
        background = taps_EkkO[:, 0, 0]
        return background if bias is None else background + bias
    (H, W), p = map_size, spec.patch_size
    height, width = (H, W) if spec.context == "map" else (p, p)
    inside = (_taps_inside(height, ks, taps_EkkO), _taps_inside(width, ks, taps_EkkO))
    background = torch.einsum("hi,wj,eijo->ehwo", *inside, taps_EkkO).repeat(1, H // height, W // width, 1)
    return background if bias is None else background + bias[:, None, None]


def _taps_inside(size: int, kernel: int, like: Tensor) -> Tensor:
    """(size, kernel): 1 where a tap of a kernel centred at a position is inside the map, 0 on the zero padding."""
    position = torch.arange(size, device=like.device).unsqueeze(1)
    position = position + torch.arange(kernel, device=like.device) - kernel // 2
    return ((position >= 0) & (position < size)).to(like.dtype)


def _scatter_conv_autograd(values: Tensor, weight: Tensor, index: ScatterIndex) -> tuple[Tensor, Tensor]:
    contributions = tap_matmul(values, weight)
    return scatter_add(contributions.flatten(0, 1), index), contributions[:, -1]


def _scatter_conv(values: Tensor, weight: Tensor, matrix: Tensor, index: ScatterIndex) -> tuple[Tensor, Tensor]:
    (E, M, _), (_, O, _, ks, _) = values.shape, weight.shape
    taps = values.new_empty(E * M * ks * ks + 1, O)
    taps[-1] = 0  # what a row receives where no pixel contributes
    contributions = taps[:-1].view(E, M, ks * ks, O)
    if _transpose_contributions(M, weight):
        for experts, transposed in expert_bmm_parts(values, matrix.transpose(1, 2)):
            contributions[experts].copy_(transposed.view(-1, M, O, ks * ks).transpose(2, 3))
    else:
        expert_bmm(values, matrix.transpose(1, 2), out=contributions.view(E, M, ks * ks * O))
    if index.within_pixels:
        sums = F.embedding_bag(index.sources_Rk, taps, mode="sum")
    else:
        sums = scatter_add(contributions.view(E * M, ks * ks, O), index)
    return sums, contributions[:, -1].clone()


class _ScatterConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, index: ScatterIndex) -> tuple[Tensor, Tensor]:
        matrix = _matrix(weight, _transpose_contributions(values.shape[1], weight))
        ctx.save_for_backward(values, weight, matrix)
        ctx.index = index
        return _scatter_conv(values, weight, matrix, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, matrix = ctx.saved_tensors
        index: ScatterIndex = ctx.index
        if torch.is_grad_enabled():  # double backward
            outputs = _scatter_conv_autograd(values, weight, index)
            return *_double_backward(outputs, (values, weight), grad_outputs, ctx.needs_input_grad), None
        (E, M, C), (_, O, _, ks, _) = values.shape, weight.shape
        grad_sums, grad_background = grad_outputs
        row = index.row_Rk.flatten()
        dropped = row >= index.rows
        if index.rows:
            grads = grad_sums.index_select(0, row.masked_fill(dropped, 0)).masked_fill_(dropped.unsqueeze(1), 0)
        else:  # an empty batch
            grads = grad_sums.new_zeros(row.shape[0], O)
        grads = grads.view(E, M, ks * ks, O)
        grads[:, -1] += grad_background
        transpose = _transpose_contributions(M, weight)
        grads = (grads.transpose(2, 3) if transpose else grads).reshape(E, M, ks * ks * O)
        grad_values = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_values = expert_bmm(grads, matrix)
        if ctx.needs_input_grad[1]:
            if ks == 1:
                grad_weight = expert_bmm(grads.transpose(1, 2), values).view(weight.shape)
            elif transpose:
                grad_weight = expert_bmm(grads.transpose(1, 2), values).view(E, O, ks, ks, C).permute(0, 1, 4, 2, 3)
            elif weight.is_contiguous():  # the layout closest to contiguous
                grad_weight = expert_bmm(values.transpose(1, 2), grads).view(E, C, ks, ks, O).permute(0, 4, 1, 2, 3)
            else:
                grad_weight = expert_bmm(grads.transpose(1, 2), values).view(E, ks, ks, O, C).permute(0, 3, 4, 1, 2)
        return grad_values, grad_weight, None


def _bn_relu_minus_background_autograd(values: Tensor, scale_EC: Tensor, shift_EC: Tensor) -> Tensor:
    background = F.relu(shift_EC).unsqueeze(1)
    normed = torch.addcmul(shift_EC.unsqueeze(1), values, scale_EC.unsqueeze(1))
    return torch.cat([F.relu(normed) - background, background], 1)


class _BNReLUMinusBackground(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        E, M, C = values.shape
        y = values.new_empty(E, M + 1, C)
        # ReLU(a + s) − ReLU(s) is the larger of a + min(s, 0) and −ReLU(s)
        pixels, background = y[:, :M], F.relu(shift)
        torch.addcmul(shift.clamp_max(0).unsqueeze(1), values, scale.unsqueeze(1), out=pixels)
        torch.maximum(pixels, background.neg().unsqueeze(1), out=pixels)
        y[:, M] = background
        ctx.save_for_backward(values, scale, shift, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, shift, y = ctx.saved_tensors
        if torch.is_grad_enabled():
            output = _bn_relu_minus_background_autograd(values, scale, shift)
            return _double_backward((output,), (values, scale, shift), grad_outputs, ctx.needs_input_grad)
        grad_pixels, grad_background = grad_outputs[0][:, :-1], grad_outputs[0][:, -1]
        active = y[:, :-1] > F.relu(shift).neg().unsqueeze(1)
        grad_active = grad_pixels * active
        grad_shift = grad_active.sum(1) + (grad_background - grad_pixels.sum(1)) * (shift > 0)
        grad_values = grad_active * scale.unsqueeze(1) if ctx.needs_input_grad[0] else None
        grad_scale = grad_active.mul_(values).sum(1) if ctx.needs_input_grad[1] else None
        return grad_values, grad_scale, grad_shift


def _double_backward(
    outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], grad_outputs: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of outputs computed by differentiable operations."""
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=False) if need]
    grads = iter(torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=True, allow_unused=True))
    return tuple(next(grads) if need else None for _, need in zip(inputs, needed, strict=False))


def _transpose_contributions(M: int, weight: Tensor) -> bool:
    """Whether to use channels_last weights as they are and transpose the contributions, which are smaller."""
    return weight.shape[2] > M and weight.permute(0, 1, 3, 4, 2).is_contiguous()


def _matrix(weight: Tensor, transpose: bool) -> Tensor:
    """The matrix of all taps (E, ks·ks·O, C); or, without a copy of the weights, (E, O·ks·ks, C)."""
    return weight.permute(0, 1, 3, 4, 2).flatten(1, 3) if transpose else tap_matrix(weight)

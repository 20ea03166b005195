"""What pixels contribute at every tap of their expert's kernel, summed where it lands; on a CPU without copies.

Contributions are one product per expert. A product wants a matrix of all taps: weights in channels_last hold it
already, with an output channel's taps side by side, while sums want a tap's output channels side by side. Either the
weights are brought into that order or the product is, whichever is smaller. Gradients of weights come as the weights
lie, and contributions are not remembered for the backward pass: fresh memory costs a CPU more than the sums themselves.

Compilers, transforms such as vmap, second derivatives and other devices are given the same in torch's own operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from moesaic.ops.dispatch import PatchSpec

__all__ = [
    "Landing",
    "answer_to_constant",
    "by_hand",
    "deviations",
    "land",
    "land_with_rest",
    "landed",
    "nobody_learns",
    "tap_matrix",
    "tap_products",
]


def by_hand(*tensors: Tensor) -> bool:
    """Whether tensors are plain ones of a CPU in float32 or float64, which no compiler or transform looks at."""
    traced = torch._C._get_tracing_state() is not None  # pyright: ignore
    if traced or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    if transformed or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return False
    return all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        for tensor in tensors
    )


def nobody_learns(*tensors: Tensor) -> bool:
    """Whether no gradient of these will be asked for."""
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def tap_matrix(weight: Tensor) -> Tensor:
    """Weights (E, O, C, ks, ks) as rows of all taps, a tap's output channels side by side: (E, ks·ks·O, C)."""
    return weight.permute(0, 3, 4, 1, 2).flatten(1, 3)


def tap_products(values_EMC: Tensor, weight: Tensor) -> Tensor:
    """Values (E, M, C) times the taps of convolutions (E, O, C, ks, ks): (E, M, ks·ks, O).

    >>> values, weight = torch.ones(1, 2, 3), torch.arange(9.0).view(1, 1, 1, 3, 3).expand(1, 1, 3, 3, 3)
    >>> tap_products(values, weight)[0, 0, :, 0].tolist()
    [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0]
    """
    E, O, _, ks, _ = weight.shape
    products = torch.bmm(values_EMC, tap_matrix(weight).transpose(1, 2))
    return products.view(E, values_EMC.shape[1], ks * ks, O)


@dataclass(frozen=True)
class Landing:
    """Where each tap of each of R pixels lands among rows of sums."""

    at_Rk: Tensor
    """(R, ks·ks); what is at ``rows`` or past it counts nowhere."""
    rows: int
    beyond: int
    """How many rows past the others are used: several, lest threads queue for one."""
    among_pixels: bool
    """Whether the rows are the R pixels themselves. Then what lands on one comes from where its own taps land."""

    @property
    def sources_Rk(self) -> Tensor:
        """Among pixels: which contribution, counted as r · ks² + k, each row gets at each tap; R · ks² for none."""
        R, taps = self.at_Rk.shape
        from_Rk = self.at_Rk.flip(1)
        contribution_Rk = from_Rk * taps + torch.arange(taps)
        return torch.where(from_Rk < R, contribution_Rk, R * taps)


def land(values: Tensor, weight: Tensor, landing: Landing) -> Tensor:
    """Sums (rows, O) of what pixels with values (E, M, C) contribute, R = E · M, each where its tap lands.

    >>> values, landing = torch.tensor([[[1.0], [2.0]]]), Landing(torch.tensor([[0], [0]]), 1, 0, among_pixels=False)
    >>> land(values, torch.full((1, 1, 1, 1, 1), 10.0), landing).tolist()
    [[30.0]]
    """
    if not landing.at_Rk.numel():
        return landed(tap_products(values, weight).flatten(0, 1), landing)
    return land_with_rest(values, weight, landing)[0]


def land_with_rest(values: Tensor, weight: Tensor, landing: Landing) -> tuple[Tensor, Tensor]:
    """The same, and the products (E, ks·ks, O) of each expert's last value, wherever it lands."""
    if not by_hand(values, weight) or values.dtype != weight.dtype:
        return _land_plain(values, weight, landing)
    return cast("tuple[Tensor, Tensor]", _Land.apply(values, weight, landing))


def landed(taps_RkO: Tensor, landing: Landing) -> Tensor:
    """Contributions (R, ks·ks, O), each added where it lands: (rows, O)."""
    y = taps_RkO.new_zeros(landing.rows + landing.beyond, taps_RkO.shape[2])
    return y.index_add_(0, landing.at_Rk.flatten(), taps_RkO.flatten(0, 1))[: landing.rows]


def deviations(values: Tensor, scale_EC: Tensor, shift_EC: Tensor) -> Tensor:
    """ReLU(scale · value + shift) of values (E, M, C), less the ReLU(shift) that stands where there is no value.

    And behind them that ReLU(shift) itself: (E, M + 1, C).

    >>> deviations(torch.tensor([[[3.0], [-3.0]]]), torch.tensor([[2.0]]), torch.tensor([[1.0]])).flatten().tolist()
    [6.0, -1.0, 1.0]
    """
    if not by_hand(values, scale_EC, shift_EC):
        return _deviations_plain(values, scale_EC, shift_EC)
    return cast(Tensor, _Deviations.apply(values, scale_EC, shift_EC))


def answer_to_constant(taps_EkkO: Tensor, bias: Tensor | None, map_size: tuple[int, int], spec: PatchSpec) -> Tensor:
    """What each convolution answers to a constant map, given each tap's answer to the constant.

    (E, O), or (E, H, W, O) for kernels that see the zero padding.
    """
    ks = taps_EkkO.shape[1]
    if ks == 1:
        null = taps_EkkO[:, 0, 0]
        return null if bias is None else null + bias
    (H, W), p = map_size, spec.patch_size
    height, width = (H, W) if spec.context == "map" else (p, p)
    inside = (_taps_inside(height, ks, taps_EkkO), _taps_inside(width, ks, taps_EkkO))
    null = torch.einsum("hi,wj,eijo->ehwo", *inside, taps_EkkO).repeat(1, H // height, W // width, 1)
    return null if bias is None else null + bias[:, None, None]


def _taps_inside(size: int, kernel: int, like: Tensor) -> Tensor:
    """(size, kernel): 1 where a tap of a kernel centred there falls inside, 0 where on the zero padding."""
    at = torch.arange(size, device=like.device).unsqueeze(1) + torch.arange(kernel, device=like.device) - kernel // 2
    return ((at >= 0) & (at < size)).to(like.dtype)


def _land_plain(values: Tensor, weight: Tensor, landing: Landing) -> tuple[Tensor, Tensor]:
    products = tap_products(values, weight)
    return landed(products.flatten(0, 1), landing), products[:, -1]


def _land(values: Tensor, weight: Tensor, matrix: Tensor, landing: Landing) -> tuple[Tensor, Tensor]:
    (E, M, _), (_, O, _, ks, _) = values.shape, weight.shape
    taps = values.new_empty(E * M * ks * ks + 1, O)
    taps[-1] = 0  # what a row gets where nothing lands on it
    products = taps[:-1].view(E, M, ks * ks, O)
    if _turning_is_cheaper(M, weight):
        turned = torch.bmm(values, matrix.transpose(1, 2))
        products.copy_(turned.view(E, M, O, ks * ks).transpose(2, 3))
    else:
        torch.bmm(values, matrix.transpose(1, 2), out=products.view(E, M, ks * ks * O))
    if landing.among_pixels:
        sums = F.embedding_bag(landing.sources_Rk, taps, mode="sum")
    else:
        sums = landed(products.view(E * M, ks * ks, O), landing)
    return sums, products[:, -1].clone()


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, landing: Landing) -> tuple[Tensor, Tensor]:
        matrix = _matrix(weight, _turning_is_cheaper(values.shape[1], weight))
        ctx.save_for_backward(values, weight, matrix)
        ctx.landing = landing
        return _land(values, weight, matrix, landing)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, matrix = ctx.saved_tensors
        landing: Landing = ctx.landing
        if torch.is_grad_enabled():  # someone wants a gradient of the gradient
            again = _land_plain(values, weight, landing)
            return *_again(again, (values, weight), gradients, ctx.needs_input_grad), None
        (E, M, C), (_, O, _, ks, _) = values.shape, weight.shape
        of_sums, of_rest = gradients
        at = landing.at_Rk.flatten()
        nowhere = at >= landing.rows
        if landing.rows:
            rows = of_sums.index_select(0, at.masked_fill(nowhere, 0)).masked_fill_(nowhere.unsqueeze(1), 0)
        else:  # of an empty batch: there is no row to stand in for nowhere
            rows = of_sums.new_zeros(at.shape[0], O)
        rows = rows.view(E, M, ks * ks, O)
        rows[:, -1] += of_rest
        as_it_lies = _turning_is_cheaper(M, weight)
        rows = (rows.transpose(2, 3) if as_it_lies else rows).reshape(E, M, ks * ks * O)
        of_values = of_weight = None
        if ctx.needs_input_grad[0]:
            of_values = torch.bmm(rows, matrix)
        if ctx.needs_input_grad[1]:
            if as_it_lies:
                of_weight = torch.bmm(rows.transpose(1, 2), values).view(E, O, ks, ks, C).permute(0, 1, 4, 2, 3)
            elif weight.is_contiguous():  # which is nearer to taps behind channels
                of_weight = torch.bmm(values.transpose(1, 2), rows).view(E, C, ks, ks, O).permute(0, 4, 1, 2, 3)
            else:
                of_weight = torch.bmm(rows.transpose(1, 2), values).view(E, ks, ks, O, C).permute(0, 3, 4, 1, 2)
        return of_values, of_weight, None


def _deviations_plain(values: Tensor, scale_EC: Tensor, shift_EC: Tensor) -> Tensor:
    resting = F.relu(shift_EC).unsqueeze(1)
    normed = torch.addcmul(shift_EC.unsqueeze(1), values, scale_EC.unsqueeze(1))
    return torch.cat([F.relu(normed) - resting, resting], 1)


class _Deviations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        E, M, C = values.shape
        y = values.new_empty(E, M + 1, C)
        # ReLU(a + s) − ReLU(s) is the larger of a + min(s, 0) and −ReLU(s)
        pixels, resting = y[:, :M], F.relu(shift)
        torch.addcmul(shift.clamp_max(0).unsqueeze(1), values, scale.unsqueeze(1), out=pixels)
        torch.maximum(pixels, resting.neg().unsqueeze(1), out=pixels)
        y[:, M] = resting
        ctx.save_for_backward(values, scale, shift, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, shift, y = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = _deviations_plain(values, scale, shift)
            return _again((again,), (values, scale, shift), gradients, ctx.needs_input_grad)
        of_pixels, of_resting = gradients[0][:, :-1], gradients[0][:, -1]
        active = y[:, :-1] > F.relu(shift).neg().unsqueeze(1)
        through = of_pixels * active
        of_shift = through.sum(1) + (of_resting - of_pixels.sum(1)) * (shift > 0)
        of_values = through * scale.unsqueeze(1) if ctx.needs_input_grad[0] else None
        of_scale = through.mul_(values).sum(1) if ctx.needs_input_grad[1] else None
        return of_values, of_scale, of_shift


def _again(
    results: tuple[Tensor, ...], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated, of results in torch's own operations."""
    learned = [tensor for tensor, need in zip(inputs, needed, strict=False) if need]
    found = iter(torch.autograd.grad(results, learned, gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for _, need in zip(inputs, needed, strict=False))


def _turning_is_cheaper(M: int, weight: Tensor) -> bool:
    """Whether to take the weights as they lie, and bring products in order: they are the smaller of the two."""
    return weight.shape[2] > M and weight.permute(0, 1, 3, 4, 2).is_contiguous()


def _matrix(weight: Tensor, as_it_lies: bool) -> Tensor:
    """The matrix of all taps, or without a copy (E, O·ks·ks, C)."""
    return weight.permute(0, 1, 3, 4, 2).flatten(1, 3) if as_it_lies else tap_matrix(weight)

"""The fused backward pass through norm, gates and router, against torch's gradients in float64."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import TYPES, Named, assert_near, numbers, poison

from moesaic.ops.triton.launch import PatchDims
from moesaic.ops.triton.norm_router_backward import fits, fused_gradients
from moesaic.ops.triton.operands import NormTensors, PatchOptions, RoutedMap
from moesaic.ops.triton_backend import GATE_KINDS

EPS = 1e-3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch, *(f"moesaic.ops.triton.{name}" for name in ("norm_router_backward", "norm", "launch")))


@dataclasses.dataclass(frozen=True)
class Case(Named):
    B: int = 3
    C: int = 21
    H: int = 6
    W: int = 9
    E: int = 3
    L: int = 2
    p: int = 3
    kind: str = "softmax_all"
    training: bool = True
    rest: bool = True


CASES = [
    Case(),
    Case(training=False),
    Case(kind="softmax_selected", rest=False),
    Case(kind="softmax_selected", training=False, L=1),
    Case(p=4, H=8, W=16, C=70, E=5),  # more than a block of channels
    Case(p=4, H=4, W=4, E=2, L=1, B=1, C=1),  # a single patch
    Case(p=4, H=8, W=8, E=16, L=4, B=2, C=5),  # as many experts and places as there may be
    Case(p=8, H=16, W=8, E=2, L=1, B=2, C=9),  # patches of as many pixels
    Case(B=40, C=3),  # several parts of images
]


def values_of(x, router, norm_weight, norm_bias, mean, var, index, case):
    """Values of selected pixels less the background (E, B·L·p², C), and the background (E, C)."""
    B, C, E, L, p = x.shape[0], case.C, case.E, case.L, case.p
    patches = F.unfold(x.permute(0, 3, 1, 2), p, stride=p).view(B, C, p * p, -1).permute(0, 3, 2, 1)
    scores = torch.einsum("bnac,eac->bne", patches, router.permute(0, 2, 3, 1).flatten(1, 2))
    taken = scores.transpose(1, 2).gather(2, index)
    gate = scores.softmax(1).transpose(1, 2).gather(2, index)
    if case.kind == "softmax_selected":
        gate = taken.softmax(2)
    rows = torch.stack([patches[b, index[b]] for b in range(B)]) * gate[..., None, None]  # B, E, L, p², C
    rows = rows.transpose(0, 1).reshape(E, B * L * p * p, C)
    positions = B * case.H * case.W
    if case.training:
        mean = rows.sum(1) / positions
        var = (rows.square().sum(1) / positions - mean.square()).clamp_min(0)
    scale = norm_weight * (var + EPS).rsqrt()
    shift = norm_bias - mean * scale
    at_rest = shift.relu()
    return (rows * scale[:, None] + shift[:, None]).relu() - at_rest[:, None], at_rest, scores, gate, mean, var


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_map_router_and_norm_equal_float64(case, on):
    device, dtype = on
    wide = torch.promote_types(dtype, torch.float32)
    B, C, H, W, E, L, p = case.B, case.C, case.H, case.W, case.E, case.L, case.p
    dims = PatchDims(B, H, W, C, E, L, p)
    assert fits(dims)
    x = numbers(B, H, W, C, seed=1, device=device, dtype=dtype)
    router = numbers(E, C, p, p, seed=2, device=device, dtype=dtype, scale=(C * p * p) ** -0.5)
    norm_weight, norm_bias = (numbers(E, C, seed=seed, device=device, dtype=wide) for seed in (3, 4))
    mean = numbers(E, C, seed=5, device=device, dtype=wide, scale=0.1)
    var = numbers(E, C, seed=6, device=device, dtype=wide).abs() + 0.5
    grad = numbers(E, dims.padded_rows(case.rest), C, seed=7, device=device, dtype=dtype)
    index = torch.rand(B, E, dims.N, generator=torch.Generator().manual_seed(8)).argsort(-1)[..., :L].contiguous()

    leaves = [leaf.cpu().double().requires_grad_() for leaf in (x, router, norm_weight, norm_bias)]
    values, at_rest, *found = values_of(*leaves, mean.cpu().double(), var.cpu().double(), index, case)
    objective = (values * grad[:, : dims.M].cpu().double()).sum()
    if case.rest:
        objective = objective + (at_rest * grad[:, dims.M].cpu().double()).sum()
    expected = torch.autograd.grad(objective, leaves)

    scores, gate, mean, var = (each.detach().to(device, wide) for each in found)
    slots = torch.full((B, E, dims.N), -1, dtype=torch.int32).scatter_(
        2, index, torch.arange(L, dtype=torch.int32).expand(B, E, L).contiguous()
    )
    norm = NormTensors(norm_weight, norm_bias, mean, var, EPS, case.training)
    options = PatchOptions(p, GATE_KINDS[case.kind], True, False, False, case.training, True)
    routed = RoutedMap(
        x, index.to(device), slots.to(device), gate.contiguous(), scores.contiguous(), router, norm, options
    )
    mine = fused_gradients(grad, routed, centre=True)
    assert_near((mine.x, mine.router, mine.norm_weight, mine.norm_bias), expected, dtype)


def test_other_dimensions_are_not_fused():
    assert not fits(PatchDims(2, 4, 4, 8, 2, 1, 2))  # sums over four pixels save nothing
    assert not fits(PatchDims(2, 32, 32, 8, 17, 1, 4))
    assert not fits(PatchDims(2, 64, 64, 8, 2, 1, 4))
    assert not fits(PatchDims(2, 32, 32, 8, 2, 33, 4))

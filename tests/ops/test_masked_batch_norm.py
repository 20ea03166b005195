"""BatchNorm of stacked experts: that of each expert's own samples, on CPUs and GPUs, in every type and layout."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.ops.masked_batch_norm import masked_batch_norm

S, C, COUNTS = 5, 4, (5, 2, 4)
E = len(COUNTS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [(), (6, 5), (3, 2, 4)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class CudaMoments(TorchDispatchMode):
    """Gradients of scale and shift as CUDA's kernels have them, which read the saved moments alone."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.native_batch_norm_backward.default:
            return func(*args, **kwargs or {})
        self.calls += 1
        grad, x, weight, _, _, mean, inverse, train, _, mask = args
        assert (train, mask) == (False, [False, True, True])
        assert weight.dtype == mean.dtype == inverse.dtype == torch.promote_types(x.dtype, torch.float32)
        assert all(each.ndim == 1 and each.is_contiguous() for each in (weight, mean, inverse))
        dims = [0, *range(2, x.ndim)]
        shape = (1, -1, *[1] * (x.ndim - 2))
        normalised = (x - mean.view(shape)) * inverse.view(shape)
        return None, (grad * normalised).sum(dims), grad.to(mean.dtype).sum(dims)


def used_and_share(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slot_S = torch.arange(S, device=device)
    used_SE = torch.stack([slot_S < count for count in COUNTS], 1)
    wide = torch.promote_types(dtype, torch.float32)
    return used_SE.to(dtype), used_SE.to(wide) / used_SE.sum(0)


def case(
    size: tuple[int, ...], affine: bool, device: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> tuple[list[Tensor | None], Tensor]:
    """Samples, scale and shift that need gradients; the gradient of the outputs, 0 of repeated samples."""
    # samples that are apart: where two are nearly equal, the gradient is a difference of large numbers
    apart = torch.arange(S).remainder(2).mul(3).view(S, *[1] * (1 + len(size)))
    x = torch.randn(S, E * C, *size).mul(0.4).add(apart).add(0.5).to(device, dtype)
    used_SE, share_SE = used_and_share(device, dtype)
    grad = torch.randn(S, E, C, *size).to(used_SE) * used_SE.view(S, E, *[1] * (1 + len(size)))
    grad = grad.flatten(1, 2)
    if len(size) == 2:
        x, grad = x.contiguous(memory_format=memory_format), grad.contiguous(memory_format=memory_format)
    affines = [torch.randn(E, C).to(share_SE) if affine else None for _ in range(2)]
    return [None if each is None else each.requires_grad_() for each in (x, *affines)], grad


def outputs_and_gradients(inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    x, weight, bias = inputs
    assert x is not None
    y, mean, var = masked_batch_norm(x, weight, bias, *used_and_share(x.device.type, x.dtype), 1e-5)
    return [y, mean, var, *torch.autograd.grad(y, [each for each in inputs if each is not None], grad)]


def expert_by_expert(inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    """The same from torch's BatchNorm in float64, on the samples of one expert after the other."""
    leaves = [None if each is None else each.detach().double().requires_grad_() for each in inputs]
    x, weight, bias = leaves
    assert x is not None
    outputs, means, variances, loss = [], [], [], 0.0
    for e, count in enumerate(COUNTS):
        own = x[:count, e * C : (e + 1) * C]
        affine = (None if each is None else each[e] for each in (weight, bias))
        y = F.batch_norm(own, None, None, *affine, training=True, eps=1e-5)
        loss = loss + (y * grad[:count, e * C : (e + 1) * C]).sum()
        var, mean = torch.var_mean(own, [0, *range(2, own.ndim)], correction=0)
        outputs.append(y)
        means.append(mean)
        variances.append(var)
    gradients = torch.autograd.grad(loss, [each for each in leaves if each is not None])
    return [*outputs, torch.stack(means), torch.stack(variances), *gradients]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_every_expert_has_the_norm_of_its_own_samples(device, size, affine, memory_format, dtype):
    inputs, grad = case(size, affine, device, dtype, memory_format)
    y, *found = outputs_and_gradients(inputs, grad)
    expected = expert_by_expert(inputs, grad)
    for e, count in enumerate(COUNTS):
        close(y[:count, e * C : (e + 1) * C], expected[e], dtype)
    for each, its in zip(found, expected[E:], strict=True):
        close(each, its, dtype)
    if len(size) == 2:
        assert all(each.is_contiguous(memory_format=memory_format) for each in (y, found[2]))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_backward_pass_gives_cuda_the_moments_that_it_reads(size, affine, dtype):
    inputs, grad = case(size, affine, "cpu", dtype, torch.contiguous_format)
    expected = outputs_and_gradients(inputs, grad)
    with CudaMoments() as mode:
        found = outputs_and_gradients(inputs, grad)
    assert mode.calls == 1
    for each, its in zip(found, expected, strict=True):
        close(each, its, dtype)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_their_gradients_are_those_of_small_differences(device, memory_format):
    (x, weight, bias), _ = case((2, 3), True, device, torch.float64, memory_format)
    used_SE, share_SE = used_and_share(device, torch.float64)
    outputs = used_SE.view(S, E, 1, 1, 1).expand(S, E, C, 2, 3).flatten(1, 2)

    def normed(*inputs: Tensor) -> Tensor:
        return masked_batch_norm(*inputs, used_SE, share_SE, 1e-5)[0] * outputs

    assert gradcheck(normed, (x, weight, bias), fast_mode=True)
    assert gradgradcheck(normed, (x, weight, bias), fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_one_value_for_all_outputs(device):
    x = torch.randn(S, E * C, 3, 2, device=device, dtype=torch.float64, requires_grad=True)
    used_SE = torch.ones(S, E, device=device, dtype=torch.float64)
    y, _, _ = masked_batch_norm(x, None, None, used_SE, used_SE / S, 1e-5)
    y.sum().backward()  # of stride 0 in every dimension
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-12

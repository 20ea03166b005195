"""BatchNorm of samples of which the last ones repeat another: that of the others, on CPUs and GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.ops.padded_batch_norm import batch_norm_of_counted, batch_norm_of_first

S, C, COUNT = 5, 4, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [(), (7,), (6, 5), (3, 2, 4)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


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
        dims = [0, *range(2, x.ndim)]
        shape = (1, -1, *[1] * (x.ndim - 2))
        normalised = (x - mean.view(shape)) * inverse.view(shape)
        return None, (grad * normalised).sum(dims), grad.to(mean.dtype).sum(dims)


def first(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return batch_norm_of_first(x, COUNT, None, weight, bias, 0.0, 1e-5)


def share_of(x: Tensor) -> Tensor:
    used_S = torch.arange(S, device=x.device) < COUNT
    return used_S.to(torch.promote_types(x.dtype, torch.float32)) / COUNT


def counted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return batch_norm_of_counted(x, share_of(x), weight, bias, 1e-5)[0]


def case(
    size: tuple[int, ...], affine: bool, device: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> tuple[list[Tensor | None], Tensor]:
    """Samples, scale and shift that need gradients; the gradient of the outputs, 0 of repeated samples."""
    # samples that are apart: where two are nearly equal, the gradient is a difference of large numbers
    apart = torch.arange(S).remainder(2).mul(3).view(S, *[1] * (1 + len(size)))
    x = torch.randn(S, C, *size).mul(0.4).add(apart).add(0.5)
    x[COUNT:] = x[COUNT - 1]
    grad = torch.randn(S, C, *size)
    grad[COUNT:] = 0
    x, grad = (each.to(device, dtype) for each in (x, grad))
    if len(size) == 2:
        x, grad = x.contiguous(memory_format=memory_format), grad.contiguous(memory_format=memory_format)
    wide = torch.promote_types(dtype, torch.float32)
    affines = [torch.randn(C).to(device, wide) if affine else None for _ in range(2)]
    return [None if each is None else each.requires_grad_() for each in (x, *affines)], grad


def outputs_and_gradients(norm: Norm, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    y = norm(*inputs)
    return [y, *torch.autograd.grad(y, [each for each in inputs if each is not None], grad)]


def alone(inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    """The same from torch's BatchNorm in float64, on the samples that count."""
    leaves = [None if each is None else each.detach().double().requires_grad_() for each in inputs]
    x, weight, bias = leaves
    assert x is not None
    y = F.batch_norm(x[:COUNT], None, None, weight, bias, training=True, eps=1e-5)
    gradients = torch.autograd.grad(y, [each for each in leaves if each is not None], grad[:COUNT].double())
    return [torch.cat([y, y[-1:].expand(S - COUNT, *y.shape[1:])]), *gradients]


@pytest.mark.parametrize("norm", [first, counted])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_norm_of_the_samples_that_count(device, size, affine, memory_format, dtype, norm):
    inputs, grad = case(size, affine, device, dtype, memory_format)
    found = outputs_and_gradients(norm, inputs, grad)
    for each, its in zip(found, alone(inputs, grad), strict=True):
        close(each, its, dtype)
    assert found[1][COUNT:].eq(0).all()
    if len(size) == 2:
        assert all(each.is_contiguous(memory_format=memory_format) for each in found[:2])


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_give_running_statistics_as_torch_does(size, device):
    (x, _, _), _ = case(size, False, device, torch.float64, torch.contiguous_format)
    assert x is not None
    expected = [torch.zeros(C, device=device).double(), torch.ones(C, device=device).double()]
    running = copies = tuple(each.clone() for each in expected)
    F.batch_norm(x[:COUNT], *expected, training=True, momentum=0.3)
    batch_norm_of_first(x, COUNT, copies, None, None, 0.3, 1e-5)
    torch.testing.assert_close(list(running), expected)
    _, mean, var = batch_norm_of_counted(x, share_of(x), None, None, 1e-5)
    values = COUNT * x.shape[2:].numel()
    torch.testing.assert_close([0.3 * mean, 0.7 + 0.3 * var * values / (values - 1)], expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_backward_pass_gives_cuda_the_moments_that_it_reads(size, affine, dtype):
    inputs, grad = case(size, affine, "cpu", dtype, torch.contiguous_format)
    expected = outputs_and_gradients(counted, inputs, grad)
    with CudaMoments() as mode:
        found = outputs_and_gradients(counted, inputs, grad)
    assert mode.calls == 1
    for each, its in zip(found, expected, strict=True):
        close(each, its, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_half_precision(device, dtype):
    (x, _, _), grad = case((3, 3), False, device, dtype, torch.channels_last)
    weight, bias = (torch.randn(C, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    for norm in (first, counted):
        found = outputs_and_gradients(norm, [x, weight, bias], grad)
        assert [each.dtype for each in found] == [dtype] * 4
        for each, its in zip(found, alone([x, weight, bias], grad), strict=True):
            torch.testing.assert_close(each.double(), its.double(), rtol=0.2, atol=0.2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_their_gradients_are_those_of_small_differences(device, memory_format):
    (x, weight, bias), _ = case((2, 3), True, device, torch.float64, memory_format)
    assert x is not None
    own = x.detach()[:COUNT].clone(memory_format=torch.preserve_format).requires_grad_()

    def padded(own: Tensor) -> Tensor:
        return torch.cat([own, own[-1:].expand(S - COUNT, *own.shape[1:])]).contiguous(memory_format=memory_format)

    inputs = (own, weight, bias)
    assert gradcheck(lambda own, *affine: first(padded(own), *affine)[:COUNT], inputs, fast_mode=True)
    assert gradcheck(lambda own, *affine: counted(padded(own), *affine)[:COUNT], inputs, fast_mode=True)
    assert gradgradcheck(lambda own, *affine: first(padded(own), *affine)[:COUNT], inputs, fast_mode=True)


def test_a_graph_that_is_differentiated_again_says_that_it_cannot():
    x = torch.randn(S, C, 2, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(counted(x, None, None)[:COUNT].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

"""Conditions under which fast eager code with in-place updates and hand-written gradients may run."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = ["is_eager_cpu", "no_grad_needed"]


def is_eager_cpu(*tensors: Tensor) -> bool:
    """Whether all tensors are plain float32 or float64 CPU tensors, outside tracing, compilation and transforms."""
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


def no_grad_needed(*tensors: Tensor) -> bool:
    """Whether autograd records nothing for these tensors.

    >>> no_grad_needed(torch.ones(2)), no_grad_needed(torch.ones(2, requires_grad=True))
    (True, False)
    """
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))

"""Shared by tests of the Triton kernels: devices and dtypes, tolerances, and memory that shows unwritten elements.

On a GPU kernels are compiled, in float32, bfloat16 and float16. Where there is none they run in Triton's interpreter,
in float64. The reference runs on a CPU.
"""

import dataclasses
import importlib
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from triton_interpreter import INTERPRETED

from moesaic.ops import triton_backend

__all__ = [
    "CHANNEL_CONV_KERNELS",
    "CPU_TYPE",
    "GATED_NORM_KERNELS",
    "GPU_TYPES",
    "INTERPRETED",
    "MLP_KERNELS",
    "ONE_TYPE",
    "PATCH_KERNELS",
    "TOLERANCE",
    "TYPES",
    "Named",
    "assert_captured",
    "assert_near",
    "in_float64",
    "maps_made",
    "numbers",
    "on_cpu",
    "poison",
    "run_anywhere",
    "with_gradients",
]

GPU_TYPES = [
    pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"cuda-{str(dtype)[6:]}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
CPU_TYPE = pytest.param(
    ("cpu", torch.float64), marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"), id="float64"
)
TYPES = [CPU_TYPE, *GPU_TYPES]
ONE_TYPE = [CPU_TYPE, GPU_TYPES[0]]

# relative error of ‖out − ref‖ / ‖ref‖
TOLERANCE = {torch.float64: 5e-9, torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


PATCH_KERNELS = tuple(
    f"moesaic.ops.triton.{name}"
    for name in (
        "expert_choice", "gather", "scatter", "expert_background", "norm", "norm_router_backward", "launch",
        "patch_backward", "patch_ops",
    )
)  # fmt: skip
"""Modules that a routed convolution runs through."""
MLP_KERNELS = tuple(f"moesaic.ops.triton.{name}" for name in ("activation", "mlp", "mlp_ops", "pointwise_experts"))
"""Modules of expert MLPs and of 1×1 experts."""
GATED_NORM_KERNELS = tuple(f"moesaic.ops.triton.{name}" for name in ("gated_norm", "channel_topk_gates", "norm"))
"""Modules of channel gates in training."""
CHANNEL_CONV_KERNELS = tuple(f"moesaic.ops.triton.{name}" for name in ("channel_conv", "open_channel_blocks"))
"""Modules of channel gates in inference."""


def run_anywhere(monkeypatch):
    """In the interpreter kernels run on a CPU, in float64 as well."""
    if INTERPRETED:
        monkeypatch.setattr(triton_backend, "kernel_refusal", lambda x: None)


class Named:
    """A test case whose name is the fields that differ from their defaults."""

    def __str__(self):
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "plain"


def assert_near(found, expected, dtype, least=None):
    """Tensors, by name or in order: all that are expected are there and written, each to the tolerance of the dtype.

    That is relative to its norm, or where the norm is less to 0.001, or to what ``least`` has for its name.
    """
    if not isinstance(expected, dict):
        found, expected = (dict(enumerate(each)) for each in (found, expected))
        assert len(found) == len(expected)
    for name, right in expected.items():
        mine = found[name]
        assert mine is not None, f"{name} is missing"
        assert mine.shape == right.shape, name
        mine, right = (each.detach().cpu().double() for each in (mine, right))
        assert mine.isfinite().all(), f"{name}: not everything was written"
        error = ((mine - right).norm() / right.norm().clamp_min((least or {}).get(name, 1e-3))).item()
        assert error <= TOLERANCE[dtype], f"{name} is off by {error:.2e}, more than {TOLERANCE[dtype]:.0e}"


def numbers(*shape, seed, device, dtype, scale=1.0):
    """Random numbers that the dtype holds exactly."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(device=device, dtype=dtype)


def with_gradients(function, *leaves):
    """A function's output and its gradients of the leaves; the last argument is the gradient of the output."""
    *leaves, grad = leaves
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def in_float64(function, *leaves):
    """The same on a CPU."""
    *leaves, grad = [each.detach().cpu().double() for each in leaves]
    return with_gradients(function, *(each.requires_grad_() for each in leaves), grad)


def on_cpu(tensors):
    """Copies for the reference, which must not depend on a GPU library's float64."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def poison(monkeypatch, *modules):
    """Fill fresh memory of these modules, and of `moesaic.ops.weight_layout`, with NaN: unwritten elements show."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor):
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 123456)

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def empty(*shape, **options):
            return filled(empty(*shape, **options))

        @staticmethod
        def empty_like(*like, **options):
            return filled(empty_like(*like, **options))

    for name in ("moesaic.ops.weight_layout", *modules):
        monkeypatch.setattr(importlib.import_module(name), "torch", Torch())


_ALLOTTED = re.compile(r"empty_strided_\w+\(\((\d+), (\d+), (\d+), (\d+)\), \((\d+), (\d+), (\d+), (\d+)\)")


def maps_made(step):
    """Sizes and strides of maps that inductor makes memory for in a step: in each of the graphs that it compiles."""
    torch.compiler.reset()
    _, codes = run_and_get_code(step)
    made = [[tuple(map(int, each)) for each in _ALLOTTED.findall(code)] for code in codes]
    return [[each for each in maps if min(each[1:4]) > 1] for maps in made]


def assert_captured(step, x, **tolerance):
    """A step that reads ``x`` and gives a list, captured in a CUDA graph, gives the same for other numbers in it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for mine, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(mine, expected, **tolerance)

"""Layers and maps of every kind and odd shape, for property tests."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moesaic
from moesaic import ops
from moesaic.experts import MLPExperts
from moesaic.routing_record import UNASSIGNED

BACKENDS = [name for name in ops.backends() if name != "triton"]  # triton runs on GPUs only


class PickyChoice(moesaic.ExpertChoice):
    """Experts take only the patches they score above zero: places of ``index`` stay unused."""

    def choose(self, scores: Tensor, **kwargs: Any) -> moesaic.Routing:
        routing = super().choose(scores, **kwargs)
        wanted = scores.transpose(1, 2).gather(2, routing.index) > 0
        return replace(
            routing, index=routing.index.where(wanted, UNASSIGNED), gate=routing.gate.where(wanted, 0), may_drop=True
        )


@dataclass
class Case:
    """A layer's recipe and the batch of maps it meets; ``build`` gives the same layer every time."""

    shape: tuple[int, int, int, int]
    options: dict[str, Any]
    router: str = "expert"
    mlp: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float64
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def build(self) -> moesaic.PatchMoE:
        options = dict(self.options)
        E, C, p = options["experts"], self.shape[1], options["patch_size"]
        out = options.pop("width") * (E if options["combine"] == "concat" else 1)
        if self.router == "picky":
            L, gate = options.pop("patches_per_expert"), options.pop("gate")
            options["router"] = PickyChoice(C, E, L, p, gate=gate, dtype=self.dtype)
        elif self.router != "expert":
            del options["patches_per_expert"], options["gate"]
            factor = 0.5 if self.router == "capacity" else None
            options["router"] = moesaic.TokenChoice(
                C, E, min(2, E), p, capacity_factor=factor, in_eval=True, dtype=self.dtype
            )
        if self.mlp:
            width = out // E if options["combine"] == "concat" else out
            options["experts"] = MLPExperts(
                E, C, 5, width, bias=options["bias"], norm=options["expert_norm"], dtype=self.dtype
            )
        layer = moesaic.PatchMoE(C, out, **options, dtype=self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-1, 1, generator=generator)
        return layer

    def map(self) -> Tensor:
        return torch.randn(self.shape, dtype=self.dtype, generator=self._generator)


@st.composite
def cases(draw: st.DrawFn, *, batch: st.SearchStrategy[int] = st.integers(0, 3), **fixed: Any) -> Case:
    """Odd maps, one patch, L = N, one expert, empty batches; every option of ``PatchMoE``."""
    p = draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    mlp = fixed.pop("mlp", None)
    mlp = draw(st.booleans()) if mlp is None else mlp
    router = fixed.pop("router", None) or draw(st.sampled_from(["expert", "picky", "unit", "capacity"]))
    options: dict[str, Any] = {
        "experts": draw(st.integers(1, 4)),
        "width": draw(st.integers(1, 3)),
        "patches_per_expert": draw(st.integers(1, rows * columns)),
        "patch_size": p,
        "kernel_size": 1 if mlp else draw(st.sampled_from([1, 3, 5])),
        "gate": draw(st.sampled_from(["softmax_selected", "softmax_all", "softmax_experts", "one"])),
        "gate_on": draw(st.sampled_from(["output", "input"])),
        "context": draw(st.sampled_from(["map", "patch"])),
        "expert_norm": draw(st.booleans()),
        "combine": draw(st.sampled_from(["concat", "sum"])),
        "bias": draw(st.booleans()),
    }
    options.update(fixed)
    B = draw(batch)
    if options["expert_norm"] and B * rows * columns * p * p == 1:
        B = 2  # one value has no variance
    shape = (B, draw(st.integers(1, 4)), rows * p, columns * p)
    return Case(shape, options, router, mlp, seed=draw(st.integers(0, 2**16)))


def run(layer: torch.nn.Module, x: Tensor, backend: str, steps: int = 1) -> dict[str, Tensor]:
    """Output, every gradient and every buffer after ``steps`` passes of a copy of the layer on a backend."""
    layer = copy.deepcopy(layer)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        with moesaic.backend(backend):
            y = layer(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(step), dtype=y.dtype).to(y.device))
        assert x.grad is not None
        found[f"output {step}"], found[f"gradient of input {step}"] = y.detach(), x.grad
    for name, parameter in layer.named_parameters():
        # an unused parameter counts as one with a zero gradient
        found[f"gradient of {name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found.update(layer.named_buffers())
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


class NoHostSync(TorchDispatchMode):
    """Refuses whatever brings a value from the device to the host, or has a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "unique"}, name
        return func(*args, **(kwargs or {}))


@contextmanager
def no_cuda_sync() -> Iterator[None]:
    """A block in which CUDA refuses to wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

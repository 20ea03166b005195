"""Routing by sample: every backend equals the dense, masked sum in output and every gradient; other invariants."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BACKENDS, assert_same, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import moesaic
from moesaic.experts import LinearExperts, MLPExperts, PatchNetExperts
from moesaic.experts.sample_experts import SampleActivation
from moesaic.ops.torch_backend import TorchBackend
from moesaic.routing import SampleRouter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ACTIVATIONS = {
    "identity": lambda z: z,
    "cubic": lambda z: z**3,
    "relu": F.relu,
    "celu": F.celu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}
KINDS = ["modules", "linear", "patch net", "mlp", "mlp on tokens"]
P, D = 3, 4


class Biased(nn.Module):
    """Scores that depend on the sample, and keep off the experts whose offset is low."""

    def __init__(self, offset: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(D, len(offset))
        with torch.no_grad():
            self.linear.bias.copy_(torch.tensor(offset))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1, -2).sum(1) if x.ndim > 2 else x)


@dataclass
class Case:
    kind: str
    batch: int
    offset: list[float]
    options: dict[str, Any]
    activation: SampleActivation
    bias: bool
    outputs: int
    seed: int

    def build(self, dtype: torch.dtype = torch.float64) -> moesaic.SampleMoE:
        torch.manual_seed(self.seed)
        E, options = len(self.offset), {"activation": self.activation, "bias": self.bias}
        experts: Any
        if self.kind == "modules":
            experts = [nn.Sequential(nn.Flatten(), nn.Linear(P * D, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(E)]
        elif self.kind == "linear":
            experts = LinearExperts(E, D, 3, **options)
        elif self.kind == "patch net":
            experts = PatchNetExperts(E, D, 4, self.outputs, init_std=0.7, **options)
        else:
            experts = MLPExperts(E, D, 5, 2, bias=self.bias)
        generator = torch.Generator().manual_seed(self.seed)  # the same noise on every backend
        return moesaic.SampleMoE(Biased(self.offset), experts, generator=generator, **self.options).to(dtype)

    def samples(self) -> Tensor:
        shape = (self.batch, D) if self.kind in ("linear", "mlp") else (self.batch, P, D)
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed + 1))


@st.composite
def cases(draw: st.DrawFn, kind: str, batch: st.SearchStrategy[int] = st.integers(0, 9)) -> Case:
    """Even loads, experts that get nothing, more experts than samples, one expert for all."""
    offset = draw(st.lists(st.sampled_from([0.0, 0.0, -20.0]), min_size=1, max_size=5))
    options = {
        "top_k": draw(st.integers(1, len(offset))),
        "noise": draw(st.sampled_from(["uniform", None])),
        "gate": draw(st.sampled_from(["softmax", "raw"])),
    }
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    seed = draw(st.integers(0, 2**16))
    return Case(
        kind, draw(batch), offset, options, activation, draw(st.booleans()), draw(st.sampled_from([1, 2])), seed
    )


def expert_output(experts: nn.Module, e: int, x: Tensor) -> Tensor:
    """Expert e on all samples, written out."""
    if isinstance(experts, nn.ModuleList):
        return experts[e](x)
    if isinstance(experts, MLPExperts):
        b_in, b_out = (None if b is None else b[e] for b in (experts.bias_in, experts.bias_out))
        return F.linear(F.gelu(F.linear(x, experts.weight_in[e], b_in)), experts.weight_out[e], b_out)
    bias = None if experts.bias is None else experts.bias[e]
    z = ACTIVATIONS[experts.activation](F.linear(x, experts.weight[e], bias))
    if isinstance(experts, LinearExperts):
        return z
    return torch.stack([half.sum((1, 2)) for half in z.chunk(experts.outputs, dim=2)], dim=1)


class DenseSum(nn.Module):
    """The definition without any of the library's execution: every expert on every sample, times weights or 0."""

    def __init__(self, layer: moesaic.SampleMoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weights = self.layer.route(x).weights[:, 0]
        experts = self.layer.experts
        each = [expert_output(experts, e, x) for e in range(len(experts))]
        return sum(w.view(-1, *[1] * (y.ndim - 1)) * y for w, y in zip(weights.unbind(1), each, strict=True))


def without_prefix(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("of layer.", "of "): tensor for name, tensor in found.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_the_layer_is_the_gated_sum_of_its_experts(kind, backend, device, data):
    case = data.draw(cases(kind))
    if device == "cuda":
        case.options["noise"] = None  # a generator of the CPU does not serve there
    x = case.samples().to(device)
    expected = run(DenseSum(case.build().to(device)), x, "reference")
    assert_same(run(case.build().to(device), x, backend), without_prefix(expected), tolerance=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_output_of_a_sample_does_not_depend_on_its_batch(kind, data):
    case = data.draw(cases(kind, st.integers(2, 9)))
    layer, x = case.build().eval(), case.samples()
    with torch.no_grad():
        together = layer(x)
        alone = torch.cat([layer(sample[None]) for sample in x])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_low_precision_is_within_its_rounding_error_of_float64(kind, dtype, device, data):
    case = data.draw(cases(kind))
    case.options["noise"] = None
    rounded, exact = case.build(dtype).to(device), case.build().to(device)
    exact.load_state_dict(rounded.state_dict())
    x = case.samples().to(device, dtype)
    y, expected = rounded(x), exact(x.double())
    if not torch.equal(rounded.route(x).mask, exact.route(x.double()).mask):
        return  # a near-tie fell the other way
    assert y.dtype == dtype
    scale = expected.abs().amax().clamp_min(1).item() * 8 if expected.numel() else 1
    # the router here is a plain nn.Linear: its scores round too, and the gate with them
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=256 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "experts",
    [[nn.Flatten(1, 2), nn.Flatten(1, 2)], PatchNetExperts(2, D, 4), MLPExperts(2, D, 3, 2)],
    ids=["modules", "patch net", "mlp"],
)
def test_samples_of_other_experts_do_not_affect_the_output_even_if_nan(experts, backend):
    layer = moesaic.SampleMoE(Biased([0.0, 0.0]), experts, noise=None)
    with torch.no_grad():
        layer.router.linear.weight.copy_(torch.tensor([[1.0] * D, [-1.0] * D]))
    sign = torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]  # samples go to the two experts by turns
    x = (sign * (1 + torch.rand(8, P, D))).requires_grad_()
    routing = layer.route(x)
    one = routing.index.flatten() == 1
    assert one.tolist() == [False, True] * 4
    poisoned = torch.where(one[:, None, None], x, torch.nan)
    with moesaic.backend(backend):
        y = (
            layer.experts(poisoned, routing)
            if layer._stacked
            else moesaic.ops.run_each(poisoned, routing, layer._run_expert)
        )
    assert y[one].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "backend", "dtype"),
    [
        ("patch net", "torch", torch.float64),  # float32 may differ by more than the tolerance: sums in another order
        ("mlp", "torch", torch.bfloat16),
        ("linear", "reference", torch.float64),
    ],
)
def test_stacked_experts_compile_into_one_graph(kind, backend, dtype):
    torch.compiler.reset()
    options = {"top_k": 2, "noise": None, "gate": "softmax"}
    case = Case(kind, 7, [0.0, 0.0, -20.0, 0.0], options, "cubic", True, 2, seed=3)
    layer, x = case.build(dtype), case.samples().to(dtype)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    found = []
    for model in (layer, compiled):
        with moesaic.backend(backend):
            y = model(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("experts", ["modules", "stacked"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_multiply_adds_are_those_of_the_assigned_experts(experts, top_k):
    B, C, O, E = 48, 32, 16, 8
    made = [nn.Linear(C, O) for _ in range(E)] if experts == "modules" else LinearExperts(E, C, O)
    layer, x = moesaic.SampleMoE(SampleRouter(C, E), made, top_k), torch.randn(B, C)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    router = 2 * B * C * 16  # its columns are padded to sixteen
    assert counter.get_total_flops() == router + 2 * top_k * B * C * O


@pytest.mark.parametrize("kind", ["linear", "patch net", "mlp"])
def test_the_requested_backend_runs(kind, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("torch ran")

    monkeypatch.setattr(TorchBackend, "stacked", refuse)
    case = Case(kind, 3, [0.0, 0.0], {}, "relu", True, 1, seed=0)
    with moesaic.backend("reference"):
        case.build()(case.samples())
    with pytest.raises(AssertionError, match="torch ran"):
        case.build()(case.samples())

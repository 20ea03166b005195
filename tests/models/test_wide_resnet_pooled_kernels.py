"""A routed convolution, BatchNorm, ReLU and the mean without a map in between: against the reference, gradients too.

On a GPU compiled, in float32, bfloat16 and float16, against the reference in float64 on the same numbers. Where Triton
is installed and there is no GPU, in its interpreter (``TRITON_INTERPRET=1``), in float64.

What is next to zero in front of a ReLU becomes active or not as it is rounded, and its gradient comes or goes: among as
few numbers as here, one of them is a large part of all. So biases are chosen such that zero falls into a gap between
a channel's values, some of which are active and others not. What is left is rounding, and tolerances are those of
other kernels.
"""

import copy
import dataclasses

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import moesaic
from moesaic.models.wide_resnet import pooled_head, thin_conv
from moesaic.models.wide_resnet.network import WideResNetPMoE
from moesaic.ops.dispatch import ConvWeights, Norm, PatchSpec
from moesaic.ops.reference_backend import ReferenceBackend
from moesaic.routing_record import UNASSIGNED, Routing

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    CPU_TYPE,
    INTERPRETED,
    ONE_TYPE,
    PATCH_KERNELS,
    TYPES,
    Named,
    assert_captured,
    assert_near,
    numbers,
    on_cpu,
    poison,
    run_anywhere,
)

FAR = 2**-6
"""How near to zero a value may be in front of a ReLU, of the largest of its channel: twice the steps of bfloat16."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    run_anywhere(monkeypatch)
    poison(monkeypatch, *PATCH_KERNELS, "moesaic.models.wide_resnet.triton.pooled_head")
    monkeypatch.setattr(pooled_head, "MAX_COVERAGE", float("inf"))


@pytest.fixture(autouse=True)
def exact():
    """Convolutions around the kernels are deterministic and do not use TF32."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@dataclasses.dataclass(frozen=True)
class Case(Named):
    B: int = 2
    C: int = 5
    O: int = 3
    H: int = 6
    W: int = 6
    E: int = 3
    L: int = 2
    p: int = 2
    ks: int = 3
    gate_on: str = "input"
    context: str = "map"
    norm: str | None = "train"
    bias: bool = False
    drop: bool = False
    training: bool = True


CASES = [
    Case(),
    Case(training=False),
    Case(norm="eval", training=False, bias=True),
    Case(norm=None),
    Case(norm=None, bias=True),
    Case(norm=None, bias=True, training=False),
    Case(bias=True, drop=True, C=17),
    Case(L=9),  # every patch is chosen, every position reached by several
    Case(L=6, E=2, p=1, H=4, W=5),
    Case(p=1, L=3, ks=5, H=5, W=4),
    Case(p=4, L=3, H=8, W=12, O=18, E=2, B=2),
    Case(p=3, L=2, H=6, W=9, ks=5),
    Case(p=2, L=8, H=8, W=6, ks=5, E=2, drop=True),  # others reach from two patches away
    Case(ks=1, p=1, L=5, O=20, E=2),
    Case(ks=1, p=3, L=3, H=6, W=9, bias=True),
    Case(ks=1, norm=None, bias=True, drop=True),
    Case(ks=1, norm=None),
    Case(context="patch"),
    Case(context="patch", ks=5, p=3, bias=True),
    Case(gate_on="output"),
    Case(gate_on="output", norm=None, bias=True),
    Case(gate_on="output", norm=None, training=False),
    Case(gate_on="output", bias=True, drop=True, L=4),
    Case(gate_on="output", context="patch", bias=True),
    Case(gate_on="output", ks=1, bias=True),
    Case(gate_on="output", ks=1, norm=None, bias=True, p=1, L=7),
    Case(gate_on="output", ks=5, p=1, L=8),
    # through two norms' own statistics of a single patch little of the gradient is left but rounding
    Case(B=1, E=1, L=1, O=1, C=1, norm=None),
    Case(B=1, E=1, L=1, O=1, C=1, norm="eval"),
]


def make(case, device, dtype):
    """Index; leaves in the dtype, gate and norms in float32 at least; statistics."""
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(0)
    N, X = (case.H // case.p) * (case.W // case.p), case.E * case.O
    index = torch.rand(case.B, case.E, N, generator=g).argsort(-1)[..., : case.L]
    gate = torch.rand(case.B, case.E, case.L, generator=g, dtype=torch.float64) + 0.1
    if case.drop:
        gone = torch.rand(index.shape, generator=g) < 0.4
        index, gate = index.masked_fill(gone, UNASSIGNED), gate.masked_fill(gone, 0)
    narrow, full = {"device": "cpu", "dtype": dtype}, {"device": "cpu", "dtype": wide}
    weight = case.E, case.O, case.C, case.ks, case.ks
    leaves = {
        "x": numbers(case.B, case.C, case.H, case.W, seed=1, **narrow).contiguous(memory_format=torch.channels_last),
        "gate": gate.to(wide),
        "weight": numbers(*weight, seed=2, scale=(case.C * case.ks**2) ** -0.5, **narrow),
        "after weight": numbers(X, seed=8, **full),
        "after bias": torch.zeros(X, **full),
    }
    state = {
        "after mean": numbers(X, seed=10, scale=0.1, **full),
        "after var": numbers(X, seed=11, **full).abs() + 0.5,
    }
    if case.bias:
        leaves["bias"] = numbers(case.E, case.O, seed=3, **narrow)
    if case.norm:
        leaves |= {
            "norm weight": numbers(case.E, case.C, seed=4, **full) + 0.5,
            "norm bias": torch.zeros(case.E, case.C, **full),
        }
        state |= {
            "mean": numbers(case.E, case.C, seed=6, scale=0.1, **full),
            "var": numbers(case.E, case.C, seed=7, **full).abs() + 0.5,
        }
    move_biases_from_kinks(case, index, leaves, state)
    leaves, state = ({name: v.to(device) for name, v in each.items()} for each in (leaves, state))
    return index.to(device), leaves, state


class BeforeReLU(TorchFunctionMode):
    """Records the inputs of ReLUs."""

    def __init__(self):
        super().__init__()
        self.inputs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.relu:
            self.inputs.append(args[0].detach().transpose(0, 1).flatten(1))
        return func(*args, **(kwargs or {}))


def before_relu(case, index, leaves, state):
    """Values of channels (E·C, B·H·W) that experts normalised, and of those (E·O, B·H·W) that experts output."""
    with BeforeReLU() as relu:
        run(case, index, leaves, state, torch.float64, by_reference)
    *experts, last = relu.inputs
    return ({"norm bias": torch.cat(experts)} if experts else {}) | {"after bias": last}


def middle_of_gap(values):
    """Of a wide gap in each row (X, n), with several values on either side where there are."""
    ordered, n = values.sort(1).values, values.shape[1]
    below = torch.arange(1, n)
    side = torch.minimum(below, n - below).clamp_max(8)
    at = (ordered.diff() * side).argmax(1, keepdim=True)
    return (ordered.gather(1, at) + ordered.gather(1, at + 1)).squeeze(1) / 2


def move_biases_from_kinks(case, index, leaves, state):
    """Sets the biases in front of ReLUs so that rounding makes nothing active that is not, and nothing inactive."""
    for name in ("norm bias", "after bias"):  # in this order: the first changes what the second is added to
        if name in leaves:
            leaves[name] -= middle_of_gap(before_relu(case, index, leaves, state)[name]).view_as(leaves[name])
    for name, values in before_relu(case, index, leaves, state).items():
        nearest = (values.abs().amin(1) / values.abs().amax(1)).min()
        assert nearest > FAR, f"{case}: with this {name} a value is only {nearest:.1e} of the largest away from zero"


def run(case, index, leaves, state, dtype, pooled):
    """Means, gradients of every leaf and statistics, computed in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    narrow = ("x", "weight", "bias")
    t = {name: v.detach().to(dtype if name in narrow else wide, copy=True) for name, v in leaves.items()}
    statistics = {name: v.to(wide, copy=True) for name, v in state.items()}
    for v in t.values():
        v.requires_grad_()
    grid = (case.H // case.p, case.W // case.p)
    scores = torch.zeros(case.B, grid[0] * grid[1], case.E, device=index.device, dtype=wide)
    routing = Routing("patch", scores, index, t["gate"], "expert", grid, may_drop=case.drop)
    norm = None
    if case.norm:
        norm = Norm(
            t["norm weight"], t["norm bias"], statistics["mean"], statistics["var"], 0.1, 1e-3, case.norm == "train"
        )
    after = Norm(
        t["after weight"], t["after bias"], statistics["after mean"], statistics["after var"], 0.2, 1e-2, case.training
    )
    y = pooled(
        t["x"], routing, ConvWeights(t["weight"], t.get("bias")), norm,
        PatchSpec(case.p, case.gate_on, case.context, "concat"), after,
    )  # fmt: skip
    probe = numbers(*y.shape, seed=99, device=y.device, dtype=torch.bfloat16).to(dtype)
    (y * probe).sum().backward()
    return {"means": y.detach()} | {f"grad of {name}": v.grad for name, v in t.items()} | statistics


def by_reference(x, routing, experts, norm, spec, after):
    y = ReferenceBackend().conv(x, routing, experts, norm, spec)
    y = F.batch_norm(
        y, after.running_mean, after.running_var, after.weight, after.bias, after.training, after.momentum, after.eps
    )
    return F.relu(y).mean((2, 3))


def check(case, device, dtype):
    index, leaves, state = make(case, device, dtype)
    reference = run(case, index.cpu(), on_cpu(leaves), on_cpu(state), torch.float64, by_reference)
    mine = run(case, index, leaves, state, dtype, pooled_head.pooled_conv)
    # a bias that BatchNorm cancels has no gradient
    assert_near(mine, reference, dtype, least={"grad of bias": reference["grad of weight"].norm().item()})


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_and_every_gradient_equal_the_references(case, on):
    check(case, *on)


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize(
    "case", [Case(), Case(L=9), Case(context="patch", ks=5, p=3, bias=True), Case(gate_on="output", bias=True)], ids=str
)
def test_patches_too_large_to_unroll_give_the_same(case, on, monkeypatch):
    monkeypatch.setattr("moesaic.models.wide_resnet.triton.pooled_head.MAX_TAPS", 0)
    check(case, *on)


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize("case", [Case(), Case(p=1, L=6)], ids=str)
def test_more_splits_of_sums_than_are_loaded_at_a_time_give_the_same(case, on, monkeypatch):
    monkeypatch.setattr("moesaic.models.wide_resnet.triton.pooled_head.MAX_LOADED_SPLITS", 2)
    check(case, *on)


NETWORKS = [
    {"image_size": 32, "patch_size": 2, "kernel_size": 3, "patches_per_expert": 5},
    {"image_size": 16},
    {"image_size": 16, "gate": "softmax_selected", "gate_on": "output", "kernel_size": 3, "experts": 2},
    {"image_size": 16, "expert_norm": False, "fidelity": "released"},
]


def network(options, device, dtype):
    torch.manual_seed(0)
    model = WideResNetPMoE(10, 1, 3, **options).to(device, dtype)
    x = numbers(2, 3, options["image_size"], options["image_size"], seed=1, device=device, dtype=dtype)
    with torch.no_grad():  # scores far enough apart that rounding does not change who is chosen
        model.moe.router.weight.copy_(numbers(*model.moe.router.weight.shape, seed=2, device=device, dtype=dtype))
    return model, x.contiguous(memory_format=torch.channels_last)


def run_step(model, x, name):
    """Scores, gradients of all weights and of the images, and all buffers."""
    x = x.clone().requires_grad_()
    with moesaic.backend(name):
        scores = model(x)
    F.cross_entropy(scores, torch.arange(len(x), device=x.device)).backward()
    gradients = {f"grad of {name}": weight.grad for name, weight in model.named_parameters()}
    return {"scores": scores.detach(), "grad of x": x.grad} | gradients | dict(model.named_buffers())


@pytest.fixture
def fused(monkeypatch):
    """Calls of the kernels, one for each map that was not written."""
    calls = []
    pooled_conv = pooled_head.pooled_conv

    def counting(*args):
        calls.append(args)
        return pooled_conv(*args)

    trained_at_once = pooled_head._trained_at_once

    def counting_at_once(*args):
        found = trained_at_once(*args)
        calls.extend([] if found is None else [args])
        return found

    monkeypatch.setattr(pooled_head, "pooled_conv", counting)
    monkeypatch.setattr(pooled_head, "_trained_at_once", counting_at_once)
    return calls


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("options", NETWORKS)
def test_a_network_equals_one_that_writes_the_map(options, on, fused):
    device, dtype = on
    model, x = network(options, device, dtype)
    other = copy.deepcopy(model)
    expected, got = run_step(other, x, "torch"), run_step(model, x, "triton")
    assert len(fused) == 1
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    with torch.no_grad(), moesaic.backend("triton"):
        logits = model.eval()(x)
    with torch.no_grad(), moesaic.backend("torch"):
        torch.testing.assert_close(logits, other.eval()(x), **tolerance)
    assert len(fused) == 2


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("gate", ["softmax_all", "one"])
def test_operators_that_a_mode_watches_equal_the_joint_one(gate, on, fused):
    """A mode sees the expert choice, the statistics and the rest one after the other."""
    model, x = network({"image_size": 16, "gate": gate}, *on)
    twin, seen = copy.deepcopy(model), []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Watching():
        watched = run_step(twin, x, "triton")
    expected = run_step(model, x, "triton")
    assert len(fused) == 2
    parts = ("moesaic::patch_route", "moesaic::patch_statistics", "moesaic::patch_conv_pooled")
    assert [name for name in seen if name in parts] == list(parts)
    for name, each in expected.items():
        if each is None:
            assert watched[name] is None, name
        else:
            torch.testing.assert_close(watched[name], each, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("on", ONE_TYPE)
def test_a_residual_network_writes_the_map(on, fused):
    model, x = network({"image_size": 16, "residual": True}, *on)
    with moesaic.backend("triton"):
        model(x)
    assert not fused


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize(("patches", "written"), [(2, False), (3, True)])  # of 4×4 positions each, on a map of 36
def test_the_map_is_written_where_patches_cover_more_positions_than_it_has(patches, written, on, fused, monkeypatch):
    monkeypatch.setattr(pooled_head, "MAX_COVERAGE", 1.0)
    device, dtype = on
    options = {"patch_size": 2, "kernel_size": 3, "gate_on": "input", "expert_norm": True}
    layer = moesaic.PatchMoE(5, 9, experts=3, patches_per_expert=patches, **options).to(device, dtype)
    norm = torch.nn.BatchNorm2d(9).to(device, dtype)
    with moesaic.backend("triton"):
        means = pooled_head.pooled_head(layer, numbers(2, 5, 6, 6, seed=1, device=device, dtype=dtype), norm)
    assert means.shape == (2, 9)
    assert len(fused) == (0 if written else 1)


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("place", ["body.group3.0.moe", "body.group3.0.moe.experts", "body.norm", "body.relu", "body"])
def test_hooks_get_the_same_outputs(place, on, fused):
    model, x = network({"image_size": 16}, *on)
    other = copy.deepcopy(model)
    outputs = []
    for each, name in ((model, "triton"), (other, "torch")):
        each.get_submodule(place).register_forward_hook(lambda module, given, result: outputs.append(result.detach()))
        with moesaic.backend(name):
            each(x)
    assert not fused
    assert outputs[0].shape == outputs[1].shape
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on", ONE_TYPE)
def test_routing_is_recorded_without_the_map(on, fused):
    model, x = network({"image_size": 16}, *on)
    with moesaic.backend("triton"), moesaic.record_routing(model) as routing:
        model(x)
    assert len(fused) == 1
    assert routing["body.group3.0.moe"].index.shape == (2, 4, 4)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice to trade precision for speed
@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_network_needs_one_graph(training, on, fused):
    device, dtype = on
    model, x = network({"image_size": 16}, device, dtype)
    other = copy.deepcopy(model)
    torch.compiler.reset()
    with moesaic.backend("triton"):
        run_compiled = torch.compile(
            model.train(training), fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor"
        )
        compiled = run_compiled(x)
        plain = other.train(training)(x)
    assert len(fused) >= 1
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    for each in (compiled, plain):
        each.sum().backward()
    torch.testing.assert_close(model.body.stem.weight.grad, other.body.stem.weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.body.norm.running_var, other.body.norm.running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on", [pytest.param("cpu", marks=CPU_TYPE.marks), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_under_autocast_means_are_narrow_and_gradients_as_weights(on, fused, monkeypatch):
    if INTERPRETED:  # it has no products of bfloat16, which the first convolutions would take
        monkeypatch.setattr(thin_conv, "_DTYPES", ())
    model, x = network({"image_size": 16}, on, torch.float32)
    other = copy.deepcopy(model)
    means = []
    for each, name in ((model, "triton"), (other, "torch")):
        with moesaic.backend(name), torch.autocast(on, torch.bfloat16):
            means.append(each.features(x))
            each.head(means[-1]).sum().backward()
    assert len(fused) == 1
    assert means[0].dtype == means[1].dtype == torch.bfloat16
    torch.testing.assert_close(means[0], means[1], rtol=0.1, atol=0.05)
    for name, weight in model.named_parameters():
        assert weight.grad.dtype == torch.float32, name
        assert weight.grad.isfinite().all(), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_step_can_be_captured_in_a_cuda_graph(fused):
    model, x = network({"image_size": 64}, "cuda", torch.float32)
    weights = list(model.parameters())

    def step():
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), weights)]

    assert_captured(step, x, rtol=1e-3, atol=1e-4)
    assert len(fused) == 4

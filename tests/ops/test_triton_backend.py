"""Every kernel against the reference backend: outputs and all gradients.

On a GPU compiled, in float32, bfloat16 and float16, against the reference in float64 on the same numbers. Where Triton
is installed and there is no GPU, in its interpreter (``TRITON_INTERPRET=1``), in float64.
"""

import dataclasses
import importlib
import weakref

import pytest
import torch
from torch.nn import functional as F

import moesaic
from moesaic.ops.dispatch import ConvWeights, MLPWeights, Norm, PatchSpec
from moesaic.ops.reference_backend import ReferenceBackend
from moesaic.ops.triton_backend import TritonBackend
from moesaic.routing_record import UNASSIGNED, Routing

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    CPU_TYPE,
    GPU_TYPES,
    MLP_KERNELS,
    ONE_TYPE,
    PATCH_KERNELS,
    TOLERANCE,
    TYPES,
    Named,
    assert_near,
    numbers,
    on_cpu,
    poison,
    run_anywhere,
)

from moesaic.ops.triton.launch import PatchDims

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    run_anywhere(monkeypatch)
    poison(monkeypatch, *PATCH_KERNELS, *MLP_KERNELS)


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
    gate_on: str = "output"
    context: str = "map"
    combine: str = "concat"
    norm: str | None = None
    bias: bool = True
    drop: bool = False
    activation: str = "gelu"

    @property
    def spec(self):
        return PatchSpec(self.p, self.gate_on, self.context, self.combine)


def make(case, device, dtype, seed=0):
    """Leaves in the dtype (gate and norm in float32 at least, as routers return them)."""
    N = (case.H // case.p) * (case.W // case.p)
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.Generator().manual_seed(seed)
    index = torch.rand(case.B, case.E, N, generator=g).argsort(-1)[..., : case.L]
    gate = torch.rand(case.B, case.E, case.L, generator=g, dtype=torch.float64) + 0.1
    if case.drop:
        gone = torch.rand(index.shape, generator=g) < 0.4
        index, gate = index.masked_fill(gone, UNASSIGNED), gate.masked_fill(gone, 0)
    leaves = {
        "x": numbers(case.B, case.C, case.H, case.W, seed=seed + 1, device=device, dtype=dtype),
        "gate": gate.to(device, wide),
        "weight": numbers(case.E, case.O, case.C, case.ks, case.ks, seed=seed + 2, device=device, dtype=dtype,
                          scale=(case.C * case.ks**2) ** -0.5),
    }  # fmt: skip
    if case.bias:
        leaves["bias"] = numbers(case.E, case.O, seed=seed + 3, device=device, dtype=dtype)
    if case.norm:
        leaves["norm_weight"] = numbers(case.E, case.C, seed=seed + 4, device=device, dtype=wide) + 0.5
        leaves["norm_bias"] = numbers(case.E, case.C, seed=seed + 5, device=device, dtype=wide)
        leaves["mean"] = numbers(case.E, case.C, seed=seed + 6, device=device, dtype=wide, scale=0.1)
        leaves["var"] = numbers(case.E, case.C, seed=seed + 7, device=device, dtype=wide).abs() + 0.5
    leaves["x"] = leaves["x"].contiguous(memory_format=torch.channels_last)
    return index.to(device), leaves


def run(backend, kind, case, index, leaves, dtype, blind=False, wide_map=False):
    """Output, gradients of every leaf, and the running statistics, computed in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    like = {
        "x": wide if wide_map else dtype,
        "weight": dtype,
        "bias": dtype,
        "weight_in": dtype,
        "weight_out": dtype,
        "bias_in": dtype,
    }
    t = {n: v.detach().to(like.get(n, wide), copy=True) for n, v in leaves.items()}
    grads = [n for n in t if n not in ("mean", "var")]
    for name in grads:
        t[name].requires_grad_()
    x = t["x"]
    if blind:  # unselected pixels must not matter, even if they are NaN
        N = (case.H // case.p) * (case.W // case.p)
        chosen = torch.zeros(case.B, N, dtype=torch.bool, device=x.device)
        chosen.scatter_(1, index.flatten(1), True)
        over = chosen.view(case.B, 1, case.H // case.p, case.W // case.p)
        over = over.repeat_interleave(case.p, 2).repeat_interleave(case.p, 3)
        x = torch.where(over, x, float("nan")).contiguous(memory_format=torch.channels_last)
    N = (case.H // case.p) * (case.W // case.p)
    scores = torch.zeros(case.B, N, case.E, device=x.device, dtype=wide)
    routing = Routing("patch", scores, index, t["gate"], "expert", (case.H // case.p, case.W // case.p),
                      may_drop=case.drop)  # fmt: skip
    norm = None
    if case.norm:
        norm = Norm(t["norm_weight"], t["norm_bias"], t["mean"], t["var"], 0.1, 1e-3, case.norm == "train")
    if kind == "conv":
        y = backend.conv(x, routing, ConvWeights(t["weight"], t.get("bias")), norm, case.spec)
    else:
        weights = MLPWeights(
            t["weight_in"], t.get("bias_in"), t["weight_out"], t.get("bias"), ACTIVATIONS[case.activation]
        )
        y = backend.mlp(x, routing, weights, norm, case.spec)
    probe = numbers(*y.shape, seed=99, device=y.device, dtype=torch.bfloat16).to(dtype)
    (y * probe).sum().backward()
    result = {"y": y.detach()} | {f"grad of {n}": t[n].grad for n in grads}
    if case.norm == "train":
        result |= {"running mean": t["mean"], "running var": t["var"]}
    return result


def check(kind, case, device, dtype, seed=0, blind=False):
    index, leaves = make(case, device, dtype, seed)
    if kind == "mlp":
        del leaves["weight"]
        leaves["weight_in"] = numbers(case.E, 7, case.C, seed=11, device=device, dtype=dtype, scale=case.C**-0.5)
        leaves["weight_out"] = numbers(case.E, case.O, 7, seed=12, device=device, dtype=dtype, scale=7**-0.5)
        if case.bias:
            leaves["bias_in"] = numbers(case.E, 7, seed=13, device=device, dtype=dtype)
    reference = run(ReferenceBackend(), kind, case, index.cpu(), on_cpu(leaves), torch.float64)
    mine = run(TritonBackend(), kind, case, index, leaves, dtype, blind)
    if blind:
        del reference["grad of x"]
    assert_near(mine, reference, dtype)


CONV = [
    Case(),
    Case(ks=1),
    Case(ks=1, p=1, L=5, C=17, O=40, E=2, B=5),
    Case(ks=1, p=3, L=1, H=6, W=9, bias=False),
    Case(ks=1, p=1, L=36, drop=True),
    Case(ks=5, H=4, W=6),
    Case(p=1, L=4, H=3, W=5),
    Case(p=3, L=1, H=6, W=9),
    Case(p=4, L=2, H=8, W=4, B=1),
    Case(L=9),  # all patches
    Case(L=1, E=1, C=1, O=1),
    Case(C=17, O=18, E=5, B=3, H=4, W=4),
    Case(bias=False),
    Case(drop=True),
    Case(gate_on="input"),
    Case(gate_on="input", ks=1, bias=False, p=1, L=5),
    Case(gate_on="input", drop=True),
    Case(context="patch"),
    Case(context="patch", gate_on="input", ks=5),
    Case(combine="sum"),
    Case(combine="sum", gate_on="input", drop=True),
    Case(combine="sum", ks=1, p=1, O=9),
]
NORMED = [
    Case(norm="train"),
    Case(norm="eval"),
    Case(norm="train", gate_on="input"),
    Case(norm="eval", gate_on="input", bias=False),
    Case(norm="train", gate_on="input", ks=1, p=1, L=5),
    Case(norm="train", gate_on="input", drop=True, C=17),
    Case(norm="train", combine="sum"),
    Case(norm="eval", combine="sum", gate_on="input"),
    Case(norm="train", context="patch", gate_on="input"),
    Case(norm="train", context="patch", ks=5, p=3),
    Case(norm="train", context="patch", ks=5, p=3, gate_on="input"),
    Case(norm="train", gate_on="input", L=9, E=1),  # nothing is left unchosen
]


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize("case", CONV + NORMED, ids=str)
def test_a_convolution_equals_the_reference_in_output_and_every_gradient(case, on):
    check("conv", case, *on)


@pytest.mark.parametrize("on", GPU_TYPES[1:])
@pytest.mark.parametrize("case", [Case(), Case(norm="train", gate_on="input"), Case(combine="sum")], ids=str)
def test_a_wide_map_and_narrow_weights_as_under_autocast(case, on):
    device, dtype = on
    index, leaves = make(case, device, dtype)
    reference = run(ReferenceBackend(), "conv", case, index.cpu(), on_cpu(leaves), torch.float64)
    mine = run(TritonBackend(), "conv", case, index, leaves, dtype, wide_map=True)
    assert mine["y"].dtype == dtype
    assert mine["grad of x"].dtype == torch.float32
    assert_near(mine, reference, dtype)


def without_plans(monkeypatch, operator):
    """An operator of which nothing is recorded: its Python code runs."""
    monkeypatch.setattr(operator._implementation, "_plans", {})
    monkeypatch.setattr(operator._implementation, "_guarded", {})


@pytest.mark.parametrize("on", TYPES)
def test_experts_in_two_groups_give_the_same(monkeypatch, on):
    without_plans(monkeypatch, importlib.import_module("moesaic.ops.triton.patch_ops").patch_conv_backward)
    monkeypatch.setattr(importlib.import_module("moesaic.ops.triton.patch_backward"), "GROUP_BYTES", 0)
    for case in (Case(E=4), Case(E=2, norm="train", gate_on="input")):
        check("conv", case, *on)


@pytest.mark.parametrize("on", ONE_TYPE)
def test_the_first_group_of_experts_is_freed_before_the_second(monkeypatch, on):
    chosen = importlib.import_module("moesaic.ops.triton.patch_backward")
    experts = importlib.import_module("moesaic.ops.triton.patch_ops")
    without_plans(monkeypatch, experts.patch_conv_backward)
    monkeypatch.setattr(chosen, "GROUP_BYTES", 0)
    given: list[weakref.ref] = []
    alive: list[int] = []
    add, spread = chosen.InputBackward.add, experts.scatter_backward

    def remember(self, grad_rows, group):
        given.append(weakref.ref(grad_rows))
        add(self, grad_rows, group)

    def count(*arguments):
        alive.append(sum(each() is not None for each in given))
        return spread(*arguments)

    monkeypatch.setattr(chosen.InputBackward, "add", remember)
    monkeypatch.setattr(experts, "scatter_backward", count)
    check("conv", Case(E=4), *on)
    assert alive == [0, 0]
    assert len(given) == 2


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case(ks=1),
        Case(ks=1, p=1, L=5, activation="relu"),
        Case(ks=1, gate_on="input", activation="tanh"),
        Case(ks=1, combine="sum", bias=False),
        Case(ks=1, combine="sum", gate_on="input", p=1),
        Case(ks=1, norm="train", gate_on="input"),
        Case(ks=1, norm="train"),
        Case(ks=1, drop=True),
        Case(ks=1, drop=True, norm="eval", gate_on="input"),
    ],
    ids=str,
)
def test_mlps_equal_the_reference_in_output_and_every_gradient(case, on):
    check("mlp", case, *on)


@pytest.mark.parametrize("on", [CPU_TYPE, GPU_TYPES[1]])
@pytest.mark.parametrize("case", [Case(), Case(norm="train", gate_on="input"), Case(norm="eval")], ids=str)
def test_unselected_pixels_do_not_matter_even_if_nan(case, on):
    check("conv", case, *on, blind=True)


def loss(scores, gate, seed):
    probes = (
        numbers(*t.shape, seed=seed + i, device=t.device, dtype=torch.float64) for i, t in enumerate((scores, gate))
    )
    return sum((t.double() * probe).sum() for t, probe in zip((scores, gate), probes, strict=True))


@pytest.mark.parametrize("on", TYPES)
@pytest.mark.parametrize("softmax", ["softmax_selected", "softmax_all", "softmax_experts", "one"])
@pytest.mark.parametrize("wide_router", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 6, 6, 3, 2, 2), (1, 20, 4, 4, 5, 16, 1), (3, 3, 8, 4, 17, 1, 4)])
def test_a_map_is_scored_and_every_expert_selects_its_top_patches(shape, wide_router, softmax, on):
    (device, dtype), (B, C, H, W, E, L, p) = on, shape
    x = numbers(B, C, H, W, seed=1, device=device, dtype=dtype)
    kind = torch.promote_types(dtype, torch.float32) if wide_router else dtype
    router = moesaic.ExpertChoice(C, E, L, p, gate=softmax).to(device, kind)
    with torch.no_grad():
        router.weight.copy_(numbers(E, C, p, p, seed=2, device=device, dtype=kind))
    mine = x.clone(memory_format=torch.channels_last).requires_grad_()
    with moesaic.backend("triton"):
        got = router(mine)
    wide, theirs = moesaic.ExpertChoice(C, E, L, p, gate=softmax).to(device, torch.float64), x.double().requires_grad_()
    wide.load_state_dict(router.state_dict())
    with moesaic.backend("torch"):
        expected = wide(theirs)
    torch.testing.assert_close(got.scores.double(), expected.scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.index, expected.index)
    torch.testing.assert_close(got.gate.double(), expected.gate, rtol=1e-5, atol=1e-6)
    loss(got.scores, got.gate, 3).backward()
    loss(expected.scores, expected.gate, 3).backward()
    rtol = 4 * max(TOLERANCE[dtype], 1e-6)
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=rtol, atol=rtol)
    scale = wide.weight.grad.abs().max().item()
    torch.testing.assert_close(router.weight.grad.double(), wide.weight.grad, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("on", ONE_TYPE)
def test_equal_scores_go_to_the_lower_patch(on):
    device, dtype = on
    x = torch.ones(1, 3, 4, 4, device=device, dtype=dtype)
    x[0, :, 2, 1] = 2
    router = moesaic.ExpertChoice(3, 2, 4).to(device, dtype)
    with torch.no_grad():
        router.weight.fill_(1)[1] = -1
    with moesaic.backend("triton"):
        assert router(x).index.tolist() == [[[9, 0, 1, 2], [0, 1, 2, 3]]]


@pytest.mark.parametrize("on", [CPU_TYPE, *GPU_TYPES[:2]])
@pytest.mark.parametrize("patch_size", [1, 2, 4])
def test_an_images_scores_do_not_depend_on_the_batch(patch_size, on):
    device, dtype = on
    x = numbers(70, 20, 8, 8, seed=1, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    router = moesaic.ExpertChoice(20, 3, 2, patch_size).to(device, dtype)
    with moesaic.backend("triton"):
        alone, together = router(x[:1].contiguous(memory_format=torch.channels_last)), router(x)
    assert torch.equal(alone.scores, together.scores[:1])
    assert torch.equal(alone.gate, together.gate[:1])


@pytest.mark.parametrize("on", ONE_TYPE)
def test_the_variance_does_not_cancel(on):
    statistics = importlib.import_module("moesaic.ops.triton.norm").masked_statistics
    device, _ = on
    x = numbers(2, 4, 4, 3, seed=5, device=device, dtype=torch.float32) * 1e-2 + 100
    index = torch.arange(16, device=device).expand(2, 1, 16).contiguous()
    running = torch.zeros(1, 3, device=device), torch.ones(1, 3, device=device)
    mean, var = statistics(x, index, None, *running, 0.1, 1)
    wide = x.double().flatten(0, 2)
    torch.testing.assert_close(mean[0].double(), wide.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(var[0].double(), wide.var(0, unbiased=False), rtol=1e-3, atol=0)


@pytest.mark.parametrize("on", ONE_TYPE)
def test_the_same_input_gives_the_same_bits(on):
    case = Case(norm="train", gate_on="input")
    index, leaves = make(case, *on)
    first, again = (run(TritonBackend(), "conv", case, index, leaves, on[1]) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("on", ONE_TYPE)
def test_large_batches_stay_within_the_sizes_of_a_grid(monkeypatch, on):
    """Only the first axis of a grid may have more than 65535 programs."""
    device, dtype = on
    grids: dict[str, tuple[int, ...]] = {}

    class Launches:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            grids[self.name] = grid
            return lambda *arguments, **constants: None

    scatter = importlib.import_module("moesaic.ops.triton.scatter")
    choice = importlib.import_module("moesaic.ops.triton.expert_choice")
    monkeypatch.setattr(scatter, "scatter_kernel", Launches("scatter"))
    monkeypatch.setattr(choice, "score_backward_kernel", Launches("scores"))
    B = 1 << 20
    dims = PatchDims(B, 2, 2, 1, 1, 1, 1)
    rows = torch.zeros(1, dims.M, 1, device=device, dtype=dtype)
    slots = torch.zeros(B, 1, 4, device=device, dtype=torch.int32)
    scatter.scatter(rows, dims, slots, None, None, scatter.ScatterSpec(1, False, False))
    maps, kernels = (
        torch.zeros(B, 2, 2, 1, device=device, dtype=dtype),
        torch.zeros(1, 1, 1, device=device, dtype=dtype),
    )
    choice.scores_to_map_gradient(torch.zeros(B, 4, 1, device=device, dtype=dtype), kernels, None, maps, 1)
    assert set(grids) == {"scatter", "scores"}
    for name, grid in grids.items():
        assert all(programs <= 65535 for programs in grid[1:]), name

"""BatchNorm, gates and ReLU in one pass, and top-k gates of all layers from one kernel, against plain torch.

On a GPU compiled (``-m gpu``). Where Triton is installed and there is no GPU, in its interpreter
(``TRITON_INTERPRET=1``).
"""

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    GATED_NORM_KERNELS,
    INTERPRETED,
    ONE_TYPE,
    TYPES,
    Named,
    assert_captured,
    assert_near,
    numbers,
    poison,
    run_anywhere,
)

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import moesaic
from moesaic.layers import ChannelMoE
from moesaic.models.deepmoe.gated_conv import GatedConv, GatedReLU
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.resnet import ResNet
from moesaic.models.vgg import VGG16
from moesaic.ops.dispatch import explain_backend
from moesaic.ops.triton.channel_ops import gated_map_norm, gated_norm, topk_gates
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.joint_channel_gates import route_channels


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    run_anywhere(monkeypatch)
    poison(monkeypatch, *GATED_NORM_KERNELS)


@dataclass(frozen=True)
class Case(Named):
    """A map and what follows the convolution."""

    batch: int = 3
    channels: int = 20
    height: int = 5
    width: int = 4
    block: int = 8
    gated: bool = True
    closed: float = 0.5
    relu: bool = True
    training: bool = True
    shift: float = 0.5
    joint: bool = False

    __str__ = Named.__str__


CASES = [
    Case(),
    Case(relu=False),
    Case(training=False),
    Case(training=False, relu=False),
    Case(gated=False),
    Case(gated=False, training=False, channels=70),
    Case(closed=1.0),
    Case(closed=0.0, block=20),
    Case(closed=0.9, joint=True, block=5),
    Case(block=1, channels=37),
    Case(block=1, channels=3, relu=False),
    Case(block=3, channels=70, batch=5, height=1, width=1),
    Case(block=32, channels=96, batch=2, height=2, width=2),
    Case(batch=1, channels=64, height=11, width=13, block=32),
    Case(batch=130, channels=8, height=2, width=1, block=4),
    Case(channels=600, height=1, width=3, block=100),
    Case(shift=50.0),
]


def arguments(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Map, weight and bias, gates of each block, and the gradient of the output."""
    acc = torch.promote_types(dtype, torch.float32)
    shape = (case.batch, case.channels, case.height, case.width)
    blocks = -(-case.channels // case.block)
    x = numbers(*shape, seed=0, device=device, dtype=dtype) + case.shift
    layers = 3 if case.joint else 1
    gate = numbers(case.batch, layers * blocks, seed=1, device=device, dtype=acc).abs() + 0.1
    chosen = torch.rand(gate.shape, generator=torch.Generator().manual_seed(2)).to(device)
    gate = gate.where(chosen >= case.closed, 0)
    return {
        "x": x.contiguous(memory_format=torch.channels_last),
        "weight": numbers(case.channels, seed=3, device=device, dtype=acc) + 1,
        "bias": numbers(case.channels, seed=4, device=device, dtype=acc),
        "gate": gate[:, -blocks:],
        "grad": numbers(*shape, seed=5, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last),
    }


def defined(case: Case, x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    y = F.batch_norm(x, mean, var, weight, bias, case.training, 0.3, 1e-3)
    if case.gated:
        y = y * gate.repeat_interleave(case.block, 1)[:, : case.channels, None, None]
    return F.relu(y) if case.relu else y


def by_kernels(case: Case, x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    if case.training:
        batches = torch.tensor(41, device=x.device)
        options = (case.block, int(case.relu), int(case.training))
        gate = gate[:, None] if case.gated else None  # as `DeepMoE` has them
        y, _, _ = gated_map_norm(x, weight, bias, gate, mean, var, batches, options, 0.3, 1e-3)
        assert int(batches) == 42
        return y
    options = (case.block, int(case.relu), int(case.training))
    return gated_norm(x, weight, bias, gate if case.gated else None, mean, var, options, 1e-3)


def everything(run, case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, gradients and running statistics."""
    leaves = {name: each.detach().clone().requires_grad_() for name, each in given.items() if name != "grad"}
    if not case.gated:
        leaves["gate"].requires_grad_(False)
    acc = torch.promote_types(given["x"].dtype, torch.float32)
    mean, var = (
        (numbers(case.channels, seed=seed, device="cpu", dtype=torch.float64).abs() + 0.5).to(given["x"].device, acc)
        for seed in (6, 7)
    )
    y = run(case, leaves["x"], leaves["weight"], leaves["bias"], leaves["gate"], mean, var)
    wanted = {name: each for name, each in leaves.items() if each.requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), given["grad"].to(y.dtype))
    found = {"y": y, **dict(zip(wanted, grads, strict=True))}
    return {**found, "mean": mean, "var": var} if case.training else found


@pytest.mark.parametrize("place", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_gates_and_relu_in_one_pass_equal_those_one_after_the_other(case, place):
    device, dtype = place
    if case.shift > 1 and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("numbers so far from 0 are rounded to a few")
    given = arguments(case, device, dtype)
    mine = everything(by_kernels, case, given)
    right = everything(defined, case, {name: each.cpu().double() for name, each in given.items()})
    assert mine["y"].is_contiguous(memory_format=torch.channels_last)
    assert mine["y"].dtype == mine["x"].dtype == dtype
    running = {name: (mine.pop(name), right.pop(name)) for name in ("mean", "var") if name in mine}
    # rounding of a 16-bit map cancels in none of the sums, whatever they add up to
    least = {
        "gate": 1e-3 + 3 * right["gate"].abs().max() if "gate" in right else 1,
        "bias": 3.0,
        "weight": 3.0,
        "x": 0.1,
    }
    assert_near(mine, right, dtype, least if dtype in (torch.bfloat16, torch.float16) else {"gate": 1.0, "x": 0.1})
    for found, expected in running.values():  # the momentum is a float32 in a kernel
        torch.testing.assert_close(
            found.cpu().double(), expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5
        )


SHORT = [
    pytest.param(("cpu", dtype), marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"))
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("place", SHORT, ids=str)
def test_16_bit_maps_are_summed_in_float32(place):
    test_norm_gates_and_relu_in_one_pass_equal_those_one_after_the_other(Case(), place)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_closed_channels_are_zero_and_need_no_gradient(place):
    device, dtype = place
    case = Case(training=False)
    given = arguments(case, device, dtype)
    closed = (given["gate"] == 0).repeat_interleave(case.block, 1)[:, : case.channels, None, None]
    given["x"] = given["x"].where(~closed, torch.nan).contiguous(memory_format=torch.channels_last)
    found = everything(by_kernels, case, given)
    assert bool((found["y"] == 0).where(closed, True).all())  # closed channels are not read
    assert bool((found["x"] == 0).where(closed, True).all())
    assert bool(found["gate"].isfinite().all())
    assert bool((found["gate"] == 0).where(given["gate"] == 0, True).all())


@pytest.mark.parametrize("place", ONE_TYPE)
def test_the_same_input_gives_the_same_bits(place):
    device, dtype = place
    case = Case(batch=6, height=9, width=9)
    given = arguments(case, device, dtype)
    first, second = (everything(by_kernels, case, given) for _ in range(2))
    for name, each in first.items():
        assert torch.equal(each, second[name]), name


# gates of all layers -------------------------------------------------------------------------------------------------

SIZES = [(8, 4), (8, 4), (10, 4), (150, 2), (12, 1), (6, 3)]


def some_heads(place, training: bool, noise: float, **options) -> list[ChannelGate]:
    device, dtype = place
    torch.manual_seed(0)
    heads = [ChannelGate(5, channels, block=block, device=device, dtype=dtype, **options) for channels, block in SIZES]
    for head in heads:
        nn.init.normal_(head.weight)
        head.train(training).noise = noise
        if head.bias is not None:
            nn.init.normal_(head.bias, std=9)
    with torch.no_grad():
        heads[3].weight[::2] = heads[3].weight[:1]  # equal scores
        if heads[3].bias is not None:
            heads[3].bias[::2] = 30.0  # where softplus is linear
    return heads


def gates_and_gradients(heads: list[ChannelGate], embedding: Tensor, joint: bool, use: str):
    torch.manual_seed(1)
    routings = route_channels(heads, embedding, embedding.dtype) if joint else [head(embedding) for head in heads]
    parts = {"gate": [each.gate for each in routings], "weights": [each.weights for each in routings]}
    values = [*parts["gate"], *parts["weights"]] if use == "both" else parts[use]
    loss = sum((value * torch.randn(value.shape).to(value)).sum() for value in values)
    if use == "both":
        loss = loss + sum((each.scores * torch.randn(each.scores.shape).to(loss)).sum() for each in routings)
    leaves = [embedding, *(parameter for head in heads for parameter in head.parameters())]
    floats = [each for routing in routings for each in (routing.scores, routing.gate, routing.weights)]
    chosen = [each for routing in routings for each in (routing.index, routing.mask)]
    return [*floats, *torch.autograd.grad(loss, leaves)], chosen


@pytest.mark.parametrize("place", ONE_TYPE)
@pytest.mark.parametrize("use", ["both", "gate", "weights"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("options", [{"keep": 2}, {"keep": 1, "bias": None}], ids=str)
def test_one_kernel_makes_the_gates_that_the_heads_make_alone(options, noise, use, place, monkeypatch):
    device, dtype = place
    heads = some_heads(place, True, noise, mode="topk", **options)
    embedding = numbers(7, 5, seed=3, device=device, dtype=dtype).requires_grad_()
    found, chosen = gates_and_gradients(heads, embedding, True, use)
    expected, expected_chosen = gates_and_gradients(heads, embedding, False, use)
    tight = {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, **tight)
    for mine, right in zip(chosen, expected_chosen, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_heads_that_were_evaluated_in_inference_mode_can_be_trained(place):
    device, dtype = place
    heads = [ChannelGate(5, blocks, mode="topk", keep=3).to(device, dtype) for blocks in (9, 11)]
    embedding = numbers(4, 5, seed=3, device=device, dtype=dtype)
    with torch.inference_mode():
        route_channels([head.eval() for head in heads], embedding, dtype)
    sum(each.weights.sum() for each in route_channels([head.train() for head in heads], embedding, dtype)).backward()
    assert all(head.weight.grad is not None for head in heads)


def topk_of(scores: Tensor, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index, gates and dense gates of one layer."""
    blocks = scores.shape[1]
    layers = torch.tensor([[0, blocks, keep, 0]], dtype=torch.int32, device=scores.device)
    return topk_gates(scores, layers, (blocks, blocks, keep))


@pytest.mark.parametrize("place", ONE_TYPE)
def test_infinite_scores_have_the_gradients_that_softplus_gives_them(place):
    device, dtype = place
    scores = torch.tensor([[torch.inf, 0.5, -torch.inf]], device=device, dtype=dtype, requires_grad=True)
    _, _, dense = topk_of(scores, 3)
    (found,) = torch.autograd.grad(dense, scores, torch.ones_like(dense))
    expected = torch.autograd.grad(F.softplus(scores).sum(), scores)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_scores_may_have_any_strides(place):
    device, dtype = place
    scores = numbers(6, 4, seed=0, device=device, dtype=dtype).T.requires_grad_()
    compact = scores.detach().contiguous().requires_grad_()
    found, expected = topk_of(scores, 2), topk_of(compact, 2)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)
    mine, right = (torch.autograd.grad(each[2].square().sum(), leaf)[0] for each, leaf in
                   ((found, scores), (expected, compact)))  # fmt: skip
    assert torch.equal(mine, right)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_gradients_of_the_heads_are_taken_as_they_are(place):
    """Parts of one matrix in rows: autograd would copy every gradient whose layout is not that of its weight."""
    device, dtype = place
    heads = some_heads(place, True, 0.0, mode="topk", keep=2)
    embedding = numbers(16, 5, seed=3, device=device, dtype=dtype)
    sum(each.weights.sum() for each in route_channels(heads, embedding, dtype)).backward()
    assert len({head.weight.grad.untyped_storage().data_ptr() for head in heads}) == 1


# networks ------------------------------------------------------------------------------------------------------------

NETWORKS = {
    "vgg": (lambda: VGG16(6, width=0.08), {"mode": "topk", "keep": 0.4, "block": 2}),
    "vgg, relu": (lambda: VGG16(6, width=0.08), {}),
    "vgg, hard": (lambda: VGG16(6, width=0.08), {"mode": "hard"}),
    "basic blocks": (lambda: ResNet(18, 6, width=0.08), {"mode": "topk", "keep": 0.5, "block": 3}),
}


def some_network(name: str, place) -> nn.Module:
    device, dtype = place
    torch.manual_seed(0)
    make, options = NETWORKS[name]
    model = deepmoe(make(), num_classes=6, **options)
    for head in model.gates.values():
        nn.init.normal_(head.weight, std=0.5)
        nn.init.normal_(head.bias, std=0.1)
    return model.to(device, dtype, memory_format=torch.channels_last)


def step_of(model: nn.Module, x: Tensor, backend: str | None) -> dict[str, Tensor]:
    model.zero_grad()
    labels = torch.arange(len(x), device=x.device) % 6
    with moesaic.backend(backend) if backend else contextlib.nullcontext():
        output = model.forward_with_routing(x)
        loss = F.cross_entropy(output.logits, labels) + F.cross_entropy(output.embedding_logits, labels)
        (loss + 0.1 * sum(each.gate.mean() for each in output.routing.values())).backward()
    grads = {name: each.grad for name, each in model.named_parameters()}
    return {"logits": output.logits.detach(), **grads, **dict(model.named_buffers())}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_a_network_equals_that_of_the_reference(name, training):
    place = ("cpu", torch.float64) if INTERPRETED else ("cuda", torch.float32)
    model = some_network(name, place).train(training)
    x = numbers(3, 3, 32, 32, seed=1, device=place[0], dtype=place[1]).contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    found, expected = step_of(model, x, None), step_of(other, x, "reference")
    tight = {"rtol": 1e-6, "atol": 1e-9} if INTERPRETED else {"rtol": 2e-2, "atol": 2e-3}
    for key, right in expected.items():
        if "num_batches" in key:
            assert torch.equal(found[key], right)
        else:
            torch.testing.assert_close(found[key], right, msg=lambda text, key=key: f"{key}: {text}", **tight)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_relu_runs_once_and_not_where_a_hook_watches_the_convolution(place):
    model = some_network("vgg", place).train()
    x = numbers(2, 3, 32, 32, seed=1, device=place[0], dtype=place[1]).contiguous(memory_format=torch.channels_last)
    convs = [each for each in model.backbone.modules() if isinstance(each, GatedConv)]
    relus = [each for each in model.backbone.modules() if isinstance(each, GatedReLU)]
    assert len(convs) == len(relus) == 13
    passed: list[bool] = []
    for relu in relus:
        relu.register_forward_hook(lambda module, args, y: passed.append(args[0] is y))
    model(x)
    assert passed == [True] * 13
    passed.clear()
    seen: list[Tensor] = []
    convs[4].register_forward_hook(lambda module, args, y: seen.append(y))
    model(x)
    assert passed == [number != 4 for number in range(13)]
    assert bool((seen[0] < 0).any())
    passed.clear()
    with moesaic.backend("torch"):
        model(x)
    assert passed == [False] * 13


@pytest.mark.parametrize("place", ONE_TYPE)
@pytest.mark.parametrize("case", ["no norm", "contiguous", "a single value"])
def test_what_the_kernels_do_not_take_runs_as_before(case, place):
    device, dtype = place
    torch.manual_seed(0)
    layer = ChannelMoE(3, 6, 3, norm=case != "no norm", device=device, dtype=dtype).to(
        memory_format=torch.contiguous_format if case == "contiguous" else torch.channels_last
    )
    gate = ChannelGate(4, 6, device=device, dtype=dtype)
    routing = gate(numbers(1, 4, seed=0, device=device, dtype=dtype))
    x = numbers(1, 3, *((1, 1) if case == "a single value" else (5, 5)), seed=1, device=device, dtype=dtype)
    assert explain_backend(x, routing).name == "triton"
    if case == "a single value":
        with pytest.raises(ValueError, match="more than 1 value"):
            layer(x, routing)
        return
    found = layer(x, routing)
    with moesaic.backend("reference"):
        torch.testing.assert_close(found, layer(x, routing))


@pytest.mark.gpu
def test_a_training_step_is_captured_in_a_graph():
    model = some_network("vgg", ("cuda", torch.float32)).train()
    x = numbers(4, 3, 32, 32, seed=1, device="cuda", dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            output = model.forward_with_routing(x)
        loss = output.logits.float().square().sum() + output.embedding_logits.float().square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    assert_captured(step, x, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("place", ONE_TYPE)
@pytest.mark.parametrize("name", ["vgg", "basic blocks"])
def test_gradient_checkpointing_changes_nothing(name, place):
    model = some_network(name, place).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    x = numbers(2, 3, 32, 32, seed=1, device=place[0], dtype=place[1]).contiguous(memory_format=torch.channels_last)
    found, expected = step_of(other, x, None), step_of(model, x, None)
    for key, right in expected.items():
        torch.testing.assert_close(found[key], right, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("place", ONE_TYPE)
def test_operators_that_a_mode_watches_equal_the_joint_one(place):
    """A mode sees an operator for the statistics and one for the rest."""
    given, case = arguments(Case(), *place), Case()
    expected = everything(by_kernels, case, given)
    with FlopCounterMode(display=False):
        found = everything(by_kernels, case, given)
    for name, each in expected.items():
        assert torch.equal(found[name], each), name

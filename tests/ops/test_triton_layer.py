"""Routed layers on the `triton` backend, router included: as on the reference, compiled, captured and exported."""

import copy
import dataclasses
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import moesaic
from moesaic.experts import MLPExperts
from moesaic.models.rescaled_routers import RescaledExpertChoice
from moesaic.ops.dispatch import PatchSpec
from moesaic.ops.weight_layout import channels_last, is_taps_first, to_taps_first
from moesaic.routing_record import Routing

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    CPU_TYPE,
    GPU_TYPES,
    INTERPRETED,
    MLP_KERNELS,
    ONE_TYPE,
    PATCH_KERNELS,
    assert_captured,
    assert_near,
    maps_made,
    poison,
    run_anywhere,
)

from moesaic.ops.triton.scatter import taps_to_weight, weight_to_taps


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    run_anywhere(monkeypatch)
    poison(monkeypatch, *PATCH_KERNELS, *MLP_KERNELS)


LAYERS = [
    {},
    {"patch_size": 2, "kernel_size": 3},
    {"patch_size": 2, "kernel_size": 3, "gate": "softmax_all"},
    {"gate": "one"},
    {"gate_on": "input"},
    {"patch_size": 2, "kernel_size": 3, "gate_on": "input", "gate": "softmax_all", "expert_norm": True},
    {"combine": "sum"},
    {"experts": "mlp", "combine": "sum"},
    {"experts": "mlp", "gate_on": "input", "gate": "softmax_all"},
    {"experts": "mlp", "combine": "sum", "gate": "softmax_experts"},
    {"gate": "softmax_experts"},
    {"patch_size": 2, "kernel_size": 3, "gate": "softmax_experts", "gate_on": "input", "expert_norm": True},
]


def layer_of(options, device, dtype):
    torch.manual_seed(0)
    options = {"experts": 3} | options
    if options["experts"] == "mlp":
        options |= {"experts": MLPExperts(3, 4, 5, 6 if options.get("combine") == "sum" else 2)}
    layer = moesaic.PatchMoE(4, 6, patches_per_expert=2, **options).to(device, dtype)
    torch.nn.init.normal_(layer.router.weight)
    return layer


def results(layer, call, backend, x, device, extra):
    layer.zero_grad()
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        recorded = moesaic.record_routing(layer) if extra else nullcontext({})  # without, it is one operator
        with moesaic.backend(backend), recorded as routing:
            y = call(leaf)
        objective = y.square().sum()
        if extra:  # a loss on the routing itself, beside the layer's
            objective = objective + routing[""].scores.square().sum() + routing[""].gate.cos().sum()
        objective.backward()
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return {"y": y.detach(), "x": leaf.grad, **gradients}


def assert_same(mine, expected):
    assert mine.keys() == expected.keys()
    for name in mine:
        if expected[name] is None:
            assert mine[name] is None or not mine[name].any(), name
        else:
            torch.testing.assert_close(
                mine[name], expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("extra", [False, True], ids=["", "routing in the loss"])
def test_a_layer_equals_the_reference_with_its_router(options, extra, on):
    device, dtype = on
    layer = layer_of(options, device, dtype)
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert_same(*(results(layer, layer, name, x, device, extra) for name in ("triton", "reference")))


@pytest.mark.parametrize("on", ONE_TYPE)
def test_rescaled_gates_equal_the_reference(on):
    device, dtype = on
    torch.manual_seed(0)
    router = RescaledExpertChoice(8, 4, capacity=1.5, gate="softmax_experts", summed=True)
    layer = moesaic.TokenMoE(8, experts=4, hidden_dim=16, router=router).to(device, dtype)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(2, 9, 8, device=device, dtype=dtype)
    with moesaic.backend("triton"):
        assert router.select(x.transpose(1, 2).unsqueeze(2))[1] is None
    calls = (results(layer, layer, name, x, device, False) for name in ("triton", "reference"))
    assert_same(*calls)


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 7, 8), {"capacity": 1.5}),
        ((1, 1, 8), {"capacity": 1.0}),
        ((3, 11, 8), {"capacity": 2.0, "prefix_tokens": 2, "prefix": "bypass", "bias": False}),
        ((2, 130, 8), {"tokens_per_expert": 3, "activation": "relu"}),  # more than one program ranks at once
        ((2, 3, 5, 8), {"capacity": 1.0, "gate": "softmax_all"}),
    ],
    ids=str,
)
def test_tokens_equal_the_reference(shape, options, padded, on):
    device, dtype = on
    torch.manual_seed(0)
    layer = moesaic.TokenMoE(8, experts=3, hidden_dim=16, **options).to(device, dtype)
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(shape, device=device, dtype=dtype)
    mask = (torch.arange(math.prod(shape[:-1]), device=device) % 3 != 1).view(shape[:-1]) if padded else None
    calls = (results(layer, lambda x: layer(x, mask), name, x, device, False) for name in ("triton", "reference"))
    assert_same(*calls)


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize(
    ("patch_size", "channels", "experts", "gate", "training"),
    [
        (4, 37, 3, "softmax_all", True),
        (3, 21, 5, "softmax_all", False),
        (3, 5, 3, "softmax_selected", True),
        (3, 5, 3, "softmax_experts", True),
        (3, 4, 17, "softmax_all", True),  # too many experts to go through their kernels patch by patch
    ],
)
def test_a_router_in_front_of_a_norm_and_patches_of_many_pixels(patch_size, channels, experts, gate, training, on):
    device, dtype = on
    torch.manual_seed(1)
    layer = moesaic.PatchMoE(
        channels, 2 * experts, experts=experts, patches_per_expert=2, patch_size=patch_size, kernel_size=3,
        gate_on="input", gate=gate, expert_norm=True,
    ).to(device, dtype)  # fmt: skip
    torch.nn.init.normal_(layer.router.weight, std=(channels * patch_size**2) ** -0.5)
    with torch.no_grad():  # these choose the same patches, so that three or five experts leave some of eight to none
        layer.router.weight[1 : experts // 2 + 1] = layer.router.weight[0]
    layer.train(training)
    x = torch.randn(2, channels, 2 * patch_size, 4 * patch_size, device=device, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    owners = F.one_hot(layer.route(x).index, 8).sum((1, 2))
    assert owners.max() > experts // 2
    assert experts > 8 or owners.min() == 0
    assert_same(*(results(layer, layer, name, x, device, False) for name in ("triton", "reference")))


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice to trade precision for speed
def test_a_layer_compiled_between_others_copies_no_maps(on):
    device, dtype = on
    torch.manual_seed(0)
    options = {"kernel_size": 3, "gate_on": "input", "expert_norm": True}
    layer = moesaic.PatchMoE(6, 10, experts=2, patches_per_expert=1, patch_size=3, **options).to(device, dtype)
    before, after = torch.nn.Conv2d(4, 6, 3, padding=1), torch.nn.Conv2d(10, 8, 3, padding=1)
    network = torch.nn.Sequential(before, torch.nn.ReLU(), layer, torch.nn.ReLU(), after)
    network = network.to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 9, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(network, fullgraph=True)

    def step():
        with moesaic.backend("triton"):
            compiled(x).square().mean().backward()

    forward, back = maps_made(step)
    for maps in (forward, back):
        assert len(maps) == len({channels for _, channels, *_ in maps})
        for _, C, H, W, *strides in maps:
            assert (H, W) == (6, 9)
            assert strides == [C * H * W, 1, W * C, C]


def put_channels_last(kernels):
    return kernels.movedim(2, 4).contiguous().movedim(4, 2)


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("layout", [put_channels_last, to_taps_first])
@pytest.mark.parametrize("expert_norm", [False, True], ids=["", "norm"])
def test_gradients_of_weights_have_their_memory_layout(expert_norm, layout, compiled, on, monkeypatch):
    device, dtype = on
    options = {"gate": "softmax_all", "gate_on": "input", "expert_norm": expert_norm}
    layer = layer_of({"patch_size": 2, "kernel_size": 3} | options, device, dtype)
    other = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    other.experts.weight.data = layout(other.experts.weight.data)
    assert (channels_last if layout is put_channels_last else is_taps_first)(other.experts.weight)
    assert channels_last(other.router.weight)
    call = other
    if compiled:
        monkeypatch.undo()
        run_anywhere(monkeypatch)
        torch.compiler.reset()
        call = torch.compile(other, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    found = results(other, call, "triton", x, device, False)
    assert_same(found, results(layer, layer, "reference", x, device, False))
    assert found["experts.weight"].stride() == other.experts.weight.stride()
    assert found["router.weight"].stride() == other.router.weight.stride()


@pytest.mark.parametrize("on", ONE_TYPE)
def test_weights_stored_taps_first_are_matrices_without_a_copy(on):
    device, dtype = on
    weight = to_taps_first(torch.randn(3, 2, 4, 3, 3, device=device, dtype=dtype))
    matrix = weight_to_taps(weight)
    assert matrix.data_ptr() == weight.data_ptr()
    assert torch.equal(matrix, weight_to_taps(weight.contiguous()))
    back = taps_to_weight(matrix, weight)
    assert back.data_ptr() == weight.data_ptr()
    assert torch.equal(back, weight)


@pytest.mark.gpu
def test_channels_last_stores_taps_first_on_a_gpu():
    layer = layer_of({"patch_size": 2, "kernel_size": 3}, "cpu", torch.float32)
    weight = layer.experts.weight.detach().clone()
    layer.to("cuda", memory_format=torch.channels_last)
    assert is_taps_first(layer.experts.weight)
    layer.to(torch.float64)
    assert is_taps_first(layer.experts.weight)
    assert torch.equal(layer.experts.weight.cpu(), weight.double())
    layer.float().cpu()
    assert channels_last(layer.experts.weight)
    assert torch.equal(layer.experts.weight, weight)
    layer.cuda().to(memory_format=torch.contiguous_format)
    assert layer.experts.weight.is_contiguous()
    assert torch.equal(layer.experts.weight.cpu(), weight)


@pytest.mark.parametrize("on", [CPU_TYPE, *GPU_TYPES[1:]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patch_size": 2},
        {"patch_size": 6, "patches_per_expert": 1},
        {"gate": "softmax_all"},
        {"gate": "softmax_experts"},
        {"gate": "one"},
    ],
    ids=str,
)
def test_a_layer_of_1x1_experts_equals_the_reference_in_its_dtype(options, on):
    device, dtype = on
    torch.manual_seed(0)
    layer = moesaic.PatchMoE(24, 120, experts=3, **{"patches_per_expert": 5} | options).to(device, dtype)
    torch.nn.init.normal_(layer.router.weight)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(7, 24, 6, 12, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    mine = results(layer, layer, "triton", x, device, False)
    expected = results(exact, exact, "reference", x.double(), device, False)
    assert_near(mine, {name: each for name, each in expected.items() if each is not None}, dtype)


@pytest.mark.parametrize("on", ONE_TYPE)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_a_layer_compiles_without_a_break_and_gives_the_same(options, on, monkeypatch):
    monkeypatch.undo()
    run_anywhere(monkeypatch)
    torch.compiler.reset()
    device, dtype = on
    layer = layer_of(options, device, dtype)
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")
    assert_same(*(results(layer, call, "triton", x, device, False) for call in (compiled, layer)))


@pytest.mark.parametrize("on", ONE_TYPE)
def test_a_gate_that_was_replaced_gets_its_own_gradient(on):
    device, dtype = on
    layer = layer_of({}, device, dtype)
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)

    def halved(x):
        with torch.enable_grad():
            routing = layer.router(x)
            routing = dataclasses.replace(routing, gate=routing.gate / 2)
            return layer.experts(x, routing, PatchSpec(1, "output", "map", "concat"))

    layer.route(x)
    found = []
    for name in ("triton", "reference"):
        layer.zero_grad()
        with moesaic.backend(name):
            halved(x).square().sum().backward()
        found.append({name: weight.grad for name, weight in layer.named_parameters()})
    assert_same(*found)


@pytest.mark.parametrize("on", ONE_TYPE)
def test_a_recorded_routing_is_a_plain_record_that_does_not_keep_the_map_alive(on):
    device, dtype = on
    layer = layer_of({}, device, dtype)
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), moesaic.backend("triton"), moesaic.record_routing(layer) as routing:
        layer(x)
    assert type(routing[""]) is Routing
    map_ref = weakref.ref(x)
    del x
    assert map_ref() is None


@pytest.mark.parametrize("on", ONE_TYPE)
def test_a_router_with_hooks_is_called_as_a_module_and_the_layer_gives_the_same(on):
    device, dtype = on
    layer = layer_of({}, device, dtype)
    x = torch.randn(2, 4, 6, 6, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    expected = results(layer, layer, "triton", x, device, False)
    calls = []
    layer.router.register_forward_hook(lambda module, inputs, output: calls.append(type(output)))
    assert_same(results(layer, layer, "triton", x, device, False), expected)
    assert calls == [Routing]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"patch_size": 2, "kernel_size": 3, "expert_norm": True, "gate_on": "input"}, torch.float32),
        ({"patch_size": 2, "kernel_size": 3}, torch.float32),
        ({}, torch.bfloat16),
    ],
    ids=str,
)
def test_a_step_can_be_captured_in_a_cuda_graph(options, dtype):
    layer = layer_of(options, "cuda", dtype)
    x = torch.randn(2, 4, 6, 6, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    weights = list(layer.parameters())

    def step():
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), weights)]

    assert_captured(step, x, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_an_exported_layer_gives_the_same():
    layer = layer_of({"patch_size": 2, "kernel_size": 3}, "cuda", torch.float32).eval()
    x = torch.randn(2, 4, 6, 6, device="cuda")
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x), rtol=1e-4, atol=1e-5)

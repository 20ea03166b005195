"""Matmuls of experts on a CPU: the same numbers by oneDNN and MKL, and when each is used."""

import pytest
import torch
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

import moesaic
from moesaic.experts import MLPExperts
from moesaic.ops import cpu_gemm
from moesaic.ops.cpu_gemm import expert_bmm, expert_bmm_parts, expert_mm
from moesaic.ops.expert_linear import expert_linear

E, M, K, N = 3, 40, 33, 65


@pytest.fixture
def small_matmuls_by_onednn(monkeypatch):
    """oneDNN for every float32 matmul, on any CPU; returns the shapes that it multiplied."""
    monkeypatch.setattr(cpu_gemm, "is_faster_by_onednn", lambda: True)
    for limit in ("_MIN_MACS_PER_THREAD", "_MIN_ROWS", "_MIN_SIDE"):
        monkeypatch.setattr(cpu_gemm, limit, 1)
    linear, shapes = cpu_gemm._onednn_linear(), []
    assert linear is not None, "this torch has no mkldnn._linear_pointwise, or it computes something else"

    def counted(left, right):
        shapes.append((*left.shape, right.shape[0]))
        return linear(left, right)

    monkeypatch.setattr(cpu_gemm, "_onednn_linear", lambda: counted)
    return shapes


def operands(layout, dtype=torch.float32):
    left, right = torch.randn(E, M, K, dtype=dtype), torch.randn(E, K, N, dtype=dtype)
    if layout == "transposed":
        return left.mT.contiguous().mT, right.mT.contiguous().mT
    if layout == "sliced":
        return torch.cat([left, left], 2)[:, :, :K], torch.cat([right, right], 1)[:, ::2][:, :K]
    if layout == "expanded":
        return left[:1].expand(E, -1, -1), right[:1].expand(E, -1, -1)
    return left, right


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
def test_onednn_multiplies_operands_with_any_strides(layout, small_matmuls_by_onednn):
    left, right = operands(layout)
    expected = (left.double() @ right.double()).float()
    out = torch.full((E, M, N), torch.nan)
    parts = list(expert_bmm_parts(left, right))
    assert expert_bmm(left, right, out=out) is out
    for found in (expert_bmm(left, right), out, torch.cat([part for _, part in parts])):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expert_mm(left[1], right[1]), expected[1], rtol=1e-5, atol=1e-5)
    assert [experts for experts, _ in parts] == [slice(e, e + 1) for e in range(E)]
    assert small_matmuls_by_onednn == [(M, K, N)] * (3 * E + 1)


@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)])
def test_empty_operands_give_what_bmm_gives(shape, small_matmuls_by_onednn):
    experts, rows, inner, columns = shape
    left, right = torch.ones(experts, rows, inner), torch.ones(experts, inner, columns)
    assert torch.equal(expert_bmm(left, right), torch.zeros(experts, rows, columns))
    assert not small_matmuls_by_onednn


def test_mkl_multiplies_what_onednn_has_no_rule_for(small_matmuls_by_onednn):
    left, right = operands("contiguous")
    expert_bmm(left.double(), right.double())
    expert_bmm(left.bfloat16(), right.bfloat16())
    assert vmap(expert_mm)(left, right).shape == (E, M, N)
    with FlopCounterMode(display=False) as counter:
        expert_bmm(left, right)
    assert counter.get_total_flops() == 2 * E * M * K * N
    leaf = left.clone().requires_grad_()
    expert_bmm(leaf, right).sum().backward()
    torch.testing.assert_close(leaf.grad, right.sum(2).unsqueeze(1).expand_as(leaf))
    assert not small_matmuls_by_onednn
    with torch.no_grad():
        expert_bmm(leaf, right)
    assert small_matmuls_by_onednn


def test_the_choice_follows_the_cpu_the_shape_and_the_threads(monkeypatch):
    monkeypatch.setattr(cpu_gemm, "is_faster_by_onednn", lambda: True)
    large, small, thin = torch.ones(1024, 128), torch.ones(128, 64), torch.ones(4, 2**21)

    def by_onednn(left):
        return cpu_gemm._onednn_for(left, left.T) is not None

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert [by_onednn(left) for left in (large, small, thin)] == [True, False, False]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 128)
    assert not by_onednn(large)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cpu_gemm, "is_faster_by_onednn", lambda: False)
    assert not by_onednn(large)


ZEN_5 = {"sse4a": True, "avx512_f": True, "avx_vnni": True}


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (ZEN_5, True),
        ({**ZEN_5, "avx_vnni": False}, False),  # Zen 4
        ({**ZEN_5, "sse4a": False}, False),  # Intel
        ({"architecture": "aarch64"}, False),
    ],
)
def test_onednn_is_for_amd_from_zen_5_on(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cpu_gemm.is_faster_by_onednn.__wrapped__() is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in older versions of torch
    assert not cpu_gemm.is_faster_by_onednn.__wrapped__()


def test_the_check_of_onednn_does_not_depend_on_default_dtype_and_device():
    expected = cpu_gemm._onednn_linear.__wrapped__() is None
    torch.set_default_dtype(torch.float64)  # restored after the test
    with torch.device("meta"):
        assert (cpu_gemm._onednn_linear.__wrapped__() is None) == expected


def test_a_torch_without_the_operator_uses_mkl(monkeypatch):
    monkeypatch.setattr(cpu_gemm, "is_faster_by_onednn", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", object(), raising=False)
    assert cpu_gemm._onednn_linear.__wrapped__() is None


LAYERS = {
    "plain": {"bias": False},
    "released block": {"gate": "softmax_all", "gate_on": "input", "expert_norm": True},
    "patches alone": {"context": "patch"},
    "1×1": {"kernel_size": 1},
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_gradients_equal_the_reference(name, memory_format, small_matmuls_by_onednn):
    options = {"kernel_size": 3, **LAYERS[name]}
    layer = moesaic.PatchMoE(12, 10, experts=2, patches_per_expert=3, patch_size=2, **options)
    layer.to(memory_format=memory_format)
    x = torch.randn(3, 12, 6, 8).contiguous(memory_format=memory_format).requires_grad_()
    found, expected = (
        results(layer, x, "torch"),
        results(layer.double(), x.detach().double().requires_grad_(), "reference"),
    )
    assert len(small_matmuls_by_onednn) >= 3 * 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    inference(layer.float().eval(), x, small_matmuls_by_onednn)


def results(layer, x, backend):
    """Output and gradients in training mode, without a change of the layer's statistics."""
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    with moesaic.backend(backend):
        y = layer.train()(x)
    weights = [x, *layer.parameters()]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    grads = torch.autograd.grad(y, weights, upstream)
    layer.load_state_dict(state)
    return y, *grads


def inference(layer, x, shapes):
    shapes.clear()
    with torch.no_grad():
        found = layer(x)
        with moesaic.backend("reference"):
            expected = layer(x)
    assert shapes
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ends", [None, torch.tensor([0, 7, 7])], ids=["equal", "unequal"])
def test_expert_linear_by_onednn(ends, needed, small_matmuls_by_onednn):
    values = torch.randn((3, 4, 5) if ends is None else (7, 5), requires_grad=needed[0])
    weight = torch.randn(3, 2, 5, requires_grad=needed[1])
    doubles = [each.detach().double().requires_grad_(each.requires_grad) for each in (values, weight)]
    found, expected = expert_linear(values, weight, ends), expert_linear(*doubles, ends)
    assert small_matmuls_by_onednn
    for ours, theirs in zip(grads(found, values, weight), grads(expected, *doubles), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    if needed == (True, True):  # second derivatives
        (first,) = torch.autograd.grad(found.square().sum(), values, create_graph=True)
        assert torch.autograd.grad(first.sum(), weight)[0].shape == weight.shape


def grads(y, values, weight):
    wanted = [each for each in (values, weight) if each.requires_grad]
    return y, *torch.autograd.grad(y.square().sum(), wanted, retain_graph=True)


def test_several_gradients_at_once_equal_single_ones(small_matmuls_by_onednn):
    layer = moesaic.TokenMoE(6, experts=MLPExperts(2, 6, 4, 6), capacity=1.0)
    y = layer(torch.randn(2, 8, 6))
    each = torch.randn(3, *y.shape)
    weight = layer.experts.weight_in
    (together,) = torch.autograd.grad(y, weight, each, retain_graph=True, is_grads_batched=True)
    alone = torch.stack([torch.autograd.grad(y, weight, one, retain_graph=True)[0] for one in each])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

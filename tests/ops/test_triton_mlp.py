"""Stacked MLPs by Triton kernels, every variant of them, against float64: outputs and all gradients.

On a GPU compiled (``-m gpu``). Where Triton is installed and there is no GPU, in its interpreter
(``TRITON_INTERPRET=1``).
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_interpreter import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from moesaic.ops.triton import activation, mlp

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")


def places(*dtypes: torch.dtype) -> list[Any]:
    on_cpu = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
    return [
        pytest.param((device, dtype), marks=mark, id=f"{device}-{str(dtype)[6:]}")
        for device, mark in (("cpu", on_cpu), ("cuda", pytest.mark.gpu))
        for dtype in dtypes
        if not (device == "cuda" and dtype == torch.float64)
    ]


EXACT = torch.float64, torch.float32
SHORT = torch.bfloat16, torch.float16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
FUSED = ("pointers", "descriptors")
FORMS = [("gelu", True), ("relu", False)]

# relative error of ‖out − ref‖ / ‖ref‖; where rounding turns a sign, the slope of relu jumps
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

# (E, M, C, J, O): less than a tile, and tiles with rests on every side; fused products take rows of whole 16 bytes
SHAPES = [(1, 1, 3, 5, 2), (3, 37, 19, 23, 21), (2, 40, 24, 56, 16)]
WHOLE = [(1, 1, 8, 8, 8), (3, 37, 24, 56, 40), (2, 32, 16, 48, 64)]
LARGE = (3, 300, 200, 328, 136)
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what overflows in the interpreter
LONG = {"BM": 1, "BJ": 4096}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """The interpreter is slow: tiles that fit small shapes several times, and divide little."""
    if INTERPRETED:
        monkeypatch.setitem(activation.TILES, "activate", {"BM": 8, "BJ": 16})
        monkeypatch.setitem(activation.TILES, "activate_backward", {"BM": 4, "BJ": 16, "ROWS": 8})
        tile = {"BM": 16, "BJ": 16, "BK": 16, "GROUP": 2}
        for variants in mlp.TILES.values():
            monkeypatch.setitem(variants, "pointers", tile)
            monkeypatch.setitem(variants, "descriptors", {**tile, "PROGRAMS": 3})


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch):
    """Fresh memory is full of NaN, so that unwritten elements show."""

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*shape: Any, **options: Any) -> Tensor:
            return torch.empty(*shape, **options).fill_(float("nan"))

        @staticmethod
        def empty_like(like: Tensor) -> Tensor:
            return torch.empty_like(like).fill_(float("nan"))

    for name in ("activation", "mlp", "launch"):
        monkeypatch.setattr(importlib.import_module(f"moesaic.ops.triton.{name}"), "torch", Poisoned())


def error(found: Tensor, true: Tensor) -> float:
    assert found.shape == true.shape
    return float((found.double() - true).norm() / true.norm().clamp_min(1e-30))


def case(
    shape: tuple[int, int, int, int, int], on: tuple[str, torch.dtype], bias: bool, seed: int = 0
) -> dict[str, Any]:
    """Random leaves that the dtype holds exactly, and a gradient of the outputs."""
    (E, M, C, J, O), (device, dtype) = shape, on
    draw = torch.Generator().manual_seed(seed)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=draw, dtype=torch.float64) * scale).to(device, dtype)

    return {
        "values": normal(E, M, C),
        "weight_in": normal(E, J, C, scale=1.5 * C**-0.5),
        "bias_in": normal(E, J) if bias else None,
        "weight_out": normal(E, O, J, scale=J**-0.5),
        "grad": normal(E, M, O),
    }


def in_float64(given: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """Hidden values, outputs and all gradients by autograd."""
    leaves = {n: t.double().requires_grad_() for n, t in given.items() if t is not None and n != "grad"}
    before = leaves["values"] @ leaves["weight_in"].mT
    after = ACTIVATIONS[kind](before + leaves["bias_in"].unsqueeze(1) if "bias_in" in leaves else before)
    outputs = after @ leaves["weight_out"].mT
    before.retain_grad()
    outputs.backward(given["grad"].double())
    grads = {f"grad of {name}": leaf.grad for name, leaf in leaves.items()}
    true = {"before": before, "after": after, "outputs": outputs, "grad of before": before.grad, **grads}
    return {name: tensor.detach() for name, tensor in true.items() if tensor is not None}


def check_layer(given: dict[str, Any], kind: str, tolerance: float) -> None:
    weights = given["weight_in"], given["bias_in"], given["weight_out"]
    outputs, before, after = mlp.forward(given["values"], *weights, kind, True)
    grads = mlp.backward(given["grad"].clone(), mlp.Hidden(given["values"], before, after), *weights, kind)
    names = ("grad of values", "grad of weight_in", "grad of bias_in", "grad of weight_out")
    found = {"outputs": outputs, "before": before, "after": after, **dict(zip(names, grads, strict=True))}
    true = in_float64(given, kind)
    assert (found["grad of bias_in"] is None) == (given["bias_in"] is None)
    for name, tensor in found.items():
        if tensor is not None:
            assert error(tensor, true[name]) < tolerance, name


@pytest.mark.parametrize("on", places(*EXACT, *SHORT))
@pytest.mark.parametrize(("kind", "bias"), FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pass_of_its_own_for_the_activation_equals_float64(shape, kind, bias, on, monkeypatch):
    monkeypatch.setattr(mlp, "VARIANTS", {"forward": "separate", "backward": "separate"})
    check_layer(case(shape, on, bias), kind, TOLERANCE[on[1]])


@pytest.mark.parametrize("on", places(*SHORT))
@pytest.mark.parametrize(("kind", "bias"), FORMS)
@pytest.mark.parametrize("shape", WHOLE, ids=str)
@pytest.mark.parametrize("variant", FUSED)
def test_matmuls_fused_with_the_activation_equal_float64(variant, shape, kind, bias, on, monkeypatch):
    monkeypatch.setattr(mlp, "VARIANTS", {"forward": variant, "backward": variant})
    check_layer(case(shape, on, bias), kind, TOLERANCE[on[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("programs", [0, 7, 132])
@pytest.mark.parametrize("variant", FUSED)
def test_matmuls_of_many_tiles_equal_float64(variant, programs, dtype, monkeypatch):
    monkeypatch.setattr(mlp, "VARIANTS", {"forward": variant, "backward": variant})
    if variant == "descriptors":
        for variants in mlp.TILES.values():
            monkeypatch.setitem(variants, variant, {**variants[variant], "PROGRAMS": programs})
    check_layer(case(LARGE, ("cuda", dtype), True, programs), "gelu", TOLERANCE[dtype])


@pytest.mark.parametrize("on", places(torch.bfloat16))
@pytest.mark.parametrize("variant", ["separate", *FUSED])
def test_outputs_have_the_same_bits_without_saving(variant, on, monkeypatch):
    monkeypatch.setattr(mlp, "VARIANTS", {"forward": variant, "backward": variant})
    given = case((2, 40, 24, 56, 16), on, True)
    weights = given["weight_in"], given["bias_in"], given["weight_out"]
    kept, _, _ = mlp.forward(given["values"], *weights, "gelu", True)
    alone, before, _ = mlp.forward(given["values"], *weights, "gelu", False)
    assert torch.equal(kept, alone)
    assert before.numel() == 0


@pytest.mark.parametrize("on", places(torch.bfloat16))
@pytest.mark.parametrize("variant", ["separate", *FUSED])
def test_gradients_are_the_same_bits_every_time_and_with_hidden_values_recomputed(variant, on, monkeypatch):
    monkeypatch.setattr(mlp, "VARIANTS", {"forward": "separate", "backward": variant})
    given = case((2, 40, 24, 56, 16), on, True)
    weights = given["weight_in"], given["bias_in"], given["weight_out"]
    _, before, after = mlp.forward(given["values"], *weights, "gelu", True)
    runs = [
        mlp.backward(given["grad"], mlp.Hidden(given["values"], before, kept), *weights, "gelu")
        for kept in (after, after, after.new_empty(0))
    ]
    for first, *others in zip(*runs, strict=True):
        assert first is not None
        assert all(torch.equal(first, other) for other in others)


@QUIET
@pytest.mark.parametrize("on", places(*SHORT))
def test_gelu_of_every_16_bit_number_is_that_of_float64_rounded(on):
    device, dtype = on
    v = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    v = v[v.isfinite() & ((v > -9.5) | (v == 0))]  # below, what is left is less than float16 holds
    true = F.gelu(v.double())
    found = activation.activate(v.view(1, 1, -1), None, "gelu", tiles=LONG).flatten().double()
    # half a step of the dtype, and 3 % of one; a step where the interpreter cuts bfloat16 off; 6e-8 is float16's least
    step = torch.finfo(dtype).eps * (1.03 if INTERPRETED and dtype == torch.bfloat16 else 0.53)
    assert ((found - true).abs() <= step * true.abs() + 6e-8).all()


@pytest.mark.parametrize("on", places(*SHORT, torch.float32))
@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_derivatives_are_those_of_autograd(kind, on):
    device, dtype = on
    v = torch.linspace(-12, 12, 4001, dtype=torch.float64).to(device, dtype)
    leaf = v.double().requires_grad_()
    (true,) = torch.autograd.grad(ACTIVATIONS[kind](leaf).sum(), leaf)
    found, _ = activation.activate_backward(
        torch.ones_like(v).view(1, 1, -1), v.view(1, 1, -1), None, kind, tiles={**LONG, "ROWS": 1}
    )
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(found.flatten().double(), true, rtol=tolerance, atol=2 * min(tolerance, 1e-5))


@QUIET
@pytest.mark.parametrize("on", places(*SHORT, torch.float32))
@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_infinity_and_nan_are_preserved(kind, on):
    device, dtype = on
    v = torch.tensor([float("inf"), float("nan"), 0.0, 300.0, -300.0], dtype=dtype, device=device)
    found = activation.activate(v.view(1, 1, -1), None, kind).flatten()
    true = torch.tensor([float("inf"), float("nan"), 0.0, 300.0, 0.0], dtype=dtype, device=device)
    torch.testing.assert_close(found, true, equal_nan=True)


@pytest.mark.parametrize("on", places(torch.float16))
@pytest.mark.parametrize("variant", FUSED)
def test_rows_of_other_than_whole_16_bytes_go_to_cublas(variant, on):
    rows = torch.zeros(2, 3, 8, device=on[0], dtype=on[1])
    assert mlp._supported(variant, rows, 16) == variant
    assert mlp._supported(variant, rows, 12) == "separate"
    assert mlp._supported(variant, rows[:, :, :7], 16) == "separate"
    assert mlp._supported(variant, rows.float(), 16) == "separate"
    assert mlp._supported(variant, rows[:, :0], 16) == "separate"

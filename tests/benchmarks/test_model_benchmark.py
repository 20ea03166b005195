"""The network benchmark: its stand-in for a routed layer takes that place alone, and what is found is written."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_scripts import loaded_script
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule
from torch.nn import functional as F

BATCH, CHANNELS, SIDE = 3, 64, 8
"""Of the map in front of the routed layer, in a network of width 1 for images of 32×32."""


@pytest.fixture(scope="module")
def loaded() -> Iterator[ModuleType]:
    """The script, loaded once, since an op can be defined only once."""
    with loaded_script("model") as module:
        yield module


@pytest.fixture
def bench(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With networks of width 1 for those of 10."""
    monkeypatch.setattr(loaded, "NETWORKS", {"WRN": "wrn10_1", "WRN-pMoE": "wrn10_1_pmoe"})
    return loaded


def setting(bench: ModuleType, **more: Any) -> Any:
    chosen = {
        "shape": "cifar",
        "batch": BATCH,
        "what": "training step",
        "fidelity": "best",
        "device": "cpu",
        "dtype": "float32",
        "autocast": False,
        "compiled": False,
        "cuda_graph": False,
        "optimizer": False,
        "backend": None,
        "burst": 1,
    }
    return bench.Setting(**{**chosen, **more})


def stand_in(bench: ModuleType, chosen: Any, memory_format: torch.memory_format = torch.channels_last) -> Any:
    return chosen.network(bench.LIMIT, memory_format)


class Graphs:
    """A compiler that runs a graph as it is and keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Any:
        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vector_and_the_gradient_have_the_shapes_and_formats_of_real_ones(
    bench: ModuleType, memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    x = torch.randn(BATCH, 6, 4, 4, dtype=dtype).contiguous(memory_format=memory_format).requires_grad_()
    y = bench.ForNothing(10)(x)
    assert (y.shape, y.dtype) == ((BATCH, 10), dtype)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert (gradient.shape, gradient.stride(), gradient.dtype) == (x.shape, x.stride(), dtype)


def test_the_ops_agree_with_what_a_compiler_is_told_of_them(bench: ModuleType) -> None:
    x = torch.randn(2, 6, 4, 4).contiguous(memory_format=torch.channels_last)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth compares numbers
    told = torch.library.opcheck(bench.vector_for_nothing, (x.requires_grad_(), 10), test_utils=checks)
    told |= torch.library.opcheck(
        bench.map_for_nothing, (torch.randn(2, 10), list(x.shape), list(x.stride())), test_utils=checks
    )
    assert set(told.values()) == {"SUCCESS"}


@pytest.mark.parametrize("fidelity", ["best", "released", "print"])
def test_all_weights_outside_layer_and_norm_stay_and_learn(bench: ModuleType, fidelity: str) -> None:
    chosen = setting(bench, fidelity=fidelity)
    real = chosen.network("WRN-pMoE", torch.channels_last)
    model = stand_in(bench, chosen)
    layer = next(name for name, module in real.named_modules() if module is real.moe)
    kept = {name for name, _ in real.named_parameters() if not name.startswith((f"{layer}.", "body.norm."))}
    assert {name for name, _ in model.named_parameters()} == kept
    bench.training_step(model, chosen.images(torch.channels_last), chosen)()
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in model.parameters())


def test_the_stand_in_is_given_the_map_that_the_routed_layer_is_given(bench: ModuleType) -> None:
    chosen = setting(bench)
    real, model = chosen.network("WRN-pMoE", torch.channels_last), stand_in(bench, chosen)
    seen: list[Tensor] = []
    for module in (real.moe, model.body.mean):
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for network in (real, model):
        network(chosen.images(torch.channels_last))
    assert seen[0].shape == (BATCH, CHANNELS, SIDE, SIDE)
    assert torch.equal(*seen)
    assert seen[0].stride() == seen[1].stride()


def test_scores_that_are_not_numbers_stop_neither_step_nor_optimizer(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.ForNothing, "forward", lambda self, x: x.mean((2, 3)) * float("nan"))
    chosen = setting(bench, optimizer=True)
    model = stand_in(bench, chosen)
    step = bench.training_step(model, chosen.images(torch.channels_last), chosen)
    step()
    step()
    assert model.head.weight.isnan().all()


def test_a_training_step_is_compiled_into_one_graph(bench: ModuleType) -> None:
    chosen = setting(bench)
    torch.compiler.reset()
    graphs = Graphs()
    model: Any = torch.compile(
        stand_in(bench, chosen), backend=aot_autograd(fw_compiler=graphs, bw_compiler=graphs), fullgraph=True
    )
    scores = model(chosen.images(torch.channels_last))
    assert scores.shape == (BATCH, 10)
    F.cross_entropy(scores, chosen.targets()).backward()
    forward, backward = graphs.calls
    assert sum("vector_for_nothing" in call for call in forward) == 1
    assert sum("map_for_nothing" in call for call in backward) == 1
    convolutions = [sum("aten.convolution" in call for call in calls) for calls in (forward, backward)]
    assert convolutions[0] == convolutions[1] > 5
    norms = [sum("batch_norm" in call for call in calls) for calls in (forward, backward)]
    assert norms[0] == norms[1] == 5  # two in each of the first two blocks, one in the last: none behind the layer


@pytest.mark.parametrize("what", ["inference", "training step"])
@pytest.mark.parametrize("more", [{}, {"autocast": True, "dtype": "bfloat16"}, {"dtype": "bfloat16"}])
def test_each_kind_of_run_gives_a_row(bench: ModuleType, what: str, more: dict[str, Any]) -> None:
    names = [*bench.NETWORKS, bench.LIMIT]
    rows, times, _ = bench.compare(setting(bench, what=what, **more), names, ["channels_last"], 1, {})
    assert [row["network"] for row in rows] == names
    assert set(times) == {f"{name}, channels_last" for name in names}


def test_the_limit_follows_from_the_times(bench: ModuleType) -> None:
    rows = [{"network": name, "ms": ms} for name, ms in (("WRN", 9.2), ("WRN-pMoE", 8.4), (bench.LIMIT, 7.0))]
    assert bench.limit(rows) == pytest.approx(
        {"limit, × WRN": 9.2 / 7, "layer, ms": 1.4, "bar 1 leaves, ms": 2.2, "bar 1.15 leaves, ms": 1.0}
    )
    assert bench.limit(rows[:2]) == {}


def test_the_limit_is_written_where_it_is_asked_for(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "model.json"
    asked = ["--limit", "--shape", "cifar", "--batch", "2", "--what", "inference", "--repetitions", "2"]
    monkeypatch.setattr(sys, "argv", ["model.py", *asked, "--out", str(out)])
    bench.main()
    (measured,) = json.loads(out.read_text())["measurements"]
    ms = {row["network"]: row["ms"] for row in measured["networks"]}
    assert measured["limit"]["layer, ms"] == pytest.approx(ms["WRN-pMoE"] - ms[bench.LIMIT])
    assert measured["limit"]["limit, × WRN"] == pytest.approx(ms["WRN"] / ms[bench.LIMIT])


def test_kernels_are_those_of_one_run_the_longest_first(bench: ModuleType) -> None:
    x = torch.randn(200, 200)

    def run() -> None:
        (x @ x @ x).relu()

    found = bench.kernels(run, "cpu")
    number = {row["kernel"]: row["number"] for row in found}
    assert number["aten::mm"] == 2
    assert number["aten::relu"] == 1
    times = [row["ms"] for row in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0


def test_kernels_are_written_and_printed_where_they_are_asked_for(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.json"
    asked = ["--kernels", "--shape", "cifar", "--batch", "2", "--what", "inference", "--repetitions", "1"]
    monkeypatch.setattr(sys, "argv", ["model.py", *asked, "--out", str(out)])
    bench.main()
    (measured,) = json.loads(out.read_text())["measurements"]
    assert set(measured["kernels"]) == set(bench.NETWORKS)
    for rows in measured["kernels"].values():
        assert any("conv" in row["kernel"] for row in rows)
    assert "WRN-pMoE: " in capsys.readouterr().out

"""The page on when not to route shows what is in the committed results, and says so where there are none."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]


@pytest.fixture
def speed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed", ROOT / "docs" / "speed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(layer: str, backend: str | None, forward: float, step: float, **more: Any) -> dict[str, Any]:
    return {
        "layer": layer,
        "backend": backend,
        "picked": backend == "triton",
        "forward, ms": forward,
        "forward, × dense": 1 / forward,
        "step, ms": step,
        "step, × dense": 3 / step,
        "step, share of floor": 0.5,
        **more,
    }


def measurement(name: str, forward: float, step: float, *, form: str = "plain", equal: bool = True) -> dict[str, Any]:
    shape = {
        "batch": 128,
        "channels": 640,
        "size": 16,
        "experts": 8,
        "patches_per_expert": 2,
        "patch_size": 4,
        "kernel_size": 3,
    }
    work = {"dense": {"flops": 8e9, "bytes": 2e7}, "routed": {"flops": 1e9, "bytes": 1e7}}
    return {
        "name": name,
        "form": form,
        "shape": shape,
        "share": 0.125,
        "ceilings": {"bytes_per_second": 2e12, "flops_per_second": 5e14},
        "least work": {"forward": work, "step": work},
        "check": {"equal": equal, "tolerance": 0.01, "errors": {"triton": {"output": 0.002, "map": 0.003}}},
        "layers": [
            row("dense convolution", None, 1.0, 3.0),
            row("PatchMoE, triton", "triton", forward, step, **{"memory, × dense": 0.55}),
        ],
    }


@pytest.fixture
def of(speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on made-up results."""
    content = {
        "machine": {"gpu": "a GPU", "processor": "a CPU", "threads": 2},
        "device": "cuda",
        "dtype": "bfloat16",
        "ceilings": {"bytes_per_second": 2e12, "flops_per_second": 5e14},
        "measurements": [
            measurement("celeba", 0.5, 1.0),
            measurement("celeba", 0.5, 1.0, form="with bias"),
            measurement("celeba", 0.5, 2.0, form="released"),
            measurement("cifar", 4.0, 2.0),
            measurement("celeba-b1", 0.9, 9.0),
            measurement("celeba-l1", 0.1, 0.1, equal=False),
        ],
    }
    (tmp_path / "layer-cuda.json").write_text(json.dumps(content))
    (tmp_path / "layer-cpu.json").write_text(json.dumps({"shapes": {}}))  # an older form
    settings = [("celeba", False, 10.0, 9.0), ("celeba", True, 8.0, 6.4)]
    networks = [
        {
            "setting": {
                "shape": shape,
                "what": "training step",
                "batch": 128,
                "fidelity": "best",
                "compiled": compiled,
            },
            "networks": [{"network": "WRN", "ms": wrn}, {"network": "WRN-pMoE", "ms": pmoe}],
        }
        for shape, compiled, wrn, pmoe in settings
    ]
    (tmp_path / "model-cuda.json").write_text(json.dumps({"measurements": networks}))
    steps = {"products": 0.9, "dense": 1.2, "dense, compiled": 1.0, "ours": 1.5, "bmm": 2.1, "grouped": 3.0}
    perceptrons = [{"what": name, "step, ms": ms} for name, ms in steps.items()]
    (tmp_path / "mlp-cuda.json").write_text(json.dumps({"equality": {"ours": {"equal": True}}, "steps": perceptrons}))
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    return speed


def test_the_tables_on_the_page_are_those_of_the_committed_results(speed: ModuleType):
    text = speed.PAGE.read_text("utf-8")
    assert set(speed.PLACE.findall(text)) == set(speed.TABLES)
    assert speed.with_tables(text) == text, "run: python docs/speed.py"


def test_the_figures_on_the_page_are_there(speed: ModuleType):
    for figure in re.findall(r"\]\((images/[\w-]+\.svg)\)", speed.PAGE.read_text("utf-8")):
        assert (ROOT / "docs" / figure).is_file()


def test_a_shape_that_loses_anywhere_stands_among_those_in_which_dense_is_faster(of: ModuleType):
    lost, won = of.grid_table("layer-cuda", lost=True), of.grid_table("layer-cuda", lost=False)
    assert lost.startswith("*2 of 3 shapes on a GPU, bfloat16")
    assert "| **0.25** | 1.50 |" in lost
    assert "| 1.11 | **0.33** |" in lost
    assert won.count("\n") == lost.count("\n") - 1
    assert "| 2.00 | 3.00 |" in won


def test_what_differs_from_the_reference_is_shown_nowhere(of: ModuleType):
    assert all("30.00" not in table() for table in of.TABLES.values())


def test_results_that_are_missing_or_of_an_older_form_are_said_to_be_missing(of: ModuleType):
    for name in ("lost-cpu", "won-cpu", "named-cpu"):
        assert of.TABLES[name]() == "*not measured yet*"
    assert "| ≥ 4 | ≥ 6 | – | not measured yet |" in of.goals_table()


def test_goals_are_judged_by_what_was_measured(of: ModuleType):
    found = {line.split(" | ")[0].removeprefix("| "): line for line in of.goals_table().splitlines()}
    assert "| ≥ 2 | ≥ 4 | 3.00 | bar |" in found["celeba layer on a GPU, training step, × dense"]
    assert "| ≥ 1 | ≥ 1.3 | 1.50 | goal |" in found["cifar layer on a GPU, training step, × dense"]
    memory = found["celeba layer on a GPU, memory of a training step, share of the dense layer's"]
    assert "| ≤ 0.6 | – | 0.55 | bar |" in memory
    assert "| ≥ 1.3 | – | 1.40 | bar |" in found["MLP layer on a GPU, training step, × the fastest routed peer"]
    # against the faster of two dense ones
    perceptrons = found["MLP layer on a GPU, training step, time over that of a dense MLP of equal FLOPs"]
    assert "| – | ≤ 1.1 | 1.50 | **neither** |" in perceptrons
    # the fastest of each network, compiled or not
    assert "| ≥ 1.15 | ≥ 1.25 | 1.25 | goal |" in found["WRN-pMoE on a GPU, training step, celeba, × WRN"]


def test_a_bar_that_is_missed_is_told(speed: ModuleType):
    goal = speed.Goal("x", 2, 4, lambda: 1.9, "too slow")
    assert goal.cells() == ["x", "≥ 2", "≥ 4", "1.90", "**neither**", "too slow"]


def test_the_floor_is_told_with_its_bytes_and_operations(of: ModuleType):
    text = of.least_work("layer-cuda", "celeba", "step")()
    assert text == (
        "At least 1 GFLOP (0.002 ms at the measured rate) and 10 MB (0.005 ms), so bound by bytes; "
        "50 % of that floor is reached."
    )


def test_the_named_layers_are_there_in_all_forms_that_were_measured(of: ModuleType):
    table = of.named_table("layer-cuda")
    assert "**celeba**: 3×3 kernels, 640 channels, 16×16 maps, batch 128" in table
    assert "| released block | PatchMoE, triton | 0.5 ms | 2.00 | 2 ms | 1.50 | 0.50 | 0.55 |" in table


def test_the_roofline_has_every_shape_that_is_right(of: ModuleType):
    figure = of.draw_roofline(of.results("layer-cuda"))
    points = [len(group.get_offsets()) for axes in figure.axes for group in axes.collections]
    assert points == [1, 2, 1, 2] * 2  # dense then routed: of the grid, named


def test_the_same_results_give_the_same_figure(of: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def small(_: object) -> Figure:
        figure = Figure(figsize=(1, 1))
        figure.text(0.5, 0.5, "roof")
        return figure

    monkeypatch.setattr(of, "draw_roofline", small)
    monkeypatch.syspath_prepend(ROOT / "docs")  # as for a script of that folder
    path = tmp_path / "new" / "roofline.svg"
    of.write_roofline({}, path)
    first = path.read_text("utf-8")
    assert first.startswith("<svg")
    assert "@media (prefers-color-scheme: dark)" in first
    of.write_roofline({}, path)
    assert path.read_text("utf-8") == first

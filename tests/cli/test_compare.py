"""`moesaic compare`: on images with a local pattern it finds the mixture ahead; what it writes, and how it fails."""

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from PIL import Image

from moesaic.cli.compare import Compare
from moesaic.cli.shared import CommandError
from moesaic.report.chart import read_charts
from moesaic.report.comparison_report import write_comparison_report
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.comparison_result import read_comparison
from moesaic.training.paired_comparison import paired_comparisons

TILES, SIDE = 3, 4
CROSS = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
KINDS = {"cross": CROSS, "ring": 1 - CROSS}


def compare(*given: str) -> int:
    """As the program calls it."""
    return tyro.cli(Compare, args=list(given)).run(["compare", *given])


def write_mosaics(folder: Path, parts: dict[str, int], seed: int = 0) -> None:
    """JPEGs of 3×3 tiles of random pixels, of which one, anywhere, is a cross or a ring."""
    rng = np.random.default_rng(seed)
    for part, count in parts.items():
        for i in range(count):
            kind = list(KINDS)[i % len(KINDS)]
            tiles = rng.integers(0, 2, (TILES, TILES, SIDE, SIDE))
            tiles[rng.integers(TILES), rng.integers(TILES)] = KINDS[kind]
            picture = tiles.transpose(0, 2, 1, 3).reshape(TILES * SIDE, TILES * SIDE)
            noisy = np.clip(50 + 155 * picture + rng.normal(0, 25, picture.shape), 0, 255).astype(np.uint8)
            path = folder / part / kind / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy).resize((24, 24), Image.Resampling.NEAREST).save(path, quality=95)


SMALL = [
    "--samples",
    "8,16",
    "--trials",
    "2",
    "--epochs",
    "2",
    "--batch-size",
    "8",
    "--img-size",
    "8",
    "--device",
    "cpu",
]
SMALL += ["--cache-dir", "cache", "--models", "wrn10_1,wrn10_1_pmoe"]
OUT = Path("runs/compare-mosaics")


@pytest.fixture
def mosaics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of few images, in the folder that commands are called in."""
    monkeypatch.chdir(tmp_path)
    write_mosaics(tmp_path / "mosaics", {"train": 24, "test": 8})
    return tmp_path / "mosaics"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a comparison of the same images was made."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_mosaics(folder / "mosaics", {"train": 24, "test": 8})
        assert compare("mosaics", *SMALL) == 0
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are trained from here on, in this order; the third run of a test is interrupted by "stop"."""
    module = import_module("moesaic.training.comparison_runs")
    whole, trained = module.fit, []

    def fit(*given: Any, **more: Any) -> Any:
        if trained == ["stop", "wrn10_1", "wrn10_1_pmoe"]:
            trained.append("")
            raise KeyboardInterrupt
        trained.append(more["spec"].name)
        return whole(*given, **more)

    monkeypatch.setattr(module, "fit", fit)
    return trained


def timeless(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: timeless(value) for name, value in content.items() if name != "seconds"}
    return [timeless(each) for each in content] if isinstance(content, list) else content


def test_it_finds_the_mixture_ahead_where_the_pattern_is_local(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_mosaics(tmp_path / "mosaics", {"train": 240, "test": 200})
    routed = "wrn10_1_pmoe:patch_size=2:experts=8:patches_per_expert=2:kernel_size=3"  # a patch for each tile
    given = ["--models", f"wrn10_1,{routed}", "--samples", "200", "--trials", "3"]
    given += ["--epochs", "6", "--batch-size", "16", "--img-size", "24", "--device", "cpu"]
    assert compare("mosaics", *given, "--cache-dir", "cache") == 0
    found = read_comparison(OUT / "result.json")
    [pair] = paired_comparisons(found)
    assert pair.ahead == routed
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"wrn10_1_pmoe\S* is \S+ \[.*\] points more accurate", said)
    assert f"Next: moesaic train mosaics --model {routed} --img-size 24 # {routed}, trained on all images" in said
    # with a part of the arithmetic of the dense network
    assert found.models[1].macs < found.models[0].macs


def test_too_little_memory_is_told_with_a_way_out(mosaics, monkeypatch):
    def full(*given: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(import_module("moesaic.training.comparison_runs"), "fit", full)
    with pytest.raises(CommandError, match="cpu has too little memory for --batch-size 8; use a smaller one"):
        compare("mosaics", *SMALL)


def test_it_writes_everything_a_reader_needs_and_the_page_is_made_of_the_files(finished, tmp_path):
    out = finished / OUT
    assert {path.name for path in out.iterdir()} == {
        "cells",
        "charts.json",
        "config.json",
        "figures",
        "networks",
        "plans",
        "report.html",
        "result.json",
    }
    names = {f"{name}.{kind}" for name in ("labels", "work") for kind in ("png", "svg")}
    assert {path.name for path in (out / "figures" / "compare").iterdir()} == names
    verdicts = json.loads((out / "result.json").read_text("utf-8"))["verdicts"]
    assert verdicts[0] in (out / "report.html").read_text("utf-8").replace("\u00a0%", " %")
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["arguments"]["samples"] == "8,16"
    found, charts = read_comparison(out / "result.json"), read_charts(out / "charts.json")
    write_comparison_report(tmp_path / "again.html", found, charts, command=config["command"])
    assert (tmp_path / "again.html").read_bytes() == (out / "report.html").read_bytes()
    for folder in (out / "networks").iterdir():
        assert load_checkpoint(folder).input_shape == (3, 8, 8)


def test_ctrl_c_tells_how_to_continue_and_the_end_is_the_same(mosaics, finished, runs, capsys):
    runs.append("stop")
    assert compare("mosaics", *SMALL) == 130
    said = capsys.readouterr().err
    assert f"Interrupted. Finished runs are in {OUT}. To resume:" in said
    assert "compare mosaics --samples 8,16 --trials 2" in said
    assert not (OUT / "result.json").exists()
    assert compare("mosaics", *SMALL) == 0
    assert len(runs) == 1 + 3 + 6
    output = capsys.readouterr().out
    assert re.search(r"labels\s+wrn10_1\s+wrn10_1_pmoe\s+lead", output)
    assert f"Report: {OUT / 'report.html'}" in output
    first, second = (json.loads((out / "result.json").read_text("utf-8")) for out in (finished / OUT, OUT))
    assert timeless(first) == timeless(second)


def test_with_more_asked_for_only_what_is_missing_is_run(mosaics, finished, runs):
    shutil.copytree(finished / OUT, OUT)
    assert compare("mosaics", *SMALL, "--samples", "4,8,16") == 0
    assert sorted(runs) == ["wrn10_1", "wrn10_1", "wrn10_1_pmoe", "wrn10_1_pmoe"]
    assert read_comparison(OUT / "result.json").samples == (4, 8, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--models", "wrn10_1,wrn10_1pmoe"], r" --models='wrn10_1pmoe' is unknown; .*did you mean 'wrn10_1_pmoe'"),
        (["--models", "wrn10_1,wrn10_1_pmoe:router=sofd"], r"router='sofd' is unknown .did you mean 'soft'"),
        (["--models", "wrn10_1,wrn10_1_pmoe:router=no_module:Mine"], "'no_module' cannot be imported"),
        (["--models", "wrn10_1"], "has 1 of the at least 2 models"),
        (["--models", "wrn10_1,wrn10_1"], "models names 'wrn10_1' twice"),
        (["--samples", "8,25"], " --samples=25, but there are 24 images to train on in mosaics; use at most 24"),
        (["--samples", "1,8"], "samples=1 is less than one image for each of the 2 classes"),
        (
            ["--samples", "8,many"],
            r"--samples='8,many', of which 'many' is not a whole number; give for example 250,500",
        ),
        (["--samples", "0"], "of which 0 is below 1"),
        (["--samples", ","], "samples names no number"),
        (["--trials", "1"], "trials=1; it must be at least 2"),
        (["--optimizer", "adam"], r"--optimizer='adam' is unknown; .*did you mean 'adamw'"),
        (["--img-size", "0"], " --img-size=0; it must be at least 1"),
        (["--epochs", "0"], " --epochs=0; it must be at least 1"),
        (["--augment", "flips"], r"augment='flips' is unknown; .*did you mean 'flip'"),
        (["--device", "gpu"], "--device='gpu' is unknown"),
        (["--seed", "-1"], "--seed=-1; it must be from 0"),
        (["--trials", "some"], "--trials='some' is not a whole number; give one such as 5, or auto"),
        (["--max-trials", "9"], "--max-trials=9 with --trials=2; it is for --trials auto: leave one out"),
        (["--trials", "auto", "--max-trials", "99"], " --max-trials=99; it must be from 3 to 24"),
        (["--minutes", "0"], "--minutes=0; it must be above 0"),
        (["--minutes", "0.001"], r"--minutes 0.001 is too little: .* the smallest plan .* use --minutes .* or more"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(mosaics, given, message):
    with pytest.raises(CommandError, match=message):
        compare("mosaics", *SMALL, *given)
    assert not Path("runs").exists()


def test_data_that_is_not_there_is_told(mosaics):
    with pytest.raises(CommandError, match="mosiacs"):
        compare("mosiacs", *SMALL)


def test_a_diverging_run_is_told_by_name(mosaics):
    with pytest.raises(CommandError, match=r"moesaic compare: wrn10_1, 8 samples, trial 1: .*Lower lr"):
        compare("mosaics", *SMALL, "--lr", "1e30")


def test_a_dry_run_prints_the_plan_and_writes_nothing(mosaics, capsys):
    assert compare("mosaics", *SMALL, "--trials", "auto", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        r"(About|From) .* on this machine: 2 networks × 2 label counts × 3 trials, up to 12 while", lines[0]
    )
    assert lines[1] == "  8 and 16 labels, 2 epochs"
    assert [re.match(r"  (\S+): \d+ s; a step takes \d+ ms", line)[1] for line in lines[2:]] == [
        "wrn10_1",
        "wrn10_1_pmoe",
    ]
    assert not Path("runs").exists()


def test_samples_fit_the_folder_by_default(mosaics, capsys):
    given = [each for each in SMALL if each not in ("--samples", "8,16")]
    assert compare("mosaics", *given, "--dry-run") == 0
    assert "  5 and 10 labels, 2 epochs" in capsys.readouterr().out


def test_the_plan_comes_before_the_work_and_finished_runs_count_for_nothing(mosaics, finished, runs, capsys):
    shutil.copytree(finished / OUT, OUT)
    assert compare("mosaics", *SMALL) == 0
    said = capsys.readouterr().err
    assert "Nothing left to train: 2 networks × 2 label counts × 2 trials, all 8 runs are finished" in said
    assert compare("mosaics", *SMALL, "--trials", "3") == 0
    said = capsys.readouterr().err
    assert "3 trials; 8 of 12 runs are finished" in said
    assert len(runs) == 4


def test_trials_are_added_within_the_budget(mosaics, capsys):
    assert compare("mosaics", *SMALL, "--trials", "auto", "--max-trials", "4", "--minutes", "30") == 0
    found = read_comparison(OUT / "result.json")
    assert found.max_trials == 4
    assert 3 <= found.trials <= 4
    content = json.loads((OUT / "result.json").read_text("utf-8"))
    assert content["answers"][0]["question"] == "Which network should I use?"
    said = " ".join(capsys.readouterr().out.split())
    assert content["answers"][0]["answer"] in said
    page = re.sub(r"\s+", " ", (OUT / "report.html").read_text("utf-8").replace("\u00a0%", " %"))
    assert content["answers"][0]["answer"] in page
    assert "trials were added one by one, up to 4" in page


def test_one_routed_network_is_compared_with_the_dense_one(mosaics, capsys):
    assert compare("mosaics", *SMALL, "--models", "wrn10_1_pmoe", "--dry-run") == 0
    assert "  wrn10_1: " in capsys.readouterr().out

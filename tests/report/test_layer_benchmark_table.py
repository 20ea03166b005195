"""What `moesaic bench layer` concludes from times."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from moesaic.bench.layer_benchmark import LayerTimes
from moesaic.bench.timing import Memory, Timing
from moesaic.ops.dispatch import BackendChoice
from moesaic.report.layer_benchmark_table import advice, print_layer_times


def row(name: str, backend: str | None, milliseconds: float, picked: bool = False) -> LayerTimes:
    timing = Timing(milliseconds, milliseconds, milliseconds)
    return LayerTimes(name, backend, picked=picked, step={"channels_last": timing})


@pytest.mark.parametrize(
    ("dense", "ours", "sentence"),
    [
        (100.0, 120.0, "Routing is slower: a training step takes 1.2 times as long as that of the dense layer."),
        (120.0, 100.0, "Routing is faster: a training step is 1.2 times as fast as that of the dense layer."),
        (100.0, 103.0, "No difference: a training step takes as long as that of the dense layer."),
        (103.0, 100.0, "No difference: a training step takes as long as that of the dense layer."),
        (0.1, 0.12, "Routing is slower: a training step takes 1.2 times as long as that of the dense layer."),
    ],
)
def test_a_difference_counts_beyond_five_percent(dense, ours, sentence):
    rows = [row("dense convolution", None, dense), row("PatchMoE, torch", "torch", ours, picked=True)]
    assert advice(rows, ["step"]) == [sentence]


@pytest.mark.parametrize(("other", "faster"), [(0.5, True), (0.97, False), (2.0, False)])
def test_another_backend_is_named_if_it_is_faster(other, faster):
    rows = [
        row("dense convolution", None, 1.0),
        row("PatchMoE, torch", "torch", 1.0, picked=True),
        row("PatchMoE, reference", "reference", other),
    ]
    named = [sentence for sentence in advice(rows, ["step"]) if sentence.startswith("Backend reference")]
    assert bool(named) == faster
    if faster:
        assert named == [
            "Backend reference is 2.0 times as fast in the training step: use it with moesaic.backend('reference')."
        ]


def test_without_times_there_is_no_advice():
    assert advice([row("dense convolution", None, 1.0)], ["step"]) == []


@pytest.mark.parametrize(
    ("dense", "ours", "verdict"),
    [(100.0, 105.0, "No difference"), (105.0, 100.0, "No difference"), (100.0, 106.0, "Routing is slower")],
)
def test_five_percent_alone_are_no_difference(dense, ours, verdict):
    rows = [row("dense convolution", None, dense), row("PatchMoE, torch", "torch", ours, picked=True)]
    assert advice(rows, ["step"])[0].startswith(verdict)
    exactly = [
        row("dense convolution", None, 100.0),
        row("PatchMoE, torch", "torch", 105.0, picked=True),
        row("PatchMoE, reference", "reference", 100.0),
    ]
    assert len(advice(exactly, ["step"])) == 1


def test_compiled_rows_are_neither_the_choice_nor_advised():
    compiled = replace(row("PatchMoE, torch", "torch", 0.1, picked=True), compiled=True)
    rows = [row("dense convolution", None, 1.0), compiled, row("PatchMoE, torch", "torch", 2.0, picked=True)]
    rows.append(replace(row("PatchMoE, reference", "reference", 0.1), compiled=True))
    assert advice(rows, ["step"]) == [
        "Routing is slower: a training step takes 2.0 times as long as that of the dense layer."
    ]


def printed(rows: list[LayerTimes]) -> list[list[str]]:
    """The cells of each row of the table."""
    console = Console(file=io.StringIO(), width=120)
    print_layer_times("title", rows, BackendChoice("torch", "it fits", {}), ["step"], console)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    return [re.split(r"\s{2,}", line.strip()) for line in lines if " ms" in line or "–" in line]


def test_times_ratios_and_memory_are_in_the_table():
    rows = [
        replace(row("dense convolution", None, 100.0), memory=Memory(held=2**20, peak=3 * 2**20)),
        row("PatchMoE, torch", "torch", 99.9994, picked=True),
        LayerTimes("PatchMoE, reference", "reference"),
    ]
    assert printed(rows) == [
        ["dense convolution", "100 ms", "1.00", "2.0 MiB"],
        ["PatchMoE, torch ←", "99.999 ms", "1.00", "–"],
        ["PatchMoE, reference", "–", "–", "–"],
    ]
    assert printed(rows[1:2]) == [["PatchMoE, torch ←", "99.999 ms", "–"]]

"""What `moesaic bench layer` concludes from times."""

import pytest

from moesaic.bench.layer_benchmark import LayerTimes
from moesaic.bench.timing import Timing
from moesaic.report.layer_benchmark_table import advice


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

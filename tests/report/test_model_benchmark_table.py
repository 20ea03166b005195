"""Tables and advice of a model benchmark."""

import json

import pytest
from rich.console import Console

from moesaic.bench.model_benchmark import ModelBenchmark
from moesaic.bench.network_timer import LayerGain, NetworkGain
from moesaic.bench.timing import Timing
from moesaic.report.model_benchmark_table import benchmark_json, model_advice, print_model_benchmark


def benchmark(routed: float, bound: float = 1.5, **options) -> ModelBenchmark:
    layer = LayerGain(("a.conv", "b.conv"), "3×3, 8 channels on 4×4", 0.25, {"forward": 2.0}, {"forward": 1.0})
    network = NetworkGain("eager", "forward", Timing(10, 9, 11), Timing(routed, routed, routed))
    values = {"routed_share": 0.25, "routed_macs": 0.8, "bounds": {"forward": bound}}
    return ModelBenchmark(**{**values, "layers": (layer,), "networks": (network,), **options})


@pytest.mark.parametrize(
    ("routed", "sentence"),
    [
        (8.0, "Routing is faster: a forward pass is 1.25 times as fast (eager)."),
        (10.2, "No difference: a forward pass takes as long as in the dense network (eager)."),
        (20.0, "Do not route this network for the speed of its forward pass: it takes 2.00 times as long as in"),
        (5.0, "Measured 2.00, above that bound: the machine is busy; measure again."),
    ],
)
def test_the_advice_says_whether_to_route(routed: float, sentence: str):
    advice = model_advice(benchmark(routed))
    bound = "In eager mode, even routed layers that take no time would make a forward pass at most 1.50 times as fast."
    assert advice[1] == bound
    assert advice[-1].startswith(sentence)


def test_the_tables_have_layers_networks_and_notes():
    console = Console(width=100, record=True)
    failed = NetworkGain("compiled", "forward", None, None, "no compiler")
    found = benchmark(8.0)
    print_model_benchmark(
        "A network",
        benchmark(8.0, networks=(*found.networks, failed)),
        console,
    )
    text = console.export_text()
    for part in (
        "A network",
        "a.conv and 1 more",
        "25\u00a0%",
        "2.00",
        "forward pass, eager",
        "10.0 ms",
        "1.25",
        "forward pass, compiled: no compiler",
    ):
        assert part in text


def test_the_json_has_gains_and_advice():
    content = json.loads(json.dumps(benchmark_json(benchmark(8.0, bound=float("inf"))), allow_nan=False))
    assert content["networks"][0]["gain"] == 1.25
    assert content["layers"][0]["gain"] == {"forward": 2.0}
    assert content["bounds"] == {"forward": None}
    assert content["advice"]

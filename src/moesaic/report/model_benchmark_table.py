"""Terminal tables of a model benchmark: layers, the whole network, and advice whether to route."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.model_benchmark import ModelBenchmark
from moesaic.bench.network_timer import NOISE
from moesaic.report.formatting import percent

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PASSES", "benchmark_json", "model_advice", "print_model_benchmark"]

PASSES: dict[Pass, str] = {"forward": "forward pass", "step": "training step"}


def print_model_benchmark(title: str, found: ModelBenchmark, console: Console | None = None) -> None:
    """Prints the layers, the networks and the advice of `model_advice`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    passes: list[Pass] = list(found.bounds)
    console.print(Text(title, style="bold"))
    layers = Table(box=box.SIMPLE_HEAD)
    for name in ("layer", "shape"):
        layers.add_column(name, overflow="fold")
    for name in ("work", *(f"{PASSES[what]}, × dense" for what in passes)):
        layers.add_column(name, justify="right")
    for layer in found.layers:
        first, *others = layer.names
        more = f" and {len(others)} more" if others else ""
        gains = (_ratio(layer.gain(what)) for what in passes)
        layers.add_row(Text(first + more), layer.shape, percent(layer.share), *gains)
    console.print(layers)
    networks = Table(box=box.SIMPLE_HEAD)
    networks.add_column("the whole network")
    for name in ("dense", "routed", "× dense"):
        networks.add_column(name, justify="right", no_wrap=True)
    for each in found.networks:
        times = (f"{timing.median:.1f} ms" if timing else "–" for timing in (each.dense, each.routed))
        networks.add_row(f"{PASSES[each.what]}, {each.mode}", *times, _ratio(each.gain))
    console.print(networks)
    notes = [f"{PASSES[each.what]}, {each.mode}: {each.note}" for each in found.networks if each.note is not None]
    for line in (*notes, *model_advice(found)):
        console.print(Text(line), highlight=False)


def model_advice(found: ModelBenchmark) -> list[str]:
    r"""Sentences on the bound and on whether to route this network.

    >>> for sentence in model_advice(ModelBenchmark(0.5, 0.6, {"forward": 2.0}, (), ())):
    ...     print(sentence.replace("\u00a0", " "))
    The routed layers have 50 % of the dense network's multiply-adds; with them routed, 60 % of all remain.
    In eager mode, even routed layers that take no time would make a forward pass at most 2.00 times as fast.
    """
    sentences = [
        f"The routed layers have {percent(found.routed_share)} of the dense network's multiply-adds; with them routed, "
        f"{percent(found.routed_macs)} of all remain."
    ]
    for what, bound in found.bounds.items():
        most = f"at most {bound:.2f} times as fast" if math.isfinite(bound) else "of any speed"
        sentences.append(f"In eager mode, even routed layers that take no time would make a {PASSES[what]} {most}.")
        best = found.best(what)
        if best is None or best.gain is None:
            continue
        if best.mode == "eager" and best.gain > bound * NOISE:
            sentences.append(f"Measured {best.gain:.2f}, above that bound: the machine is busy; measure again.")
        elif best.gain > NOISE:
            sentences.append(f"Routing is faster: a {PASSES[what]} is {best.gain:.2f} times as fast ({best.mode}).")
        elif best.gain * NOISE < 1:
            sentences.append(
                f"Do not route this network for the speed of its {PASSES[what]}: it takes "
                f"{1 / best.gain:.2f} times as long as in the dense one ({best.mode})."
            )
        else:
            sentences.append(f"No difference: a {PASSES[what]} takes as long as in the dense network ({best.mode}).")
    return sentences


def benchmark_json(found: ModelBenchmark) -> dict[str, Any]:
    """The benchmark in plain JSON, with gains and the advice."""
    content = asdict(found)
    for row, each in zip(content["networks"], found.networks, strict=True):
        row["gain"] = each.gain
    for row, each in zip(content["layers"], found.layers, strict=True):
        row["gain"] = {what: each.gain(what) for what in found.bounds}
    content["bounds"] = {what: bound if math.isfinite(bound) else None for what, bound in found.bounds.items()}
    return {**content, "advice": model_advice(found)}


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"

"""Terminal text of `moesaic advise`: layers, whole networks, the verdict and the commands to go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesaic.bench.advise import Advice, Plan
from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.network_timer import NOISE, LayerGain
from moesaic.report.formatting import listed, percent
from moesaic.report.model_benchmark_table import PASSES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["advice_json", "print_advice", "verdict"]


def print_advice(title: str, found: Advice, commands: Mapping[str, str], console: Console | None = None) -> None:
    """Prints the layers, the networks and the verdict, with the commands of its plans by name."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    console.print(Text(title, style="bold"))
    if any(layer.note is None for layer in found.layers):
        console.print(_layer_table(found))
    for note in dict.fromkeys(layer.note for layer in found.layers if layer.note is not None):
        console.print(Text(f"Not routed: {note}."), highlight=False)
    console.print(_network_table(found))
    for line in verdict(found, commands):
        console.print(Text(line), highlight=False, soft_wrap=True)


def verdict(found: Advice, commands: Mapping[str, str]) -> list[str]:
    """Sentences on the bound, on whether routing is worth it, and the commands.

    >>> verdict(Advice({"forward": 10.0}, 0.0, {"forward": 1.0}, (), ()), {})
    ['Not worth it: no layer of this network can be routed.']
    """
    if not any(layer.note is None for layer in found.layers):
        return ["Not worth it: no layer of this network can be routed."]
    lines = [_bound(found)] if found.share else []
    best = found.best
    if best is None:
        lines.append(f"Not worth it for speed: {_why_not(found)}.")
    else:
        faster = found.faster(best)
        alone = "" if len(faster) == len(found.dense) else f" for a {PASSES[faster[0]]} alone"
        lines += [
            f"Worth trying{alone}, if accuracy holds: {_way(best)}: {_gains(found, best)}.",
            _command(commands[best.name]),
        ]
    others = [plan for plan in found.plans if plan is not best]
    for plan in others:
        if best is not None and plan.name != "experts" and found.faster(plan):
            lines += [f"Or {_way(plan)}: {_gains(found, plan)}.", _command(commands[plan.name])]
        if plan.name == "experts":
            times = listed(
                [f"{1 / plan.estimated[what]:.2f} times as long for a {PASSES[what]}" for what in found.dense]
            )
            lines += [
                f"For accuracy rather than speed: {_way(plan)}, {plan.parameters:.1f} times the parameters at "
                f"{plan.macs:.2f} times the multiply-adds; estimated to take {times}.",
                _command(commands[plan.name]),
            ]
    if len(lines) > 2:
        lines.append("Only times were measured: moesaic compare DATA --models … measures the accuracy.")
    return lines


def advice_json(found: Advice, commands: Mapping[str, str]) -> dict[str, Any]:
    """The advice in plain JSON, with gains, bounds, the verdict and the commands."""
    content = asdict(found)
    content["bounds"] = _finite(found.bounds)
    for row, layer in zip(content["layers"], found.layers, strict=True):
        row["gain"] = {what: layer.gain(what) for what in found.dense}
        row["bounds"] = _finite({what: found.bound(layer, what) for what in layer.dense})
    for row, plan in zip(content["plans"], found.plans, strict=True):
        row["command"] = commands[plan.name]
        row["estimated"] = _finite(plan.estimated)
        for each, gain in zip(row["measured"], plan.measured, strict=True):
            each["gain"] = gain.gain
    best = found.best
    return {**content, "worth_it": best is not None, "best": best and best.name, "verdict": verdict(found, commands)}


def _finite(values: Mapping[Pass, float]) -> dict[Pass, float | None]:
    return {what: value if math.isfinite(value) else None for what, value in values.items()}


def _layer_table(found: Advice) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("work", justify="right", no_wrap=True)
    table.add_column("routed", no_wrap=True)
    for what in found.dense:
        table.add_column(f"{PASSES[what]},\ndense → routed", justify="right", no_wrap=True)
    table.add_column("network\nat most", justify="right")
    earlier: tuple[str, ...] = ()
    for layer in found.layers:
        if layer.note is not None:
            continue
        first, *more = layer.names
        name = f"{first}{f' and {len(more)} more' if more else ''}\n{layer.shape}"
        again = layer.names == earlier
        earlier = layer.names
        bounds = "\n".join(_times(found.bound(layer, what)) for what in found.dense)
        cells = ("", "") if again else (name, percent(layer.share))
        table.add_row(
            Text(cells[0]),
            cells[1],
            layer.way or "",
            *(_change(layer, what) for what in found.dense),
            "" if again else bounds,
        )
    return table


def _change(layer: LayerGain, what: Pass) -> str:
    return f"{_ms(layer.dense[what])} → {_ms(layer.routed[what])} ms\n= {_times(layer.gain(what) or 0.0)}"


def _network_table(found: Advice) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("the whole network")
    table.add_column("work", justify="right")
    for what in found.dense:
        table.add_column(PASSES[what], justify="right")
    table.add_row("dense", "100\u00a0%", *(f"{_ms(found.dense[what])} ms" for what in found.dense))
    for plan in found.plans:
        table.add_row(_way(plan), f"{100 * plan.macs:.0f}\u00a0%", *(_network_cell(plan, what) for what in found.dense))
    return table


def _network_cell(plan: Plan, what: Pass) -> str:
    best = plan.best(what)
    if best is None or best.gain is None or best.routed is None:
        notes = {each.note for each in plan.measured if each.what == what and each.note}
        return f"≈ {_times(plan.estimated[what])}\nestimated{f' ({listed(sorted(notes))})' if notes else ''}"
    mode = "" if best.mode == "eager" else f", {best.mode}"
    return f"{_ms(best.routed.median)} ms = {_times(best.gain)}\nmeasured{mode}"


def _way(plan: Plan) -> str:
    names: list[str] = []
    for each in plan.conversions:
        if "skip" in each:
            names.append(f"{percent(each['keep'])} of the tokens in {_rule(each['skip'])}")
        elif each.get("init") == "split":
            names.append(f"{listed(each['layer'])} split in {each['experts']}, {each['capacity']:g} for a token")
        elif "capacity" in each:
            names.append(f"{each['experts']} experts in {listed(each['layer'])}, {each['capacity']:g} for a token")
        else:
            names.append(f"{each['experts']} experts in {_few(each['layer'])}")
    return " and ".join(names)


def _rule(names: list[str]) -> str:
    return "every second block" if names == ["every-2"] else listed(names)


def _few(names: list[str]) -> str:
    return listed(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _bound(found: Advice) -> str:
    most = listed([f"{_times(bound)} for a {PASSES[what]}" for what, bound in found.bounds.items()])
    sentence = (
        f"{percent(found.share)} of the multiply-adds are in convolutions and MLPs that can be routed. Even if these "
        f"took no time, the speed-up would be at most {most}."
    )
    if all(map(math.isfinite, found.bounds.values())):
        return sentence
    return f"{sentence} Unclear: alone, these layers took longer than the network; measure again on an idle machine."


def _gains(found: Advice, plan: Plan) -> str:
    return f"measured {listed([_gain(found, plan, what) for what in found.dense])}"


def _gain(found: Advice, plan: Plan, what: Pass) -> str:
    best = plan.best(what)
    assert best is not None
    assert best.gain is not None
    mode = "" if best.mode == "eager" else f", {best.mode}"
    if best.gain * NOISE < 1:
        return f"{1 / best.gain:.2f} times as slow in a {PASSES[what]}{mode}"
    if best.gain <= NOISE:
        return f"as fast in a {PASSES[what]}{mode}"
    above = max(found.bounds.values()) if plan.name == "convert" else math.inf
    busy = " (above the bound: the machine is busy, measure again)" if best.gain > above * NOISE else ""
    return f"{best.gain:.2f} times as fast in a {PASSES[what]}{mode}{busy}"


def _why_not(found: Advice) -> str:
    speed = [plan for plan in found.plans if plan.name != "experts"]
    measured = [plan for plan in speed if plan.measured and all(plan.best(what) for what in found.dense)]
    if measured:
        return "; ".join(f"{_way(plan)}: {_gains(found, plan)}" for plan in measured)
    if speed:
        best = max(max(plan.estimated.values()) for plan in speed)
        return f"by the times of its layers the network would be at most {best:.2f} times as fast"
    if max(found.bounds.values()) <= NOISE and not any(layer.way == "skip" for layer in found.layers):
        return f"even layers that took no time would make it only {max(found.bounds.values()):.2f} times as fast"
    return f"no layer is faster routed on this machine{_hint(found)}"


def _hint(found: Advice) -> str:
    """Layers that gain in one pass alone."""
    speed = [layer for layer in found.layers if layer.way != "experts"]
    alone: list[Pass] = [what for what in found.dense if any(layer.gains([what]) for layer in speed)]
    if len(found.dense) < 2 or not alone:
        return ""
    option = {"forward": "--inference", "step": "--training"}[alone[0]]
    return f", in both passes; some are faster in a {PASSES[alone[0]]}: {option} times that pass alone"


def _command(line: str) -> str:
    return f"  {line}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "unclear"

"""The text of advice: what it says when routing pays, and when it does not."""

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from moesaic.bench.advise import Advice, Plan
from moesaic.bench.network_timer import LayerGain, NetworkGain
from moesaic.bench.timing import Timing
from moesaic.report.advice_table import advice_json, print_advice, verdict

NAMES = ("blocks.0.mlp", "blocks.1.mlp")
SPLIT = {"layer": ["blocks.*.mlp"], "experts": 8, "capacity": 4.0, "init": "split"}
COMMANDS = {"convert": "moesaic train A", "skip": "moesaic train B", "experts": "moesaic train C"}


def layer(routed: float, **options) -> LayerGain:
    return LayerGain(
        NAMES, "MLP 8→32→8 on 50 tokens", 0.5, {"forward": 2.0}, {"forward": routed}, **{"way": "split", **options}
    )


def gain(milliseconds: float) -> NetworkGain:
    return NetworkGain("eager", "forward", Timing(10, 9, 11), Timing(*[milliseconds] * 3))


def plan(milliseconds: float | None, **options) -> Plan:
    measured = () if milliseconds is None else (gain(milliseconds),)
    found = Plan("convert", (SPLIT,), 0.75, 1.01, {"forward": 1.3}, measured)
    return replace(found, **options)


EXPERTS = plan(
    None,
    name="experts",
    conversions=({"layer": ["blocks.*.mlp"], "experts": 8, "capacity": 1},),
    macs=1.01,
    parameters=5.5,
    estimated={"forward": 0.8},
)


def advice(*plans: Plan, layers: tuple[LayerGain, ...] = (layer(1.0),), bound: float = 1.67) -> Advice:
    return Advice({"forward": 10.0}, 0.5, {"forward": bound}, layers, plans)


def test_a_bound_is_unclear_where_layers_took_longer_than_the_network():
    line = verdict(advice(plan(8.0), bound=math.inf), COMMANDS)[0]
    assert (
        "unclear for a forward pass. Unclear: alone, these layers took longer than the network; measure again" in line
    )


def test_a_gain_is_worth_trying_and_has_its_command():
    lines = verdict(advice(plan(8.0), EXPERTS), COMMANDS)
    assert lines[0].startswith("50\u00a0% of the multiply-adds are in convolutions and MLPs that can be routed.")
    assert lines[0].endswith("the speed-up would be at most 1.67× for a forward pass.")
    assert lines[1] == (
        "Worth trying, if accuracy holds: blocks.*.mlp split in 8, 4 for a token: measured 1.25 times as fast in a "
        "forward pass."
    )
    assert lines[2] == "  moesaic train A"
    assert lines[3].startswith(
        "For accuracy rather than speed: 8 experts in blocks.*.mlp, 1 for a token, 5.5 times the parameters at 1.01 "
        "times the multiply-adds; estimated to take 1.25 times as long for a forward pass."
    )
    assert lines[4] == "  moesaic train C"


def test_a_second_way_is_offered_if_it_gains():
    skip = plan(9.0, name="skip", conversions=({"skip": ["every-2"], "keep": 0.5},))
    lines = verdict(advice(plan(8.0), skip), COMMANDS)
    assert lines[3:5] == [
        "Or 50\u00a0% of the tokens in every second block: measured 1.11 times as fast in a forward pass.",
        "  moesaic train B",
    ]
    lines = verdict(advice(plan(8.0), replace(skip, measured=(gain(11.0),))), COMMANDS)
    assert not any("moesaic train B" in line for line in lines)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (advice(plan(10.0)), "blocks.*.mlp split in 8, 4 for a token: measured as fast in a forward pass."),
        (advice(plan(20.0)), "measured 2.00 times as slow in a forward pass."),
        (advice(plan(None, estimated={"forward": 1.02})), "the network would be at most 1.02 times as fast."),
        (advice(layers=(layer(3.0),)), "no layer is faster routed on this machine."),
        (advice(layers=(layer(3.0),), bound=1.01), "even layers that took no time would make it only 1.01 times as"),
    ],
)
def test_not_worth_it_has_the_numbers_that_say_so(found: Advice, why: str):
    lines = verdict(found, COMMANDS)
    assert lines[1].startswith("Not worth it for speed: ")
    assert why in lines[1]
    assert not any(line.startswith("  moesaic") for line in lines)


def test_layers_that_gain_in_one_pass_alone_are_pointed_out():
    times = {"dense": {"forward": 2.0, "step": 2.0}, "routed": {"forward": 1.0, "step": 3.0}}
    found = replace(
        advice(layers=(replace(layer(1.0), **times),)), dense={"forward": 9.0, "step": 9.0}, bounds={"forward": 2.0}
    )
    assert "some are faster in a forward pass: --inference times that pass alone" in verdict(found, COMMANDS)[1]


def test_a_gain_in_one_pass_is_for_that_pass_alone():
    step = NetworkGain("eager", "step", Timing(10, 9, 11), Timing(20, 20, 20))
    found = replace(
        advice(plan(8.0, measured=(gain(8.0), step))), dense={"forward": 9.0, "step": 9.0}, bounds={"forward": 2.0}
    )
    line = verdict(found, COMMANDS)[1]
    assert line.startswith("Worth trying for a forward pass alone, if accuracy holds: ")
    assert line.endswith("1.25 times as fast in a forward pass and 2.00 times as slow in a training step.")


def test_a_gain_above_the_bound_is_noise():
    (line,) = (line for line in verdict(advice(plan(1.0)), COMMANDS) if line.startswith("Worth"))
    assert "(above the bound: the machine is busy, measure again)" in line


def test_the_tables_have_layers_and_networks():
    refused = LayerGain(("head",), "MLP 8→9→8 on 50 tokens", 0.1, note="'head' has 9 hidden neurons", way="split")
    console = Console(width=100, record=True)
    print_advice("A network", advice(plan(8.0), EXPERTS, layers=(layer(1.0), refused)), COMMANDS, console)
    text = console.export_text()
    for part in (
        "A network",
        "blocks.0.mlp and 1 more",
        "MLP 8→32→8 on 50 tokens",
        "50\u00a0%",
        "2.0 → 1.0 ms",
        "= 2.00×",
        "1.67×",
        "8.0 ms = 1.25×",
        "measured",
        "≈ 0.80×",
        "estimated",
        "101\u00a0%",
        "Not routed: 'head' has 9 hidden neurons.",
        "  moesaic train A",
    ):
        assert part in text, part


def test_the_json_has_gains_bounds_and_commands():
    found = advice(plan(8.0), layers=(replace(layer(1.0), dense={"forward": 6.0}),), bound=float("inf"))
    content = json.loads(json.dumps(advice_json(found, COMMANDS), allow_nan=False))
    assert content["worth_it"] is True
    assert content["best"] == "convert"
    assert content["bounds"] == {"forward": None}
    assert content["layers"][0]["gain"] == {"forward": 6.0}
    assert content["layers"][0]["bounds"] == {"forward": None}
    assert content["plans"][0]["command"] == "moesaic train A"
    assert content["plans"][0]["measured"][0]["gain"] == 1.25
    assert content["verdict"]
    assert advice_json(advice(), COMMANDS)["best"] is None

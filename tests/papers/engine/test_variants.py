"""Variants: which cells change, under which names, and what is refused."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from moesaic.papers.engine.runner import Runner
from moesaic.papers.engine.variants import (
    RefusedVariant,
    Variation,
    VariedCell,
    cell_parameters,
    check_known,
    check_values,
    make_variants,
    parse_variation,
)


@dataclass(frozen=True)
class Network:
    kind: Literal["dense", "moe"] = "moe"
    experts: int = 8
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "dense" and self.experts != 1:
            raise ValueError(f"a dense network has one expert, got {self.experts}")


@dataclass(frozen=True)
class Cell:
    network: Network
    samples: int = 300
    widths: tuple[int, ...] = (4, 4)
    shuffle: bool = False
    trial: int = 0

    steps = 1

    def missing_requirement(self, runner: Runner) -> str | None:
        return None

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {}

    def measure(self, runner: Runner) -> dict[str, Any]:
        raise ValueError(f"{self.samples} are too few")

    def result(self, stored: dict[str, Any]) -> None:
        return None


LETTERS = {"k": "experts", "N": "samples"}
SWEEP = {f"fig6/N=300/{k}": Cell(Network(experts=k)) for k in (8, 16)}
CURVES = {
    f"fig4/{kind}/{n}": Cell(Network(kind, 8 if kind == "moe" else 1), n)
    for kind in ("moe", "dense")
    for n in (100, 300)
}


def variants_of(cells: dict[str, Cell], *texts: str):
    return make_variants(cells, [parse_variation(text) for text in texts], LETTERS)


def test_values_are_added_to_those_that_an_experiment_runs_through():
    (variant,) = variants_of(SWEEP, "k=4,8")
    assert variant.label == "k=4,8 added"
    assert variant.cells == {**SWEEP, "fig6/N=300/4": Cell(Network(experts=4))}
    assert variant.changed == {"fig6/N=300/4"}, "the paper has 8 itself"
    assert variant.adds
    assert variant.comparable


def test_another_value_replaces_the_papers_in_cells_that_accept_it():
    first, second = variants_of(CURVES, "k=2,4")
    assert (first.label, second.label) == ("k=2", "k=4")
    assert first.cells == {
        name: replace(cell, network=Network(experts=2)) if "/moe/" in name else cell for name, cell in CURVES.items()
    }
    assert first.changed == {"fig4/moe/100", "fig4/moe/300"}
    assert first.comparable
    assert not first.adds


def test_a_value_that_equals_a_part_of_a_name_by_chance_is_no_sweep():
    cells = {f"fig7/N=300/{l}": Cell(Network(experts=8), widths=(l,)) for l in (8, 16)}
    (variant,) = variants_of(cells, "k=4")
    assert variant.cells.keys() == cells.keys()
    assert {cell.network.experts for cell in variant.cells.values()} == {4}


def test_several_parameters_are_combined():
    labels = [variant.label for variant in variants_of(SWEEP, "rate=0.1,0.2", "shuffle=true", "k=4")]
    assert labels == ["rate=0.1, shuffle=true, k=4 added", "rate=0.2, shuffle=true, k=4 added"]
    (grid,) = variants_of(CURVES, "N=50", "k=2")
    assert grid.cells["fig4/moe/50"] == Cell(Network(experts=2), 50)
    assert grid.cells["fig4/dense/50"] == Cell(Network("dense", 1), 50)
    assert grid.cells["fig4/moe/300"] == Cell(Network(experts=2), 300)


def test_a_rule_that_compares_what_became_equal_does_not_apply():
    cells = {"wide": Cell(Network(), widths=(8,)), "narrow": Cell(Network(), widths=(4,))}
    (variant,) = variants_of(cells, "widths=6x6")
    assert not variant.comparable
    assert {cell.widths for cell in variant.cells.values()} == {(6, 6)}


def test_claims_without_the_parameter_have_no_variants():
    assert variants_of(SWEEP, "momentum=0.9") == []
    assert variants_of({"fig4/dense/100": CURVES["fig4/dense/100"]}, "k=4") == []


def test_the_parameters_are_the_fields_of_all_dataclasses_of_a_cell():
    assert cell_parameters(SWEEP.values()) == {
        "kind": ["moe"],
        "experts": ["8", "16"],
        "rate": ["none"],
        "samples": ["300"],
        "widths": ["4x4"],
        "shuffle": ["false"],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=", "write it as NAME=VALUE,VALUE"),
        ("=4", "write it as NAME=VALUE,VALUE"),
        ("k=4,,8", "write it as NAME=VALUE,VALUE"),
    ],
)
def test_what_is_no_parameter_and_value_is_refused(text: str, message: str):
    with pytest.raises(RefusedVariant, match=message):
        parse_variation(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=x", "--vary k=x cannot run: experts='x' is not a whole number"),
        ("rate=fast", "rate='fast' is not a number or none"),
        ("shuffle=yes", "shuffle='yes' is not true or false"),
        ("kind=conv", "kind='conv' is not dense or moe"),
        ("widths=4,a", "widths='a' is not numbers joined by x, such as 3x3"),
        ("kind=dense", "a dense network has one expert, got 8"),
    ],
)
def test_a_value_that_no_cell_accepts_is_refused(text: str, message: str):
    with pytest.raises(RefusedVariant, match=message):
        check_values([parse_variation(text)], [({"a": Cell(Network())}, LETTERS)])


def test_a_value_is_accepted_if_one_claim_has_a_cell_for_it():
    dense = ({"fig4/dense/100": CURVES["fig4/dense/100"]}, LETTERS)
    with pytest.raises(RefusedVariant, match="one expert"):
        check_values([Variation("k", ("4",))], [dense])
    check_values([Variation("k", ("4",))], [dense, (SWEEP, LETTERS)])


def test_an_unknown_name_lists_the_parameters_and_the_nearest():
    claims = {"fig6-falls": (SWEEP, LETTERS)}
    with pytest.raises(
        RefusedVariant, match=r"experiments of fig6-falls; they have kind, experts \(k\), rate, samples"
    ) as e:
        check_known([Variation("expert", ("4",))], claims)
    assert "did you mean 'experts'?" in str(e.value)
    with pytest.raises(RefusedVariant, match="k is given 2 times"):
        check_known([Variation("k", ("4",)), Variation("k", ("8",))], claims)
    check_known([Variation("experts", ("4",)), Variation("N", ("8",))], claims)


def test_what_a_cell_cannot_run_with_names_the_variant():
    cell = VariedCell(Cell(Network(), samples=1), "N=1")
    with pytest.raises(RefusedVariant, match="--vary N=1 cannot run: 1 are too few"):
        cell.measure(None)  # type: ignore[arg-type]

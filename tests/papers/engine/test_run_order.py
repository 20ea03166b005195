"""Cells run in an order that gives verdicts early."""

from dataclasses import dataclass
from typing import Any

from moesaic.papers.engine.run_order import CellGroup, run_order


@dataclass(frozen=True)
class Cell:
    name: str
    steps: int


def group(*cells: Any, headline: bool = False) -> CellGroup:
    return CellGroup({cell.name: cell for cell in cells}, headline)


A, B, C, D = Cell("a", 5), Cell("b", 50), Cell("c", 500), Cell("d", 0)


def test_main_claims_come_first_and_then_those_with_the_fewest_steps_left():
    assert run_order([group(C), group(A), group(B, headline=True), group(D)]) == ["b", "d", "a", "c"]


def test_cells_that_others_need_anyway_cost_nothing():
    # after c, the claim that needs c and a has only a left
    assert run_order([group(B), group(C, headline=True), group(C, A)]) == ["c", "a", "b"]


def test_every_cell_runs_once_under_each_name():
    same = CellGroup({"another name": A})
    order = run_order([group(A, B), same, group(B, C)])
    assert sorted(order) == ["a", "another name", "b", "c"]
    assert run_order([]) == []
    assert run_order([CellGroup({})]) == []

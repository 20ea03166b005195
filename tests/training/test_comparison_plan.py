"""What a comparison will take: the sum of what is missing, and the most complete part of it that fits a budget."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from training.test_compare import MODELS, RECIPE, TASK, Trainer

from moesaic.training.compare import Grid, compare
from moesaic.training.comparison_plan import (
    MIN_EPOCHS,
    MIN_TRIALS,
    ComparisonPlan,
    OverBudget,
    RunCost,
    measure_costs,
    plan_comparison,
)
from moesaic.training.comparison_runs import ComparisonRuns
from moesaic.training.recipe import Recipe

LONG = Recipe(epochs=40, batch_size=8)
COSTS = {MODELS[0]: RunCost(step=1.0, test=0.0), MODELS[1]: RunCost(step=2.0, test=0.0)}
GRID = Grid(MODELS, (8, 16, 32), 5)


def runs_in(out: Path, recipe: Recipe = LONG) -> ComparisonRuns:
    return ComparisonRuns.of(TASK, recipe, out, 0, "cpu", None, None, print)


def plan(out: Path, grid: Grid = GRID, budget: float | None = None, costs=COSTS) -> ComparisonPlan:
    return plan_comparison(runs_in(out), grid.contenders(TASK), grid, costs, budget)


def test_a_run_takes_its_steps_epochs_and_tests():
    cost = RunCost(step=0.5, test=3.0, setup=7.0, epoch=0.25)
    assert cost.seconds(8, LONG) == 7 + 40 * (0.25 + 0.5) + 20 * 3
    assert cost.seconds(9, LONG) == 7 + 40 * (0.25 + 2 * 0.5) + 20 * 3, "two batches"


def test_everything_takes_the_sum_of_its_runs(tmp_path):
    found = plan(tmp_path)
    assert [model.seconds for model in found.models] == [5 * 40 * 7, 2 * 5 * 40 * 7]
    assert found.seconds == found.most_seconds == 3 * 5 * 40 * 7
    assert (found.runs, found.finished, found.left_out) == (30, 0, ())
    growing = plan(tmp_path, Grid(MODELS, GRID.samples, 3, 6))
    assert growing.seconds == 3 * 3 * 40 * 7
    assert growing.most_seconds == 2 * growing.seconds


def test_features_are_computed_once(tmp_path):
    costs = {name: replace(cost, features=100.0 if name == MODELS[0] else 0.0) for name, cost in COSTS.items()}
    found = plan(tmp_path, costs=costs)
    assert found.features == 100
    assert found.seconds == found.most_seconds == 100 + 3 * 5 * 40 * 7


def test_finished_runs_take_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("moesaic.training.comparison_runs"), "fit", Trainer())
    small = Grid(MODELS, (8, 16), 2)
    compare(TASK, small, RECIPE, out=tmp_path)
    runs = runs_in(tmp_path, RECIPE)
    contenders = small.contenders(TASK)
    assert measure_costs(runs, contenders, small, print) == {}, "nothing is left to measure"
    found = plan_comparison(runs, contenders, small, {})
    assert (found.seconds, found.most_seconds, found.finished, found.runs) == (0, 0, 8, 8)
    assert [model.step for model in found.models] == [None, None]
    more = Grid(MODELS, (8, 16), 3)
    assert plan_comparison(runs, contenders, more, COSTS).seconds == 3 * 2 * (1 + 2)


@pytest.mark.parametrize(
    ("budget", "trials", "samples", "epochs", "left_out"),
    [
        (4200, 5, (8, 16, 32), 40, ()),
        (4199, 4, (8, 16, 32), 40, ("1 of 5 trials",)),
        (2520, 3, (8, 16, 32), 40, ("2 of 5 trials",)),
        (2519, 3, (8, 32), 40, ("2 of 5 trials", "16 labels")),
        (1799, 3, (8, 32), 20, ("2 of 5 trials", "16 labels", "20 of 40 epochs")),
        (899, 3, (8, 32), 10, ("2 of 5 trials", "16 labels", "30 of 40 epochs")),
        (449, 3, (8,), 10, ("2 of 5 trials", "16 and 32 labels", "30 of 40 epochs")),
    ],
)
def test_what_fits_has_fewer_trials_first_then_fewer_labels_then_fewer_epochs(
    tmp_path, budget, trials, samples, epochs, left_out
):
    found = plan(tmp_path, budget=budget)
    assert found.seconds <= budget
    assert (found.grid.trials, found.grid.samples, found.recipe.epochs) == (trials, samples, epochs)
    assert found.left_out == left_out
    assert found.full_seconds == (4200 if left_out else 0)
    assert trials >= MIN_TRIALS
    assert epochs >= MIN_EPOCHS


def test_a_budget_that_holds_no_plan_is_told_with_what_it_takes(tmp_path):
    with pytest.raises(OverBudget, match=r"1.4 minutes are left, and the smallest plan \(2 networks with 8 labels, 3 "
                       r"trials, 10 epochs\) takes about 1.5; use --minutes 3 or more"):  # fmt: skip
        plan(tmp_path, budget=85)


def test_the_advised_budget_holds_what_was_spent_before_the_plan(tmp_path):
    runs, contenders = runs_in(tmp_path), GRID.contenders(TASK)
    with pytest.raises(OverBudget, match=r"takes about 1\.5; use --minutes 5 or more"):
        plan_comparison(runs, contenders, GRID, COSTS, budget=30, spent=140)
    assert plan_comparison(runs, contenders, GRID, COSTS, budget=4199, spent=140).full_seconds == 4340


def test_few_epochs_and_two_trials_stay_what_they_are(tmp_path):
    grid, recipe = Grid(MODELS, (8, 16), 2), Recipe(epochs=4, batch_size=8)
    runs = runs_in(tmp_path, recipe)
    found = plan_comparison(runs, grid.contenders(TASK), grid, COSTS, 24.0)
    assert (found.grid.samples, found.grid.trials, found.recipe.epochs) == ((8,), 2, 4)


def test_steps_and_tests_are_measured_without_writing_anything(tmp_path):
    grid = Grid((*MODELS, "wrn10_1_pmoe:experts=2"), (8, 16), 3, 4)
    runs = runs_in(tmp_path, replace(LONG, lr=1e30))
    before = torch.random.get_rng_state()
    costs = measure_costs(runs, grid.contenders(TASK), grid, print)
    assert torch.equal(torch.random.get_rng_state(), before), "results do not depend on it"
    assert list(costs) == list(grid.models)
    for cost in costs.values():
        assert min(cost.step, cost.test, cost.setup, cost.epoch) > 0
        assert cost.features == 0
    assert not list(tmp_path.iterdir())

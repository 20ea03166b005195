"""The plan of a comparison in words."""

from dataclasses import replace

from moesaic.report.comparison_plan_text import describe_plan
from moesaic.training.compare import Grid
from moesaic.training.comparison_plan import ComparisonPlan, ModelPlan
from moesaic.training.recipe import Recipe

FIXED = ComparisonPlan(
    Grid(("a", "b"), (250, 500, 1000), 3),
    Recipe(epochs=50),
    (ModelPlan("a", 300.0, 0.0123), ModelPlan("b", 420.0, 2.5)),
    features=0.0,
    most_seconds=720.0,
    finished=0,
)
GROWING = replace(FIXED, grid=replace(FIXED.grid, max_trials=12), most_seconds=2880.0)


def test_the_first_line_says_what_the_run_takes():
    assert describe_plan(FIXED) == [
        "About 12 min on this machine: 2 networks × 3 label counts × 3 trials",
        "  250, 500 and 1,000 labels, 50 epochs",
        "  a: 5 min; a step takes 12 ms",
        "  b: 7 min; a step takes 2.5 s",
    ]
    assert describe_plan(GROWING)[0] == (
        "From 12 min to 48 min on this machine: 2 networks × 3 label counts × 3 trials, up to 12 while a comparison is "
        "undecided"
    )
    assert describe_plan(GROWING, minutes=20)[0].startswith("From 12 min to 20 min on")
    one = replace(FIXED, grid=replace(FIXED.grid, samples=(250,)), finished=2)
    assert describe_plan(one)[0].endswith("2 networks × 1 label count × 3 trials; 2 of 6 runs are finished")


def test_hours_are_told_with_a_way_out():
    slow = replace(GROWING, models=(ModelPlan("a", 20_000.0, 1.0), ModelPlan("b", 1000.0, 1.0)), most_seconds=84_000.0)
    assert describe_plan(slow)[0].startswith("From 5.8 h to 23.3 h on this machine")
    assert describe_plan(slow)[0].endswith("; --minutes 10 chooses what fits")
    assert "--minutes" not in describe_plan(FIXED)[0]


def test_features_finished_networks_and_what_is_left_out_have_lines():
    some = replace(
        FIXED,
        features=200.0,
        models=(ModelPlan("a", 0.0, None), FIXED.models[1]),
        left_out=("500 labels", "25 of 50 epochs"),
        full_seconds=1000.0,
    )
    assert describe_plan(some, minutes=11.5)[2:] == [
        "  features of the images: 3 min, once for all runs",
        "  a: finished",
        "  b: 7 min; a step takes 2.5 s",
        "  --minutes 11.5 leaves out 500 labels and 25 of 50 epochs; --minutes 18 would hold all",
    ]


def test_nothing_to_do_is_one_line():
    done = replace(FIXED, models=(ModelPlan("a", 0.0, None),) * 2, most_seconds=0.0, finished=18)
    assert describe_plan(done) == [
        "Nothing left to train: 2 networks × 3 label counts × 3 trials, all 18 runs are finished"
    ]

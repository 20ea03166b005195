"""The figures show what was measured, in the right place: made-up results, and small networks really trained."""

import math

import numpy as np
import pytest

from moesaic import keyed_random
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022 import figures_synthetic as chen2022_charts
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches
from moesaic.papers.chen2022.experiments_synthetic import ExperimentResults, MixtureCell
from moesaic.papers.chen2022.figures_synthetic import charts
from moesaic.papers.chen2022.paper import PAPER
from moesaic.papers.chen2022.trial_training import MixtureSchedule
from moesaic.papers.chen2022.two_layer_networks import Mixture, Mixtures
from moesaic.papers.engine.cells import ArrayCell, CellArrays
from moesaic.papers.engine.runner import Runner
from moesaic.report.chart import Chart, Panel
from moesaic.report.chart_drawing import draw
from moesaic.training import NoProgress

RUNNER = Runner(None, None, device="cpu", seed=0, progress=NoProgress())  # type: ignore[arg-type]
CELL = MixtureCell(Mixture.of("print"), MixtureSchedule(steps=6, learning_rate=0.05), 1, 3, 60, 50, follow=2)


def result(*accuracy: float, **more: object) -> CellArrays:
    return ArrayCell().result({"accuracy": list(accuracy), **more})


def experiment(
    results: dict[str, CellArrays], fidelity: Fidelity = "print", cell: MixtureCell = CELL
) -> ExperimentResults:
    return ExperimentResults(dict.fromkeys(results, cell), results, RUNNER, fidelity=fidelity)


def drawn(results: dict[str, CellArrays], **others: dict[str, CellArrays]) -> dict[str, Chart]:
    experiments: dict[Fidelity, ExperimentResults] = {"print": experiment(results)}
    if "released" in others:
        experiments["released"] = experiment(others["released"], "released")
    return {chart.id: chart for chart in charts(experiments)}


def lines(panel: Panel) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    return {line.label: (line.x, line.y) for line in panel.series}


def own(*owners: int, samples: int = 5) -> np.ndarray:
    """(K, 8) of clusters that go to one expert each."""
    table = np.zeros((len(owners), 8))
    table[np.arange(len(owners)), list(owners)] = samples
    return table


PURE, EVEN = own(5, 2, 7, 1), np.ones((4, 8))


def test_without_results_there_are_no_figures():
    assert charts({}) == []
    assert drawn({}) == {}


def test_accuracies_stand_at_their_setting_beside_the_papers():
    released = {"moe/cubic/s3": result(98, 100, test_dispatch=[PURE, EVEN], train_dispatch=[PURE, PURE])}
    figure = drawn({"single/cubic-512/s2": result(50, 54)}, released=released)["tables-1-and-3"]
    titles = ["one nonlinear, 512 filters", "eight nonlinear experts", "eight nonlinear experts"]
    single, mixture, entropy = figure.panels
    assert [panel.title for panel in figure.panels] == titles
    assert lines(single)["as printed"] == ((2,), (52,))
    assert single.series[0].spread == pytest.approx((8**0.5,))
    assert lines(single)["the paper's value"] == ((1, 2, 3, 4), (78.18, 52.09, 67.78, 61.65))
    assert lines(mixture)["as released"] == ((3,), (99,))
    # as released, entropy is that of the training samples
    assert lines(entropy)["as released"] == ((3,), (0,))
    assert (entropy.level, entropy.series[-1].spread) == (1.39, (0.087, 0.103, 0.011, 0.120))


def test_a_single_trial_has_no_spread():
    assert drawn({"single/cubic-128/s1": result(80)})["tables-1-and-3"].panels[0].series[0].spread is None


def test_activations_have_panels_of_their_own_under_the_best_that_is_possible():
    results = {"table7/relu": result(74, 76), "table8/relu/s2": result(80, 82), "single/identity-128/s1": result(68)}
    linear, relu = drawn(results)["tables-7-and-8"].panels
    assert (linear.title, relu.title) == ("linear", "relu")
    assert lines(linear)["as printed"] == ((1,), (68,))
    assert lines(relu)["as printed"] == ((2, 3), (81, 75))
    assert lines(relu)["the paper's value"] == ((1, 2, 3), (72.28, 80.12, 73.45))
    assert lines(relu)["best possible for one network"][1] == pytest.approx((92.5, 92.5, 87.5))


def test_load_balancing_is_shown_only_where_it_was_tried():
    linear = {"moe/identity/s1": result(90, 92, test_dispatch=[EVEN, EVEN])}
    assert "table-9" not in drawn(linear)
    figure = drawn({**linear, "balanced/identity/s1": result(93, 95)})["table-9"]
    assert [lines(panel)["as printed"][1] for panel in figure.panels] == [(91,), (94,)]


def test_entropy_over_training_is_the_mean_over_trials():
    track = np.stack([np.stack([EVEN, PURE]), np.stack([EVEN, EVEN])])  # (T, S, K, E)
    cells = {"moe/cubic/s2": result(90, 92, test_dispatch=track[:, 1], track_dispatch=track, track_steps=[0, 10])}
    (panel,) = drawn(cells)["figure-3"].panels
    (line,) = panel.series
    assert (line.label, line.x, panel.x_label) == ("nonlinear, setting 2", (0, 10), "Training step, up to 10")
    assert line.y == pytest.approx((math.log(4), math.log(4) / 2))
    assert line.spread == pytest.approx((0, math.log(4) / 2**0.5))


def test_dispatch_tables_show_the_purest_the_least_pure_and_the_median():
    mixed = 4 * EVEN
    final = np.stack([mixed, 9 * PURE + EVEN, PURE])  # a trial each
    track = np.stack([np.stack([EVEN * (t + 1), final[t]]) for t in range(3)])
    cell = result(90, 91, 92, train_dispatch=final, test_dispatch=final, track_dispatch=track, track_steps=[0, 10])
    figures = drawn({"moe/cubic/s1": cell, "moe/identity/s1": cell})

    def shown(id: str) -> tuple[str, tuple[tuple[float, ...], ...]]:
        (panel,) = figures[id].panels
        assert panel.counts is not None
        assert panel.counts.rows == ("at first", "at the end", "cluster 1", "cluster 2", "cluster 3", "cluster 4")
        return panel.title, panel.counts.values

    title, values = shown("table-4")
    assert title == "as printed: accuracy 92.00 %, entropy 0.000"
    assert values[0] == (12,) * 8  # three of each cluster
    assert values[1] == (0, 5, 5, 0, 0, 5, 0, 5)
    assert values[2] == (0, 0, 0, 0, 0, 5, 0, 0)
    assert shown("table-5")[0] == "as printed: accuracy 90.00 %, entropy 1.386"
    assert shown("table-6")[0].startswith("as printed: accuracy 91.00 %")


def test_experts_of_the_lemma_are_named_by_their_cluster_and_shown_by_their_errors():
    accuracy = np.array([[[1.0, 0.75], [0.5, 0.999]]])  # one trial, two experts, two clusters
    tables = {"test_dispatch": [EVEN], "train_dispatch": [EVEN]}
    cell = result(90, groups=[[0, 1]], explored_accuracy=accuracy, expert_accuracy=1 - accuracy, **tables)
    explored, final = drawn({"moe/cubic/s1": cell})["lemma-5-2"].panels
    assert explored.counts is not None
    assert final.counts is not None
    assert explored.counts.rows == ("expert 1, of cluster 1", "expert 2, of cluster 2")
    assert explored.counts.values == ((0, 25), (50, 0.1))
    assert final.counts.values == ((100, 75), (50, 99.9))
    assert "lemma-5-2" not in drawn({}, released={"moe/cubic/s1": cell})


def test_the_theory_is_looked_at_in_setting_3_where_there_is_one():
    cells = {
        f"moe/cubic/s{s}": result(90, test_dispatch=[EVEN], track_steps=[0], track_load=[[[0.25 * s, 0.1]]])
        for s in (1, 3)
    }
    figure = drawn(cells)["load"]
    assert "as printed, setting 3" in figure.caption
    assert lines(figure.panels[0]) == {"expert 1": ((0,), (75,)), "expert 2": ((0,), (10,))}
    assert figure.panels[0].level == 50


def test_the_sweep_over_initial_weights_goes_by_their_scale():
    cells = {f"init/{s}": result(90 - 10 * s, 92 - 10 * s, test_dispatch=[PURE, EVEN]) for s in (1.0, 0.01, 0.1)}
    accuracy, entropy = drawn(cells)["initialisation"].panels
    assert accuracy.log_x
    assert accuracy.series[0].x == entropy.series[0].x == (0.01, 0.1, 1.0)
    assert accuracy.series[0].y == pytest.approx((90.9, 90, 81))
    assert entropy.series[0].y == pytest.approx([math.log(4) / 2] * 3)


@pytest.fixture(scope="module")
def really() -> dict[str, Chart]:
    """Figures of networks that trained for a few steps."""
    linear = MixtureCell(Mixture.of("print", "identity"), CELL.schedule, 1, 3, 60, 50, follow=2)
    small = {
        f"figure1/{kind}": MixtureCell(
            Mixture.of("print", kind, experts=4),
            MixtureSchedule(3, 0.3, 50.0),
            "figure 1",
            2,
            80,
            60,
        )
        for kind in ("cubic", "identity")
    }
    plan = {"moe/cubic/s1": CELL, "moe/identity/s1": linear, **small}
    results = {name: cell.result(cell.measure(RUNNER)) for name, cell in plan.items()}
    return {chart.id: chart for chart in charts({"print": ExperimentResults(plan, results, RUNNER)})}


def test_real_cells_can_all_be_drawn(really: dict[str, Chart]):
    expected = "tables-1-and-3 figure-1 figure-3 figure-4 figure-5 table-4 table-5 table-6 lemma-5-2 load"
    assert list(really) == expected.split()
    for chart in really.values():
        draw(chart)


def test_every_chart_stands_where_claims_are_made(really: dict[str, Chart]):
    """A run shows the charts of the places whose claims it judges, and no others."""
    made = drawn(
        {
            "table7/relu": result(74),
            "balanced/identity/s1": result(93),
            "init/0.1": result(90, test_dispatch=[EVEN]),
        }
    )
    places = {claim.where for claim in PAPER.claims}
    assert {*made} == {"tables-7-and-8", "table-9", "initialisation"}
    assert [chart.id for chart in (*really.values(), *made.values()) if chart.where not in places] == []


def test_without_scikit_learn_only_the_plane_is_missing(monkeypatch: pytest.MonkeyPatch):
    small = MixtureCell(Mixture.of("print", experts=4), MixtureSchedule(1), "figure 1", 1, 40, 40)
    monkeypatch.setattr(chen2022_charts, "find_spec", lambda name: None)
    results = {"figure1/cubic": result(90), "single/cubic-128/s1": result(80)}
    assert [chart.id for chart in charts({"print": experiment(results, cell=small)})] == [
        "tables-1-and-3",
        "tables-7-and-8",
    ]


def test_inner_products_have_a_row_for_each_kind_and_a_column_for_each_cluster(really: dict[str, Chart]):
    for id, activation in (("figure-4", "cubic"), ("figure-5", "identity")):
        figure = really[id]
        assert (len(figure.panels), figure.columns, len(figure.row_titles)) == (16, 4, 4)
        source = ClusterPatches.setting(1)
        first = Mixtures.initial(Mixture.of("print", activation), keyed_random.keys(0, [0]), dim=50)
        for row, directions in ((0, source.features), (1, source.centres)):
            products = (first.weights[0] @ directions.T).abs().amax(dim=1)  # (E, K)
            for k in range(4):
                series = figure.panels[4 * row + k].series
                assert series[0].x == (0, 2, 4, 6)
                assert [line.y[0] for line in series] == pytest.approx(products[:, k].tolist(), rel=1e-3)


def test_the_plane_has_every_test_sample_once_with_its_class(really: dict[str, Chart]):
    figure = really["figure-1"]
    labels = ClusterPatches.setting("figure 1").draw(keyed_random.keys(0, [0]), 60, "test").labels[0]
    assert [panel.title for panel in figure.panels] == ["at initialisation", "after training"] * 2
    for panel in figure.panels:
        assert panel.points is not None
        of_class = {mark: sum(len(g.x) for g in panel.points.groups if g.marker == mark) for mark in "+-"}
        assert of_class == {"+": int(labels.sum()), "-": 60 - int(labels.sum())}
        assert {g.label for g in panel.points.groups} <= {f"expert {number}" for number in range(1, 5)}
        assert all(g.role == g.label.replace(" ", "-") for g in panel.points.groups)
        regions = panel.points.regions
        assert regions is not None
        assert regions.scores is not None
        assert len(regions.x) == len(regions.y) == len(regions.values) == len(regions.scores) == 60
        assert regions.roles == ("expert-1", "expert-2", "expert-3", "expert-4")


def test_the_plane_shows_all_panels_the_same_samples_and_training_moves_them_to_other_experts(
    really: dict[str, Chart],
):
    def experts(panel: Panel) -> dict[tuple[float, float], str]:
        assert panel.points is not None
        return {place: g.role for g in panel.points.groups for place in zip(g.x, g.y, strict=True)}

    before, after, *linear = (experts(panel) for panel in really["figure-1"].panels)
    assert before.keys() == after.keys() == linear[0].keys() == linear[1].keys()
    assert before == linear[0]  # routers start from zeros, and noise decides
    assert before != after


def test_regions_are_what_most_of_the_samples_around_say():
    from moesaic.papers.chen2022.figures_expert_map import _regions

    rng = np.random.default_rng(0)
    places = rng.normal(size=(200, 2)) + np.where(np.arange(200) < 100, -9, 9)[:, None]
    expert = (np.arange(200) >= 100).astype(np.int64)
    regions = _regions(places, expert, np.where(expert == 1, 1.0, -1.0), 2)
    assert regions.scores is not None
    assert (regions.values[0][0], regions.values[-1][-1]) == (0, 1)
    assert (regions.scores[0][0], regions.scores[-1][-1]) == (-1, 1)
    assert regions.x == tuple(sorted(regions.x))
    assert regions.x[0] == pytest.approx(places[:, 0].min(), abs=1e-3)

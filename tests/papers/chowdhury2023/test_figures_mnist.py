"""The figures show what was measured, in the right place."""

import numpy as np
import pytest

from moesaic.papers.chowdhury2023.experiments_two_layer import ExperimentResults, Result
from moesaic.papers.chowdhury2023.figures_mnist import charts
from moesaic.papers.chowdhury2023.paper import PAPER
from moesaic.report.chart import Chart


def result(accuracy: list[float], **more: np.ndarray) -> Result:
    values = np.asarray(accuracy)
    return Result(values, np.ones(len(values)), np.zeros(len(values)), **more)


def drawn(results: dict[str, Result], fidelity: str = "print", **others: ExperimentResults) -> dict[str, Chart]:
    cell = next(iter(PAPER.plan("quick", "print").values()))
    experiment = ExperimentResults(dict.fromkeys(results, cell), results, runner=None)  # type: ignore[arg-type]
    return {chart.id: chart for chart in charts({fidelity: experiment, **others})}  # type: ignore[dict-item]


def test_without_results_there_are_no_figures():
    assert drawn({}) == {}


def test_curves_are_means_with_standard_deviations_in_the_order_of_samples():
    results = {f"fig4/cnn/{n}": result([80 + n / 100, 90 + n / 100]) for n in (1000, 100, 300)}
    (panel,) = drawn(results)["figure-4"].panels
    line, published = panel.series
    assert (published.role, published.x, published.y) == ("published", (600,), (95.0,)), "60 % of the CNN's samples"
    assert (panel.title, panel.level, line.role) == ("as printed", 95.0, "cnn")
    assert line.x == (100, 300, 1000)
    assert line.y == pytest.approx((86, 88, 95))
    assert line.spread == pytest.approx((50**0.5,) * 3)


def test_blocks_have_a_row_for_each_number_of_samples_and_a_column_for_each_l():
    shares = {(2, 100): [90, 96], (2, 300): [95, 96], (6, 100): [90, 90], (6, 300): [99, 90], (6, 900): [99, 99]}
    shares[2, 900] = [99, 94]
    drawn_blocks = drawn({f"fig5/l={l}/{n}": result(a) for (l, n), a in shares.items()})["figure-5"].panels[0].blocks
    assert drawn_blocks is not None
    assert (drawn_blocks.x, drawn_blocks.y) == ((2, 6), (100, 300, 900))
    assert drawn_blocks.values == ((0.5, 0.0), (1.0, 0.5), (0.5, 1.0))


def test_sweeps_have_a_line_for_each_fixed_number_of_samples():
    results = {f"fig6/N={n}/{k}": result([n / 10 + k, n / 10 + k]) for n in (1000, 300) for k in (16, 8)}
    lines = drawn(results)["figure-6"].panels[0].series
    assert [(line.label, line.x, line.y) for line in lines] == [
        ("N=300", (8, 16), (38, 46)),
        ("N=1000", (8, 16), (108, 116)),
    ]


def test_the_sweep_of_l_leaves_one_out():
    results = {f"fig7/N=300/{l}": result([50.0 + l, 52.0 + l]) for l in (1, 2, 4)}
    (line,) = drawn(results)["figure-7"].panels[0].series
    assert (line.x, line.y) == ((2, 4), (53, 55))
    assert line.spread == pytest.approx((2**0.5,) * 2)


def test_routers_are_shown_by_their_top_l_and_gates_by_class():
    routed = np.arange(2 * 2 * 16).reshape(2, 2, 16) / 100
    gates = np.array([[0.1, 0.9], [0.3, 0.7]])
    figures = drawn(
        {"fig4/separate/300": result([90, 92], routed=routed), "fig4/joint/300": result([90, 92], largest_gate=gates)}
    )
    tops = {line.label: line.y[0] for line in figures["figure-8"].panels[0].series}
    expected = {f"in the top {l}": 100 * routed[:, :, l - 1].mean() for l in (1, 2, 4, 6)}
    assert tops == pytest.approx(expected)
    by_class = {line.label: line.y[0] for line in figures["figure-9"].panels[0].series}
    assert by_class == pytest.approx({'class 1 (digit "1")': 80.0, 'class 2 (digit "0")': 20.0})


def test_our_own_network_is_drawn_beside_theirs():
    cell = next(iter(PAPER.plan("quick", "print").values()))
    own = {"best/pmoe/100": result([94, 96]), "sweep/l/4": result([95, 97])}
    best = ExperimentResults(dict.fromkeys(own, cell), own, runner=None)  # type: ignore[arg-type]
    figures = drawn({"fig4/cnn/100": result([80, 82])}, best=best)
    lines = {line.role: line for line in figures["figure-4"].panels[0].series}
    assert [(role, line.y) for role, line in lines.items()] == [("cnn", (81,)), ("published", (95,)), ("best", (95,))]
    assert lines["published"].x == (60,), "of the largest N, as the CNN does not get to 95 %"
    assert [panel.series[0].y for panel in figures["our-own-l"].panels] == [(96,)]

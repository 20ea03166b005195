"""Expressive power and Table 1: what is calculated, and the rules at their limits."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest

from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.papers.reproduce import PAPERS
from moesaic.papers.wang2019 import claims_expressivity
from moesaic.papers.wang2019.claims_expressivity import CHECKS
from moesaic.papers.wang2019.experiments_expressivity import CollisionCell, RankCell, plan
from moesaic.papers.wang2019.paper import PAPER, charts
from moesaic.papers.wang2019.theory.mask_collisions import all_distinct_probability, coin_confusion
from moesaic.papers.wang2019.vgg_widths import WIDENINGS
from moesaic.training import NoProgress, ResultCache

CLAIMS = {test.claim.id: test for test in CHECKS}
PLAN = plan()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ExperimentResults[CellArrays]:
    """All cells, carried out."""
    runner = Runner(ResultCache(tmp_path_factory.mktemp("cells")), None, device="cpu", seed=0, progress=NoProgress())
    done = runner.run(PLAN)
    return ExperimentResults(PLAN, {name: each.result for name, each in done.items()}, runner)


def evaluated(id: str, given: ExperimentResults[CellArrays]) -> CheckResult:
    return CLAIMS[id].evaluate(given)


def decision(id: str, given: ExperimentResults[CellArrays]) -> str:
    return evaluated(id, given).verdict.partition(":")[0]


def but(
    found: ExperimentResults[CellArrays], changed: Mapping[str, Mapping[str, object]]
) -> ExperimentResults[CellArrays]:
    """The same results with some of them made up."""
    made = {name: {key: np.asarray(value, float) for key, value in each.items()} for name, each in changed.items()}
    return replace(found, results={name: {**each, **made.get(name, {})} for name, each in found.results.items()})


def test_the_paper_is_listed_and_its_claims_are_told_apart():
    assert PAPERS["wang2019"] is PAPER
    ids = [claim.id for claim in PAPER.claims]
    assert len(set(ids)) == len(ids)
    for claim in PAPER.claims:
        assert claim.paper == "wang2019"
        assert claim.statement.endswith(".")
        assert "olds if" in claim.rule
        assert (claim.published is None) == (claim.where == "Our own")


def test_calculations_are_part_of_both_presets_and_need_nothing():
    for preset in ("quick", "short", "full"):
        cells = PAPER.plan(preset, "print")
        assert cells.keys() == PLAN.keys()
        runner = Runner(ResultCache(Path("nowhere")), None, device="cpu", seed=0, progress=NoProgress())
        assert all(cell.missing_requirement(runner) is None and cell.steps == 0 for cell in cells.values())
        assert all(test.can_run(cells, preset) for test in CHECKS)
    assert PAPER.plan("quick", "best") == PAPER.plan("short", "released") == {}


def test_cells_are_plain_json_repeat_and_change_with_the_seed(tmp_path: Path):
    labs = [Runner(ResultCache(tmp_path), None, device="cpu", seed=seed, progress=NoProgress()) for seed in (0, 1)]
    for cell in (CollisionCell((4, 4), (2, 2), samples=50, trials=2), RankCell((3,), (2,), 4, trials=2)):
        assert cell.measure(labs[0]) == cell.measure(labs[0])
        json.dumps([cell.measure(labs[0]), cell.spec(labs[0])], allow_nan=False)
        assert cell.spec(labs[0]) != cell.spec(labs[1])
    coins = CollisionCell((4, 4), (2, 2), samples=50, trials=2)
    assert coins.measure(labs[0]) != coins.measure(labs[1])


def test_verdicts_of_what_is_printed(found: ExperimentResults[CellArrays]):
    verdicts = {id: decision(id, found) for id in CLAIMS}
    assert verdicts == {
        "rank-dense": "partly",
        "rank-between": "partly",
        "rank-features": "holds",
        "rank-static": "holds",
        "rank-dynamic": "holds",
        "rank-one-sided": "holds",
        "rank-probability": "fails",
        "collision-subsets": "holds",
        "collision-coins": "fails",
        "pair-told-apart": "holds",
        "pair-closed": "holds",
        "inputs-told-apart": "holds",
        "table1-layers": "undecided",
        "table1-weights": "holds",
        "table1-work": "holds",
    }
    assert evaluated("rank-dense", found).measured == 4  # print has 8
    assert evaluated("rank-probability", found).measured == 14 / 16
    assert evaluated("rank-one-sided", found).measured == 45 / 81
    assert evaluated("pair-closed", found).measured == pytest.approx(
        9 * coin_confusion((3, 3), (1 / 3, 1 / 3)), rel=0.05
    )
    distinct = all_distinct_probability(16, (4, 4), (2, 2))
    assert evaluated("inputs-told-apart", found).measured == pytest.approx(distinct, abs=0.006)
    assert evaluated("table1-work", found).measured == pytest.approx(12.3, abs=0.05)
    coin = (1 / 8) ** 2 + (7 / 8) ** 2
    assert evaluated("collision-coins", found).measured == pytest.approx(coin**64 * comb(64, 8))


def test_the_exponent_of_width_decides_on_the_rank(found: ExperimentResults[CellArrays]):
    def ranks(exponents: Mapping[int, float]) -> ExperimentResults[CellArrays]:
        return but(
            found,
            {
                f"widths/L={layers}": {"ranks": found.results[f"widths/L={layers}"]["widths"] ** exponent}
                for layers, exponent in exponents.items()
            },
        )

    assert evaluated("rank-dense", ranks({1: 2, 2: 4, 3: 8})) == CheckResult("holds", 8.0)
    assert decision("rank-dense", ranks({1: 1, 2: 2, 3: 3})) == "fails"
    assert decision("rank-features", ranks({2: 2})) == "fails"  # 8 channels and 6 features


def test_each_layer_that_counts_makes_the_rank_smaller(found: ExperimentResults[CellArrays]):
    def narrowed(two: list[float], three: list[float]) -> str:
        made = {"widths/L=2": {"full": [36], "narrowed": two}, "widths/L=3": {"full": [256], "narrowed": three}}
        return evaluated("rank-between", but(found, made)).verdict

    assert narrowed([1, 6], [1, 2, 3]) == "holds"
    assert narrowed([1, 36], [1, 256, 256]) == "partly: only the first layer's width counts"
    assert narrowed([1, 6], [1, 256, 256]) == "partly: not that of every layer"
    assert narrowed([36, 36], [256, 256, 256]) == "fails"
    assert narrowed([1, 36], [1, 2, 256]) == "partly: not that of every layer"
    assert narrowed([36, 36], [1, 2, 256]) == "partly: not that of every layer"
    made = {"widths/L=2": {"full": [36], "narrowed": [9, 18]}, "widths/L=3": {"full": [256], "narrowed": [1, 2, 192]}}
    assert evaluated("rank-between", but(found, made)).measured == 0.75


def test_masks_are_judged_by_the_ranks_they_leave(found: ExperimentResults[CellArrays]):
    first = found.results["ranks/L=2"]
    static = evaluated("rank-static", but(found, {"ranks/L=2": {"static": first["static"] + 1}}))
    assert static == CheckResult("fails", 1.25)  # 5 over 4
    lower = first["dense"] - [1, 0, 0, 0, 0]
    assert evaluated("rank-dynamic", but(found, {"ranks/L=2": {"dynamic": lower}})) == CheckResult("fails", 80.0)
    third = found.results["ranks/L=3"]
    assert decision("rank-one-sided", but(found, {"ranks/L=3": {"one_sided": third["dense"]}})) == "fails"
    assert decision("rank-one-sided", but(found, {"ranks/L=3": {"one_sided": third["dense"] - 1}})) == "fails"


def test_the_probability_of_a_rank_must_be_the_printed_one(found: ExperimentResults[CellArrays]):
    assert evaluated("rank-probability", but(found, {"maskings": {"restored": [0.5] * 5}})) == CheckResult("holds", 0.5)
    assert "less often" in evaluated("rank-probability", but(found, {"maskings": {"restored": [0.25] * 5}})).verdict
    one = evaluated("rank-probability", but(found, {"maskings": {"restored": [0.5] * 4 + [0.75]}}))
    assert one.verdict == "fails: more often; 0.5 is the probability for one pair of inputs"
    assert one.measured == pytest.approx(0.55)


def test_collisions_are_judged_by_their_ratio_to_the_printed_probability(found: ExperimentResults[CellArrays]):
    def share(kind: str, ratios: list[float]) -> ExperimentResults[CellArrays]:
        return but(found, {"collisions/two": {kind: np.array(ratios) / 36}})

    assert decision("collision-subsets", share("subsets", [1.1, 1.101])) == "fails"
    assert decision("collision-subsets", share("subsets", [0.9, 0.901])) == "fails"
    assert decision("collision-subsets", share("subsets", [1.0, 1.12])) == "undecided"
    for middle in (0.97, 1.03):  # two trials this far apart have the interval ± 0.057, so one end is outside
        found_here = evaluated("collision-subsets", share("subsets", [middle - 0.0045, middle + 0.0045]))
        assert found_here.verdict == "undecided: the interval is not within 0.95 to 1.05"
    alike = {f"collisions/one/{n}": {"coins": [1 / comb(8, n)] * 2} for n in (1, 2, 3, 4)}
    few = but(share("coins", [1.0, 1.0]), alike)
    assert evaluated("collision-coins", few).verdict == "partly: not for 1 of 6 layers"
    two = but(few, {"collisions/one/1": {"coins": [1.06 / 8] * 2}})
    assert evaluated("collision-coins", two).verdict == "partly: not for 2 of 6 layers"
    three = but(two, {"collisions/one/2": {"coins": [0.94 / 28] * 2}})
    assert evaluated("collision-coins", three).verdict == "fails"  # half of them
    rare = but(few, {"collisions/one/1": {"coins": [1e-20] * 2}})
    assert evaluated("collision-coins", rare).measured == pytest.approx(8e-20)  # farthest on the log scale


def test_pairs_are_judged_by_how_many_stay_alike(found: ExperimentResults[CellArrays]):
    def alike(kind: str, ratios: list[float]) -> ExperimentResults[CellArrays]:
        return but(found, {"blind": {kind: np.array(ratios) / 9}})

    assert decision("pair-told-apart", alike("subsets", [2.0, 2.01])) == "fails"
    assert decision("pair-told-apart", alike("subsets", [0.5, 0.51])) == "fails"
    assert decision("pair-told-apart", alike("subsets", [1.0, 1.1])) == "undecided"
    assert decision("pair-told-apart", alike("subsets", [1.19, 1.2])) == "undecided"  # 1.13 to 1.26
    assert decision("pair-told-apart", alike("subsets", [0.84, 0.85])) == "undecided"  # 0.78 to 0.91
    assert decision("pair-closed", alike("coins", [0.5, 0.51])) == "fails"
    for ratios in ([5.0, 5.01], [1.1, 1.11]):  # about 2 is expected
        assert evaluated("pair-closed", alike("coins", ratios)).verdict == "partly: more often, but not as calculated"
    assert evaluated("pair-closed", alike("coins", [0.5, 3.0])).verdict == "undecided: 1 is in the interval"


def test_all_inputs_at_once_are_judged_against_one_pair(found: ExperimentResults[CellArrays]):
    assert decision("inputs-told-apart", but(found, {"distinct": {"distinct": [0.99, 0.991]}})) == "fails"


def test_table_1_is_judged_by_weights_and_work(found: ExperimentResults[CellArrays]):
    weights = but(found, {"table1": {"weights": [1, 100, 1, 102], "work": [1, 1.05, 1, 1]}})
    assert decision("table1-weights", weights) == "fails"
    assert decision("table1-work", weights) == "fails"
    at_limits = but(found, {"table1": {"weights": [1, 100, 1, 101], "work": [1, 1.1, 1, 1]}})
    assert evaluated("table1-weights", at_limits) == CheckResult("holds", 1.01)
    assert evaluated("table1-work", at_limits) == CheckResult("fails", 1.1)
    assert decision("table1-work", but(found, {"table1": {"work": [1, 1.11, 1, 1]}})) == "holds"


def test_columns_of_table_1_count_where_they_widen_what_they_are_named_for(
    found: ExperimentResults[CellArrays], monkeypatch: pytest.MonkeyPatch
):
    middle = WIDENINGS["w1_mid"]
    elsewhere = replace(middle, widths=(*middle.widths[:5], 300, *middle.widths[6:]))
    monkeypatch.setattr(claims_expressivity, "WIDENINGS", {**WIDENINGS, "w1_mid": elsewhere})
    assert evaluated("table1-layers", found) == CheckResult("partly: 2 of 4 do", 2.0)
    monkeypatch.setattr(claims_expressivity, "WIDENINGS", dict.fromkeys(WIDENINGS, elsewhere))
    assert evaluated("table1-layers", found) == CheckResult("fails", 0.0)


def test_the_chart_shows_ranks_and_collisions(found: ExperimentResults[CellArrays]):
    [chart] = charts({"print": found})
    ranks, collisions = chart.panels
    by_label = {line.label: line.y for line in ranks.series}
    assert by_label["dense, as printed"] == (9, 81, 3**8)
    assert by_label["dense"] == (3, 9, 81)
    assert by_label["one mask for all inputs"] == (2, 4, 16)
    assert by_label["a mask for each input"] == (4, 16, 256)
    assert len(collisions.series) == 4
    assert collisions.series[0].y == pytest.approx(collisions.series[2].y, rel=0.05)
    without = replace(found, results={name: each for name, each in found.results.items() if name[0] != "r"})
    assert len(charts({"print": without})[0].panels) == 1

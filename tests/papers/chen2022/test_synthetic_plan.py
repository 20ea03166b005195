"""Chen et al. 2022: its claims have ids and rules, and each preset has the cells they need and no more work."""

import pytest

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.experiments_synthetic import INIT_SCALES, SIZES, MixtureCell, plan
from moesaic.papers.chen2022.paper import PAPER
from moesaic.papers.engine.paper import NEEDS_SHORT_PRESET
from moesaic.papers.reproduce import PAPERS


def test_ids_are_unique_and_every_rule_says_when_the_claim_holds():
    assert PAPERS["chen2022"] is PAPER
    assert len({check.claim.id for check in PAPER.checks}) == len(PAPER.checks)
    others = {claim.id for paper in PAPERS.values() if paper is not PAPER for claim in paper.claims}
    assert not others & {claim.id for claim in PAPER.claims}, "claims are asked for by id, whatever the paper"
    for claim in PAPER.claims:
        assert claim.paper == "chen2022"
        assert "olds if" in claim.rule, f"{claim.id}: the rule does not say when it holds"
        assert claim.statement.endswith(".")


MEANS = {
    *(f"table1-{kind}-s{setting}" for kind in ("linear", "nonlinear") for setting in (1, 2, 3, 4)),
    *(f"table9-s{setting}" for setting in (1, 2, 3, 4)),
}
"""Published means of networks that trained on 16 000 samples."""

BEYOND_QUICK = {
    "print": {
        *("table3-singles-behind", "table3-singles", "table3-overfits"),
        *("table7-bound", "table7-values", "table8-bound", "table8-values", "table9-behind", "table9-no-key"),
        *MEANS,
        *("fig1-clusters", "fig3-linear", "fig3-nonlinear", "lemmaE.1-sum"),
        *(f"theorem4.2-{what}" for what in ("training", "test", "groups", "start")),
    },
    "released": {
        *("table3-singles", "table3-overfits", "table7-values", "table8-bound", "table8-values", "fig1-clusters"),
        *MEANS,
        *("fig1-why", "fig3-why", "fig4-why", "theorem4.2-why", "theorem4.2-weights", "table9-why", "table9-dataset"),
    },
}


def synthetic(fidelity: Fidelity) -> list[str]:
    """Claims on synthetic data."""
    place = ("Table 2", "Table 10", "Table 11", "Figure 7", "Figure 8")
    named = [check for check in PAPER.checks if fidelity in check.fidelities and check.claim.where not in place]
    return [check.claim.id for check in named if not check.claim.id.startswith(("table2-", "tweets-"))]


@pytest.mark.parametrize("fidelity", ["print", "released"])
def test_the_quick_preset_decides_all_but_these_claims_and_the_full_one_all(fidelity: Fidelity):
    quick, full = PAPER.plan("quick", fidelity), PAPER.plan("short", fidelity)
    checks = {check.claim.id: check for check in PAPER.checks}
    left = {name for name in synthetic(fidelity) if not checks[name].can_run(quick, "quick")}
    assert left == BEYOND_QUICK[fidelity]
    assert all(checks[name].missing == NEEDS_SHORT_PRESET for name in left)
    assert all(checks[name].can_run(full, "short") for name in synthetic(fidelity))


def test_the_quick_preset_decides_tables_1_3_7_and_9_theorem_41_and_lemma_51():
    places: set[str] = set()
    for fidelity in ("print", "released"):
        cells = PAPER.plan("quick", fidelity)
        places |= {t.claim.where for t in PAPER.checks if fidelity in t.fidelities and t.can_run(cells, "quick")}
    assert places >= {"Table 1", "Table 3", "Table 7", "Table 9", "Theorem 4.1", "Lemma 5.1"}


def test_numbers_that_depend_on_the_sample_size_are_compared_at_the_papers_only():
    sized = {check.claim.id for check in PAPER.checks if check.not_quick}
    assert sized == {"table3-singles", "table7-values", *MEANS}
    check = next(check for check in PAPER.checks if check.claim.id == "table7-values")
    cells = PAPER.plan("quick", "released")
    assert check.cells(cells)
    assert not check.can_run(cells, "quick")


def test_every_estimate_has_at_least_two_trials():
    for preset in SIZES:
        for fidelity in ("print", "released"):
            for cell in plan(preset, fidelity).values():
                assert getattr(cell, "trials", 2) >= 2


def test_the_quick_preset_stays_quick():
    """A demo takes minutes; what it does is counted here in samples seen by networks that train."""
    total = trial_steps = 0
    for fidelity in ("print", "released"):
        cells = {cell for cell in plan("quick", fidelity).values() if isinstance(cell, MixtureCell)}
        trial_steps += sum(cell.steps for cell in cells)
        total += sum(cell.steps * cell.samples for cell in cells)
    assert trial_steps <= 80_000
    assert total <= 240e6


def test_the_full_preset_has_the_papers_sizes():
    for fidelity in ("print", "released"):
        cells = plan("short", fidelity)
        for name, cell in cells.items():
            if name.startswith("theory/"):
                continue
            assert isinstance(cell, MixtureCell)
            size = 1600 if name.startswith("figure1/") else 16_000
            assert (cell.trials, cell.samples, cell.test_samples) == (10, size, size)
            mixture = name.startswith(("moe/", "balanced/", "init/", "explored/"))
            experts = 8 if mixture else 4 if name.startswith("figure1/") else 1
            assert cell.model.experts == experts
            filters = 512 if "-512/" in name else 16 if experts > 1 else 128
            assert cell.model.filters == filters


@pytest.mark.parametrize("preset", SIZES)
@pytest.mark.parametrize("fidelity", ["print", "released"])
def test_cells_are_named_after_what_they_are(preset: str, fidelity: Fidelity):
    for name, cell in plan(preset, fidelity).items():
        parts = name.split("/")
        if parts[0] == "theory":
            assert fidelity == "print"
            continue
        assert isinstance(cell, MixtureCell)
        if parts[-1] in ("s1", "s2", "s3", "s4"):
            assert parts[-1] == f"s{cell.setting}"
        elif parts[0] == "init":
            assert (cell.setting, cell.model.init_scale) == (3, float(parts[1]))
        else:
            assert cell.setting == {"table7": 7, "figure1": "figure 1"}[parts[0]]
        if parts[0] != "init":
            assert cell.model.activation == parts[1].partition("-")[0]
        assert (cell.schedule.balance > 0) == (parts[0] == "balanced")
        assert bool(cell.follow) == (parts[0] in ("moe", "figure1", "init", "explored")), (
            "only of these is the training looked at"
        )
        assert cell.model.two_logits == (fidelity == "released")
        assert (cell.schedule.optimizer == "adam") == (not cell.model.routed)


def test_there_is_nothing_of_ours_to_compare_and_nothing_but_the_full_preset_sweeps_the_initial_scale():
    assert plan("short", "best") == plan("quick", "best") == {}
    swept = {name for name in plan("short", "print") if name.startswith("init/")}
    assert swept == {f"init/{scale}" for scale in INIT_SCALES}
    assert not any(name.startswith("init/") for name in [*plan("quick", "print"), *plan("short", "released")])


def test_the_claim_on_initial_weights_needs_one_cell_and_the_others_run_for_its_chart():
    (check,) = (check for check in PAPER.checks if check.claim.id == "theorem4.2-start")
    cells = PAPER.plan("short", "print")
    assert set(check.cells(cells)) == {"init/0.3"}
    assert set(check.chart_cells(cells)) == {f"init/{scale}" for scale in INIT_SCALES}
    assert not any(other.chart_cells(cells) for other in PAPER.checks if other is not check)


def test_tables_share_the_cells_they_have_in_common():
    cells = plan("short", "released")
    for setting in (1, 2):
        for activation in ("identity", "cubic"):
            assert cells[f"table8/{activation}/s{setting}"] == cells[f"single/{activation}-128/s{setting}"]


@pytest.mark.parametrize("preset", SIZES)
def test_looks_are_spread_over_all_of_the_training(preset: str):
    for fidelity in ("print", "released"):
        for cell in plan(preset, fidelity).values():
            if isinstance(cell, MixtureCell) and cell.follow:
                last = cell.schedule.steps // cell.follow * cell.follow
                assert cell.schedule.steps - last <= 1, "the last look is at the trained network, or a step before"
                assert cell.schedule.steps // cell.follow in (1, 25, 50)

"""A budget that workers share: planned once, and every look is decided once."""

from pathlib import Path

import pytest

from moesaic.leases import Leases
from moesaic.training.comparison_budget import BudgetPlan, SharedTimeBudget


def budget(out: Path, now: float = 0.0, asked: str = "asked") -> SharedTimeBudget:
    return SharedTimeBudget(out, asked, Leases(out / "cells"), clock=lambda: now)


def test_the_first_worker_plans_and_the_others_follow(tmp_path: Path):
    first, second = budget(tmp_path), budget(tmp_path)
    assert first.join() is None
    first.publish((8, 16), 3, 20, workers=2, seconds=60.0)
    found = second.join()
    assert found == BudgetPlan((8, 16), 3, 20, 2, 60.0, found.session)
    first.close()
    assert budget(tmp_path).join() is None, "nobody is at work: a new budget"


def test_who_comes_while_the_first_measures_waits_for_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = budget(tmp_path), budget(tmp_path)
    assert first.join() is None
    monkeypatch.setattr(Leases, "wait", lambda self: first.publish((8,), 3, 20, workers=1, seconds=60.0))
    found = second.join()
    assert found is not None
    assert found.samples == (8,)
    first.close()


def test_every_look_is_decided_once_for_all_workers(tmp_path: Path):
    first = budget(tmp_path, now=10.0)
    assert first.join() is None
    first.publish((8,), 3, 20, workers=2, seconds=60.0)
    late = budget(tmp_path, now=65.0)
    late.join()
    assert first.seconds_left() == 2 * 60.0
    assert late.seconds_left() == 2 * 60.0, "as the first decided"
    assert late.seconds_left() == 2 * 5.0
    assert first.seconds_left() == 2 * 5.0
    first.close()


def test_others_that_are_at_work_keep_their_budget_when_the_first_worker_is_gone(tmp_path: Path):
    first = budget(tmp_path)
    assert first.join() is None
    first.publish((8,), 3, 20, workers=1, seconds=60.0)
    first.close()
    with Leases(tmp_path / "cells").hold("a cell"):
        joined = budget(tmp_path)
        assert joined.join() is not None
        joined.close()
    other = budget(tmp_path, asked="something else")
    assert other.join() is None
    other.close()


def test_a_budget_without_a_plan_leaves_nothing(tmp_path: Path):
    out = tmp_path / "runs" / "compare"
    planless = budget(out)
    assert planless.join() is None
    assert out.exists()
    planless.close()
    assert list(tmp_path.iterdir()) == []

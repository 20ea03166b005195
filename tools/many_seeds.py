"""Runs every quick test from many seeds: ``make seeds SEEDS=20``.

A test that compares random numbers with a limit may pass with the numbers of `make test` and fail with others. To run
the whole suite again for each seed takes minutes a seed, most of them in imports, collection and long tests. Here each
test runs from all seeds, one after the other, before the next; tests that take longer than ``--slow`` seconds from the
first seed run from that alone. Fixtures that several tests share keep their numbers.

This file is also the plugin of pytest that does so; MOESAIC_SEEDS has the number of seeds and the limit.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol


def find_conftest(config: pytest.Config) -> Any:
    """The conftest.py whose SEED starts every test."""
    return next(each for each in config.pluginmanager.get_plugins() if hasattr(each, "seed_generators"))


class ManySeeds:
    """Repeats tests from seeds after the first, and reports the first failure of each."""

    def __init__(self, count: int, slow: float) -> None:
        self.count, self.slow = count, slow
        self.root: Any = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.root = find_conftest(session.config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        first, reports = self.root.SEED, list[pytest.TestReport]()
        doctest: Any = getattr(item, "dtest", None)
        names: dict[str, Any] = {} if doctest is None else dict(doctest.globs)  # which a doctest clears at its end
        session: Any = item.session
        try:
            for number in range(self.count):
                self.root.SEED = first + number
                if number:
                    item._initrequest()  # type: ignore[attr-defined]  # new fixtures, doctests have them too
                    if doctest is not None:
                        doctest.globs = dict(names)
                # as if another test of the same file followed, so that fixtures which its tests share stay
                reports = runtestprotocol(item, nextitem=item.parent, log=False)  # type: ignore[arg-type]
                failed = next((each for each in reports if each.failed), None)
                if failed is not None:
                    failed.sections.append(("seed", f"MOESAIC_TEST_SEED={self.root.SEED}"))
                seconds = sum(each.duration for each in reports)
                if seconds > self.slow or any(each.outcome != "passed" for each in reports):
                    break
        finally:
            self.root.SEED = first
            session._setupstate.teardown_exact(nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def pytest_configure(config: pytest.Config) -> None:
    if "MOESAIC_SEEDS" in os.environ:
        count, slow = os.environ["MOESAIC_SEEDS"].split()
        config.pluginmanager.register(ManySeeds(int(count), float(slow)), "moesaic-many-seeds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds for each test (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument(
        "--slow", type=float, default=0.25, help="seconds of a test that runs once (default: %(default)s)"
    )
    given, more = parser.parse_known_args()  # the rest is for pytest: paths, -k, -x
    own = {"MOESAIC_SEEDS": f"{given.seeds} {given.slow}", "MOESAIC_TEST_SEED": str(given.first)}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "many_seeds", "-n", "auto", "--maxprocesses", "8", *more]
    return subprocess.run(command, env={**os.environ, **own, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())

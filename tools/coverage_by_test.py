"""A plugin of pytest for tools/mutate.py: which test runs which lines of src, or a given list of tests in its order.

MOESAIC_LINES_TO=folder    each process writes a JSON file there: {test: {"seconds", "subprocess", "lines"}}
MOESAIC_TESTS_FROM=file    only the tests whose ids the JSON file lists are run, in that order
"""

import json
import os
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

TESTS_FROM, LINES_TO = os.environ.get("MOESAIC_TESTS_FROM"), os.environ.get("MOESAIC_LINES_TO")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if TESTS_FROM:
        order = {name: i for i, name in enumerate(json.loads(Path(TESTS_FROM).read_text("utf-8")))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


class Lines:
    """Records the lines of src that every test runs, and whether it starts a process, whose lines are not seen."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self.file = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
        source = Path("src").resolve()
        self.root = source.parent
        self.coverage = coverage.Coverage(data_file=None, config_file=False, source=[str(source)])
        self.coverage.start()
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.starts_process: set[str] = set()
        self.running = ""
        self.context = ""
        """The shared fixture that is being set up."""
        self.fixtures: dict[str, set[str]] = {}
        """Contexts of the fixtures that each test shares with others."""
        sys.addaudithook(self._notice)
        start = BaseProcess.start

        def start_noticed(process: BaseProcess) -> None:  # a fork server starts them for the test, with no event here
            self.starts_process.add(self.running)
            start(process)

        BaseProcess.start = start_noticed  # type: ignore[method-assign]

    def _notice(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.starts_process.add(self.running)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.running = item.nodeid
        found = getattr(item, "_fixtureinfo", None)  # doctests have none
        names = {} if found is None else found.name2fixturedefs
        self.fixtures[item.nodeid] = {_context(each) for several in names.values() for each in several}
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
        """Lines of a fixture that several tests share count for all of them, not only for the first."""
        if fixturedef.scope == "function":
            return (yield)
        outer, self.context = self.context, _context(fixturedef)
        self.coverage.switch_context(self.context)
        try:
            return (yield)
        finally:
            self.context = outer
            self.coverage.switch_context(outer or self.running)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines: dict[str, dict[str, set[int]]] = {}  # by context and file
        for file in data.measured_files():
            name = str(Path(file).relative_to(self.root))
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    lines.setdefault(context, {}).setdefault(name, set()).add(line)
        found: dict[str, Any] = {}
        for test in self.seconds.keys() - self.failed:
            own: dict[str, set[int]] = {}
            for context in (test, *self.fixtures.get(test, ())):
                for name, some in lines.get(context, {}).items():
                    own.setdefault(name, set()).update(some)
            found[test] = {
                "seconds": self.seconds[test],
                "subprocess": test in self.starts_process,
                "lines": {name: sorted(some) for name, some in own.items()},
            }
        self.file.write_text(json.dumps({"tests": found, "failed": sorted(self.failed)}), "utf-8")


def _context(fixture: pytest.FixtureDef[Any]) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def pytest_configure(config: pytest.Config) -> None:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if LINES_TO and (is_worker or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Lines(Path(LINES_TO)), "moesaic-lines")

"""A plugin of pytest for tools/mutate.py: which test runs which lines of src, or a given list of tests in its order.

MOESAIC_LINES_TO=folder    each process writes a JSON file there: {test: {"seconds", "subprocess", "lines"}}
MOESAIC_TESTS_FROM=file    only the tests whose ids the JSON file lists are run, in that order
"""

import json
import os
import sys
from collections.abc import Iterator
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
        sys.addaudithook(self._notice)

    def _notice(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.starts_process.add(self.running)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.running = item.nodeid
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            name = str(Path(file).relative_to(self.root))
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    lines.setdefault(test, {}).setdefault(name, []).append(line)
        found = {
            test: {"seconds": seconds, "subprocess": test in self.starts_process, "lines": lines.get(test, {})}
            for test, seconds in self.seconds.items()
            if test not in self.failed
        }
        self.file.write_text(json.dumps({"tests": found, "failed": sorted(self.failed)}), "utf-8")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if LINES_TO and (is_worker or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Lines(Path(LINES_TO)), "moesaic-lines")

"""`moesaic view`: shows the page of a run in the browser while the run goes on."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import Positional, arg

from moesaic.cli.browser import open_browser
from moesaic.cli.faults import escaped
from moesaic.cli.shared import user_errors

if TYPE_CHECKING:
    from moesaic.report.page_server import LivePage

__all__ = ["View"]

_LAST_FILES = {"compare": "result.json", "reproduce": "claims.json"}
"""The file that each command writes when it is complete."""


@dataclass(frozen=True)
class View:
    """Show the page of a run in the browser, and update it while the run goes on.

    The page is served to this machine only, until Ctrl-C ends it.
    """

    folder: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Output folder of moesaic train, compare or reproduce."""
    port: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the first free one from 8642 on)")] = (
        None
    )
    """Port on 127.0.0.1; 0: any free one."""
    browser: bool = True
    """Open the page in the browser, where there is a display."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command until it is interrupted."""
        from moesaic.report.page_server import PageServer

        with user_errors("view"):
            if self.port is not None and not 0 <= self.port < 1 << 16:
                raise ValueError(f"view: --port={self.port}; it must be from 0 to 65535")
            page = _page_of(self.folder)
            page.page()  # refuses a folder that cannot be shown
            server = PageServer(page, self.port)
        with server:
            sys.stdout.write(f"{escaped(str(self.folder))}: {server.url} (Ctrl-C ends it)\n")
            sys.stdout.flush()
            if self.browser:
                open_browser(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:  # the way to end it
                return 0
        return 0


def _page_of(folder: Path) -> LivePage:
    """The page of a folder, by what its config.json says it is."""
    from moesaic.report.page_server import LivePage
    from moesaic.report.training_page import training_page
    from moesaic.training.run_reader import RUN_FILES, is_run, read_run
    from moesaic.validated_json import InvalidFile

    advice = "name the output folder of moesaic train, compare or reproduce"
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; {advice}")
    if is_run(folder):
        return LivePage(
            lambda: [folder / name for name in RUN_FILES], lambda live: training_page(read_run(folder), live=live)
        )
    command = _command(folder)
    if command is None:
        raise InvalidFile(f"{folder} has no config.json of a run; {advice}")
    return _sweep_page(folder, command)


def _command(folder: Path) -> str | None:
    """The command line of a comparison or a reproduction; None if the folder has none."""
    from moesaic.validated_json import InvalidFile, read_json

    try:
        content = read_json(folder / "config.json")
    except (OSError, InvalidFile):
        return None
    line = cast("dict[str, Any]", content).get("command") if isinstance(content, dict) else None
    words = line.split() if isinstance(line, str) else []
    return line if len(words) > 1 and words[1] in _LAST_FILES else None


def _sweep_page(folder: Path, command: str) -> LivePage:
    """The report of a comparison or a reproduction if it is complete, else a table of its cells."""
    from moesaic.report.cells_page import cell_files, cells_page, read_cells
    from moesaic.report.page_server import LivePage

    kind = command.split()[1]
    last = folder / _LAST_FILES[kind]

    def watched() -> list[Path]:
        return [folder / "config.json", last, folder / "charts.json", folder / "notes.json", *cell_files(folder)]

    def render(live: Mapping[str, str]) -> str:
        # a command that was run again with other options is not complete because an earlier one was
        if last.exists() and all(path.stat().st_mtime <= last.stat().st_mtime for path in cell_files(folder)):
            return _comparison(folder, command) if kind == "compare" else _reproduction(folder, command)
        return cells_page(command, read_cells(folder), live=live)

    return LivePage(watched, render)


def _comparison(folder: Path, command: str) -> str:
    from moesaic.report import write_comparison_report
    from moesaic.report.chart import read_charts
    from moesaic.training.comparison_result import read_comparison

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "report.html")
        charts = read_charts(folder / "charts.json")
        write_comparison_report(path, read_comparison(folder / "result.json"), charts, command=command)
        return path.read_text("utf-8")


def _reproduction(folder: Path, command: str) -> str:
    from moesaic.papers.engine.findings import read_findings
    from moesaic.papers.engine.report import write_report
    from moesaic.papers.reproduce import PAPERS
    from moesaic.report.chart import read_charts
    from moesaic.validated_json import decode, read_json

    findings = read_findings(folder / "claims.json")
    named = dict.fromkeys(finding.paper for finding in findings)
    notes = folder / "notes.json"
    machine = cast("dict[str, Any]", read_json(folder / "config.json")).get("machine", "")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "report.html")
        write_report(
            path,
            findings=findings,
            charts=read_charts(folder / "charts.json"),
            papers=[PAPERS[paper].source for paper in named if paper in PAPERS],
            notes=decode(tuple[str, ...], read_json(notes), str(notes)) if notes.exists() else (),
            command=command,
            machine=machine if isinstance(machine, str) else "",
        )
        return path.read_text("utf-8")

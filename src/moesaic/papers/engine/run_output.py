"""Writes the results of a run into its directory: figures, charts.json, notes.json, claims.json and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from moesaic.files import write_json
from moesaic.papers.engine import report
from moesaic.papers.engine.findings import Finding, Source, read_findings, write_findings
from moesaic.report.chart import Chart, read_charts, write_charts
from moesaic.report.chart_drawing import write_figures

__all__ = ["write_results"]


def write_results(
    out: Path,
    findings: Iterable[Finding],
    charts: Sequence[Chart],
    *,
    papers: Sequence[Source],
    notes: Sequence[str],
    command: str,
    machine: str,
) -> list[Finding]:
    """Writes all files and returns the findings as claims.json has them.

    The last four arguments are those of `write_report`.
    """
    _remove_stale_figures(out, charts)
    write_figures(out / "figures", charts)
    write_charts(out / "charts.json", charts)
    write_json(out / "notes.json", list(notes))
    write_findings(out / "claims.json", findings)
    # read back, so that the report shows exactly what claims.json has
    written = read_findings(out / "claims.json")
    report.write_report(
        out / "report.html",
        findings=written,
        charts=charts,
        papers=papers,
        notes=notes,
        command=command,
        machine=machine,
    )
    return written


def _remove_stale_figures(out: Path, charts: Iterable[Chart]) -> None:
    """Removes the figures of an earlier run in the same directory that this run does not draw."""
    try:
        earlier = {(chart.paper, chart.id) for chart in read_charts(out / "charts.json")}
    except (OSError, ValueError):
        return
    for paper, name in earlier - {(chart.paper, chart.id) for chart in charts}:
        folder = out / "figures" / Path(paper).name
        for kind in ("png", "svg"):
            (folder / f"{Path(name).name}.{kind}").unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

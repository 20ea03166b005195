"""`moesaic view`: the page of every kind of run, and how it ends."""

import http.client
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from papers.record import RUN
from report.example_run import write_run
from training.example_comparison import comparison

from moesaic.cli import main
from moesaic.cli import view as view_module
from moesaic.cli.view import View
from moesaic.papers.engine.findings import read_findings
from moesaic.report.chart import write_charts
from moesaic.report.comparison_charts import comparison_charts
from moesaic.report.page_server import PageServer
from moesaic.training.comparison_result import write_comparison
from moesaic.training.paired_comparison import paired_comparisons


def page_of(folder: Path) -> str:
    return view_module._page_of(folder).page().decode()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Requests made to the server of a command, which then is interrupted as by Ctrl-C."""
    answers: list[bytes] = []

    def serve(server: PageServer) -> None:
        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            connection.request("GET", "/")
            answers.append(connection.getresponse().read())

        client = threading.Thread(target=ask)
        client.start()
        server.handle_request()
        client.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", serve)
    return answers


def test_it_serves_the_page_of_a_run_until_it_is_interrupted(tmp_path: Path, asked: list[bytes], capsys):
    folder = write_run(tmp_path / "run")
    assert main(["view", str(folder), "--port", "0", "--no-browser"]) == 0
    assert b"Learning curves" in asked[0]
    assert b"fetch" in asked[0], "the script that updates it"
    assert re.search(r"run: http://127.0.0.1:\d+/ \(Ctrl-C ends it\)\n$", capsys.readouterr().out)


def test_the_browser_is_opened_unless_it_is_not_wanted(tmp_path: Path, asked: list[bytes], monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(view_module, "open_browser", opened.append)
    folder = str(write_run(tmp_path / "run"))
    main(["view", folder, "--port", "0", "--no-browser"])
    assert opened == []
    main(["view", folder, "--port", "0"])
    assert re.fullmatch(r"http://127.0.0.1:\d+/", opened[0])


def test_a_run_in_progress_is_shown_as_far_as_it_is(tmp_path: Path):
    live = view_module._page_of(write_run(tmp_path, [], complete=False, tested=False))
    first = live.version()
    assert "No epoch is complete yet" in live.page().decode()
    write_run(tmp_path, complete=False)
    assert live.version() != first
    assert "not complete: after epoch 4 of 6" in live.page().decode()


def config(folder: Path, command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"command": command, "machine": "a machine"}))


def test_a_comparison_shows_its_cells_then_its_report(tmp_path: Path):
    config(tmp_path, "moesaic compare pets")
    (tmp_path / "cells").mkdir()
    cell = tmp_path / "cells" / "wrn-0123456789abcdef.json"
    cell.write_text('{"seconds": 2, "result": {"accuracy": 71.5}}')
    os.utime(cell, (1000, 1000))
    assert "71.5" in page_of(tmp_path)
    found = comparison((50, 100), [[80, 81], [85, 86]], [[82, 83], [88, 89]])
    write_comparison(tmp_path / "result.json", found)
    write_charts(tmp_path / "charts.json", comparison_charts(found, paired_comparisons(found))[:0])
    shown: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesaic.report.write_comparison_report", written(shown))
        page_of(tmp_path)
        assert shown == ["moesaic compare pets"]
        os.utime(tmp_path / "result.json", (999, 999))
        assert "1 cell finished" in page_of(tmp_path), "a run with more trials is under way"


def written(shown: list[str]) -> Callable[..., None]:
    def write(path: Path, *content: object, command: str, **options: object) -> None:
        shown.append(command)
        path.write_text("the report")

    return write


def test_a_reproduction_shows_its_report_made_from_its_files(tmp_path: Path):
    with zipfile.ZipFile(RUN) as archive:
        archive.extract("claims.json", tmp_path)
    config(tmp_path, "moesaic reproduce <b>")
    write_charts(tmp_path / "charts.json", [])
    (tmp_path / "notes.json").write_text('["a note & more"]')
    page = page_of(tmp_path)
    assert read_findings(tmp_path / "claims.json")[0].statement in page
    assert "a note &amp; more" in page
    assert "moesaic reproduce &lt;b&gt;" in page


@pytest.mark.parametrize(
    ("prepare", "fault"),
    [
        (lambda folder: None, "there is no folder"),
        (lambda folder: folder.mkdir(), "has no config.json of a run; name the output folder of moesaic train"),
        (lambda folder: config(folder, "moesaic bench"), "has no config.json of a run"),
        (lambda folder: config(folder, "moesaic"), "has no config.json of a run"),
        (lambda folder: (write_run(folder) / "metrics.jsonl").write_text("[]\n"), "metrics.jsonl, line 1"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tmp_path: Path, prepare, fault: str, capsys):
    prepare(tmp_path / "run")
    assert main(["view", str(tmp_path / "run"), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert fault in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: int, capsys):
    assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port={port}; it must be from 0 to 65535" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, capsys):
    folder = write_run(tmp_path)
    with PageServer(view_module._page_of(folder), 0) as taken:
        assert View(folder, port=taken.server_port).port == taken.server_port
        assert main(["view", str(folder), "--port", str(taken.server_port)]) == 2
    assert "is not free" in capsys.readouterr().err

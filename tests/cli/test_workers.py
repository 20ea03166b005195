"""Workers of one command: their number, their threads, one progress for all, and a job that loses one of them."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro
from PIL import Image
from rich.console import Console

from moesaic.cli import workers
from moesaic.cli.compare import Compare
from moesaic.cli.shared import CommandError, use_threads
from moesaic.cli.workers import cpu_threads, job_count
from moesaic.files import as_json
from moesaic.report.progress_bars import Bars, Lines
from moesaic.training.comparison_result import read_comparison


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_jobs_are_a_number_or_one_for_each_core_or_gpu(eight_cores: None, monkeypatch: pytest.MonkeyPatch):
    assert job_count("compare", "3", "cpu") == 3
    assert job_count("compare", "auto", "cpu") == 8
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert job_count("compare", "auto", "cuda") == 4
    for jobs in ("0", "-1", "1.5", "many", "9999"):
        with pytest.raises(ValueError, match=r"compare: --jobs='.*'; it must be a number from 1 to 1024, or auto"):
            job_count("compare", jobs, "cpu")


@pytest.mark.parametrize(
    ("jobs", "earlier", "threads"),
    [(2, [], 4), (8, [], 1), (16, [], 1), (2, [1], 1), (2, [4, 2], 4), (2, [8], 4), (1, [1], 1), (1, [3], 3)],
)
def test_workers_share_the_cores_and_keep_the_threads_of_earlier_results(eight_cores: None, jobs, earlier, threads):
    assert cpu_threads(jobs, earlier) == threads


def test_the_environment_decides_the_threads(eight_cores: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr("torch.get_num_threads", lambda: 5)
    assert cpu_threads(4, [1]) == 5


def test_a_run_in_a_folder_computes_with_the_threads_of_its_results(eight_cores, tmp_path, capsys, monkeypatch):
    torch.set_num_threads(2)
    (tmp_path / "config.json").write_text('{"threads": [1]}')
    assert use_threads(tmp_path, 1, "cpu") == 1
    assert torch.get_num_threads() == 1
    assert (
        f"computing with 1 CPU threads, as the results in {tmp_path} were; OMP_NUM_THREADS" in capsys.readouterr().err
    )


def test_each_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [workers._visible_gpu(number, "cuda")["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert [workers._visible_gpu(number, "cuda")["CUDA_VISIBLE_DEVICES"] for number in range(2)] == ["4", "GPU-7"]
    assert workers._visible_gpu(0, "cuda:1") == {}
    assert workers._visible_gpu(0, "cpu") == {}


def show(display: Any, *events: tuple[int, list[Any]]) -> None:
    some = [SimpleNamespace(number=i, row=None, depth=0, cell="", done=0) for i in range(2)]
    shown = workers._ShownProgress(display)
    for number, event in events:
        shown.show(some[number], event)


def test_the_progress_of_workers_is_counted_by_cell():
    class Clock:
        now = 0.0

    file, clock = io.StringIO(), Clock()
    lines = Lines(Console(file=file, width=100), clock=lambda: clock.now)
    both = [(0, ["begin", "8 runs", 80, 10]), (1, ["begin", "8 runs", 80, 20])]
    first = [(0, ["begin", "a", 10, 0]), (0, ["advance", 6, "x"])]
    # the second worker takes over what the first left at 6 of 10, and finds another cell finished
    second = [(1, ["begin", "a", 10, 0]), (1, ["skip", 5]), (1, ["advance", 5, ""]), (1, ["end"])]
    found = [(1, ["begin", "b", 10, 0]), (1, ["skip", 10]), (1, ["end"])]
    show(lines, *both, *first, *second, *found, (0, ["log", "hello"]), (1, ["log", "hello"]), (1, ["what"]), (0, []))
    clock.now = 10.0
    lines.advance(0)
    assert file.getvalue() == "hello\n8 runs: 37 %, 1 epochs/s, 50 s left\n"


def test_a_terminal_has_a_bar_for_each_worker():
    file = io.StringIO()
    bars = Bars(Console(file=file, force_terminal=True, width=120, legacy_windows=False))
    begun = [(number, ["begin", "8 runs", 80, 0]) for number in range(2)]
    with bars.display:
        show(bars, *begun, (0, ["begin", "a", 10, 0]), (1, ["begin", "b", 10, 0]), (1, ["advance", 5, "loss 0.5"]))
        bars.display.refresh()
    shown = file.getvalue()
    assert "worker 1: a" in shown
    assert "worker 2: b" in shown
    assert "loss 0.5" in shown


def test_a_bad_number_of_jobs_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="--jobs='0'; it must be a number from 1"):
        tyro.cli(Compare, args=["no-images", "--jobs", "0"]).run(["compare"])


def test_a_worker_writes_its_progress_in_lines_of_json(capsys, monkeypatch):
    monkeypatch.setattr(workers, "_end_with_parent", lambda: None)
    progress = workers.WorkerProgress()
    progress.begin("a", 10, 2)
    progress.advance(3, "loss 0.5")
    progress.skip(5)
    progress.log("a message")
    progress.report({"verdict": "holds"})
    progress.end()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        ["begin", "a", 10, 2],
        ["advance", 3, "loss 0.5"],
        ["skip", 5],
        ["log", "a message"],
        ["report", {"verdict": "holds"}],
        ["end"],
    ]


def test_what_workers_report_reaches_the_parent_while_they_run(monkeypatch):
    """Each of two workers reports, and ends only after the parent has had both reports."""
    running: list[Any] = []
    got: list[dict[str, Any]] = []

    class Worker:
        was_killed, row = False, None

        def __init__(self, given, number, threads, device, events) -> None:
            self.process, self._events = SimpleNamespace(wait=lambda: None), events
            running.append(self)
            events.put((self, ["begin", "all", 2, 0]))
            events.put((self, ["report", {"number": number}]))

        def check_end(self) -> None:
            pass

    def on_report(content: dict[str, Any]) -> None:
        got.append(content)
        if len(got) == len(running):
            for worker in running:
                worker._events.put((worker, None))

    monkeypatch.setattr(workers, "_Worker", Worker)
    shown = SimpleNamespace(show=lambda *event: None, close=lambda worker: None, end=lambda: None)
    monkeypatch.setattr(workers, "_ShownProgress", lambda display: shown)
    workers.run_workers(["reproduce"], 2, 1, "cpu", SimpleNamespace(), on_report)
    assert got == [{"number": 0}, {"number": 1}]


def test_a_worker_ends_with_its_parent_as_a_signal_would_end_it(monkeypatch):
    received: list[bytes | int] = [b"x", b""]
    monkeypatch.setattr(os, "read", lambda descriptor, count: received.pop(0))
    monkeypatch.setattr(signal, "raise_signal", received.append)
    workers._end_with_parent()
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("code", "message"),
    [(2, r"^moesaic compare: lower lr$"), (1, r"a worker ended with 1:\nTraceback\nmoesaic compare: lower lr")],
)
def test_a_worker_that_fails_ends_the_job_with_its_message(code: int, message: str):
    worker = workers._Worker.__new__(workers._Worker)
    worker.process = SimpleNamespace(returncode=code)
    worker._errors = io.BytesIO(b"Traceback\nmoesaic compare: lower lr\n")
    with pytest.raises(CommandError, match=message):
        worker.check_end()
    for code, killed in ((0, False), (-9, True), (143, True)):
        worker.process.returncode = code
        worker.check_end()
        assert worker.was_killed is killed


# Imported by every process when it starts. Worker 0 kills itself in the middle of its first cell; worker 1 begins its
# first cell when worker 0 is dead. Each logs the cells that it begins and those that it stores.
HOOK = """
import os, signal
if "EXECUTED" in os.environ:
    from moesaic.training.result_cache import ResultCache, cell_digest
    run, fifo, worker = ResultCache.run, os.environ["FIFO"], os.environ.get("MOESAIC_WORKER")
    begun = []

    def log(what, spec):
        file = os.open(os.environ["EXECUTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{what} {cell_digest(spec)} {worker}\\n".encode())
        os.close(file)

    def logged(self, name, spec, work):
        if worker == "1" and not begun:
            open(fifo, "rb").read()
        begun.append(name)
        log("begin", spec)
        if worker == "0":
            end = open(fifo, "wb")
            os.kill(os.getpid(), signal.SIGKILL)
        found = run(self, name, spec, work)
        log("end", spec)
        return found

    ResultCache.run = logged
"""
GIVEN = "compare pets --models wrn10_1,wrn10_1_pmoe --samples 4,8 --trials 2 --epochs 1 --batch-size 8 --img-size 16"
GIVEN += " --device cpu --cache-dir cache"


def timeless(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: timeless(value) for name, value in content.items() if name != "seconds"}
    return [timeless(each) for each in content] if isinstance(content, list) else content


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a FIFO makes one worker wait for another")
def test_a_job_that_loses_a_worker_does_every_cell_once_and_ends_as_one_process_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, shade in (("cat", 40), ("dog", 200)):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (16, 16), (shade, 8 * number, 90)).save(tmp_path / "pets" / kind / f"{number}.png")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    os.mkfifo(tmp_path / "fifo")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "hook"), *filter(None, sys.path)]),
        "EXECUTED": str(tmp_path / "executed.txt"),
        "FIFO": str(tmp_path / "fifo"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", *GIVEN.split(), "--jobs", "2", "--out", "two"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 2 workers were killed; what they left is done by the others" in done.stderr
    lines = [line.split() for line in Path("executed.txt").read_text().splitlines()]
    killed = [digest for what, digest, worker in lines if worker == "0"]
    assert len(killed) == 1
    ended = [digest for what, digest, _ in lines if what == "end"]
    assert len(ended) == len(set(ended)) == 8
    begun = [digest for what, digest, _ in lines if what == "begin"]
    assert sorted(begun) == sorted([*ended, *killed]), "only what the killed worker was at began twice"
    assert all(worker == "1" for what, _, worker in lines if what == "end"), "the parent had nothing left to do"
    assert not list(Path("two/cells").glob("*.lease"))
    torch.set_num_threads(1)
    undisturbed: list[Any] = []
    monkeypatch.setattr("moesaic.cli.compare._write", lambda found, out, command: undisturbed.append(found))
    assert tyro.cli(Compare, args=[*GIVEN.split()[1:], "--out", "one"]).run(["compare"]) == 0
    one, two = (timeless(as_json(asdict(each))) for each in (*undisturbed, read_comparison(Path("two/result.json"))))
    assert one == two

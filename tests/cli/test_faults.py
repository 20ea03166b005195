"""Faults of the surroundings: signals, full disks, folders that are gone, memory, consoles without UTF-8."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from moesaic.cli import faults, main
from moesaic.cli.faults import escaped, run_guarded, signal_handlers, work_begins
from moesaic.cli.shared import check_writable, make_folder, write_config
from moesaic.files import write_error_advice
from moesaic.training import interruption, trainer
from moesaic.training.checkpoint import read_tensors
from moesaic.training.train_step import TrainStep

OPTIONS = "--model wrn10_1_pmoe --img-size 16 --epochs 2 --batch-size 8 --device cpu --cache-dir c"
SMALL = [*OPTIONS.split(), "--out", "out"]


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOESAIC_DEBUG", raising=False)
    for kind, shade in (("cat", 40), ("dog", 200)):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(15):
            Image.new("RGB", (16, 16), (shade, 8 * number, 90)).save(tmp_path / "pets" / kind / f"{number}.png")
    return tmp_path / "pets"


def run_process(code: str, *given: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, after ``code``."""
    script = f"import os, signal, sys\n{code}\nfrom moesaic.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *given],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


# the import of a module sends the signal, whatever the speed of the machine
AT_IMPORT = """
class Signals:
    def find_spec(self, name, *rest):
        if name == "{module}":
            os.kill(os.getpid(), signal.{signal})
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Signals())
"""


@pytest.mark.parametrize(("name", "module"), [("SIGINT", "torch._C"), ("SIGTERM", "tyro")])
def test_a_signal_during_imports_is_told_without_a_traceback(name: str, module: str):
    done = run_process(AT_IMPORT.format(module=module, signal=name), "claims")
    assert done.returncode == 128 + getattr(signal, name)
    assert "Interrupted before anything was done. To run it:\n" in done.stderr
    assert done.stderr.rstrip().endswith("claims")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def signals() -> Iterator[None]:
    """Handlers as those of the command line, for a command that has begun."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    with signal_handlers(["train"]):
        yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send_at(monkeypatch: pytest.MonkeyPatch, number: int, step: int, times: int = 1) -> None:
    """The process gets the signal during a step of training."""
    whole_step, steps = TrainStep.step, 0

    def signalled(*arguments):
        nonlocal steps
        steps += 1
        if steps == step:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return whole_step(*arguments)

    monkeypatch.setattr(TrainStep, "step", signalled)


@pytest.mark.parametrize(("name", "step"), [("SIGINT", 2), ("SIGTERM", 3), ("SIGHUP", 5)])
def test_a_signal_in_training_saves_after_the_step_and_the_run_ends_like_an_undisturbed_one(
    pets: Path, signals: None, name: str, step: int, capsys: pytest.CaptureFixture[str], monkeypatch
):
    number = getattr(signal, name)
    with monkeypatch.context() as patch:
        send_at(patch, number, step)
        assert main(["train", "pets", *SMALL]) == 128 + number
    said = capsys.readouterr().err
    assert "saving a checkpoint after this step" in said
    assert "Interrupted. The last checkpoint is in out. To resume:" in said
    state = read_tensors(Path("out/training.safetensors"))[1]
    assert (len(state["epochs"]), state["batches"]) == divmod(step, 3), "an epoch has three batches"
    assert main(["train", "pets", *SMALL]) == 0
    assert "continuing after epoch" in capsys.readouterr().err
    assert main(["train", "pets", *SMALL[:-1], "whole"]) == 0
    assert Path("out/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_a_second_signal_does_not_wait_for_the_step(pets: Path, signals: None, capsys, monkeypatch):
    send_at(monkeypatch, signal.SIGTERM, step=1, times=2)
    assert main(["train", "pets", *SMALL]) == 128 + signal.SIGTERM
    assert "Interrupted before the first checkpoint. To begin again:" in capsys.readouterr().err
    assert not Path("out/model.safetensors").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_outside_training_interrupts_at_once(signals: None, name: str, capsys: pytest.CaptureFixture[str]):
    number = getattr(signal, name)

    def run() -> int:
        work_begins()
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was lost")

    assert run_guarded("theory", ["theory", "--n", "16"], run) == 128 + number
    assert capsys.readouterr().err.endswith("theory --n 16\n")


def test_a_signal_in_a_destructor_is_not_lost(signals: None, capsys: pytest.CaptureFixture[str]):
    class Signalled:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def run() -> int:
        work_begins()
        Signalled()
        never = threading.Event()
        while True:
            never.wait(1)

    assert run_guarded("theory", ["theory"], run) == 128 + signal.SIGTERM
    assert "Exception ignored" not in capsys.readouterr().err


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signal_handlers(["train"]):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "as nohup leaves it"
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_after_the_work_does_not_change_the_exit_code():
    code = "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    done = run_process(code, "completion", "bash")
    assert done.returncode == 0
    assert "reproduce" in done.stdout


def test_a_request_to_stop_waits_for_training_only():
    assert not interruption.request_stop(), "nothing trains"
    with interruption.stoppable():
        assert not interruption.stop_requested()
        assert interruption.request_stop()
        assert interruption.stop_requested()
        assert not interruption.request_stop(), "the second time the handler raises"
    assert not interruption.stop_requested()


def test_an_interrupted_command_says_how_to_run_it_again(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> int:
        raise RuntimeError("lost in a library") from KeyboardInterrupt()

    assert run_guarded("explain", ["explain", "a run"], interrupted) == 130
    assert capsys.readouterr().err.endswith("explain 'a run'\n")


def raising(error: BaseException):
    def run() -> int:
        raise error

    return run


NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "2048000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("name", "error", "line"),
    [
        (
            "train",
            RuntimeError(NO_MEMORY),
            "can't allocate memory: you tried to allocate 2048000000000000 bytes; use a",
        ),
        ("train", torch.OutOfMemoryError("tried"), "the memory is too small: tried; use a smaller --batch-size"),
        ("explain", MemoryError(), "the memory is too small: MemoryError; use fewer --samples"),
        ("reproduce", OSError(errno.ENOSPC, "No space", "out/a.json"), "out/a.json could not be used (No space). Free"),
        ("compare", OSError(errno.EROFS, "Read-only", "out/a.json"), "Make the folder out writable and run the same"),
        (
            "predict",
            OSError(errno.EROFS, "Read-only", "out/.a.csv.123.unfinished"),
            "predict: out/a.csv could not be used",
        ),
        ("export", OSError(errno.ENOENT, "No such file", "gone/a.json"), "The folder gone is gone: it was removed or"),
    ],
)
def test_a_fault_is_one_line_that_says_what_to_do(
    name: str, error: BaseException, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MOESAIC_DEBUG", raising=False)
    assert run_guarded(name, [name], raising(error)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"moesaic {name}: ")
    assert said.count("\n") == 1
    assert line in said


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), OSError("no number")])
def test_an_error_of_moesaic_keeps_its_traceback(error: Exception):
    with pytest.raises(type(error), match=str(error)):
        run_guarded("train", ["train"], raising(error))


def test_memory_that_is_exhausted_in_training_is_one_line(pets: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer.Trainer, "_run_steps", lambda self: torch.empty(1 << 55))
    assert main(["train", "pets", *SMALL]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("moesaic train: the memory is too small: ")
    assert "--grad-accum 2" in last


def test_a_folder_that_is_gone_is_not_called_a_full_disk(pets: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    test = trainer.Trainer._test

    def remove(self: trainer.Trainer):
        Path("out").rename("elsewhere")
        return test(self)

    monkeypatch.setattr(trainer.Trainer, "_test", remove)
    assert main(["train", "pets", *SMALL]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "The folder out is gone: it was removed or renamed; put it back and run the same again" in last
    assert "Free space" not in last


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free space on that disk"),
        (errno.EDQUOT, "Free space on that disk"),
        (errno.EFBIG, "Raise the limit on the size of files (ulimit -f)"),
        (errno.EACCES, "Make the folder {folder} writable"),
        (errno.EROFS, "Make the folder {folder} writable"),
        (errno.EIO, "Check that disk"),
    ],
)
def test_each_fault_of_a_disk_has_its_own_way_out(tmp_path: Path, number: int, advice: str):
    assert write_error_advice(OSError(number, "text"), tmp_path / "file") == advice.format(folder=tmp_path)


@pytest.mark.parametrize(
    ("given", "environment"),
    [
        ("theory", {"PYTHONIOENCODING": "ascii"}),
        ("--help", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
    ids=["ascii", "C"],
)
def test_a_console_without_utf_8_shows_what_it_can(given: str, environment: dict[str, str]):
    done = run_process("", given, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "?" in done.stdout


def test_names_in_files_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    assert escaped("a\x1b[2J\x9b1m\u202eb\r\udc80 ≥\xa0é\n\tc") == r"a\x1b[2J\x9b1m\u202eb\r\udc80" + " ≥\xa0é\n\tc"
    faults.log("unexpected tensor '\x1b]0;title\x07'")
    assert capsys.readouterr().err == "unexpected tensor '\\x1b]0;title\\x07'\n"


def test_another_number_of_threads_is_told_when_a_run_continues(pets: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    run_steps = trainer.Trainer._run_steps

    def interrupt(self: trainer.Trainer) -> None:
        if self.epochs:
            raise KeyboardInterrupt
        run_steps(self)

    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_run_steps", interrupt)
        assert main(["train", "pets", *SMALL]) == 130
    assert json.loads(Path("out/config.json").read_text())["threads"] == threads
    monkeypatch.setattr("torch.get_num_threads", lambda: threads + 1)
    capsys.readouterr()
    assert main(["train", "pets", *SMALL]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"began with {threads} CPU threads and continues with {threads + 1}" in said


def test_other_numbers_of_threads_are_told_where_cells_are_kept(tmp_path: Path, capsys, monkeypatch):
    def begin(threads: int) -> str:
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        write_config(tmp_path / "out", way, ["reproduce"], "cpu")
        return capsys.readouterr().err

    from moesaic.cli.reproduce import Reproduce

    way = Reproduce()
    assert begin(2) == ""
    assert begin(2) == ""
    assert "were computed with 2 CPU threads, and the rest will be with 1" in begin(1)
    assert "were computed with 1 CPU threads" in begin(2), "some results are of one thread now"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["threads"] == [2, 1]


def test_a_file_in_a_folder_that_is_read_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_writable("--csv", tmp_path / "a.csv")
    monkeypatch.setattr("os.access", lambda *_: False)  # a folder that even root cannot write to is hard to come by
    with pytest.raises(ValueError, match="cannot be written to; name a file in another one"):
        check_writable("--csv", tmp_path / "a.csv")


def test_a_folder_that_cannot_be_made_is_refused_before_images_are_read(pets: Path, capsys: pytest.CaptureFixture[str]):
    Path("file").write_text("in the way")
    for given in (["train", "pets", *SMALL[:-1], "file/out"], ["compare", "pets", "--out", "file/out"]):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, "nothing was read before"
        assert "--out='file/out' cannot be made a directory: file is a file; name another one" in said
    make_folder(Path("new/folder"))
    assert Path("new/folder").is_dir()

"""Of several ranks the first speaks, and no error is lost."""

import signal
import sys

import pytest

from moesaic.cli import rank_output
from moesaic.cli.commands import run_command
from moesaic.cli.faults import CommandError, run_guarded, signal_handlers, work_begins
from moesaic.training.interruption import stop_requested, stoppable


@pytest.fixture
def rank(monkeypatch):
    """Makes this process a rank of two, for which torchrun has no patience."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(rank_output, "_GRACE", 0.0)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "29500")
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield lambda number: monkeypatch.setenv("RANK", str(number))
    for number, handler in handlers.items():
        signal.signal(number, handler)


def speak() -> int:
    sys.stdout.write("result\n")
    sys.stderr.write("note\n")
    return 0


def fail() -> int:
    raise CommandError("moesaic train: the images are gone")


@pytest.mark.parametrize(("number", "expected"), [(0, ("result\n", "note\n")), (1, ("", ""))])
def test_the_first_rank_speaks(number, expected, rank, capfd):
    rank(number)
    with rank_output.silence_other_ranks():
        assert run_guarded("train", ["train"], speak) == 0
    assert capfd.readouterr() == expected


@pytest.mark.parametrize(("number", "expected"), [(0, ""), (1, "rank 1: ")])
def test_an_error_of_any_rank_is_reported_in_one_line(number, expected, rank, capfd, monkeypatch):
    rank(number)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    with rank_output.silence_other_ranks():
        assert run_guarded("train", ["train"], fail) == 2
    assert capfd.readouterr().err == f"{expected}moesaic train: the images are gone\n"


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:1", "Read error: Connection reset by peer"])
def test_a_lost_rank_is_one_line(text, rank, capfd):
    rank(0)

    def lose() -> int:
        raise RuntimeError(f"[gloo/transport/tcp/pair.cc:537] {text}")

    assert run_guarded("train", ["train"], lose) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("moesaic train: another rank has ended")
    assert "resumes from the last checkpoint" in line


def test_a_rank_ends_where_it_has_written_its_files(rank, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(rank_output.os, "_exit", ended.append)
    rank(1)
    rank_output.end_rank(143)
    monkeypatch.delenv("WORLD_SIZE")
    rank_output.end_rank(0)  # on its own, Python ends as always
    assert ended == [143]


def test_other_commands_are_not_for_several_ranks(rank, capfd):
    rank(0)
    with pytest.raises(SystemExit, match="2"):
        run_command(["claims"])
    assert "moesaic claims: every rank would do the same" in capfd.readouterr().err


def test_a_signal_that_torchrun_passes_on_twice_is_one(rank):
    rank(0)
    with signal_handlers(["train"]), stoppable():
        work_begins()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # in one process this would end the command at once
        assert stop_requested()

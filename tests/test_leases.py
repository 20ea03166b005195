"""Leases: one process at a time, dead ones are taken over once, and no clocks of machines are compared."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moesaic.leases import STALE_SECONDS, Holder, Leases, is_running, make_once


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def dead_process() -> int:
    """The pid of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def left_by(folder: Path, generation: int = 0, **changed: object) -> Path:
    """The lease of another process."""
    path = folder / f"a.{generation}.lease"
    path.write_bytes(replace(Holder.of_this_process(), **changed).to_bytes())
    return path


ELSEWHERE = {"machine": "another one", "host": "far", "pid": 7}


def test_one_process_has_a_lease_at_a_time(tmp_path: Path):
    first = Leases(tmp_path).acquire("a")
    assert first is not None
    assert Leases(tmp_path).acquire("a") is None
    other = Leases(tmp_path).acquire("b")
    assert other is not None
    other.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    with Leases(tmp_path).hold("a") as again:
        assert not again.lost


def test_a_lease_says_whose_it_is(tmp_path: Path):
    leases = Leases(tmp_path)
    assert leases.holder("a") is None
    with leases.hold("a"):
        content = json.loads((tmp_path / "a.0.lease").read_bytes())
        assert content["pid"] == os.getpid()
        assert content.keys() == asdict(Holder.of_this_process()).keys()
        assert leases.holder("a") == Holder(**content)
        assert leases.has_live()
    assert not leases.has_live()


def test_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path: Path):
    left_by(tmp_path, pid=dead_process())
    assert not Leases(tmp_path).has_live()
    with Leases(tmp_path).hold("a"):
        assert Leases(tmp_path).acquire("a") is None
    assert list(tmp_path.iterdir()) == [], "what the dead one left is gone too"


def test_a_pid_that_was_given_again_is_another_process():
    assert is_running(Holder.of_this_process())
    if Holder.of_this_process().process:
        assert is_running(replace(Holder.of_this_process(), process="long ago")) is False
    assert is_running(replace(Holder.of_this_process(), **ELSEWHERE)) is None
    assert is_running(replace(Holder.of_this_process(), pid=1 << 80)) is False


def test_a_process_that_ended_and_was_not_waited_for_is_dead():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    held = replace(Holder.of_this_process(), pid=child.pid, process="")
    assert is_running(held) is not Path("/proc/self/stat").exists()
    child.wait()
    assert is_running(held) is False


@pytest.mark.parametrize("started", [0.0, 4e9])
def test_silence_counts_by_the_clock_of_who_observes(tmp_path: Path, started: float):
    clock = Clock()
    leases = Leases(tmp_path, clock=clock)
    path = left_by(tmp_path, **ELSEWHERE, started=started)  # by a clock that is wrong
    os.utime(path, (started, started))
    assert leases.acquire("a") is None
    clock.now = STALE_SECONDS - 1
    assert leases.acquire("a") is None
    left_by(tmp_path, **ELSEWHERE, started=started, beats=1)
    clock.now = STALE_SECONDS + 1
    assert leases.acquire("a") is None, "there was a heartbeat"
    clock.now = 2 * STALE_SECONDS
    assert leases.acquire("a") is None
    clock.now = 2 * STALE_SECONDS + 1
    with leases.hold("a"):
        assert (tmp_path / "a.1.lease").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 5000, b'{"pid": 3}'])
def test_a_damaged_lease_is_one_without_a_heartbeat(tmp_path: Path, content: bytes):
    clock = Clock()
    leases = Leases(tmp_path, clock=clock)
    (tmp_path / "a.0.lease").write_bytes(content)
    assert leases.acquire("a") is None
    assert leases.holder("a") is None
    assert leases.holders()["a"][0] is None
    clock.now = STALE_SECONDS
    leases.hold("a").release()


def test_of_two_that_notice_a_dead_process_one_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left_by(tmp_path, pid=dead_process())
    first, second = Leases(tmp_path), Leases(tmp_path)
    acquired = []
    judge = second._is_abandoned

    def slow(path: Path) -> bool:
        found = judge(path)
        acquired.append(first.acquire("a"))  # between the look and the taking
        return found

    monkeypatch.setattr(second, "_is_abandoned", slow)
    assert second.acquire("a") is None
    assert acquired[0] is not None
    assert not acquired[0].lost
    acquired[0].release()


def test_who_is_so_slow_that_a_later_generation_exists_does_not_have_it(tmp_path: Path):
    leases = Leases(tmp_path)
    listed = [[], None]

    def generations(key: str) -> list[int]:
        if listed:
            first = listed.pop(0)
            if first is not None:
                left_by(tmp_path, generation=1)
                return first
        return Leases(tmp_path)._generations(key)

    leases._generations = generations
    assert leases.acquire("a") is None
    assert [path.name for path in tmp_path.iterdir()] == ["a.1.lease"]


def test_who_was_taken_over_notices_at_the_next_heartbeat(tmp_path: Path):
    lease = Leases(tmp_path).hold("a")
    lease.beat()
    assert not lease.lost
    content = json.loads((tmp_path / "a.0.lease").read_bytes())
    assert content["beats"] == 1
    left_by(tmp_path, generation=1)
    lease.beat()
    assert lease.lost
    lease.release()
    assert [path.name for path in tmp_path.iterdir()] == ["a.1.lease"], "the lease of the other one stays"
    gone = Leases(tmp_path).hold("b")
    (tmp_path / "b.0.lease").unlink()
    gone.beat()
    assert gone.lost
    gone.release()


def test_a_process_that_was_taken_for_dead_does_not_release_the_lease_of_another_one(tmp_path: Path):
    suspended = Leases(tmp_path).acquire("a")
    clock = Clock()
    observer = Leases(tmp_path, clock=clock)
    assert suspended is not None
    assert observer.acquire("a") is None
    clock.now = STALE_SECONDS
    observer.hold("a").release()
    with Leases(tmp_path).hold("a") as third:  # in a file of the same name
        suspended.release()
        assert Leases(tmp_path).acquire("a") is None
        third.beat()
        assert not third.lost


def test_heartbeats_come_from_a_thread_while_the_lease_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesaic.leases.BEAT_SECONDS", 0.0)
    with Leases(tmp_path).hold("a") as lease:
        while json.loads((tmp_path / "a.0.lease").read_bytes() or b'{"beats": 0}')["beats"] < 3:
            assert not lease.lost
    assert list(tmp_path.iterdir()) == []


def test_what_is_made_is_made_once_and_the_others_wait(tmp_path: Path):
    made = tmp_path / "made.txt"
    other = Leases(tmp_path).hold("a")
    told: list[str] = []

    def wait(seconds: float) -> None:
        made.write_text("by the other")
        other.release()

    found = make_once(
        Leases(tmp_path, wait=wait),
        "a",
        lambda: made.read_text() if made.exists() else None,
        lambda: pytest.fail("it is there"),
        told.append,
    )
    assert found == "by the other"
    assert told == [f"{Holder.of_this_process().host}, process {os.getpid()}"]


def test_what_was_finished_between_two_looks_is_not_made_again(tmp_path: Path):
    looks = iter([None, "finished"])
    assert make_once(Leases(tmp_path), "a", lambda: next(looks), lambda: "made") == "finished"
    assert list(tmp_path.iterdir()) == []


def test_leases_of_finished_work_are_removed(tmp_path: Path):
    left_by(tmp_path, pid=dead_process())
    left_by(tmp_path, generation=1, **ELSEWHERE)
    (tmp_path / "b.0.lease").write_bytes(b"")
    Leases(tmp_path).remove(["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["b.0.lease"]

"""What torchrun says in the environment."""

import os
import subprocess
import sys

import pytest

from moesaic import torchrun_env
from moesaic.cli.invocation import invocation

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def job(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_a_process_on_its_own_is_rank_0_of_1(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert not torchrun_env.in_job()
    assert (torchrun_env.rank(), torchrun_env.ranks(), torchrun_env.local_rank(), torchrun_env.local_ranks()) == (
        0,
        1,
        0,
        1,
    )


def test_a_rank_of_a_job_knows_its_place(job):
    assert torchrun_env.in_job()
    assert (torchrun_env.rank(), torchrun_env.ranks(), torchrun_env.local_rank(), torchrun_env.local_ranks()) == (
        5,
        8,
        1,
        4,
    )


@pytest.mark.parametrize(
    "changes",
    [{"WORLD_SIZE": "1"}, {"WORLD_SIZE": "many"}, {"MASTER_ADDR": None}],
    ids=["alone", "words", "no address"],
)
def test_an_environment_that_starts_no_job_is_none(changes, job, monkeypatch):
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    assert not torchrun_env.in_job()
    assert torchrun_env.rank() == 0


def test_the_command_to_resume_is_that_of_the_job(job, monkeypatch):
    assert invocation() == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "-m", "moesaic"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert invocation() == ["torchrun", "--nproc-per-node", "4", "-m", "moesaic"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.parametrize("started_by_torchrun", [True, False])
def test_a_rank_gets_its_signal_when_torchrun_is_killed(started_by_torchrun):
    rank = (
        "import signal, sys, time; from moesaic import torchrun_env;"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit()));"
        "torchrun_env.signal_when_agent_dies(signal.SIGKILL);"
        "torchrun_env.signal_when_agent_dies(signal.SIGTERM);"
        "print('trains', flush=True);"
        "sys.stdin.readline(); print('ends', flush=True)"
    )
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)"
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    if started_by_torchrun:
        job["TORCHELASTIC_RUN_ID"] = "run"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"} | job
    with subprocess.Popen(
        [sys.executable, "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "trains\n"
        process.kill()
        if not started_by_torchrun:
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.read() == ("saved\n" if started_by_torchrun else "ends\n")

"""SIGKILLs of ranks and of whole jobs, while two processes train one network under torchrun.

    python benchmarks/rank_kills.py [--kills 15] [--seed 0] [--out FILE.json]

A job is killed at random moments: one rank, which torchrun must notice and end the other; torchrun alone, which leaves
two ranks that must end by themselves; all processes at once; or one rank of a job that may restart (`--max-restarts`),
which must then end by itself. A killed job is started again with the same command, up to three times; in the end its
network and its metrics must be those of a job that nobody killed, to the bit. After each kill no process may be left.
Checkpoints are written after the first epoch and then every 30 seconds.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kill_campaign import SMALL, make_images, read
from measure import machine, show, write

KINDS = ("rank 0", "rank 1", "torchrun", "job", "restart")
PATIENCE = 90.0
"""Seconds in which ranks without torchrun must have ended."""
TRAIN = ["train", "pets", "--model", "wrn10_1_pmoe", "--epochs", "40", *SMALL, "--out", "out"]


def start(folder: Path, restarts: int = 0) -> subprocess.Popen[bytes]:
    """Starts a job in a process group of its own."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run += ["--max-restarts", str(restarts), "-m", "moesaic", *TRAIN]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(run, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def ranks_of(job: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks, in their order; fewer while they are being started."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    found = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    return [pid for pid in found if b"moesaic" in _command(pid)]


def processes_in(folder: Path) -> list[int]:
    """All processes that work in a folder: torchrun gives each rank a process group of its own."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _send_kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill(job: subprocess.Popen[bytes], kind: str, seconds: float) -> bool:
    """Kills part of a job after so many seconds of its ranks; whether it was still running."""
    ranks: list[int] = []
    while len(ranks) < 2 and job.poll() is None:
        ranks = ranks_of(job)
        time.sleep(0.01)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.005)
    if job.poll() is not None:
        return False
    if kind == "torchrun":
        job.kill()
        return True
    if kind == "job":
        return sum(_send_kill(pid) for pid in (job.pid, *ranks)) > 0
    return _send_kill(ranks[kind == "rank 1"])


def results(folder: Path) -> Any:
    out = folder / "out"
    lines = (out / "metrics.jsonl").read_text().count("\n")
    return read(out / "result.json"), (out / "model.safetensors").read_bytes(), lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rng, began = random.Random(given.seed), time.monotonic()
    kills, ended, faults = Counter[str](), Counter[str](), list[str]()
    slowest = dict.fromkeys(KINDS, 0.0)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary).resolve()
        make_images(base / "start" / "pets")
        shutil.copytree(base / "start", base / "whole")
        first = time.monotonic()
        assert start(base / "whole").wait() == 0, (base / "whole" / "log.txt").read_text()
        length, expected = time.monotonic() - first, results(base / "whole")
        while kills.total() < given.kills:
            kind, at = KINDS[ended.total() % len(KINDS)], base / "trial"
            shutil.copytree(base / "start", at)
            code = -1
            for attempt in range(4):
                job = start(at, restarts=3 if kind == "restart" else 0)
                killed = attempt < 3 and (attempt == 0 or rng.random() < 0.6)
                killed = killed and kill(job, kind, rng.uniform(0.1, 0.9) * length)
                kills[kind] += killed
                since = time.monotonic()
                code = job.wait()
                if killed and kind in ("torchrun", "job"):
                    while processes_in(at) and time.monotonic() - since < PATIENCE:
                        time.sleep(0.05)
                if killed and kind != "restart":
                    slowest[kind] = max(slowest[kind], round(time.monotonic() - since, 1))
                if left := processes_in(at):
                    faults.append(f"{kind}: {len(left)} processes are left")
                    for pid in left:
                        _send_kill(pid)
                if code == 0:
                    break
                if kind == "restart":
                    faults.append(f"restart: the job ended with {code}")
            same = code == 0 and results(at) == expected
            ended[f"{kind} {'identical' if same else 'other'}"] += 1
            if not same:
                faults.append(f"{kind}: ended with {code}: {(at / 'log.txt').read_text()[-300:]}")
            shutil.rmtree(at)
    rows = [
        {"killed": kind, "kills": kills[kind], **{end: ended[f"{kind} {end}"] for end in ("identical", "other")}}
        for kind in KINDS
    ]
    show(f"{kills.total()} kills: jobs that ended with the same results as without", rows)
    for each in faults:
        print(f"fault: {each}")
    content = {
        "machine": machine(),
        "seed": given.seed,
        "seconds": round(time.monotonic() - began, 1),
        "kills": kills.total(),
        "kinds": rows,
        "faults": faults,
        "seconds from a kill to the end of all processes, at most": {k: slowest[k] for k in KINDS if k != "restart"},
    }
    print(f"\n{write('rank-kills', content, given.out)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

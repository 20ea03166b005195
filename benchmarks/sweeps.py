"""Sweeps on many workers: every cell once, whoever is killed, and the results of one undisturbed process.

    python benchmarks/sweeps.py [--kills 25] [--seed 0] [--out FILE.json]

A small comparison of 45 cells is run by one process, and then by four that are started as on four machines with a
shared folder; one of the four is killed in the middle of a cell. Then it is run in two parts in two folders, one of
them packed, merged, and reported.

Then `compare` and `reproduce` run with ``--jobs 2`` again and again, and at a random moment either one worker or the
parent with all its workers gets SIGKILL. A job that lost a worker must end by itself; one that was killed as a whole is
started again, and may be killed again. Results must be those of one undisturbed process but for times.

Each process appends a line to a file when it begins a cell and when it has stored it (``executed_cells``): a cell that
was stored must never begin again, and whatever was finished at a kill must stay as it was.
"""

import argparse
import json
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

from kill_campaign import make_images, timeless
from measure import machine, show, write

HOOK = Path(__file__).parent / "executed_cells"
SMALL = ["--img-size", "16", "--batch-size", "8", "--device", "cpu", "--cache-dir", "cache", "--epochs", "3"]
MODELS = "wrn10_1,wrn10_1_pmoe,wrn10_1_pmoe:experts=2"
SWEEP = ["compare", "pets", "--models", MODELS, "--trials", "5", *SMALL]
SAMPLES = ("8", "12", "16")
CELLS = 45
KILLED = {
    "compare": ["compare", "pets", "--models", "wrn10_1,wrn10_1_pmoe", "--samples", "8,16", "--trials", "2", *SMALL],
    "reproduce": ["reproduce", "--preset", "quick", "--claim", "fig8", "--device", "cpu"],
}
RESULTS = {"compare": ("result.json",), "reproduce": ("claims.json", "charts.json")}


def start(given: list[str], at: Path, log: str = "executed.txt") -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "EXECUTED_CELLS": str(at / log)}
    with open(at / "log.txt", "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "moesaic", *given], cwd=at, stdout=output, stderr=output, env=environment
        )


def finish(given: list[str], at: Path, log: str = "executed.txt") -> None:
    process = start(given, at, log)
    assert process.wait() == 0, (at / "log.txt").read_text()[-2000:]


def executed(at: Path, log: str = "executed.txt") -> list[tuple[str, str, int]]:
    """What happened to cells, in order: begin or end, digest, process."""
    if not (at / log).exists():
        return []
    lines = [line.split() for line in (at / log).read_text().splitlines()]
    return [(what, digest, int(pid)) for what, digest, pid in lines]


def done_twice(events: list[tuple[str, str, int]]) -> list[str]:
    """Cells that began after they were stored, or were stored twice."""
    stored: set[str] = set()
    found: list[str] = []
    for what, digest, _ in events:
        found += [digest] * (digest in stored)
        if what == "end":
            stored.add(digest)
    return found


def results(command: str, out: Path) -> Any:
    return [timeless(json.loads((out / name).read_text("utf-8"))) for name in RESULTS[command]]


def cells(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "cells").glob("*.json")}


def in_a_cell(events: list[tuple[str, str, int]], pid: int) -> bool:
    own = [what for what, _, each in events if each == pid]
    return own.count("begin") > max(1, own.count("end"))


def four_workers(at: Path, expected: Any) -> dict[str, Any]:
    """Four processes on one folder, of which the first one that is at its second cell is killed there."""
    given = [*SWEEP, "--samples", ",".join(SAMPLES), "--out", "four"]
    workers = [start(given, at, "four.txt") for _ in range(4)]
    killed = None
    while killed is None and any(worker.poll() is None for worker in workers):
        events = executed(at, "four.txt")
        killed = next((worker for worker in workers if in_a_cell(events, worker.pid)), None)
        time.sleep(0.005)
    if killed is not None:
        killed.send_signal(signal.SIGKILL)
    codes = [worker.wait() for worker in workers]
    events = executed(at, "four.txt")
    by_worker = Counter(pid for what, _, pid in events if what == "end")
    return {
        "workers": 4,
        "killed": codes.count(-signal.SIGKILL),
        "ended well": codes.count(0),
        "cells": len(cells(at / "four")),
        "begun": sum(what == "begin" for what, _, _ in events),
        "stored": sum(what == "end" for what, _, _ in events),
        "stored by each": sorted(by_worker.values(), reverse=True),
        "done twice": len(done_twice(events)),
        "leases left": len(list((at / "four" / "cells").glob("*.lease"))),
        "same results": results("compare", at / "four") == expected,
    }


def merged_folders(at: Path, expected: Any) -> dict[str, Any]:
    """Two parts of the sweep in two folders, one of them packed; merged, and reported."""
    finish([*SWEEP, "--samples", SAMPLES[0], "--out", "a"], at)
    finish([*SWEEP, "--samples", ",".join(SAMPLES[1:]), "--out", "b"], at)
    for name in ("b.zip", "again.zip"):
        finish(["cells", "pack", "b", "--out", name], at)
    finish(["cells", "merge", "a", "b.zip", "--out", "merged"], at)
    finish([*SWEEP, "--samples", ",".join(SAMPLES), "--out", "merged"], at, "merged.txt")
    return {
        "packed twice alike": (at / "b.zip").read_bytes() == (at / "again.zip").read_bytes(),
        "cells": len(cells(at / "merged")),
        "run after merging": len(executed(at, "merged.txt")),
        "same results": results("compare", at / "merged") == expected,
    }


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(pids: list[int]) -> int:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(pids)


def one_trial(name: str, at: Path, rng: random.Random, seconds: float) -> tuple[Counter[str], list[str]]:
    """Runs a job that is killed, whole or in part, until one ends; counts the kills, and lists faults."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    given = [*KILLED[name], "--jobs", "2", "--out", "out"]
    before: dict[str, bytes] = {}
    for round_number in range(4):
        process = start(given, at)
        whole = rng.random() < 0.5
        moment = time.monotonic() + rng.uniform(0.2, 1.0) * seconds
        last = round_number == 3
        while process.poll() is None and (last or time.monotonic() < moment):
            time.sleep(0.01)
        workers = children(process.pid)
        if process.poll() is None and (whole or not workers):
            counts["whole jobs"] += kill([process.pid, *workers])
        elif process.poll() is None:
            counts["single workers"] += kill([rng.choice(workers)])
        code = process.wait()
        for pid in workers:
            while Path(f"/proc/{pid}").exists():  # orphans are reaped by init
                time.sleep(0.005)
        now = cells(at / "out")
        faults += [f"{name}: {each} was lost or changed" for each, was in before.items() if now.get(each) != was]
        before = now
        if code == 0:
            break
        if code != -signal.SIGKILL:
            faults.append(f"{name}: ended with {code}: {(at / 'log.txt').read_text()[-300:]}")
    faults += [f"{name}: {digest} was done twice" for digest in done_twice(executed(at))]
    return counts, faults


def campaign(kills: int, seed: int, base: Path) -> tuple[list[dict[str, Any]], list[str]]:
    rng = random.Random(seed)
    expected, seconds = {}, {}
    for name in KILLED:
        at = base / f"undisturbed-{name}"
        at.mkdir()
        make_images(at / "pets")
        finish([*KILLED[name], "--out", "out"], at)
        expected[name] = results(name, at / "out")
        at = base / f"jobs-{name}"
        at.mkdir()
        make_images(at / "pets")
        begun = time.monotonic()
        finish([*KILLED[name], "--jobs", "2", "--out", "out"], at)
        seconds[name] = time.monotonic() - begun
        assert results(name, at / "out") == expected[name], f"{name} --jobs 2 has other results"
    counts = {name: Counter[str]() for name in KILLED}
    faults: list[str] = []
    while sum(each["whole jobs"] + each["single workers"] for each in counts.values()) < kills:
        name = min(KILLED, key=lambda each: counts[each]["whole jobs"] + counts[each]["single workers"])
        at = base / "trial"
        at.mkdir()
        make_images(at / "pets")
        begun = time.monotonic()
        more, found = one_trial(name, at, rng, seconds[name])
        if not more:  # the machine is faster than it was: kills would come too late for ever
            seconds[name] = min(seconds[name], time.monotonic() - begun)
        counts[name] += more
        faults += found
        same = (at / "out" / RESULTS[name][0]).exists() and results(name, at / "out") == expected[name]
        counts[name]["identical" if same else "other"] += 1
        if not same:
            faults.append(f"{name}: other results: {(at / 'log.txt').read_text()[-300:]}")
        shutil.rmtree(at)
        print(f"{name}: {dict(more)}, {'identical' if same else 'other'} results", flush=True)
    columns = ("single workers", "whole jobs", "identical", "other")
    return [{"command": name, **{each: counts[name][each] for each in columns}} for name in KILLED], faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        make_images(at / "pets")
        finish([*SWEEP, "--samples", ",".join(SAMPLES), "--out", "one"], at)
        expected = results("compare", at / "one")
        assert len(cells(at / "one")) == CELLS
        four, merged = four_workers(at, expected), merged_folders(at, expected)
        show(f"{CELLS} cells, four workers, one of them killed", [four])
        show("two folders merged", [merged])
        rows, faults = campaign(given.kills, given.seed, at)
    show("kills of jobs with two workers", rows)
    for each in faults:
        print(f"fault: {each}")
    content = {
        "machine": machine(),
        "seed": given.seed,
        "seconds": round(time.monotonic() - begun, 1),
        "four workers": four,
        "merged": merged,
        "kills": rows,
        "faults": faults,
    }
    print(f"\n{write('sweeps', content, given.out)}")
    good = (
        four["same results"] and not four["done twice"] and merged["same results"] and not merged["run after merging"]
    )
    return 0 if good and not faults else 1


if __name__ == "__main__":
    sys.exit(main())

"""SIGKILL at random moments: is anything lost, done twice, or different from an undisturbed run?

    python benchmarks/kills.py [--kills 100] [--commands train compare reproduce explain export] [--seed 0]

Each command runs once undisturbed. Then it is started again and again in a new folder and killed at a random moment,
drawn evenly over the time that the undisturbed run took; every so often it is left to finish, which ends a round, and
the next round begins in a new folder. A round passes if

* its results are those of the undisturbed run, byte for byte but for times;
* a finished cell (compare, reproduce) that was there at a kill is still the same file at the end: not lost, and not
  written a second time.

The images are noise with a bright square, made from the seed. The result is kills.json.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from measure import machine, show, write
from PIL import Image

KILLS_PER_ROUND = 4
"""Kills before a round is left to finish; those that come after the end of the command do not count."""
SMALL = ("--epochs", "4", "--batch-size", "8", "--img-size", "16", "--device", "cpu")
TIMES = re.compile(r"seconds|per_second|machine|^digest$")
"""Names of what differs between two undisturbed runs: times, and digests that cover them."""


@dataclass(frozen=True)
class Job:
    """A command, and how its results are found in the output folder."""

    arguments: Callable[[Path], list[str]]
    results: Callable[[Path], dict[str, str]]
    prepare: Callable[[Path], None] = lambda out: None


@dataclass
class Tally:
    """What happened to one command."""

    command: str
    seconds: float
    """Of the undisturbed run."""
    kills: int = 0
    rounds: int = 0
    cells_at_kills: int = 0
    lost: int = 0
    redone: int = 0
    different: int = 0
    refused: int = 0
    """Runs that did not continue: they ended with an error."""


def images(folder: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    for kind, channel in (("red", 0), ("blue", 2)):
        (folder / kind).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
            y, x = rng.integers(0, 12, 2)
            pixels[y : y + 4, x : x + 4, channel] += 120
            Image.fromarray(pixels).save(folder / kind / f"{number}.png")
    return folder


def jobs(data: Path, cache: Path, trained: Path) -> dict[str, Job]:
    folders = [str(data), "--cache-dir", str(cache)]

    def copy_of_trained(out: Path) -> None:
        if not out.exists():
            shutil.copytree(trained, out)

    return {
        "train": Job(
            lambda out: ["train", *folders, *SMALL, "--model", "wrn10_1_pmoe", "--out", str(out)],
            lambda out: digests(out, "model.safetensors", "result.json"),
        ),
        "compare": Job(
            lambda out: (
                ["compare", *folders, *SMALL, "--models", "wrn10_1,wrn10_1_pmoe"]
                + ["--samples", "8,16", "--trials", "2", "--out", str(out)]
            ),
            lambda out: digests(out, "result.json", "cells/*.json", "networks/*/model.safetensors"),
        ),
        "reproduce": Job(
            lambda out: ["reproduce", "--preset", "quick", "--claim", "fig8", "--device", "cpu", "--out", str(out)],
            lambda out: digests(out, "claims.json", "charts.json", "cells/*.json"),
        ),
        "explain": Job(
            lambda out: ["explain", str(out), "--data", *folders, "--device", "cpu"],
            lambda out: digests(out, "explanation/explanation.json", "explanation/*.png"),
            copy_of_trained,
        ),
        "export": Job(
            lambda out: ["export", str(out), "--format", "onnx", "--overwrite", "--out", str(out / "network.onnx")],
            lambda out: digests(out, "*.onnx"),
            copy_of_trained,
        ),
    }


def digests(out: Path, *patterns: str) -> dict[str, str]:
    """Digests of the result files; JSON without times and folders."""
    found: dict[str, str] = {}
    for path in sorted({path for pattern in patterns for path in out.glob(pattern)}):
        data = path.read_bytes()
        if path.suffix == ".json":
            data = json.dumps(without_times(json.loads(data)), sort_keys=True).encode()
        found[str(path.relative_to(out))] = hashlib.sha256(data.replace(str(out).encode(), b"OUT")).hexdigest()
    return found


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {name: without_times(each) for name, each in value.items() if not TIMES.search(name)}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def finished_cells(out: Path) -> dict[str, tuple[int, int]]:
    """The file of each finished cell: another inode or time of change means that it was written again."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("cells/*.json")}


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", "moesaic", *arguments]
        few = {**os.environ, "OMP_NUM_THREADS": "1"}  # networks this small gain nothing from more
        return subprocess.Popen(command, env=few, stdout=file, stderr=file, start_new_session=True)


def run_to_the_end(job: Job, out: Path, log: Path) -> tuple[float, int]:
    began = time.monotonic()
    code = start(job.arguments(out), log).wait()
    return time.monotonic() - began, code


def killed(job: Job, out: Path, log: Path, seconds: float) -> bool:
    """Runs the command and kills it after some seconds; False if it had ended by itself."""
    process = start(job.arguments(out), log)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def campaign(name: str, job: Job, kills: int, folder: Path, rng: random.Random) -> Tally:
    log, expected = folder / "log.txt", folder / "undisturbed"
    job.prepare(expected)
    seconds, code = run_to_the_end(job, expected, log)
    if code:
        raise SystemExit(f"moesaic {name} failed undisturbed:\n{log.read_text(errors='replace')}")
    wanted, tally = job.results(expected), Tally(name, seconds)
    assert wanted, f"{name} left no results"
    for out in rounds(folder):
        job.prepare(out)
        seen: dict[str, tuple[int, int]] = {}
        for _ in range(min(KILLS_PER_ROUND, kills - tally.kills)):
            if not killed(job, out, log, rng.uniform(0, seconds)):
                break  # a machine that was faster this time: the round is over
            tally.kills += 1
            now = finished_cells(out)
            tally.lost += len(seen.keys() - now.keys())
            tally.redone += sum(now[cell] != seen[cell] for cell in seen.keys() & now.keys())
            tally.cells_at_kills += len(now)
            seen |= now
        _, code = run_to_the_end(job, out, log)
        now = finished_cells(out)
        tally.lost += len(seen.keys() - now.keys())
        tally.redone += sum(now[cell] != seen[cell] for cell in seen.keys() & now.keys())
        tally.rounds += 1
        if code:
            tally.refused += 1
            print(f"{name}: exit code {code} after a kill:\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        elif job.results(out) != wanted:
            tally.different += 1
            changed = [file for file in wanted if job.results(out).get(file) != wanted[file]]
            print(f"{name}: different after kills: {', '.join(changed)}", file=sys.stderr)
        shutil.rmtree(out)
        if tally.kills >= kills:
            break
    return tally


def rounds(folder: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield folder / f"round-{number}"


def main(arguments: list[str] | None = None) -> list[Tally]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["train", "compare", "reproduce", "explain", "export"]
    parser.add_argument("--kills", type=int, default=100, help="in all, shared out among the commands")
    parser.add_argument("--commands", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file; default: benchmarks/results/kills.json")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    found: list[Tally] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = images(root / "images", options.seed)
        todo = jobs(data, root / "cache", root / "trained")
        if {"explain", "export"} & set(options.commands):
            run_to_the_end(todo["train"], root / "trained", root / "log.txt")
        for i, name in enumerate(options.commands):
            share = (options.kills * (i + 1)) // len(options.commands) - options.kills * i // len(options.commands)
            (root / name).mkdir()
            found.append(campaign(name, todo[name], share, root / name, rng))
    faults = sum(each.lost + each.redone + each.different + each.refused for each in found)
    show("SIGKILL at random moments", [asdict(each) for each in found])
    print(f"\n{sum(each.kills for each in found)} kills, {faults} faults")
    write("kills", {"machine": machine(), "seed": options.seed, "commands": found}, options.out)
    return found


if __name__ == "__main__":
    if any(each.lost + each.redone + each.different + each.refused for each in main()):
        sys.exit(1)

"""SIGKILLs at random moments of commands, for benchmarks/faults.py.

A command runs in a forked process, which is killed after a random share of the time that it takes, and is called
again, several times; the last call runs to its end. Then its files must be those of a run that nobody killed, but for
times, and whatever was finished when a kill came must still be there, unchanged.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from moesaic.cli import main as moesaic

SMALL = ["--img-size", "16", "--batch-size", "8", "--device", "cpu", "--cache-dir", "cache"]
TIMES = ("seconds", "images_per_second", "sha256", "machine", "macs_per_second")


@dataclass(frozen=True)
class Command:
    """A command, what it leaves, and what of it is finished for good once it is there."""

    arguments: list[str]
    results: Callable[[Path], Any]
    finished: str
    """Pattern of files that no later call may change."""


def timeless(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: timeless(each) for name, each in content.items() if name not in TIMES}
    return [timeless(each) for each in content] if isinstance(content, list) else content


def read(path: Path) -> Any:
    return timeless(json.loads(path.read_text("utf-8")))


COMMANDS = {
    "train": Command(
        ["train", "pets", "--model", "wrn10_1_pmoe", "--epochs", "4", *SMALL, "--out", "out"],
        lambda at: (read(at / "out" / "result.json"), (at / "out" / "model.safetensors").read_bytes()),
        "out/result.json",
    ),
    "compare": Command(
        ["compare", "pets", "--models", "wrn10_1,wrn10_1_pmoe", "--samples", "8,16", "--trials", "2", "--epochs", "2"]
        + [*SMALL, "--out", "out"],
        lambda at: read(at / "out" / "result.json")["runs"],
        "out/**/*.json",
    ),
    "reproduce": Command(
        ["reproduce", "--preset", "quick", "--claim", "fig8", "--device", "cpu", "--out", "out"],
        lambda at: (read(at / "out" / "claims.json"), read(at / "out" / "charts.json")),
        "out/cells/*.json",
    ),
    "explain": Command(
        ["explain", "trained", "pets", "--device", "cpu", "--out", "out"],
        lambda at: read(at / "out" / "explanation.json"),
        "nothing",
    ),
    "export": Command(
        ["export", "trained", "--format", "safetensors", "--out", "out.safetensors", "--overwrite"],
        lambda at: (at / "out.safetensors").read_bytes(),
        "nothing",
    ),
}


def make_images(folder: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    for kind, colour in (("cat", 0), ("dog", 2)):
        (folder / kind).mkdir(parents=True)
        for number in range(15):
            pixels = torch.randint(0, 120, (20, 20, 3), generator=rng, dtype=torch.uint8)
            pixels[4:12, 4:12, colour] += 120
            Image.fromarray(pixels.numpy()).save(folder / kind / f"{number}.png")


def run(arguments: list[str], folder: Path, seconds: float | None = None) -> tuple[int, float]:
    """Runs a command in a forked process; kills it after so many seconds. Returns its exit code, and the time."""
    sys.stdout.flush()
    start = time.monotonic()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)
            with open("log.txt", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            code = moesaic(arguments)
        finally:
            os._exit(code)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - start
        if seconds is not None and time.monotonic() - start >= seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL, seconds
        time.sleep(0.002)


def snapshot(folder: Path, pattern: str) -> dict[Path, bytes]:
    """Finished files: those of cells, and results."""
    names = [path for path in folder.glob(pattern) if "cells" in path.parts or path.name == "result.json"]
    return {path: path.read_bytes() for path in names if path.is_file()}


def kill_campaign(kills: int, seed: int, base: Path, names: list[str]) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Outcomes by command, and each fault."""
    torch.set_num_threads(1)  # a forked process has no threads but its own
    rng = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    start = base / "start"
    make_images(start / "pets")
    code, _ = run([*COMMANDS["train"].arguments[:-1], "trained"], start)
    assert code == 0, (start / "log.txt").read_text()
    expected, length = {}, {}
    for name in names:
        shutil.copytree(start, base / name)
        code, length[name] = run(COMMANDS[name].arguments, base / name)
        assert code == 0, (base / name / "log.txt").read_text()
        expected[name] = COMMANDS[name].results(base / name)
    done = 0
    while done < kills:
        name = names[counts.total() % len(names)]
        command, at = COMMANDS[name], base / "trial"
        shutil.copytree(start, at)
        before: dict[Path, bytes] = {}
        for _ in range(rng.randint(1, 4)):
            code, _ = run(command.arguments, at, rng.uniform(0, length[name]))
            done += code == -signal.SIGKILL
            lost = [path for path, content in before.items() if not path.exists() or path.read_bytes() != content]
            if lost:
                faults.append(f"{name}: {lost[0].name} was lost or done twice")
            before = snapshot(at, command.finished)
        code, _ = run(command.arguments, at)
        same = code == 0 and command.results(at) == expected[name]
        counts[name, "identical" if same else "other"] += 1
        if not same:
            log = (at / "log.txt").read_text().strip().splitlines()
            faults.append(f"{name}: ended with {code} and other results ({log[-1] if log else ''})")
        shutil.rmtree(at)
    counts["all", "kills"] = done
    return counts, faults

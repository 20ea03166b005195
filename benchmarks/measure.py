"""What every benchmark here shares: timing in turns, the machine's description, the table and the JSON."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median over repetitions, and the middle half around it."""

    median: float
    low: float
    high: float


def in_turns(candidates: dict[str, Callable[[], object]], repetitions: int, warm_up: int = 3) -> dict[str, Timing]:
    """Time all candidates alternately, so that whatever else the machine does falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-warm_up, repetitions):
        for name, candidate in candidates.items():
            synchronize()
            start = time.perf_counter()
            candidate()
            synchronize()
            if repetition >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: Timing(statistics.median(t), *quartiles(t)) for name, t in times.items()}


def quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table; plain, so that benchmarks need nothing but torch."""
    header = list(rows[0])
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *cells, strict=True)]
    print(f"\n{title}\n")
    for line in [header, ["─" * width for width in widths], *cells]:
        name, *numbers = line
        print(
            name.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)),
            sep="  ",
        )
    print()


def write(name: str, content: dict[str, Any], out: Path | None) -> Path:
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=asdict) + "\n")
    return path

"""Shared by all benchmarks: passes to time, interleaved timing, description of the machine, table and JSON output."""

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.bench.timing import Run, Timing, capture_cuda_graph, quartiles, synchronize, time_interleaved

__all__ = [
    "RESULTS",
    "Run",
    "Timing",
    "capture_cuda_graph",
    "forward_of",
    "machine",
    "quartiles",
    "show",
    "step_of",
    "synchronize",
    "time_interleaved",
    "write",
]

RESULTS = Path(__file__).parent / "results"


def forward_of(model: nn.Module, x: Tensor) -> Run:
    """A forward pass without gradients."""

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def step_of(model: nn.Module, x: Tensor) -> Run:
    """Forward and backward, with all gradients."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    grad = torch.ones_like(model(x))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        model(x).backward(grad)

    return run


def machine() -> dict[str, Any]:
    """Description of hardware and versions."""
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
    """Prints a plain table, so that benchmarks need only torch."""
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

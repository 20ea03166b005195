"""Description of the hardware and versions of a run, without names of users or hosts."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

__all__ = ["describe_machine"]


def describe_machine(device: str = "cpu") -> str:
    """Processor, cores, versions and the device, such as "AMD EPYC 9654, 2 cores, Python 3.11.7, torch 2.13.0, CPU".

    >>> describe_machine().endswith("CPU")
    True
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [
        _processor(),
        f"{cores} {'core' if cores == 1 else 'cores'}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    kind = torch.device(device)
    return ", ".join([*parts, torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type.upper()])


def _processor() -> str:
    """Name of the processor if the system reports it, otherwise its architecture."""
    try:
        if platform.system() == "Linux":
            lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
            return names[0] if names else platform.machine()
        if platform.system() == "Darwin":
            name = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
            )
            return name.stdout.strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine()

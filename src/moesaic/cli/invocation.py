"""How this program was called (``moesaic``, ``python -m moesaic``, ``torchrun …``), for commands in messages."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from moesaic import torchrun_env

__all__ = ["invocation"]


def invocation() -> list[str]:
    """Returns the words of the command line before the moesaic command, such as ``["torchrun", …, "moesaic"]``."""
    if torchrun_env.in_job():
        machines = torchrun_env.ranks() // torchrun_env.local_ranks()
        nodes = ["--nnodes", str(machines)] if machines > 1 else []
        return ["torchrun", *nodes, "--nproc-per-node", str(torchrun_env.local_ranks()), "-m", "moesaic"]
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return [sys.executable, "-m", "moesaic"]
    return [called.name if shutil.which(called.name) else sys.argv[0]]

"""The words by which this program was called, for the commands that messages suggest."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from moesaic import launcher

__all__ = ["program"]


def program() -> list[str]:
    """Returns the words by which this program was called."""
    if launcher.in_job():
        machines = launcher.ranks() // launcher.local_ranks()
        nodes = ["--nnodes", str(machines)] if machines > 1 else []
        return ["torchrun", *nodes, "--nproc-per-node", str(launcher.local_ranks()), "-m", "moesaic"]
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return [sys.executable, "-m", "moesaic"]
    return [called.name if shutil.which(called.name) else sys.argv[0]]

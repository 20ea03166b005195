"""A few of the bit flips and kills of benchmarks/faults.py: noticed or harmless, and without effect."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import loaded_script

SEED = int(os.environ.get("MOESAIC_TEST_SEED", "0"))


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    with loaded_script("faults") as module:
        yield module


def test_no_flipped_bit_is_used_silently(faults: ModuleType):
    counts, silent = faults.campaign(40, SEED)
    assert silent == []
    assert counts.total() == 40
    assert sum(count for (_, what), count in counts.items() if what == "noticed") > 10


def test_a_change_that_is_used_would_be_reported(faults: ModuleType, tmp_path):
    subject = faults.Subject(tmp_path, lambda folder: (folder / "a").read_bytes(), b"\x01")
    (tmp_path / "a").write_bytes(b"\x01")
    assert faults.outcome(subject, tmp_path) == "harmless"
    faults.flip(tmp_path / "a", 3)
    assert faults.outcome(subject, tmp_path) == "silent"


# The script, whose forks then have the modules that all commands import: kills hit the work of a command.
SCRIPT = """
import runpy, sys
import matplotlib.pyplot, moesaic.cli.compare, moesaic.cli.train, moesaic.report, moesaic.training.compare, rich.live
import torch._dynamo, torch.distributed.fsdp
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_commands_that_were_killed_end_like_undisturbed_ones(tmp_path):
    script, out = Path(__file__).parents[2] / "benchmarks" / "faults.py", tmp_path / "faults.json"
    given = ["--flips", "0", "--kills", "3", "--commands", "train,compare", "--seed", str(SEED), "--out", str(out)]
    # a process of its own: one that has computed in several threads cannot be forked
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(script), *given], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kills = json.loads(out.read_text())["kills"]
    assert kills["count"] >= 3
    assert kills["faults"] == []
    assert sum(each["identical"] for each in kills["runs"].values()) >= 1

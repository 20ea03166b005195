"""The bit flips of benchmarks/faults.py, a few of them: noticed or harmless."""

import os
from collections.abc import Iterator
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

"""tools/many_seeds.py finds a test that fails from one seed, and says from which."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools" / "many_seeds.py"
spec = importlib.util.spec_from_file_location("many_seeds", TOOL)
assert spec is not None
assert spec.loader is not None
many_seeds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(many_seeds)

CONFTEST = """
import os, random, pytest

SEED = int(os.environ["MOESAIC_TEST_SEED"])

def seed_generators():
    random.seed(SEED)

def pytest_fixture_setup(fixturedef):
    if fixturedef.scope != "function":
        seed_generators()

@pytest.fixture(autouse=True)
def same_start():
    seed_generators()
"""
TESTS = '''
"""
>>> name = log("doctest")
>>> name
'doctest'
"""
import random
from pathlib import Path
import pytest

def log(name):
    with Path(__file__).with_name("log.txt").open("a") as file:
        print(name, random.random(), file=file)
    return name

@pytest.fixture(scope="module")
def shared():
    log("shared")

@pytest.fixture
def own():
    yield []
    log("end")

def test_passes(shared, own):
    assert not own, "each seed has a list of its own"
    own.append(1)
    log("passes")

def test_fails_from_one_seed(shared):
    log("fails")
    assert random.randrange(10**6) != {unlucky}

def test_skipped():
    log("skipped")
    pytest.skip("for every seed")
'''


def run_tool(folder: Path, *given: str) -> tuple[str, dict[str, list[float]]]:
    """The output for five seeds from 11 on, and the random numbers that each part of the tests has logged."""
    second = random.Random(12)
    second.random()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_tiny.py").write_text(TESTS.replace("{unlucky}", str(second.randrange(10**6))))
    command = [sys.executable, str(TOOL), "--seeds", "5", "--first", "11", *given, "-n", "0", "--doctest-modules"]
    run = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 1 - ("0" in given[:2]), run.stdout + run.stderr
    logged: dict[str, list[float]] = {}
    for line in (folder / "log.txt").read_text().splitlines():
        name, number = line.split()
        logged.setdefault(name, []).append(float(number))
    return run.stdout, logged


def test_every_test_runs_from_every_seed_until_it_fails(tmp_path):
    output, logged = run_tool(tmp_path, "--slow", "1000")
    numbers = [random.Random(seed).random() for seed in range(11, 16)]
    assert logged["passes"] == logged["doctest"] == numbers
    assert len(logged["end"]) == 5
    assert logged["fails"] == numbers[:2], "of its seeds the second fails"
    assert logged["skipped"] == logged["shared"] == numbers[:1]
    assert "MOESAIC_TEST_SEED=12" in output
    assert "1 failed, 2 passed, 1 skipped" in output


def test_a_slow_test_runs_from_the_first_seed_alone(tmp_path):
    output, logged = run_tool(tmp_path, "--slow", "0")
    assert "3 passed, 1 skipped" in output
    assert {len(numbers) for numbers in logged.values()} == {1}


def test_another_seed_gives_a_test_other_numbers(request, monkeypatch):
    conftest = many_seeds.find_conftest(request.config)
    number = random.random()
    monkeypatch.setattr(conftest, "SEED", conftest.SEED + 1)
    conftest.seed_generators()
    assert random.random() != number

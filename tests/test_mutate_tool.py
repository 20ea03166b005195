"""tools/mutate.py: places, mutants, and what the plugin tools/coverage_by_test.py records."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
assert spec is not None
assert spec.loader is not None
mutate = importlib.util.module_from_spec(spec)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    sys.modules["mutate"] = mutate  # its dataclasses look themselves up
    spec.loader.exec_module(mutate)
    yield
    del sys.modules["mutate"]


def test_constants_that_are_left_alone_exist():
    for file, names in mutate.SPEED_ONLY.items():
        tree = ast.parse((ROOT / "src" / "moesaic" / file).read_text("utf-8"))
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        defined = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        assert set(names) <= defined, file


def test_only_the_skipped_assignments_stay():
    found = mutate.places_of("_CHUNK = 5\nLIMIT = 7\n__all__ = [3]\n", ["_CHUNK"])
    assert [old.value for place in found for old, _ in place] == [7, 7]


def test_a_mutant_knows_whether_it_runs_at_import():
    text = "LIMIT = 7\n\n\ndef f(x=3):\n    return x + LIMIT\n\n\nclass A:\n    size: int = 5\n"
    found = {}
    for place in mutate.places_of(text):
        made = mutate.mutate("a.py", text, *place[0])
        found[made.line] = made.at_import
    assert found == {1: True, 4: True, 5: False, 9: True}


def test_files_that_import_from_a_file_are_found():
    importers = mutate.find_importers(ROOT)
    assert (
        "src/moesaic/papers/chen2022/figures_language.py" in importers["src/moesaic/papers/chen2022/claims_language.py"]
    )


def test_tests_whose_processes_a_fork_server_starts_are_found(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "test_processes.py").write_text(
        "import multiprocessing\n\n\ndef test_alone():\n    pass\n\n\ndef test_process():\n"
        "    process = multiprocessing.get_context('forkserver').Process(target=len, args=('',))\n"
        "    process.start()\n    process.join()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "coverage_by_test", "-p", "no:cacheprovider"]
    environment = {**os.environ, "MOESAIC_LINES_TO": str(tmp_path), "PYTHONPATH": str(ROOT / "tools")}
    environment.pop("PYTEST_XDIST_WORKER", None)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    tests = json.loads((tmp_path / "main.json").read_text("utf-8"))["tests"]
    starts_process = {name.partition("::")[2]: test["subprocess"] for name, test in tests.items()}
    assert starts_process == {"test_alone": False, "test_process": True}

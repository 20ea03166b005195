"""What every test shares, doctests in src included: seeds, the order of tests, and global state put back afterwards."""

import gc
import importlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

os.environ.setdefault("MPLBACKEND", "agg")  # no test opens a window

# Workers of pytest-xdist share the cores: more threads in each would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

SEED = int(os.environ.get("MOESAIC_TEST_SEED", "0"))
"""Seeds every generator and shuffles the tests; ``make test SEED=n`` sets it."""

HAS_ACCELERATOR = torch.accelerator.is_available()


def seed_torch(seed: int) -> None:
    seed += 0x6D6F65  # not 0, 1, 2, …, with which tests seed inputs: weights would equal them
    if HAS_ACCELERATOR:
        torch.manual_seed(seed)
    else:  # the same numbers; `manual_seed` also formats the stack, three times, in case that a device starts later
        torch.default_generator.manual_seed(seed)


def seed_generators() -> None:
    random.seed(SEED)
    np.random.seed(SEED % 2**32)  # noqa: NPY002  code under test may use the global generator
    seed_torch(SEED)


class TorchGenerator:
    """torch's default generator as hypothesis wants it, so that each example of a property starts from one seed."""

    seed = staticmethod(seed_torch)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_generator = TorchGenerator()  # hypothesis holds a weak reference
hypothesis.register_random(_torch_generator)

# No deadline: the first example of a shape pays for allocation and kernel selection.
# The same examples in every run and on every machine; "fuzz" looks further, from the seed that tools/fuzz.py prints.
hypothesis.settings.register_profile(
    "moesaic", deadline=None, max_examples=40, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.register_profile(
    "fuzz", parent=hypothesis.settings.get_profile("moesaic"), derandomize=False, max_examples=200
)
FUZZ_UNTIL = float(os.environ.get("MOESAIC_FUZZ_UNTIL", "0"))  # time at which tools/fuzz.py begins no more tests
hypothesis.settings.load_profile("fuzz" if FUZZ_UNTIL else "moesaic")


def pytest_runtest_setup() -> None:
    if FUZZ_UNTIL and time.time() > FUZZ_UNTIL:
        pytest.skip("the time for fuzzing is over")


SOURCE = Path(__file__).parent / "src"


def pytest_collect_file(file_path: Path) -> None:
    """Import a module of src by its name before pytest does so by its path.

    Where nothing has imported the module's package yet, pytest would make a second copy of the module, with classes
    of its own: its doctests then failed when they were collected first.
    """
    if file_path.suffix == ".py" and file_path.is_relative_to(SOURCE) and file_path.name != "__main__.py":
        importlib.import_module(".".join(file_path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"))


def pytest_report_header() -> str:
    return f"seed and order: MOESAIC_TEST_SEED={SEED}"


LONG = {
    *("benchmarks/test_faults.py", "cli/test_compare.py", "cli/test_model_strings.py", "cli/test_workers.py"),
    *("contract/test_export.py", "contract/test_threads.py", "experts/test_sharding.py"),
    *("training/test_data_parallel.py", "training/test_export.py"),
}
"""Files with tests of many seconds, which start first: one that started last would leave the other workers idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests within each: a file's tests stay together for the fixtures they share."""
    files: dict[Any, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups, rng = list(files.values()), random.Random(SEED)
    rng.shuffle(groups)
    groups.sort(key=lambda group: "/".join(group[0].path.parts[-2:]) not in LONG)
    for group in groups:
        rng.shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: garbage collection need not look through them in every test.

    It also comes less often than by default, as torch's tracing and export make millions of objects that live on: a
    twelfth of the time of such tests, for 300 MB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """A fixture that several tests share has the same numbers whichever test asks for it first."""
    if fixturedef.scope != "function":
        seed_generators()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves torch's global settings as they were."""
    seed_generators()
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)

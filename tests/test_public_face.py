"""What a user gets from ``import moesaic``: a short list of names, explained, and nothing heavy."""

import json
import subprocess
import sys

import pytest
from record_defaults import FILE, defaults

import moesaic

NAMES = [
    "ChannelGate",
    "ChannelMoE",
    "ExpertChoice",
    "NormalizedGD",
    "PatchMoE",
    "RoutedHead",
    "Routing",
    "SampleMoE",
    "SoftRouter",
    "TokenChoice",
    "TokenMoE",
    "__version__",
    "backend",
    "convert",
    "create_model",
    "freeze",
    "list_models",
    "load",
    "record_routing",
    "register_with_timm",
    "shard_experts",
    "skip",
]

LATE = {
    "PIL",
    "datasets",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "mlxtend",
    "pandas",
    "rich",
    "sklearn",
    "timm",
    "tyro",
}


def test_the_public_names_are_the_curated_ones():
    assert sorted(moesaic.__all__) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__version__"])
def test_every_public_name_explains_itself_with_an_example(name: str):
    text = getattr(moesaic, name).__doc__
    assert text, f"moesaic.{name} has no docstring"
    assert ">>>" in text, f"the docstring of moesaic.{name} has no example"


def test_importing_moesaic_imports_nothing_that_only_some_users_need():
    # imported after torch, so that what torch itself loads is not held against us
    code = "import sys, torch; before = set(sys.modules); import moesaic; print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not LATE & set(run.stdout.split())


def test_the_public_names_do_not_import_sympy():
    code = f"import sys, moesaic; [getattr(moesaic, name) for name in {NAMES}]; print('sympy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"], "sympy takes a quarter of a second; torch imports it for compilers alone"


def test_defaults_are_the_recorded_ones():
    assert defaults() == json.loads(FILE.read_text("utf-8"))


def test_tab_completion_offers_names_and_packages_alone():
    offered = {name for name in dir(moesaic) if not name.startswith("_")}
    assert offered >= {*NAMES, "insight", "layers", "training"} - {"__version__"}
    assert not offered & {"sys", "Any", "TYPE_CHECKING", "import_module", "argument_checks", "files"}

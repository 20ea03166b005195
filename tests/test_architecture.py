"""Imports point one way: no package imports from one above it, and the core needs little but torch."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "moesaic"

# From the top. A package may import from the lines below its own, never from its own line or above.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"papers"},
    {"report"},
    {"training"},
    {"insight", "bench"},
    {"models", "data"},
    {"layers"},
    {"routing", "experts"},
    {"ops"},
    {"leases", "routing_record", "tensor_files"},
    {"files", "validated_json"},
    {
        "cache_dir",
        "argument_checks",
        "context_stacks",
        "paper_fidelity",
        "tensor_checks",
        "intervals",
        "keyed_random",
        "torchrun_env",
    },
)

HEIGHT = {package: -level for level, packages in enumerate(LAYERS) for package in packages}
PACKAGES = HEIGHT.keys()

CORE = {
    "routing",
    "experts",
    "ops",
    "layers",
    "models",
    "training",
    "leases",
    "routing_record",
    "tensor_files",
    "files",
    "validated_json",
    "cache_dir",
    "argument_checks",
    "context_stacks",
    "paper_fidelity",
    "tensor_checks",
    "intervals",
    "keyed_random",
    "torchrun_env",
}
CORE_PACKAGES = {"torch", "numpy", "safetensors", "moesaic"} | sys.stdlib_module_names
ALSO = {
    "ops": {"triton"},  # it comes with torch on GPU machines
    "models": {"triton"},
    "intervals": {"scipy"},  # Student's quantile, imported when it is called
}


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, wherever it stands: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            start = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            # of `from moesaic import ops` the name says which package, of all others the module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def may_import(package: str, other: str) -> bool:
    return package == other or HEIGHT[other] < HEIGHT[package]


def faults(source: str, path: str) -> list[str]:
    """What is wrong with the imports of the file at ``path``, relative to the package."""
    *folders, name = Path(path).with_suffix("").parts
    package = folders[0] if folders else name
    if package == "__init__":
        return []  # the public face gathers from every package
    if package not in PACKAGES:
        return [
            f"{path}: LAYERS in tests/test_architecture.py does not list the package `{package}`; "
            "add it above the packages that it imports, or move the code into a package that exists"
        ]
    found: list[str] = []
    for line, imported in imports(source, ".".join(["moesaic", *folders])):
        top, *rest = imported.split(".")
        where = f"{path}:{line}: `{package}` imports {imported}"
        if top == "moesaic":
            other = rest[0] if rest else None
            if other not in PACKAGES:  # a name of the face, or the face itself
                found.append(f"{where} through the public face; import it from the package that defines it")
            elif not may_import(package, other):
                found.append(f"{where}, but `{other}` is not below it; move the shared part down")
        if package in CORE and top not in CORE_PACKAGES | ALSO.get(package, set()):
            found.append(f"{where}, but the core runs on torch, numpy and safetensors alone")
    return found


def test_no_package_imports_from_one_above_it():
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no source under {SOURCE}"
    found = [fault for file in files for fault in faults(file.read_text("utf-8"), str(file.relative_to(SOURCE)))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layers/patch.py", "from moesaic.ops import combine"),
        ("layers/patch.py", "from ..routing.soft import SoftRouter"),
        ("layers/patch.py", "from .. import ops, routing_record"),
        ("layers/patch.py", "from .recording import RoutedLayer"),
        ("layers/__init__.py", "from .patch import PatchMoE"),
        ("routing/choice/top.py", "from ...routing_record import Routing"),
        ("routing/soft.py", "import torch.nn.functional as F, math\nfrom collections.abc import Iterator"),
        ("ops/triton/conv.py", "import triton.language as tl"),
        ("insight/overlay.py", "def draw():\n    import matplotlib.pyplot"),
        ("training/loop.py", "from moesaic import insight, data"),
        ("cli/reproduce.py", "from moesaic.papers.reproduce import reproduce"),
        ("__init__.py", "from moesaic.cli import main"),
    ],
)
def test_imports_that_are_allowed(path: str, source: str):
    assert faults(source, path) == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("ops/torch.py", "import moesaic.layers.patch", "`layers` is not below"),
        ("ops/torch.py", "from moesaic.layers import PatchMoE", "`layers` is not below"),
        ("ops/torch.py", "from moesaic import layers", "`layers` is not below"),
        ("ops/torch.py", "from ..layers import PatchMoE", "`layers` is not below"),
        ("ops/torch.py", "from .. import layers", "`layers` is not below"),
        ("ops/__init__.py", "from ..layers import PatchMoE", "`layers` is not below"),
        ("ops/cpu/conv.py", "from ...layers import PatchMoE", "`layers` is not below"),
        ("ops/torch.py", "def late():\n    from ..layers import PatchMoE", "ops/torch.py:2:"),
        ("ops/torch.py", "if TYPE_CHECKING:\n    from ..layers import PatchMoE", "ops/torch.py:2:"),
        ("routing/soft.py", "from ..experts import ConvExperts", "`experts` is not below"),
        ("routing_record.py", "from .tensor_files import write_tensors", "`tensor_files` is not below"),
        ("argument_checks.py", "from .routing_record import Routing", "`routing_record` is not below"),
        ("data/load.py", "from moesaic.papers import engine", "`papers` is not below"),
        ("report/charts.py", "from moesaic.papers.engine.findings import Finding", "`papers` is not below"),
        ("layers/patch.py", "from moesaic import PatchMoE", "through the public face"),
        ("layers/patch.py", "import moesaic", "through the public face"),
        ("layers/patch.py", "from .. import *", "through the public face"),
        ("layers/patch.py", "def draw():\n    import matplotlib.pyplot", "torch, numpy and safetensors alone"),
        ("layers/patch.py", "import triton", "torch, numpy and safetensors alone"),
        ("utils/misc.py", "", "does not list the package `utils`"),
        ("misc.py", "", "does not list the package `misc`"),
    ],
)
def test_imports_that_are_caught(path: str, source: str, fault: str):
    found = faults(source, path)
    assert len(found) == 1
    assert fault in found[0]

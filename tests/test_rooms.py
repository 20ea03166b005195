"""The house has floors: no room imports from a room above it, and the core needs little but torch."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "moesaic"

# From the top. A room may import from the lines below its own, never from its own line or above.
FLOORS = (
    {"__main__"},
    {"cli"},
    {"papers", "report"},
    {"training"},
    {"insight"},
    {"models", "data"},
    {"layers"},
    {"routing", "experts"},
    {"ops"},
    {"record", "ledger"},
    {"cache", "checks", "draws", "statistics"},
)
ALONE = {"theory"}  # imports no other room; any room but the two lowest may import it

HEIGHT = {room: -floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = HEIGHT.keys() | ALONE

CORE = {
    "routing",
    "experts",
    "ops",
    "layers",
    "models",
    "training",
    "theory",
    "record",
    "ledger",
    "cache",
    "checks",
    "draws",
    "statistics",
}
CORE_PACKAGES = {"torch", "numpy", "safetensors", "moesaic"} | sys.stdlib_module_names
ALSO = {"ops": {"triton"}}  # it comes with torch on GPU machines


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, wherever it stands: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            start = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            # of `from moesaic import ops` the name says which room, of all others the module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def may_import(room: str, other: str) -> bool:
    if room == other:
        return True
    if room in ALONE:
        return False
    if other in ALONE:
        return room not in FLOORS[-1] | FLOORS[-2]
    return HEIGHT[other] < HEIGHT[room]


def faults(source: str, path: str) -> list[str]:
    """What is wrong with the imports of the file at ``path``, relative to the package."""
    *folders, name = Path(path).with_suffix("").parts
    room = folders[0] if folders else name
    if room == "__init__":
        return []  # the public face gathers from every room
    if room not in ROOMS:
        return [
            f"{path}: FLOORS in tests/test_rooms.py does not list the room `{room}`; "
            "add it on the floor whose rooms it may not import, or move the code into a room that exists"
        ]
    found: list[str] = []
    for line, imported in imports(source, ".".join(["moesaic", *folders])):
        top, *rest = imported.split(".")
        where = f"{path}:{line}: `{room}` imports {imported}"
        if top == "moesaic":
            other = rest[0] if rest else None
            if other not in ROOMS:  # a name of the face, or the face itself
                found.append(f"{where} through the public face; import it from the room that defines it")
            elif not may_import(room, other):
                found.append(f"{where}, but `{other}` is not below it; move the shared part down")
        if room in CORE and top not in CORE_PACKAGES | ALSO.get(room, set()):
            found.append(f"{where}, but the core runs on torch, numpy and safetensors alone")
    return found


def test_no_room_imports_from_a_room_above_it():
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no source under {SOURCE}"
    found = [fault for file in files for fault in faults(file.read_text("utf-8"), str(file.relative_to(SOURCE)))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layers/patch.py", "from moesaic.ops import combine"),
        ("layers/patch.py", "from ..routing.soft import SoftRouter"),
        ("layers/patch.py", "from .. import ops, record"),
        ("layers/patch.py", "from .routed import RoutedLayer"),
        ("layers/__init__.py", "from .patch import PatchMoE"),
        ("routing/choice/top.py", "from ...record import Routing"),
        ("routing/soft.py", "import torch.nn.functional as F, math\nfrom collections.abc import Iterator"),
        ("ops/triton/conv.py", "import triton.language as tl"),
        ("insight/overlay.py", "def draw():\n    import matplotlib.pyplot"),
        ("training/loop.py", "from moesaic import theory, data"),
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
        ("record.py", "from .theory import bound", "`theory` is not below"),
        ("checks.py", "from .record import Routing", "`record` is not below"),
        ("theory/bounds.py", "from ..record import Routing", "`record` is not below"),
        ("layers/patch.py", "from moesaic import PatchMoE", "through the public face"),
        ("layers/patch.py", "import moesaic", "through the public face"),
        ("layers/patch.py", "from .. import *", "through the public face"),
        ("layers/patch.py", "def draw():\n    import matplotlib.pyplot", "torch, numpy and safetensors alone"),
        ("layers/patch.py", "import triton", "torch, numpy and safetensors alone"),
        ("utils/misc.py", "", "does not list the room `utils`"),
        ("misc.py", "", "does not list the room `misc`"),
    ],
)
def test_imports_that_are_caught(path: str, source: str, fault: str):
    found = faults(source, path)
    assert len(found) == 1
    assert fault in found[0]

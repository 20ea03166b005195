"""The walks on the architecture page name modules and functions that exist, and pass no module twice."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "moesaic"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
WALKS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##)", PAGE.split("## Data walks")[1], re.M | re.S))
NAME = re.compile(r"`([a-z_0-9]+(?:\.[A-Za-z_0-9]+)+)`")


def split(name: str) -> tuple[Path, list[str]]:
    """The file of a module and the names behind it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        file = SOURCE.joinpath(*parts[:end]).with_suffix(".py")
        if file.is_file():
            return file, parts[end:]
    raise AssertionError(f"{name}: no such module below moesaic")


def defines(body: list[ast.stmt], names: list[str]) -> bool:
    if not names:
        return True
    found = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.name == names[0]
    ]
    return any(defines(node.body, names[1:]) for node in found)


def test_there_are_four_walks():
    assert len(WALKS) == 4
    assert all(len(NAME.findall(text)) >= 5 for text in WALKS.values())


@pytest.mark.parametrize("title", WALKS)
def test_every_name_of_a_walk_exists(title: str):
    names = [name for name in NAME.findall(WALKS[title]) if not name.endswith((".json", ".safetensors"))]
    missing = [
        name for name in names if not defines(ast.parse((found := split(name))[0].read_text("utf-8")).body, found[1])
    ]
    assert missing == []


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_passes_a_module_once(title: str):
    # the first name of a numbered step is the step; the walk through PatchMoE has one branch for each backend
    shared, *branches = re.split(r"^\*\*\w+\*\*", WALKS[title], flags=re.M)
    for branch in branches or [""]:
        steps = re.findall(r"^\d+\. `([\w.]+)`", shared + branch, re.M)
        files = [split(step)[0] for step in steps]
        assert len(files) == len(set(files)), steps

"""No internal function or operator takes more than 12 parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "moesaic"
LIMIT = 12

PUBLIC = {"models/convert.py: convert", "training/fit.py: fit"}
"""Functions of the public face, which users call by keyword; constructors may take any number as well."""


def decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in function.decorator_list}


def long_signatures(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of functions with too many, Triton kernels and constructors aside."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        name = "lambda" if isinstance(node, ast.Lambda) else node.name
        if name == "__init__" or (not isinstance(node, ast.Lambda) and "triton.jit" in decorators(node)):
            continue
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(each.arg not in ("self", "cls") for each in named)
        if count > LIMIT:
            yield name, count


def test_functions_take_at_most_twelve_parameters():
    found = {
        f"{path.relative_to(SOURCE).as_posix()}: {name}"
        for path in SOURCE.rglob("*.py")
        for name, _ in long_signatures(path.read_text("utf-8"))
    }
    assert found == PUBLIC


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"def many({', '.join(f'a{i}' for i in range(13))}): ...", [("many", 13)]),
        (f"def few({', '.join(f'a{i}' for i in range(12))}): ...", []),
        (f"def method(self, {', '.join(f'a{i}' for i in range(12))}): ...", []),
        (f"def keywords(*, {', '.join(f'a{i}' for i in range(13))}): ...", [("keywords", 13)]),
        (f"@triton.jit\ndef kernel({', '.join(f'a{i}' for i in range(13))}): ...", []),
        (f"@custom_op('x')\ndef operator({', '.join(f'a{i}' for i in range(13))}): ...", [("operator", 13)]),
        (f"class A:\n    def __init__(self, {', '.join(f'a{i}' for i in range(13))}): ...", []),
    ],
)
def test_the_check_finds_long_signatures(source, expected):
    assert list(long_signatures(source)) == expected

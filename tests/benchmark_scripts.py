"""Scripts of ``benchmarks/``, loaded as modules."""

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["loaded_script"]

_FOLDER = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def loaded_script(name: str) -> Generator[ModuleType]:
    """The script, among the modules while it is in use: there dataclasses and torch.compile look for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_FOLDER)
        spec = importlib.util.spec_from_file_location(f"{name}_script", _FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
    for each in ("measure", "kill_campaign"):
        sys.modules.pop(each, None)

"""The bill of materials lists what is installed, and builds do not depend on where they are made."""

import importlib.util
import json
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_has_every_requirement_in_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    sbom = tool("sbom")
    made = sbom.bill_of_materials(project, "1.2.3", 0)
    assert made == sbom.bill_of_materials(project, "1.2.3", 0)
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    assert made["metadata"]["timestamp"] == "1970-01-01T00:00:00Z"
    versions = {each["name"]: each["version"] for each in made["components"]}
    for name in ("torch", "numpy", "pillow", "jinja2", "markupsafe"):
        assert versions[name] == version(name)
    refs = [each["bom-ref"] for each in made["components"]]
    assert len(refs) == len(set(refs))
    known = {*refs, "pkg:pypi/moesaic@1.2.3"}
    assert {each["ref"] for each in made["dependencies"]} == known
    assert all(ref in known for each in made["dependencies"] for ref in each["dependsOn"])
    json.dumps(made)


def test_two_builds_are_the_same_and_have_the_types(tmp_path):
    pytest.importorskip("hatchling")
    dist = tool("dist")
    if not (ROOT / ".git").exists():
        pytest.skip("there is no repository to build from")
    environment = {**dist.os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    (tmp_path / "deeper").mkdir()
    builds = []
    for folder in (tmp_path / "one", tmp_path / "deeper" / "other"):
        folder.mkdir()
        builds.append(dist.build(folder, environment, "wheel"))
    assert builds[0] == builds[1]
    (wheel,) = builds[0]
    assert wheel.endswith(".whl")
    assert b"moesaic/py.typed" in builds[0][wheel]

"""Writes the software bill of materials: what moesaic needs at run time, as CycloneDX 1.5 JSON.

    python tools/sbom.py [--out FILE]

Components are the requirements in pyproject.toml and theirs, in the versions that are installed here, which
constraints.txt pins. The same environment and commit give the same file.
"""

import argparse
import json
import os
import re
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(lines: list[str]) -> list[str]:
    """Names of the requirements that apply here, those of extras left out."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in lines]
    applying = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return sorted({canonical(each.name) for each in applying})


def installed(roots: list[str]) -> dict[str, Distribution]:
    """The named distributions and all that they need."""
    found: dict[str, Distribution] = {}
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"sbom: {name} is not installed here; run it in the environment of `make test`") from None
        pending += requirements(found[name].requires or [])
    return dict(sorted(found.items()))


def component(name: str, found: Distribution) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{found.version}"
    made: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": found.version, "purl": purl}
    expression = found.metadata.get("License-Expression")
    short = found.metadata.get("License", "")
    if expression:
        made["licenses"] = [{"expression": expression}]
    elif short and "\n" not in short and len(short) < 60:
        made["licenses"] = [{"license": {"name": short}}]
    return made


def bill_of_materials(project: dict[str, Any], version: str, epoch: int) -> dict[str, Any]:
    roots = requirements(project["dependencies"])
    found = installed(roots)
    refs = {name: f"pkg:pypi/{name}@{each.version}" for name, each in found.items()}
    own = f"pkg:pypi/{project['name']}@{version}"
    needs = {own: roots, **{refs[name]: requirements(each.requires or []) for name, each in found.items()}}
    content: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": version,
                "purl": own,
                "licenses": [{"expression": project["license"]}],
            },
        },
        "components": [component(name, each) for name, each in found.items()],
        "dependencies": [{"ref": ref, "dependsOn": [refs[name] for name in names]} for ref, names in needs.items()],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {"serialNumber": f"urn:uuid:{serial}", **content}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: standard output")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    source = (ROOT / "src" / "moesaic" / "__init__.py").read_text("utf-8")
    version = re.search(r'__version__ = "([^"]+)"', source)
    assert version, "src/moesaic/__init__.py has no __version__"
    made = bill_of_materials(project, version[1], int(os.environ.get("SOURCE_DATE_EPOCH", "0")))
    text = json.dumps(made, indent=1) + "\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Builds wheel, sdist and bill of materials into ``dist/``: ``make dist``.

The last commit is built twice, in two folders, and the files must be the same byte by byte; times in them are that of
the commit. Then the wheel is installed without the repository, and its command is run.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK = """
import sys
from pathlib import Path
import moesaic
assert Path(moesaic.__file__).is_relative_to(sys.argv[1]), f"{moesaic.__file__} is not the wheel's"
model = moesaic.create_model("wrn10_1_pmoe", num_classes=2)
import torch
assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
"""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def build(folder: Path, environment: dict[str, str], *targets: str) -> dict[str, bytes]:
    """The files that a build of the last commit makes, by name."""
    source, made = folder / "source", folder / "made"
    archive = folder / "source.tar"
    archive.write_bytes(git("archive", "HEAD"))
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(made)]
    command += [word for target in targets for word in ("-t", target)]  # both, if none is named
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in sorted(made.iterdir())}


def run_outside(wheel: Path, environment: dict[str, str]) -> None:
    """Installs the wheel into a folder of its own and uses it from another one."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "installed")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
        others = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "src")]
        outside = {**environment, "PYTHONPATH": os.pathsep.join([str(target), *others])}
        subprocess.run([sys.executable, "-c", CHECK, str(target)], cwd=folder, env=outside, check=True)
        subprocess.run([sys.executable, "-m", "moesaic", "--version"], cwd=folder, env=outside, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    if git("status", "--porcelain"):
        print("dist: the working tree differs from the last commit, which is what is built")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").decode().strip()}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, second = build(Path(one), environment), build(Path(other), environment)
    differing = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    if differing:
        print(f"dist: two builds differ in {', '.join(sorted(differing))}")
        return 1
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    for name, content in first.items():
        (given.out / name).write_bytes(content)
    (wheel,) = given.out.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert "moesaic/py.typed" in packed.namelist(), "the wheel has no py.typed"
    sbom = given.out / f"{wheel.name.partition('-py3')[0]}.cdx.json"
    subprocess.run([sys.executable, str(ROOT / "tools" / "sbom.py"), "--out", str(sbom)], env=environment, check=True)
    run_outside(wheel, environment)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(given.out.iterdir())]
    (given.out / "SHA256SUMS").write_text("".join(sums))
    print(f"dist: two builds are identical, and the wheel runs outside of the repository\n{''.join(sums)}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

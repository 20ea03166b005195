"""One browser for all tests of a process, and axe-core, which finds faults of accessibility."""

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.chromium import CHROMIUM, BrowserError, Chromium

AXE_VERSION = "4.10.3"
AXE_SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
AXE_FOLDER = Path(__file__).parents[2] / ".cache" / "axe-core"
"""Where .ci/run puts it; it is no part of the repository, as its licence is the MPL."""


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    try:
        started = Chromium(tmp_path_factory.mktemp("profile"))
    except BrowserError as error:
        pytest.skip(f"chromium does not start here: {error}")
    with started:
        yield started


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core: from the cache folder, or from npm."""
    found = AXE_FOLDER / f"axe-{AXE_VERSION}.min.js"
    if not found.exists():
        found = _packed(tmp_path_factory.mktemp("axe"))
    content = found.read_bytes()
    assert hashlib.sha256(content).hexdigest() == AXE_SHA256
    return content.decode()


def _packed(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no axe-core and no npm here")
    command = [npm, "pack", f"axe-core@{AXE_VERSION}", "--silent", "--fetch-retries=0", "--fetch-timeout=10000"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            archive.extract("package/axe.min.js", folder, filter="data")
    except (subprocess.SubprocessError, OSError, StopIteration, tarfile.TarError, KeyError):
        pytest.skip("axe-core cannot be had here")
    return folder / "package" / "axe.min.js"

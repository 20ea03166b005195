"""Fixtures of the tests of commands."""

import sys
from pathlib import Path

import pytest
from cli.example_papers import Papers


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Papers:
    fake = Papers()
    monkeypatch.setitem(sys.modules, "moesaic.papers.reproduce", fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOESAIC_DEBUG", raising=False)
    return fake

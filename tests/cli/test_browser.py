"""A browser is opened where someone can see it, and nowhere else."""

import sys
import webbrowser

import pytest

from moesaic.cli import browser
from moesaic.cli.browser import open_browser


class Opened:
    def __init__(self, name: str = "firefox") -> None:
        self.name = name
        self.urls: list[str] = []

    def open(self, url: str) -> bool:
        self.urls.append(url)
        return True


@pytest.fixture
def desktop(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A terminal with a display and a browser."""
    found = Opened()
    monkeypatch.setattr(webbrowser, "get", lambda: found)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    for name in ("CI", "SSH_CONNECTION", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    return found


def test_at_a_terminal_with_a_display_it_opens(desktop: Opened):
    assert open_browser("file:///a.html")
    assert desktop.urls == ["file:///a.html"]


@pytest.mark.parametrize("where", ["ci", "piped", "no display", "text browser", "no browser"])
def test_elsewhere_it_does_not(desktop: Opened, where: str, monkeypatch: pytest.MonkeyPatch):
    def none() -> None:
        raise webbrowser.Error("could not locate runnable browser")

    match where:
        case "ci":
            monkeypatch.setenv("CI", "true")
        case "piped":
            monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
        case "no display":
            monkeypatch.delenv("DISPLAY")
            monkeypatch.setattr(browser.sys, "platform", "linux")
        case "text browser":
            desktop.name = "w3m"
        case _:
            monkeypatch.setattr(webbrowser, "get", none)
    assert not open_browser("file:///a.html")
    assert desktop.urls == []

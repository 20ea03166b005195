"""Opens a page in the browser, where there is a terminal and a display."""

from __future__ import annotations

import os
import sys

__all__ = ["open_browser"]

_TEXT_BROWSERS = ("www-browser", "links", "elinks", "lynx", "w3m")
"""They would take over the terminal."""


def open_browser(url: str) -> bool:
    """Opens a page if a person sits at a terminal with a display; returns whether it was opened.

    Never in CI, nor where the output goes into a file or a pipe.
    """
    if os.environ.get("CI") or not (sys.stdout.isatty() and sys.stderr.isatty()) or not _has_display():
        return False
    import webbrowser

    try:
        browser = webbrowser.get()
        return getattr(browser, "name", "") not in _TEXT_BROWSERS and browser.open(url)
    except (webbrowser.Error, OSError):
        return False


def _has_display() -> bool:
    if sys.platform in ("darwin", "win32"):
        return not os.environ.get("SSH_CONNECTION")
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))

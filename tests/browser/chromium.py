"""Drives Chromium over the DevTools protocol: opens pages, presses keys and buttons, reads what the page says.

One browser serves many pages. It talks over two pipes, so that no port is opened and no package is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_TIMEOUT = 300.0
"""Seconds without any answer after which the browser counts as hung."""
_KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip
_START = """
import fcntl, os, sys
first, second = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(first, 3)
os.dup2(second, 4)
os.closerange(5, 20)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The protocol is spoken on the descriptors 3 and 4."""
_TEXTS = {"Enter": "\r", " ": " "}


_FAULTS = Path(__file__).with_name("faults.js").read_text("utf-8").partition("\n")[2].strip()


class BrowserError(Exception):
    """The browser does not start, or refuses a command."""


class Chromium:
    """A browser without a window; a context manager."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars",
            # the browser itself likes to call home
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "about:blank",
        )  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _START, str(to_read), str(to_write), CHROMIUM, *options],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._count = 0
        self.pages: dict[str, Page] = {}
        try:
            self.version: str = self.send("Browser.getVersion")["product"]
        except BrowserError:
            self._end()
            raise

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (BrowserError, subprocess.TimeoutExpired):
            pass
        self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, page: Path, **look: Any) -> Page:
        """Opens a file and waits until it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        opened = self.pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            opened.send(f"{domain}.enable")
        opened.look(**look)
        opened.go(page)
        return opened

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result; events of pages are stored on the way."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError("the browser has ended") from None
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message; one of a page is handed to it."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _TIMEOUT)
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("the browser does not answer")
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(first)
        page = self.pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.note(message["method"], message["params"])
        return message


class Page:
    """A tab."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.requests: list[str] = []
        """Addresses that were asked for, apart from the page itself and what is in it."""
        self._loaded = False

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value", each.get("description")) for each in event["args"]]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            address = event["request"]["url"]
            if event["type"] != "Document" and not address.startswith(("data:", "blob:")):
                self.requests.append(address)

    def go(self, page: Path) -> None:
        self._loaded = False
        self.send("Page.bringToFront")  # a tab behind another one draws nothing
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._browser.receive()

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Sets the size of the window, the theme, and whether it is printed."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[theme])

    def run(self, script: str, *arguments: object) -> Any:
        """Calls a JavaScript function with these arguments; returns its result, or that of its promise."""
        given = ", ".join(json.dumps(each) for each in arguments)
        found = self.send("Runtime.evaluate", expression=f"({script})({given})", awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """The visible text of the first element."""
        return self.run("(selector) => document.querySelector(selector).innerText", selector)

    def settle(self) -> None:
        """Waits until the page has drawn what it was asked to."""
        self.run("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def click(self, selector: str, at: int = 0) -> None:
        """Clicks at the middle of an element with the mouse."""
        x, y = self._middle(selector, at)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def hover(self, selector: str, at: int = 0) -> None:
        """Moves the mouse to the middle of an element."""
        x, y = self._middle(selector, at)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def press(self, *keys: str) -> None:
        """Presses keys one after another."""
        for key in keys:
            shared = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS.get(key, 0)}
            text = _TEXTS.get(key, key if len(key) == 1 else "")
            self.send("Input.dispatchKeyEvent", type="keyDown", **shared, **({"text": text} if text else {}))
            self.send("Input.dispatchKeyEvent", type="keyUp", **shared)
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Sets a select or a slider, as a user does."""
        self.run(
            """(selector, value) => {
                const control = document.querySelector(selector);
                control.value = value;
                control.dispatchEvent(new Event("input", { bubbles: true }));
            }""",
            selector,
            value,
        )
        self.settle()

    def faults(self) -> tuple[list[str], int]:
        """Controls without a name, images without a text, texts without contrast; and how many texts there are."""
        return self.run(_FAULTS)

    def violations(self, axe: str) -> list[str]:
        """Serious faults of accessibility that axe-core finds; ``axe`` is its script."""
        if not self.run("() => typeof axe === 'object'"):
            self.send("Runtime.evaluate", expression=axe)
        return self.run(
            """() => axe.run(document, { resultTypes: ["violations"] }).then((found) => found.violations
                .filter((each) => ["serious", "critical"].includes(each.impact))
                .map((each) => `${each.id}: ${each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))}`))"""
        )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Writes a PNG file of the window, or of the whole page."""
        clip: dict[str, Any] = {}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        found = self.send("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        del self._browser.pages[self._session]
        self._browser.send("Target.closeTarget", targetId=self._target)

    def _middle(self, selector: str, at: int) -> Sequence[float]:
        return self.run(
            """(selector, at) => {
                const element = document.querySelectorAll(selector)[at];
                element.scrollIntoView({ block: "center" });
                const box = element.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }""",
            selector,
            at,
        )

"""Serves one page to the browser of the same machine, and tells it when the files behind the page have changed.

The server listens on 127.0.0.1 and knows two addresses: ``/``, the page, and ``/version``, a small JSON that the page's
script asks for every two seconds. It reads no file that a request names. Requests for another host are refused: a
stranger's page could otherwise read this one through a name that resolves to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["LivePage", "PageServer", "live_script"]

_HOST = "127.0.0.1"
_PORT = 8642
_PORTS = 20
"""Ports that are tried where none is asked for."""
_SECONDS = 10.0
"""Seconds that a request may take to arrive."""


@cache
def live_script() -> Mapping[str, str]:
    """The script of a page that updates itself, and its digest for the Content-Security-Policy."""
    script = files("moesaic.report").joinpath("live_page.js").read_text("utf-8")
    return {"script": script, "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}


class LivePage:
    """A page that is made from files, and made again when they have changed.

    Args:
        watched: returns the files that the page is made from; some may not be there.
        render: makes the page; gets the script, its digest and the version for `live_script` pages.
    """

    def __init__(self, watched: Callable[[], Iterable[Path]], render: Callable[[Mapping[str, str]], str]) -> None:
        self._watched = watched
        self._render = render
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None

    def version(self) -> str:
        """A digest of names, sizes and times of the files."""
        content = hashlib.sha256()
        for path in self._watched():
            try:
                about = path.stat()
            except OSError:  # not there yet
                continue
            content.update(json.dumps([path.name, about.st_size, about.st_mtime_ns]).encode())
        return content.hexdigest()[:16]

    def page(self) -> bytes:
        """The page, as the files are now; raises what reading them raises."""
        with self._lock:
            version = self.version()
            if self._made is None or self._made[0] != version:
                self._made = version, self._render({**live_script(), "version": version}).encode()
            return self._made[1]

    def fault(self) -> str:
        """Why the page cannot be made; empty if it can."""
        try:
            self.page()
        except (OSError, ValueError) as error:
            return " ".join(str(error).split())
        return ""


class PageServer(ThreadingHTTPServer):
    """A server of one page on 127.0.0.1.

    Args:
        page: the page.
        port: the port; None for the first free one from 8642 on, 0 for any.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int | None = None) -> None:
        self.live_page = page
        refused = ""
        for candidate in range(_PORT, _PORT + _PORTS) if port is None else (port,):
            try:
                super().__init__((_HOST, candidate), _Handler)
                return
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                refused = error.strerror or ""
        tried = f"ports {_PORT} to {_PORT + _PORTS - 1} are" if port is None else f"--port={port} is"
        raise ValueError(f"{tried} not free ({refused}); choose another one with --port, or 0 for any free one")

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection is no error; what else goes wrong is printed."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "moesaic"
    sys_version = ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"This server answers to 127.0.0.1 and localhost only.\n")
            return
        path, page = urlsplit(self.path).path, self.server.live_page
        if path == "/version":
            content = json.dumps({"version": page.version(), "fault": page.fault()})
            self._send(HTTPStatus.OK, "application/json", content.encode())
        elif path == "/":
            fault = page.fault()
            if fault:
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{fault}\n".encode())
            else:
                self._send(HTTPStatus.OK, "text/html", page.page())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is one page here: /\n")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            # the page itself says what it may load
            "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests of the page every two seconds are not worth a line."""

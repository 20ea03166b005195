"""The server of a page: what it serves, to whom, and that it notices changes."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.report import page_server
from moesaic.report.page_server import LivePage, PageServer, live_script


class Served:
    """A server of one file on a free port, and requests to it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rendered = 0
        self.server = PageServer(LivePage(lambda: [file], self._render), 0)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _render(self, live) -> str:
        self.rendered += 1
        if not self.file.exists():
            raise ValueError("the file\nis gone")
        return f"{live['version']} {self.file.read_text()}"

    def ask(self, path: str = "/", method: str = "GET", host: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port)
        connection.putrequest(method, path, skip_host=host is not None)
        if host:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        self.text = answer.read().decode()
        connection.close()
        return answer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "page.txt").write_text("first")
    made = Served(tmp_path / "page.txt")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_it_listens_on_this_machine_only(served: Served):
    assert served.server.server_address[0] == "127.0.0.1"
    assert served.server.url == f"http://127.0.0.1:{served.server.server_port}/"


def test_the_page_is_served_with_headers_that_keep_it_to_itself(served: Served):
    answer = served.ask()
    assert answer.status == 200
    assert served.text.endswith("first")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    head = served.ask(method="HEAD")
    assert (head.status, served.text) == (200, "")
    assert head.headers["Content-Length"] == answer.headers["Content-Length"]


def test_a_change_of_the_files_is_a_new_version_and_the_page_is_made_once(served: Served):
    served.ask("/version")
    first = json.loads(served.text)
    served.ask()
    served.ask()
    assert served.rendered == 1
    assert served.text.startswith(first["version"])
    served.file.write_text("second time")
    served.ask("/version")
    second = json.loads(served.text)
    assert second["version"] != first["version"]
    assert second["fault"] == ""
    served.ask()
    assert served.text == f"{second['version']} second time"


def test_files_that_cannot_be_read_are_told_in_one_line(served: Served):
    served.file.unlink()
    served.ask("/version")
    assert json.loads(served.text)["fault"] == "the file is gone"
    assert served.ask().status == 500
    assert served.text == "the file is gone\n"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost"])
def test_requests_for_another_host_are_refused(served: Served, host: str):
    answer = served.ask(host=host.format(port=served.server.server_port) or " ")
    assert answer.status == 403
    assert "first" not in served.text


def test_a_request_without_a_host_is_refused(served: Served):
    with socket.create_connection(("127.0.0.1", served.server.server_port)) as stream:
        stream.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 403 " in stream.makefile("rb").readline()


def test_localhost_is_this_machine(served: Served):
    assert served.ask(host=f"localhost:{served.server.server_port}").status == 200


@pytest.mark.parametrize("path", ["/page.txt", "/../page.txt", "/%2e%2e/page.txt", "//etc/passwd", "/version/", "x"])
def test_no_other_file_is_served(served: Served, path: str):
    assert served.ask(path).status == 404
    assert "first" not in served.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(served: Served, method: str):
    assert served.ask(method=method).status == 501


def test_the_next_free_port_is_taken_unless_one_is_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch):
    page, taken = served.server.live_page, served.server.server_port
    monkeypatch.setattr(page_server, "_PORT", taken)
    with PageServer(page) as other:
        assert taken < other.server_port < taken + 20
    with pytest.raises(ValueError, match=f"--port={taken} is not free .*; choose another one with --port, or 0"):
        PageServer(page, taken)
    monkeypatch.setattr(page_server, "_PORTS", 1)
    with pytest.raises(ValueError, match=f"ports {taken} to {taken} are not free"):
        PageServer(page)


def test_the_script_is_that_of_its_digest():
    import base64
    import hashlib

    live = live_script()
    assert base64.b64decode(live["digest"]) == hashlib.sha256(live["script"].encode()).digest()
    assert "</script" not in live["script"]

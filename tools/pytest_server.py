"""Runs pytest again and again in forks of one process that has imported torch and the other packages already.

For tools/mutate.py, whose runs mostly take a second and would spend most of their time on imports. Reads one JSON
object a line from standard input: ``folder`` to run in, ``environment`` and ``arguments`` of pytest, ``log`` to write
its output to, ``seconds`` after which it is killed. Replies to each with a line: the exit code, or ``timeout``.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any

PACKAGES = (
    *("torch", "numpy", "scipy.stats", "scipy.optimize", "sklearn.manifold", "sklearn.metrics", "matplotlib.pyplot"),
    *("PIL.Image", "safetensors.torch", "rich.console", "rich.table", "rich.progress", "tyro", "jinja2"),
    *("mlxtend.data", "pytest"),  # not hypothesis: its plugin of pytest has to be imported by pytest
)


def run(request: dict[str, Any]) -> str:
    """Runs pytest in a fork that is a session of its own, so that what it starts can be killed with it."""
    if (child := os.fork()) == 0:
        _run_here(request)
    end = time.monotonic() + request["seconds"]
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill(child)  # processes that the tests left behind
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.05)
    _kill(child)
    os.waitpid(child, 0)
    return "timeout"


def _kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, 9)


def _run_here(request: dict[str, Any]) -> None:
    os.setsid()
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = request["environment"]["PYTHONPATH"].split(os.pathsep)
    code = 1
    try:
        import pytest

        code = int(pytest.main(request["arguments"]))
    except BaseException as error:
        print(f"ERROR {type(error).__name__}: {error}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)  # not the server's own clean-up


def main() -> None:
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(f"{run(json.loads(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

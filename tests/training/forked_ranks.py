"""Jobs of several ranks, as processes forked from the test: they need no imports, and share what the test has made."""

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TIMEOUT = 240.0

needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork") or not torch.distributed.is_available(), reason="needs fork and torch.distributed"
)


def run_ranks(count: int, work: Callable[[], Any], *, group: bool = True) -> list[Any]:
    """Runs ``work`` on so many ranks of a gloo group; what it returns on each, as JSON has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a pool do not survive a fork
    try:
        with tempfile.TemporaryDirectory() as folder:
            children = [_fork(rank, count, work, Path(folder), group) for rank in range(count)]
            _wait(children, Path(folder))
            return [json.loads((Path(folder) / f"result{rank}").read_text()) for rank in range(count)]
    finally:
        torch.set_num_threads(threads)


def _fork(rank: int, count: int, work: Callable[[], Any], folder: Path, group: bool) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if group:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
            )
        else:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        result = work()
        (folder / f"result{rank}").write_text(json.dumps(result))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        code = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(children: list[int], folder: Path) -> None:
    left, deadline, failed = set(children), time.monotonic() + TIMEOUT, False
    while left:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.discard(child)
                failed |= status != 0
        if failed or time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            errors = "\n".join(path.read_text() for path in sorted(folder.glob("error*")))
            raise AssertionError(errors or f"ranks did not end in {TIMEOUT} s")
        time.sleep(0.005)

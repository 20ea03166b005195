"""Processes that form a gloo process group, for tests of distributed code."""

import datetime
import multiprocessing as stdlib_multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

Check = Callable[[], Any]

_PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"]


def run_in_process_group(ranks: int, checks: Callable[[], dict[str, Check]], seed: int) -> dict[str, list[Any]]:
    """Starts processes, runs every check in all of them, in order; returns what each rank returned, by name.

    ``checks`` is a function of a module, so that processes can import it. A check that raises ends all of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        # one process imports everything, and ranks are forks of it
        stdlib_multiprocessing.set_forkserver_preload([*_PRELOADED, checks.__module__])
        context = multiprocessing.start_processes(
            _run, (ranks, checks, seed, folder), nprocs=ranks, join=False, start_method="forkserver"
        )
        assert context is not None
        while not context.join():
            pass
        found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(ranks)]
    return {name: [results[name] for results in found] for name in found[0]}


def _run(rank: int, ranks: int, checks: Callable[[], dict[str, Check]], seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # raised inside torch: fully_shard on a module that returns a permuted map
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a checkpoint of one rank among several
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=2))
    found: dict[str, Any] = {}
    for name, check in checks().items():
        torch.manual_seed(seed)
        found[name] = check()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way

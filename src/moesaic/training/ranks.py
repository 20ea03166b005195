"""The ranks of a job that ``torchrun`` has started, and the decisions that they take together.

There are three process groups: one for norms and losses; one for gradients, whose order relative to norms and losses
may differ between ranks; and one on the CPU for decisions, which wait for no GPU.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from moesaic import torchrun_env
from moesaic.ops.global_batch import GlobalBatch

__all__ = ["RankError", "Ranks", "join_job", "local_device", "one_per_machine_first", "tensors_of"]

T = TypeVar("T")

_DECISION_TIMEOUT = timedelta(hours=12)
"""Timeout of decisions: the first rank may have a dataset to decode."""

_WAIT_FOR_AGENT = 60.0
"""Seconds in which the store of a torchrun on this machine must answer: it was there before its ranks."""

_dist: Any = torch.distributed  # torch types it in part


class RankError(RuntimeError):
    """Another rank of the job has failed."""


class Ranks:
    """The ranks of a job, one of which is this process; all call its methods in the same order.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.world: Any = _dist.group.WORLD
        self.rank: int = _dist.get_rank()
        self.size: int = _dist.get_world_size()
        self.device = device
        self.batch = GlobalBatch()
        """The batch whose samples are spread over the ranks."""
        self.gradients: Any = _dist.new_group()
        self.decisions: Any = _dist.new_group(backend="gloo", timeout=_DECISION_TIMEOUT)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files and reports progress."""
        return self.rank == 0

    def share(self, samples: int) -> slice:
        """Returns the part of this rank of so many samples.

        Parts differ by one sample at most; with fewer samples than ranks, some are empty.
        """
        base, extra = divmod(samples, self.size)
        first = self.rank * base + min(self.rank, extra)
        return slice(first, first + base + (self.rank < extra))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Returns, for each flag, whether it is set on any rank."""
        values = torch.tensor(flags, dtype=torch.uint8)
        _dist.all_reduce(values, _dist.ReduceOp.MAX, group=self.decisions)
        return tuple(bool(value) for value in cast("list[int]", values.tolist()))

    def run_first(self, work: Callable[[], T]) -> T | None:
        """Run something on the first rank; if it fails there, all ranks raise an error."""
        return self.run_on(work, self.is_first, "fit: the first rank has stopped, and its message says why")

    def run_on(self, work: Callable[[], T], runs_here: bool, failure: str) -> T | None:
        """Run something on those ranks where ``runs_here``; if it fails on one, others raise `RankError`."""
        result, error = None, None
        if runs_here:
            try:
                result = work()
            except BaseException as raised:
                error = raised
        (failed,) = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise RankError(failure)
        return result

    def from_first(self, content: T) -> T:
        """Returns the JSON value that the first rank has."""
        blob = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        size = torch.tensor(len(blob))
        _dist.broadcast(size, 0, group=self.decisions)
        if not self.is_first:
            blob = torch.empty(int(size), dtype=torch.uint8)
        _dist.broadcast(blob, 0, group=self.decisions)
        return json.loads(blob.numpy().tobytes())

    def tensors_from_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the CPU tensors that the first rank has."""
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        described = {name: (dtypes[name], list(tensor.shape)) for name, tensor in tensors.items()}
        received: dict[str, Tensor] = {}
        for name, (dtype, shape) in self.from_first(described).items():
            tensor = tensors[name].contiguous() if self.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
            _dist.broadcast(tensor.view(-1).view(torch.uint8), 0, group=self.decisions)
            received[name] = tensor
        return received

    def copy_first(self, model: nn.Module) -> None:
        """Give the model of every rank the weights and buffers of the first."""
        for tensor in tensors_of(model):
            value = tensor.detach().contiguous()
            _dist.broadcast(value, 0, group=self.decisions if value.device.type == "cpu" else None)
            tensor.data.copy_(value)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuse ranks that were called with other settings than the first."""
        settings = json.loads(json.dumps(settings))
        first = self.from_first(settings)
        different = [name for name in {**settings, **first} if settings.get(name) != first.get(name)]
        if self.any(bool(different))[0]:
            where = "another rank says which"
            if different:
                name = different[0]
                where = f"{name}={settings.get(name)!r} here and {first.get(name)!r} on rank 0"
            raise ValueError(
                f"fit: ranks have different settings ({where}); call fit with the same arguments on every rank"
            )


class _Job:
    """The job of this process, once it has joined it."""

    ranks: Ranks | None = None


def join_job(device: torch.device | str) -> Ranks | None:
    """Returns the ranks of the job that this process belongs to, or None if it is on its own.

    A job is started by ``torchrun``, or by a call of ``torch.distributed.init_process_group``. The process group is
    initialized here unless there is one.
    """
    if not _dist.is_available():
        return None
    device = torch.device(device)
    if not _dist.is_initialized():
        if not torchrun_env.in_job():
            return None
        _share_cores()
        torchrun_env.signal_when_agent_dies(signal.SIGKILL)  # no handler runs while a rank waits for the others
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **_store_of_restart())
        else:
            _dist.init_process_group("gloo", **_store_of_restart())
        torchrun_env.signal_when_agent_dies(signal.SIGTERM)  # with which training saves its state
    if _dist.get_world_size() == 1:
        return None
    if _Job.ranks is None or _Job.ranks.world is not _dist.group.WORLD:
        _Job.ranks = Ranks(device)
    return _Job.ranks


def _store_of_restart() -> dict[str, Any]:
    """Returns arguments of ``init_process_group``: a store for this restart of a job on one machine; else none.

    torchrun has one store for all restarts, in which ranks would find the addresses of processes that are dead. The
    number of restarts is the same for all ranks of one machine; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes
    torchrun use another store each time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torchrun_env.local_ranks() != torchrun_env.ranks():
        return {}
    _check_agent()
    store, rank, ranks = next(_dist.rendezvous("env://"))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": _dist.PrefixStore(f"restart {restarts}", store), "rank": rank, "world_size": ranks}


def _check_agent() -> None:
    """Raises an error if torchrun died before this rank asked for a signal at its death."""
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=_WAIT_FOR_AGENT).close()
    except OSError:
        raise ConnectionError(
            errno.ECONNREFUSED, "torchrun has ended before its ranks met; start the job again"
        ) from None


def _share_cores() -> None:
    """Sets the number of CPU threads: the ranks of a machine share its cores.

    Without OMP_NUM_THREADS in its environment torchrun sets it to 1, so that 1 does not mean that a user chose it.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        affinity: Any = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        torch.set_num_threads(max(cores // torchrun_env.local_ranks(), 1))


def one_per_machine_first(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """Returns what ``work`` returns; the first rank of every machine runs it before the others, and fills caches."""
    if ranks is None:
        return work()
    first = torchrun_env.local_rank() == 0
    result = ranks.run_on(work, first, "the first rank of a machine has stopped, and its message says why")
    return cast("T", result) if first else work()


def local_device(device: torch.device) -> torch.device:
    """Returns the device of this rank: GPUs are numbered by the local rank."""
    numbered = ":" in str(device)
    if device.type != "cuda" or numbered or not torchrun_env.in_job():
        return device
    return torch.device("cuda", torchrun_env.local_rank())


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Returns all parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]

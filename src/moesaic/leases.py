"""Leases: which process is at work on what, in a folder that processes and machines share.

A lease is a file with a key in its name, created so that one process succeeds (`write_new`). While the process works,
a thread rewrites the file every `BEAT_SECONDS`: its heartbeat. A lease is abandoned if its process ran on this machine
and has ended, or if an observer has seen no heartbeat for `STALE_SECONDS` by its own clock; the clocks of machines are
never compared.

An abandoned lease is never removed by the process that takes over: it creates the next generation of the key, and the
highest one counts. So of several that notice a dead process, again exactly one succeeds. A process that was suspended
and taken over notices it by the next generation (`Lease.lost`).

Leases save work, they do not guard results: on a file system that lets two processes create one file, both do the work.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self, TypeVar, cast

from moesaic.files import write_new
from moesaic.validated_json import InvalidFile, JsonLimits, decode, parse_json, read_bytes

__all__ = ["BEAT_SECONDS", "STALE_SECONDS", "Holder", "Lease", "Leases", "is_running", "make_once"]

T = TypeVar("T")

BEAT_SECONDS = 10.0
"""Seconds from one heartbeat to the next."""
STALE_SECONDS = 120.0
"""Seconds without a heartbeat after which a process on another machine counts as dead; network file systems cache for
a minute."""
POLL_SECONDS = 0.5
"""Seconds from one check of the leases of others to the next."""
_SUFFIX = ".lease"
_FILE_BYTES = 1024
"""Bytes of every lease: a heartbeat overwrites it in place."""
_LIMITS = JsonLimits(bytes=1 << 16, values=100)


@dataclass(frozen=True)
class Holder:
    """The process that has a lease, as its file describes it."""

    host: str
    pid: int
    started: float
    """Unix time of the lease, by the clock of the host; for people."""
    machine: str
    """Within which the pid counts: the boot of a machine and the pid namespace of a container."""
    process: str
    """Start time of the process, as pids are reused."""
    token: str
    """Identifies the lease."""
    beats: int = 0
    """Heartbeats so far."""

    @classmethod
    def of_this_process(cls) -> Holder:
        """The calling process, with a new token."""
        host, pid = platform.node() or "unknown", os.getpid()
        return cls(host, pid, round(time.time(), 3), _machine(), _process_stat(pid)[1], secrets.token_hex(8))

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps(asdict(self)).encode().ljust(_FILE_BYTES)


def is_running(holder: Holder) -> bool | None:
    """Returns whether the process of a lease runs; None where that cannot be known from this machine.

    >>> is_running(Holder.of_this_process())
    True
    """
    if holder.machine != _machine() or os.name != "posix":  # elsewhere signal 0 is none
        return None
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    state, start = _process_stat(holder.pid)
    return state not in ("Z", "X") and (not start or not holder.process or start == holder.process)


class Leases:
    """The leases in a folder, as one process sees them.

    Args:
        folder: of the files; made where it is not there.
        clock: seconds by which the process observes the heartbeats of others.
        wait: waits so many seconds for others.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Leases(Path(folder)).acquire("a") as lease:
    ...         Leases(Path(folder)).acquire("a") is None
    ...     Leases(Path(folder)).acquire("a") is None
    True
    False
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder = folder
        self._clock = clock
        self._wait = wait
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Content of each file, and since when it is unchanged by the clock of this process."""

    def acquire(self, key: str) -> Lease | None:
        """Returns the lease of a key, or None while another process has it."""
        generations = self._generations(key)
        if generations and not self._is_abandoned(self._path(key, generations[-1])):
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        generation = generations[-1] + 1 if generations else 0
        holder, path = Holder.of_this_process(), self._path(key, generation)
        if not write_new(path, holder.to_bytes()):
            return None
        lease = Lease(self, key, generation, path, holder)
        if lease.is_superseded():  # this process was so slow that others took over meanwhile
            lease.release()
            return None
        return lease

    def hold(self, key: str) -> Lease:
        """Returns the lease of a key, after waiting for others."""
        while (lease := self.acquire(key)) is None:
            self.wait()
        return lease

    def holder(self, key: str) -> Holder | None:
        """Returns the process that has the lease of a key, if it can be read; it may be dead."""
        generations = self._generations(key)
        return _parse(_read(self._path(key, generations[-1]))) if generations else None

    def holders(self) -> dict[str, tuple[Holder | None, float]]:
        """Returns the holders of all leases by key, None where a file is damaged, and when each file was written."""
        newest: dict[str, int] = {}
        for key, generation in self._listed():
            newest[key] = max(generation, newest.get(key, 0))
        holders: dict[str, tuple[Holder | None, float]] = {}
        for key, generation in sorted(newest.items()):
            path = self._path(key, generation)
            with suppress(OSError):  # released meanwhile
                holders[key] = _parse(_read(path)), path.stat().st_mtime
        return holders

    def has_live(self) -> bool:
        """Whether a process has a lease here that is not known to be dead."""
        return any(holder is None or is_running(holder) is not False for holder, _ in self.holders().values())

    def remove(self, keys: Collection[str]) -> None:
        """Removes what dead processes left of keys whose work is finished."""
        for key, generation in self._listed():
            if key in keys:
                with suppress(OSError):
                    self._path(key, generation).unlink()

    def wait(self) -> None:
        """Waits before the next check of the leases of others."""
        self._wait(POLL_SECONDS)

    def _path(self, key: str, generation: int) -> Path:
        return self.folder / f"{key}.{generation}{_SUFFIX}"

    def _generations(self, key: str) -> list[int]:
        return sorted(generation for name, generation in self._listed() if name == key)

    def _listed(self) -> list[tuple[str, int]]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        matches = (re.fullmatch(r"(.+)\.(\d{1,9})\.lease", name) for name in names if name.endswith(_SUFFIX))
        return [(match[1], int(match[2])) for match in matches if match]

    def _is_abandoned(self, path: Path) -> bool:
        try:
            content = _read(path)
        except FileNotFoundError:
            return False  # just released, which the next check will see
        holder = _parse(content)
        if holder is not None and is_running(holder) is False:
            return True
        now, seen = self._clock(), self._seen.get(path.name)
        if seen is None or seen[0] != content:
            self._seen[path.name] = content, now
            return False
        return now - seen[1] >= STALE_SECONDS


class Lease:
    """A lease that this process has, until it is released; a context manager."""

    def __init__(self, leases: Leases, key: str, generation: int, path: Path, holder: Holder) -> None:
        self.key = key
        self.lost = False
        """Whether another process took over, for it saw no heartbeat; the work here is no longer needed."""
        self._leases, self._generation, self._path, self._holder = leases, generation, path, holder
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat_until_released, name=f"lease of {key}", daemon=True)
        self._heart.start()

    def is_superseded(self) -> bool:
        """Whether there is a later generation."""
        return self._leases._generations(self.key)[-1:] > [self._generation]  # pyright: ignore[reportPrivateUsage]

    def beat(self) -> None:
        """Shows others that this process is alive, and notices whether it was taken for dead."""
        try:
            # by descriptor: a file that others replaced meanwhile is not touched
            descriptor = os.open(self._path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            self.lost = True
            return
        with open(descriptor, "rb+", buffering=0) as file:
            if self.is_superseded() or self._is_other(_parse(file.read(_FILE_BYTES))):
                self.lost = True
                return
            self._holder = replace(self._holder, beats=self._holder.beats + 1)
            file.seek(0)
            file.write(self._holder.to_bytes())

    def release(self) -> None:
        """Lets others have it; what earlier, dead holders left is removed too."""
        self._ended.set()
        if threading.current_thread() is not self._heart:
            self._heart.join()
        with suppress(OSError):
            if self._is_other(_parse(_read(self._path))):  # which was made after the end of a process that took over
                return
            for generation in range(self._generation, -1, -1):
                self._leases._path(self.key, generation).unlink(missing_ok=True)  # pyright: ignore[reportPrivateUsage]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_other(self, holder: Holder | None) -> bool:
        """Whether a file has the lease of another process; a damaged file may be this one's."""
        return holder is not None and holder.token != self._holder.token

    def _beat_until_released(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and not self.lost:
            with suppress(OSError):  # a network file system may be away for a moment
                self.beat()


def make_once(
    leases: Leases,
    key: str,
    find: Callable[[], T | None],
    make: Callable[[], T],
    waiting: Callable[[str], None] = lambda holder: None,
) -> T:
    """Returns what ``find`` finds, or what ``make`` makes: in one process, while others wait and then find it.

    Args:
        leases: those of the folder that has it.
        key: of its lease.
        find: returns it, or None where it is not there.
        make: makes it so that ``find`` finds it.
        waiting: is called once with the holder, "HOST, process PID", before the first wait.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "a.txt")
    ...     find = lambda: file.read_text() if file.exists() else None
    ...     make_once(Leases(Path(folder)), "a", find, lambda: "made, and " + str(file.write_text("found")))
    ...     make_once(Leases(Path(folder)), "a", find, lambda: "made")
    'made, and 5'
    'found'
    """
    reported = False
    while True:
        result = find()
        if result is not None:
            return result
        lease = leases.acquire(key)
        if lease is not None:
            with lease:
                result = find()  # it may have been finished between the two looks
                return make() if result is None else result
        holder = leases.holder(key)
        if not reported and holder is not None:
            reported = True
            waiting(f"{holder.host}, process {holder.pid}")
        leases.wait()


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, _LIMITS.bytes)
    except InvalidFile:  # no lease, but in its place
        return b""


def _parse(content: bytes) -> Holder | None:
    try:
        return cast("Holder", decode(Holder, parse_json(content, "lease", limits=_LIMITS), "lease"))
    except InvalidFile:  # being written, or damaged
        return None


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{platform.node()} {uuid.getnode():x}"


def _process_stat(pid: int) -> tuple[str, str]:
    """The state of a process and when it started, empty where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (OSError, IndexError, ValueError):
        return "", ""

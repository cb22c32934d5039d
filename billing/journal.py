"""The journal: what was accepted and may not be in the database yet. It survives ``kill -9`` of the process.

``append`` is one ``write`` to a file of this process alone. The kernel holds the bytes when it returns, so they outlive
the process, not a power failure (that is the database's part, which syncs each group commit). A record is
``length u32 | xxh3_64 u64 | payload``, little-endian; one that is torn was never acknowledged.

Each writer locks its own segment files, whose names begin with the writer's id. When all files of a writer can be
locked by someone else, it is gone: whoever finds that first imports them together and removes them. Together, because
a request that was admitted in one file may have its row in a later one. Replaying is idempotent, so a record that did
reach the database does no harm. The path of one segment: created and locked → appended to → sealed when it is full →
removed once the database holds all of it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

_HEADER = struct.Struct("<IQ")
_SUFFIX = ".journal"
#: A record is some kilobytes; a length beyond this is damage.
MAX_RECORD_BYTES = 16 * 2**20


class Segment:
    """One journal file that this process has locked."""

    def __init__(self, directory: Path, owner: str | None = None, serial: int = 0) -> None:
        name = f"{owner or uuid.uuid4().hex}-{serial:08d}"
        hidden = directory / f".{name}"
        self.path = directory / f"{name}{_SUFFIX}"
        self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(self.path)  # only now can others see it, and it is locked
        except OSError:
            os.close(self._fd)
            hidden.unlink(missing_ok=True)
            raise
        self.size_bytes = 0
        self.serial = serial

    def append(self, payload: bytes) -> None:
        """Add one record. Raises ``OSError``, and then holds nothing of it."""
        record = _HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        written = os.write(self._fd, record)
        if written != len(record):
            os.ftruncate(self._fd, self.size_bytes)
            raise OSError(f"{self.path.name}: {written} of {len(record)} bytes were written")
        self.size_bytes += written

    def read(self) -> tuple[list[bytes], int]:
        """Return what the file holds, and how many bytes of it cannot be read. Raises ``OSError``."""
        return _read(self._fd)

    def set_aside(self) -> None:
        """Keep the file, which has damage, under ``.damaged`` and let go of it. Raises ``OSError``."""
        self.path.rename(self.path.with_suffix(".damaged"))
        os.close(self._fd)

    def close(self) -> None:
        """Unlock the file and leave it for whoever opens the ledger next."""
        os.close(self._fd)

    def remove(self) -> None:
        """Remove the file: the database holds everything in it."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


@dataclass(slots=True)
class Orphan:
    """The journal of a writer that is gone."""

    paths: tuple[Path, ...]
    damaged_bytes: int = 0  # how much of what was read could not be
    _files: tuple[int, ...] = ()
    _damaged: set[Path] = field(default_factory=set)

    def payloads(self) -> Iterator[bytes]:
        """Go through its whole records in the order in which they were written, one file in memory at a time."""
        for path, fd in zip(self.paths, self._files, strict=True):
            payloads, damaged = _read(fd)
            if damaged:
                self._damaged.add(path)
                self.damaged_bytes += damaged
            yield from payloads

    def remove(self) -> None:
        """Remove its files; those with damage are kept beside under ``.damaged``."""
        for path in self.paths:
            if path in self._damaged:
                path.rename(path.with_suffix(".damaged"))
            else:
                path.unlink()


def adopt(directory: Path) -> Iterator[Orphan]:
    """Go through the journals whose writers are gone, each locked while it is yielded.

    When the caller comes back for the next, the files are removed: it must have read and stored the payloads by then
    (leaving the loop, or raising, leaves them).
    """
    owners: dict[str, list[Path]] = {}
    for path in _segments(directory, ""):
        owners.setdefault(path.name.partition("-")[0], []).append(path)
    for owner, paths in owners.items():
        with ExitStack() as locks:
            files = [_locked(path, locks) for path in paths]
            if None in files or _segments(directory, owner) != paths:
                continue  # its writer lives, or another process was faster
            orphan = Orphan(tuple(paths), _files=tuple(fd for fd in files if fd is not None))
            yield orphan
            orphan.remove()


def _segments(directory: Path, owner: str) -> list[Path]:
    return sorted(directory.glob(f"{owner}*{_SUFFIX}"))


def _locked(path: Path, locks: ExitStack) -> int | None:
    """Lock a file until the stack ends; ``None`` when someone else has it or it is gone."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    locks.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd if os.path.samestat(os.fstat(fd), path.stat()) else None
    except (BlockingIOError, FileNotFoundError):
        return None


def _read(fd: int) -> tuple[list[bytes], int]:
    """Return the whole records of a file, and how many bytes after them cannot be read."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        data = file.read()
    payloads, at = [], 0
    while at + _HEADER.size <= len(data):
        length, digest = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + length]
        if length > MAX_RECORD_BYTES or len(payload) < length or xxhash.xxh3_64_intdigest(payload) != digest:
            break
        payloads.append(payload)
        at += _HEADER.size + length
    return payloads, len(data) - at

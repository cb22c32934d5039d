"""The journal: what was accepted and may not be in the database yet. It survives ``kill -9`` of the process.

``append`` is one ``write`` to a file of this process alone. The kernel holds the bytes when it returns, so they outlive
the process, not a power failure (that is the database's part, which syncs each group commit). A record is
``length u32 | xxh3_64 u64 | payload``, little-endian; one that is torn was never acknowledged.

Each process locks its own segment files. A segment that can be locked by someone else belongs to a process that is
gone: whoever finds it first imports it and removes it. Replaying is idempotent, so a record that did reach the database
does no harm. The path of one segment: created and locked → appended to → sealed when it is full → removed once the
database holds all of it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

_HEADER = struct.Struct("<IQ")
_SUFFIX = ".journal"
#: A record is some kilobytes; a length beyond this is damage.
MAX_RECORD_BYTES = 16 * 2**20


class Segment:
    """One journal file that this process has locked."""

    def __init__(self, directory: Path) -> None:
        name = uuid.uuid4().hex
        hidden = directory / f".{name}"
        self.path = directory / f"{name}{_SUFFIX}"
        self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path)  # only now can others see it, and it is locked
        self.size_bytes = 0

    def append(self, payload: bytes) -> None:
        """Add one record. Raises ``OSError``, and then holds nothing of it."""
        record = _HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        written = os.write(self._fd, record)
        if written != len(record):
            os.ftruncate(self._fd, self.size_bytes)
            raise OSError(f"{self.path.name}: {written} of {len(record)} bytes were written")
        self.size_bytes += written

    def close(self) -> None:
        """Unlock the file and leave it for whoever opens the ledger next."""
        os.close(self._fd)

    def remove(self) -> None:
        """Remove the file: the database holds everything in it."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Orphan:
    """The journal of a process that is gone: its whole records, and how many bytes after them could not be read."""

    path: Path
    payloads: tuple[bytes, ...]
    damaged_bytes: int


def adopt(directory: Path) -> Iterator[Orphan]:
    """Go through the journals that no living process holds, each locked while it is yielded.

    When the caller comes back for the next, the file is removed: it must have stored the payloads by then (leaving the
    loop, or raising, leaves the file). One with damage is kept beside under ``.damaged``.
    """
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # another process was faster
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its process lives
            if not _is_same_file(fd, path):
                continue
            orphan = _read(fd, path)
            yield orphan
            if orphan.damaged_bytes:
                path.rename(path.with_suffix(".damaged"))
            else:
                path.unlink()
        finally:
            os.close(fd)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read(fd: int, path: Path) -> Orphan:
    with os.fdopen(os.dup(fd), "rb") as file:
        data = file.read()
    payloads, at = [], 0
    while at + _HEADER.size <= len(data):
        length, digest = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + length]
        if length > MAX_RECORD_BYTES or len(payload) < length or xxhash.xxh3_64_intdigest(payload) != digest:
            break
        payloads.append(payload)
        at += _HEADER.size + length
    return Orphan(path, tuple(payloads), len(data) - at)

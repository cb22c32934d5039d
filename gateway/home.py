"""The folder of a gateway's state, used by one gateway at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.errors import SettingsError


@contextmanager
def claimed(home: Path) -> Iterator[Path]:
    """Hold the folder, made if need be; the kernel lets go with the process. Raises ``SettingsError`` when it is held.

    Two gateways on one folder would write the same disk tiers and each other's logs.
    """
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (home / "lock").open("a+")
    except OSError as error:
        raise SettingsError(f"home = {home}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"home = {home} is in use by the gateway with process id {holder_of(home)}") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield home


def holder_of(home: Path) -> str | None:
    """Return the process id of the gateway that holds the folder now, ``None`` when nobody does."""
    try:
        lock = (home / "lock").open("r")
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip()
    return None

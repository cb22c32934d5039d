"""Taking turns among workers: a lock of the kernel's on a file, for what must be decided one after another.

Two calls to the kernel, some microseconds, where nobody else has it; the kernel gives it up with the process. What is
done within it never waits, so others wait for it no longer than that takes.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class Turn:
    """A context manager: one worker at a time is in it. Used by one thread of each. Raises ``OSError`` at once where
    the file cannot be made."""

    __slots__ = ("_file",)

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

"""Instances from a file that may change: a configuration map, a template of somebody's tool, a hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.discovery.base import DiscoveryError, Tell
from gateway.instance import InstanceSpec

Read = Callable[[Path], Mapping[str, InstanceSpec]]
"""Reads the file. Raises ``DiscoveryError`` for one that is not there, or wrong."""


class FileSource:
    """Looks at the file each ``period_s``; it is read when its bytes have changed. A wrong one changes nothing."""

    def __init__(self, path: Path, read: Read, *, period_s: float = 5.0) -> None:
        self._path, self._read, self._period_s = path, read, period_s
        self.name = f"file {path}"

    async def run(self, tell: Tell) -> None:
        """See ``Source``."""
        seen: bytes | None = None
        while True:
            try:
                now = await asyncio.to_thread(self._path.read_bytes)
            except OSError as error:
                raise DiscoveryError(f"cannot be read: {error.strerror}") from None
            if now != seen:
                tell(await asyncio.to_thread(self._read, self._path))
                seen = now
            await asyncio.sleep(self._period_s)

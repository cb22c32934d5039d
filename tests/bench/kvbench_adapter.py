"""Our host, disk and pool tiers behind the methods of a page-store benchmark's adapters.

The benchmark gives keys as 64 hex digits and pages as rows of a uint8 tensor of shape (pages, page_bytes); see its
``adapters/base.py``. Run ``bench.py --ours tests/bench/kvbench_adapter.py:Disk:.venv/bin/python`` and likewise for
``Host`` and ``Pool``. Checksums are computed here on the way in, as ``TieredStore`` does when a page leaves the device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore.codec import checksum
from kvstore.page import PageKey, PageLayout, PageMeta
from kvstore.tiers.base import Page, PageTier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier

_META = PageMeta(None, bytes(64))


class Adapter:
    """What the three have in common. ``capacity_bytes`` is rounded down to whole pages."""

    persistent = False
    own_buffer = False
    tier = ""

    def __init__(self, workdir: str, page_bytes: int, capacity_bytes: int, env: dict[str, object]) -> None:
        self.workdir, self.page_bytes, self.cap, self.env = Path(workdir), page_bytes, capacity_bytes, env
        self.layout = PageLayout("kvbench", "uint8", page_tokens=16, layers=1, kv_heads=1, head_dim=page_bytes // 32)
        self.prefix = self.layout.fingerprint

    def build(self) -> PageTier:
        """Return the tier, opened."""
        raise NotImplementedError

    def open(self) -> None:
        """Open or reopen the store, in a process that has frozen what it started with, as engines do."""
        self.store = self.build()
        gc.collect()
        gc.freeze()

    def put_batch(self, keys: Sequence[str], src: torch.Tensor) -> list[bool]:
        """Store the rows of ``src``."""
        rows = _rows(src)
        pages = [Page(key, _META, row, checksum(row)) for key, row in zip(self._keys(keys), rows, strict=True)]
        return self.store.put(pages)

    def get_batch(self, keys: Sequence[str], out: torch.Tensor) -> list[bool]:
        """Fill the rows of ``out``; say which are filled."""
        return [found is not None for found in self.store.get(self._keys(keys), _rows(out))]

    def exists_batch(self, keys: Sequence[str]) -> list[bool]:
        """Say which are there."""
        return self.store.exists(self._keys(keys))

    def flush(self) -> None:
        """Return once every put is visible: they are synchronous."""

    def files(self) -> list[str]:
        """Return the store's files, for cold reads and fault injection."""
        return [os.path.join(folder, name) for folder, _, names in os.walk(self.workdir) for name in names]

    def drop_cache(self) -> None:
        """Push the store's files out of the page cache."""
        for path in self.files():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _keys(self, keys: Sequence[str]) -> list[PageKey]:
        prefix, fromhex = self.prefix, bytes.fromhex
        return [prefix + fromhex(key) for key in keys]


class Host(Adapter):
    """``HostTier``."""

    tier = "ram"

    def build(self) -> PageTier:
        """See ``Adapter``."""
        return HostTier(self.layout, capacity_bytes=self.cap)


class Disk(Adapter):
    """``DiskTier``: direct I/O, checksum verified on every read."""

    tier, persistent = "disk", True

    def build(self) -> PageTier:
        """See ``Adapter``."""
        return DiskTier(self.layout, self.workdir / "disk", capacity_bytes=self.cap)


class Pool(Adapter):
    """``PoolTier`` over TCP, as the peers are."""

    tier, persistent = "net", True

    def build(self) -> PageTier:
        """See ``Adapter``."""
        return PoolTier(self.layout, f"redis://127.0.0.1:{self.env['redis_port']}", capacity_bytes=self.cap)


def _rows(tensor: torch.Tensor) -> list[memoryview]:
    data, width = memoryview(tensor.numpy()).cast("B"), tensor.shape[1]
    return [data[start : start + width] for start in range(0, tensor.numel(), width)]

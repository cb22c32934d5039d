"""What the process that has a disk tier open tells others of it: a small file in its folder, made anew once a second
while pages are stored. LMDB cannot be read safely beside a writer that uses no lock table, and nobody should stop an
engine to learn how full its disk is."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from kvstore.page import Namespace

STATUS_NAME = "status.json"
_MOST_NAMESPACES = 1000


class DiskStatus(msgspec.Struct, frozen=True):
    """The pages of one tier. ``namespaces``: ``None`` where pages are encrypted, and so are their names."""

    pid: int
    told_at_s: float
    layout: str  # fingerprint in hex
    pages: int
    page_bytes: int  # of one page in the tier's slots
    capacity_pages: int
    namespaces: list[tuple[str | None, str | None, int]] | None = None

    @property
    def capacity_bytes(self) -> int:
        """The most bytes of pages that the tier holds."""
        return self.capacity_pages * self.page_bytes

    @property
    def age_s(self) -> float:
        """How old it is."""
        return max(0.0, time.time() - self.told_at_s)


def namespace_counts(counts: Mapping[Namespace, int]) -> list[tuple[str | None, str | None, int]]:
    """Return the largest namespaces, as a status tells of them."""
    largest = sorted(counts.items(), key=lambda item: -item[1])[:_MOST_NAMESPACES]
    return [(namespace.salt, namespace.adapter, pages) for namespace, pages in largest]


def write_status(folder: Path, status: DiskStatus) -> None:
    """Replace the file, in one step; where that fails the old one stays, and it is only a status."""
    with suppress(OSError):
        path = folder / f"{STATUS_NAME}.new"
        path.write_bytes(msgspec.json.encode(status))
        path.chmod(0o600)
        os.replace(path, folder / STATUS_NAME)


def read_status(folder: Path) -> DiskStatus | None:
    """Return what is told, ``None`` if that is nothing."""
    try:
        return msgspec.json.decode((folder / STATUS_NAME).read_bytes(), type=DiskStatus)
    except (OSError, msgspec.DecodeError):
        return None

"""One folder, many servers' slabs, one size: which part of it this process takes.

Each fingerprint has a subfolder of its own, named after it, and every data-parallel replica one more. All slabs
together keep within the size that the folder may have: slabs that nobody has open make room, the one unused longest
first; those in use stay, and a newcomer takes what they leave.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import MediumError, MediumInUse
from kvstore.tiers.disk import lock_folder
from kvstore.tiers.slab import HEADER_BYTES, SLAB_NAME

log = logging.getLogger(__name__)


def claim_disk(folder: Path, name: str, wanted_bytes: int, folder_bytes: int) -> tuple[Path, int]:
    """Return the subfolder for ``name`` and how many bytes of pages it may hold, at most ``wanted_bytes``.

    Raises ``MediumError``.
    """
    own = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            others = sorted(_slabs(folder, but=own), key=lambda slab: slab.stat().st_mtime)
            used = sum(slab.stat().st_size for slab in others)
            for slab in others:
                if used + wanted_bytes <= folder_bytes:
                    break
                used -= _give_up(slab)
    except OSError as error:
        raise MediumError(f"cannot use {folder} for pages: {error}") from error
    room = min(wanted_bytes, folder_bytes - used)
    if room < wanted_bytes:
        log.warning("keepwarm: other servers use %d bytes of %s; %d are left for %s", used, folder, max(room, 0), name)
    if room <= HEADER_BYTES:
        raise MediumError(f"{folder} is full of other servers' pages")
    return own, room - HEADER_BYTES


def _slabs(folder: Path, *, but: Path) -> Iterator[Path]:
    for slab in folder.glob(f"*/{SLAB_NAME}"):
        if slab.parent != but:
            yield slab


def _give_up(slab: Path) -> int:
    """Remove a slab with its index unless somebody has it open; return how many bytes that freed."""
    size = slab.stat().st_size
    try:
        lock_fd = lock_folder(slab.parent)
    except MediumInUse:
        return 0
    try:
        log.warning("keepwarm: removing %s, %d bytes: pages of another model or setting", slab.parent, size)
        shutil.rmtree(slab.parent)
    finally:
        os.close(lock_fd)
    return size


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other starting servers from counting at the same time."""
    fd = os.open(folder / "claim.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

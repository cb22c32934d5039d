"""Looking at disk tiers and pools from outside, whatever layout their pages have: count, verify, clear.

A disk tier is looked at while nobody has it open; a pool may be in use meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvstore.codec import PageHeader, unseal
from kvstore.errors import MediumError, MediumInUse, RecordError
from kvstore.memory import page_rows
from kvstore.page import Namespace, PageMeta, key_fingerprint
from kvstore.page_forms import StoredReader
from kvstore.tiers.disk import lock_folder
from kvstore.tiers.disk_status import DiskStatus, read_status
from kvstore.tiers.pool import POOL_PREFIX, named_key
from kvstore.tiers.pool_client import SCAN_NAMES, PoolClient
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.slab import HEADER_BYTES, SLAB_NAME, read_slab_header
from kvstore.tiers.slab_index import INDEX_NAME, SlabIndex

if TYPE_CHECKING:
    from kvstore.encryption import KeyRing

_VALUES_AT_ONCE = 16
ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class Contents:
    """What a disk tier or a pool holds. ``bad`` pages are counted by what is wrong; they are misses when asked for."""

    where: str
    pages: int = 0
    page_bytes: int = 0  # of all good pages
    layouts: Counter[str] = field(default_factory=Counter)  # pages by fingerprint, in hex
    namespaces: Counter[Namespace] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)  # pages under keys that are not here, by the key's id
    in_use: DiskStatus | None = None  # what the process says that has it open, instead of a look inside

    def add(self, fingerprint: bytes, length: int, meta: PageMeta) -> None:
        """Count a good page."""
        self.pages += 1
        self.page_bytes += length
        self.layouts[fingerprint.hex()] += 1
        self.namespaces[meta.namespace] += 1


def disk_contents(folder: Path, *, verify: bool, keys: KeyRing | None = None) -> Contents:
    """Read a disk tier's index, and with ``verify`` every page. Raises ``MediumError``.

    Of a tier that is in use it returns what its process tells, up to a second old; with ``verify`` it raises.
    """
    contents = Contents(str(folder))
    if not (folder / SLAB_NAME).is_file():
        raise MediumError(f"there is no disk tier in {folder}")
    try:
        lock_fd = lock_folder(folder)
    except MediumInUse:
        status = None if verify else read_status(folder)
        if status is None:
            raise
        return _told(folder, status)
    try:
        with (folder / SLAB_NAME).open("rb") as slab:
            try:
                header = read_slab_header(slab.fileno())
            except RecordError as error:
                contents.bad[error.reason] += 1
                return contents
            index = SlabIndex(folder / INDEX_NAME, slots=0)
            try:
                records, refused = index.load()
            finally:
                index.close()
            contents.bad.update(refused.values())
            row = memoryview(page_rows(1, header.page_bytes)[0])
            reader = StoredReader(keys, header.page_bytes)
            for record in records:
                if record.generation != header.generation:
                    contents.bad["generation"] += 1
                    continue
                told = record.header
                stored = None
                if verify:
                    moved = os.preadv(slab.fileno(), [row], HEADER_BYTES + record.slot * len(row))
                    stored = row[: min(moved, told.length if told.form is None else told.form.length)]
                _count(contents, reader, told, stored)
    except OSError as error:
        raise MediumError(f"{folder}: {error.strerror}") from error
    finally:
        os.close(lock_fd)
    return contents


def clear_disk(folder: Path) -> None:
    """Give up everything in a disk tier. Raises ``MediumError`` (also while it is in use)."""
    if not (folder / SLAB_NAME).is_file():
        raise MediumError(f"there is no disk tier in {folder}")
    lock_fd = lock_folder(folder)
    try:
        (folder / SLAB_NAME).unlink()  # first: an index without its slab is nothing
        shutil.rmtree(folder / INDEX_NAME, ignore_errors=True)
    except OSError as error:
        raise MediumError(f"{folder}: {error.strerror}") from error
    finally:
        os.close(lock_fd)


def pool_contents(url: str, *, verify: bool, keys: KeyRing | None = None) -> Contents:
    """Read the head of every page in a pool, and with ``verify`` every page. Raises ``MediumError``."""
    with _Pool(url) as client:
        contents = Contents(url)
        reader = StoredReader(keys, 0)
        for names in _batches(client.names(POOL_PREFIX), _VALUES_AT_ONCE if verify else SCAN_NAMES):
            words = (b"0", b"-1") if verify else (b"0", b"4095")
            for name, value in zip(names, client.ask(b"GETRANGE", names, *words), strict=True):
                key = named_key(name)
                if not isinstance(value, bytes) or not value or key is None:
                    contents.bad["record"] += 1
                    continue
                try:
                    header, start = unseal(key, value, PageHeader)
                except RecordError as error:
                    contents.bad[error.reason] += 1
                    continue
                _count(contents, reader, header, memoryview(value)[start:] if verify else None)
        if not client.available:
            raise MediumError(f"{url} stopped answering")
        return contents


def clear_pool(url: str, *, fingerprint: str | None) -> int:
    """Remove the pages of one layout (by its fingerprint in hex), or all; return how many. Raises ``MediumError``."""
    with _Pool(url) as client:
        prefix = POOL_PREFIX if fingerprint is None else POOL_PREFIX + fingerprint.encode() + b":"
        removed = 0
        for names in _batches(list(client.names(prefix)), SCAN_NAMES):
            removed += sum(reply == 1 for reply in client.ask(b"UNLINK", names))
        if not client.available:
            raise MediumError(f"{url} stopped answering")
        return removed


class _Pool:
    """A client for the time of one look."""

    def __init__(self, url: str) -> None:
        self._client = PoolClient(url, PoolOptions())

    def __enter__(self) -> PoolClient:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _count(contents: Contents, reader: StoredReader, told: PageHeader, stored: memoryview | None) -> None:
    """Count a page by what its header tells, and where its bytes are given, by whether they are right."""
    try:
        header = reader.open(told)
        if stored is not None:
            reader.verify(header, stored)
    except RecordError as error:
        if error.reason == "unknown_key" and told.form is not None and told.form.envelope is not None:
            contents.hidden[told.form.envelope.key_id.hex()] += 1
        else:
            contents.bad[error.reason] += 1
        return
    contents.add(key_fingerprint(header.key), header.length, header.meta)


def _told(folder: Path, status: DiskStatus) -> Contents:
    contents = Contents(str(folder), status.pages, status.pages * status.page_bytes, in_use=status)
    contents.layouts[status.layout] = status.pages
    for salt, adapter, pages in status.namespaces or ():
        contents.namespaces[Namespace(salt, adapter)] = pages
    return contents


def _batches(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch

"""The index of a slab: which key lies in which slot, in LMDB, one sealed record a page.

LMDB is a fine index and a poor store of page-sized values, so it holds nothing but these records. Transactions are not
synced one by one (a synced one costs some 20 ms whatever its size); ``sync`` does it for a group. A lost tail is a few
misses, and a record that is ahead of its page fails the page's checksum.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import lmdb

from kvstore.codec import IndexRecord, seal, unseal
from kvstore.errors import MediumError, RecordError
from kvstore.page import PageKey

log = logging.getLogger(__name__)

INDEX_NAME = "index"
_BYTES_PER_PAGE = 4096  # address space set aside for each; records take a few hundred
_LEAST_MAP_BYTES = 1 << 30


class SlabIndex:
    """The open index. One process, one writer at a time. Methods raise ``lmdb.Error``."""

    def __init__(self, path: Path, *, slots: int) -> None:
        """Open or create it; one that LMDB cannot read is started anew (``problem`` then says so)."""
        self.problem = ""
        map_bytes = max(_LEAST_MAP_BYTES, slots * _BYTES_PER_PAGE)
        try:
            self._env = _open(path, map_bytes)
        except lmdb.Error as error:
            log.warning("the index %s is unreadable and starts empty: %s", path, error)
            self.problem = "index"
            shutil.rmtree(path)
            try:
                self._env = _open(path, map_bytes)
            except lmdb.Error as again:
                raise MediumError(f"cannot open the index {path}: {again}") from again

    def load(self) -> tuple[list[IndexRecord], dict[bytes, str]]:
        """Return the good records, oldest first, and why each other key's record was refused."""
        records, refused = [], {}
        with self._env.begin() as txn:
            for key, data in txn.cursor():
                try:
                    record, _ = unseal(key, data, IndexRecord)
                    if record.header.key != key:
                        raise RecordError("key")
                    records.append(record)
                except RecordError as error:
                    refused[bytes(key)] = error.reason
        return sorted(records, key=lambda record: record.sequence), refused

    def update(self, records: Iterable[IndexRecord], gone: Iterable[PageKey]) -> None:
        """Forget the pages that are gone and enter the new ones, all or nothing."""
        with self._env.begin(write=True) as txn:
            for key in gone:
                txn.delete(key)
            for record in records:
                txn.put(record.header.key, seal(record.header.key, record))

    def sync(self) -> None:
        """Return once every update so far is on the medium."""
        self._env.sync(True)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _open(path: Path, map_bytes: int) -> lmdb.Environment:
    # One process holds the slab's lock file, so LMDB's own lock table is not needed.
    return lmdb.open(str(path), map_size=map_bytes, sync=False, metasync=False, lock=False, mode=0o600)

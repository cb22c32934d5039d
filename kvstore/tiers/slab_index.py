"""The index of a slab: which key lies in which slot, in LMDB, one sealed record a page.

LMDB is a fine index and a poor store of page-sized values, so it holds nothing but these records. Transactions are not
synced one by one (a synced one costs some 20 ms whatever its size); ``sync`` does it for a group. A lost tail is a few
misses, and a record that is ahead of its page fails the page's checksum.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import lmdb

from kvstore.codec import IndexRecord, seal, unseal
from kvstore.errors import MediumError, RecordError
from kvstore.page import KEY_BYTES, PageKey
from kvstore.tiers.index_proof import is_readable

log = logging.getLogger(__name__)

INDEX_NAME = "index"
_BYTES_PER_PAGE = 4096  # address space set aside for each; records take a few hundred
_LEAST_MAP_BYTES = 1 << 30
_SPARE_BYTES = 4 << 20  # more than any update adds


class SlabIndex:
    """The open index. One process, one writer at a time. Methods raise ``lmdb.Error``."""

    def __init__(self, path: Path, *, slots: int) -> None:
        """Open or create it (``is_new``); one that LMDB cannot read is started anew (``problem`` then says so).

        Raises ``MediumError`` where it is not the index that is at fault: it stays as it is.
        """
        self._path, self._map_bytes = path, max(_LEAST_MAP_BYTES, slots * _BYTES_PER_PAGE)
        self._file = path / "data.mdb"
        self.problem = ""
        try:
            self.is_new = not self._file.exists() or not self._file.stat().st_size
            self._env = _open(path, self._map_bytes)
        except lmdb.Error as error:
            self._start_anew(error)
        except OSError as error:
            raise MediumError(f"cannot open the index {path}: {error}") from error

    def load(self) -> tuple[list[IndexRecord], dict[bytes, str]]:
        """Return the good records, oldest first, and why each other key's record was refused.

        An index whose pages turn out to be damaged is started anew. Raises ``MediumError``.
        """
        records: list[IndexRecord] = []
        refused: dict[bytes, str] = {}
        try:
            with self._env.begin() as txn:
                for key, data in txn.cursor():
                    if len(key) != KEY_BYTES:
                        raise lmdb.CorruptedError(f"a key of {len(key)} bytes")
                    try:
                        record, _ = unseal(key, data, IndexRecord)
                        if record.header.key != key:
                            raise RecordError("key")
                        records.append(record)
                    except RecordError as error:
                        refused[bytes(key)] = error.reason
        except lmdb.Error as error:
            self._env.close()
            self._start_anew(error)
            return [], {}
        return sorted(records, key=lambda record: record.sequence), refused

    def keep_room(self) -> None:
        """Keep the file somewhat longer than its content: one that is shorter can only have been cut, and a disk that
        is full is found out here, not by a write that was begun. Raises ``OSError``."""
        size, content = self._file.stat().st_size, _content_bytes(self._env)
        if size < content + _SPARE_BYTES // 2:
            with self._file.open("r+b") as file:
                os.posix_fallocate(file.fileno(), size, content + _SPARE_BYTES - size)

    def _start_anew(self, error: lmdb.Error) -> None:
        """Give up what cannot be read. Raises ``MediumError`` if the system failed, not the index, or fails now."""
        if (getattr(error, "code", None) or 0) > 0:  # an errno; LMDB's own codes are negative
            raise MediumError(f"cannot open the index {self._path}: {error}") from error
        log.warning("the index %s is unreadable and starts empty: %s", self._path, error)
        self.problem = "index"
        try:
            shutil.rmtree(self._path)
            self._env = _open(self._path, self._map_bytes)
        except (OSError, lmdb.Error) as again:
            raise MediumError(f"cannot start the index {self._path} anew: {again}") from again

    def update(self, records: Iterable[IndexRecord], gone: Iterable[PageKey]) -> None:
        """Forget the pages that are gone and enter the new ones, all or nothing."""
        with self._env.begin(write=True) as txn:
            for key in gone:
                txn.delete(key)
            for record in records:
                txn.put(record.header.key, seal(record.header.key, record))
        try:
            self.keep_room()
        except OSError as error:
            raise lmdb.DiskError(f"{self._file}: {error}") from error

    def sync(self) -> None:
        """Return once every update so far is on the medium."""
        self._env.sync(True)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _open(path: Path, map_bytes: int) -> lmdb.Environment:
    # One process holds the slab's lock file, so LMDB's own lock table is not needed.
    if (path / "data.mdb").exists() and not is_readable(path, map_bytes):
        raise lmdb.CorruptedError("pages of it are damaged")
    env = lmdb.open(str(path), map_size=map_bytes, sync=False, metasync=False, lock=False, mode=0o600)
    content, size = _content_bytes(env), (path / "data.mdb").stat().st_size
    if content > size:
        # LMDB reads by its map: a look past the file's end would kill the process, and one at a hole ends it, too.
        env.close()
        raise lmdb.CorruptedError(f"{size} bytes of {content}")
    return env


def _content_bytes(env: lmdb.Environment) -> int:
    return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])

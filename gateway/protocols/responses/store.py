"""Stored responses: what ``previous_response_id`` continues and what ``GET /v1/responses/{id}`` returns.

One SQLite file, so that a chain outlives a restart and is the same for every process of a gateway. A response is kept
for its tenant, who alone can reach it, with the items that it was asked with; a chain is read by walking to its
parents. Bounded by bytes, for each tenant and in all, and by age: what was used longest ago goes first.

Writing never waits: one thread does everything in the order in which it was asked, so that a response can be read from
the moment in which it was put.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

Json = dict[str, object]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  tenant TEXT NOT NULL, id TEXT NOT NULL, parent TEXT, used_ns INTEGER NOT NULL, bytes INTEGER NOT NULL,
  input BLOB NOT NULL, response BLOB NOT NULL, PRIMARY KEY (tenant, id));
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_ns, tenant, bytes);
CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant, used_ns, bytes);
CREATE TABLE IF NOT EXISTS items (
  tenant TEXT NOT NULL, id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (tenant, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_response ON items (tenant, response);
"""
_ONE = "SELECT parent, input, response FROM responses WHERE tenant = ? AND id = ?"
_BUSY_S = 5.0
_log = logging.getLogger(__name__)
_Key = TypeVar("_Key")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of what is kept."""

    tenant_bytes: int = 64 << 20
    total_bytes: int = 512 << 20
    age_s: int = 30 * 24 * 3600
    chain: int = 4096  # responses that one may continue


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, and the items that it was asked with."""

    parent: str | None
    input: Sequence[Json]
    response: Json

    def output(self) -> Sequence[Json]:
        """Return its output items."""
        output = self.response.get("output")
        return [item for item in output if isinstance(item, dict)] if isinstance(output, list) else ()


class ResponseStore:
    """Responses by tenant and id. ``close`` waits until all are written."""

    def __init__(self, path: Path, limits: StoreLimits | None = None) -> None:
        """Raises ``sqlite3.Error`` where the file cannot be used."""
        self._limits = limits or StoreLimits()
        self._db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-responses")

    def put(self, tenant: str, stored: Stored) -> None:
        """Keep a response. Returns at once."""
        self._thread.submit(self._write, tenant, stored, time.time_ns())

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        """Return a response."""
        return await self._run(self._get, tenant, response_id, None)

    async def chain(self, tenant: str, response_id: str) -> list[Stored] | None:
        """Return a response and all that it continues, oldest first; ``None`` where one of them is not there."""
        return await self._run(self._chain, tenant, response_id, None)

    async def items(self, tenant: str, ids: Sequence[str]) -> Mapping[str, Json]:
        """Return those of the items that are there, by id."""
        return await self._run(self._items, tenant, ids, {})

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; tell whether it was there."""
        return await self._run(self._delete, tenant, response_id, False)

    def close(self) -> None:
        """Write what is left and close."""
        self._thread.shutdown(wait=True)
        self._db.close()

    async def _run(self, work: Callable[[str, _Key], _Found], tenant: str, key: _Key, nothing: _Found) -> _Found:
        """Do something in the thread. What cannot be read is not there."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, tenant, key)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            _log.error("stored responses cannot be read: %s", error)
            return nothing

    # ---- in the thread

    def _write(self, tenant: str, stored: Stored, at_ns: int) -> None:
        response_id = str(stored.response["id"])
        given, answered = msgspec.json.encode(stored.input), msgspec.json.encode(stored.response)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (tenant, response_id, stored.parent, at_ns, len(given) + len(answered), given, answered),
            )
            named = [str(item["id"]) for item in (*stored.input, *stored.output()) if isinstance(item.get("id"), str)]
            self._db.executemany(
                "INSERT OR IGNORE INTO items VALUES (?, ?, ?)", [(tenant, item_id, response_id) for item_id in named]
            )
            self._evict(tenant, at_ns)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            _log.error("response %s is not kept: %s", response_id, error)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _evict(self, tenant: str, now_ns: int) -> None:
        self._forget("used_ns < ?", (now_ns - self._limits.age_s * 10**9,))
        for where, arguments, limit in (
            ("tenant = ?", (tenant,), self._limits.tenant_bytes),
            ("1", (), self._limits.total_bytes),
        ):
            total = self._db.execute(f"SELECT sum(bytes) FROM responses WHERE {where}", arguments).fetchone()[0] or 0
            if total > limit:
                oldest = self._db.execute(
                    f"SELECT tenant, id, bytes FROM responses WHERE {where} ORDER BY used_ns", arguments
                )
                gone = []
                for owner, response_id, size in oldest:
                    if total <= limit:
                        break
                    gone.append((owner, response_id))
                    total -= size
                oldest.close()
                for name in gone:
                    self._forget("tenant = ? AND id = ?", name)

    def _forget(self, where: str, arguments: Sequence[object]) -> int:
        names = self._db.execute(f"SELECT tenant, id FROM responses WHERE {where}", arguments).fetchall()
        self._db.executemany("DELETE FROM items WHERE tenant = ? AND response = ?", names)
        self._db.executemany("DELETE FROM responses WHERE tenant = ? AND id = ?", names)
        return len(names)

    def _get(self, tenant: str, response_id: str) -> Stored | None:
        with closing(self._db.execute(_ONE, (tenant, response_id))) as found:
            row = found.fetchone()
        if row is None:
            return None
        self._db.execute(
            "UPDATE responses SET used_ns = ? WHERE tenant = ? AND id = ?", (time.time_ns(), tenant, response_id)
        )
        return Stored(row[0], msgspec.json.decode(row[1]), msgspec.json.decode(row[2]))

    def _chain(self, tenant: str, response_id: str) -> list[Stored] | None:
        found: list[Stored] = []
        following: str | None = response_id
        while following is not None:
            stored = self._get(tenant, following)
            if stored is None or len(found) >= self._limits.chain:
                return None
            found.append(stored)
            following = stored.parent
        return found[::-1]

    def _items(self, tenant: str, ids: Sequence[str]) -> Mapping[str, Json]:
        homes: dict[object, str] = {}
        for item_id in set(ids):
            row = self._db.execute(
                "SELECT response FROM items WHERE tenant = ? AND id = ?", (tenant, item_id)
            ).fetchone()
            if row is not None:
                homes[item_id] = row[0]
        found: dict[str, Json] = {}
        for response_id in set(homes.values()):  # each read once, however many of its items are wanted
            stored = self._get(tenant, response_id)
            for item in (*stored.input, *stored.output()) if stored is not None else ():
                if isinstance(own := item.get("id"), str) and homes.get(own) == response_id:
                    found[own] = item
        return found

    def _delete(self, tenant: str, response_id: str) -> bool:
        return bool(self._forget("tenant = ? AND id = ?", (tenant, response_id)))

"""Budget counts in an SQLite file: for all processes of one machine.

Each call is one immediate transaction. Commits are not synced: a killed process loses nothing, a power failure may lose
the last moments of counting.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from billing.budgets import Hold, Seed, Settled
from billing.errors import BudgetStoreError

BUSY_TIMEOUT_S = 5.0
_KEEP_NS = 40 * 86_400 * 10**9  # ended windows are forgotten after this long
_TABLE = """
CREATE TABLE IF NOT EXISTS counts (
  counter TEXT NOT NULL,
  start_ns INTEGER NOT NULL,
  end_ns INTEGER NOT NULL,
  used INTEGER NOT NULL,
  alerted INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (counter, start_ns)
) STRICT, WITHOUT ROWID
"""


class SqliteBudgetStore:
    """The store. Calls run in a thread; several processes may open the same path."""

    def __init__(self, path: Path, seeds: Sequence[Seed] = ()) -> None:
        """Open or create it; ``seeds`` count only in windows that it knows nothing of. Raises ``BudgetStoreError``."""
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("BEGIN EXCLUSIVE")
            self._connection.execute(_TABLE)
            self._connection.executemany(
                "INSERT INTO counts (counter, start_ns, end_ns, used) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [(seed.counter, seed.start_ns, seed.end_ns, seed.used) for seed in seeds],
            )
            self._connection.execute("COMMIT")
            self._connection.execute("PRAGMA journal_mode = WAL")
        except (OSError, sqlite3.Error) as error:
            raise BudgetStoreError(f"budgets in {path}: {error}") from error

    async def open(self, at_ns: int) -> None:
        """See ``billing.budgets.BudgetStore``: it is open."""

    async def reserve(self, holds: Sequence[Hold], at_ns: int) -> Hold | None:
        """See ``billing.budgets.BudgetStore``."""
        return await asyncio.to_thread(self._reserve, holds, at_ns)

    async def settle(self, holds: Sequence[Hold], amounts: Sequence[int]) -> list[Settled]:
        """See ``billing.budgets.BudgetStore``."""
        return await asyncio.to_thread(self._settle, holds, amounts)

    async def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def _reserve(self, holds: Sequence[Hold], at_ns: int) -> Hold | None:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    full = self._first_full(holds)
                    if full is None:
                        self._connection.executemany(
                            "INSERT INTO counts (counter, start_ns, end_ns, used) VALUES (?, ?, ?, ?) "
                            "ON CONFLICT DO UPDATE SET used = used + excluded.used",
                            [(hold.counter, hold.start_ns, hold.end_ns, hold.amount) for hold in holds],
                        )
                        self._connection.execute("DELETE FROM counts WHERE end_ns < ?", (at_ns - _KEEP_NS,))
                    self._connection.execute("COMMIT")
                    return full
                finally:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise BudgetStoreError(f"budgets in {self._path}: {error}") from error

    def _first_full(self, holds: Sequence[Hold]) -> Hold | None:
        for hold in holds:
            if hold.budget.hard and self._used(hold) + hold.amount > hold.budget.limit:
                return hold
        return None

    def _used(self, hold: Hold) -> int:
        found = self._connection.execute(
            "SELECT used FROM counts WHERE counter = ? AND start_ns = ?", (hold.counter, hold.start_ns)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def _settle(self, holds: Sequence[Hold], amounts: Sequence[int]) -> list[Settled]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    settled = [self._settle_one(hold, amount) for hold, amount in zip(holds, amounts, strict=True)]
                    self._connection.execute("COMMIT")
                    return settled
                finally:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise BudgetStoreError(f"budgets in {self._path}: {error}") from error

    def _settle_one(self, hold: Hold, amount: int) -> Settled:
        found = self._connection.execute(
            "UPDATE counts SET used = max(used + ?, 0) WHERE counter = ? AND start_ns = ? RETURNING used, alerted",
            (amount - hold.amount, hold.counter, hold.start_ns),
        ).fetchone()
        if found is None:
            return Settled(0, None)
        used, alerted = found
        reached = max((p for p in hold.budget.alerts if 100 * used >= p * hold.budget.limit), default=0)
        if reached <= alerted:
            return Settled(used, None)
        self._connection.execute(
            "UPDATE counts SET alerted = ? WHERE counter = ? AND start_ns = ?", (reached, hold.counter, hold.start_ns)
        )
        return Settled(used, reached)

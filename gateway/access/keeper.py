"""Keeps a key ring in step with the store: a look at its version now and then, and everything anew when that changed.

So a key that is revoked stops within ``refresh_s`` (and the time of one read) in every process that can reach the
store; in the one that revoked it at once, and in its other workers as soon as they have read the store again. While the
store is away, what is known goes on to be good, or for at most ``stale_limit_s``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from billing.budgets import Budget
from gateway.access.errors import AccessError
from gateway.access.keys import Rules, stored_budgets, stored_keys, with_stored
from gateway.access.records import Snapshot
from gateway.access.store import AccessStore
from gateway.identity import Key, KeyRing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """See ``gateway.settings.AccessSettings``."""

    refresh_s: float = 0.5
    stale_limit_s: float | None = None


class KeyKeeper:
    """Reads the store into a ring. ``run`` until cancelled; ``refresh`` for those who know that something changed."""

    def __init__(
        self,
        store: AccessStore,
        ring: KeyRing,
        *,
        fixed: Sequence[Key],
        rules: Rules,
        currency: str,
        options: KeeperOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``fixed``: the keys of the settings, which the store may give aliases and limits to; ``rules``: theirs."""
        self._store, self._ring, self._fixed, self._rules = store, ring, fixed, rules
        self._currency, self._options, self._clock = currency, options or KeeperOptions(), clock
        self._version: int | None = None
        self._snapshot: Snapshot | None = None
        self._read_at = clock()
        self._is_away = False
        self._lock = asyncio.Lock()

    async def refresh(self) -> Snapshot | None:
        """Look now; return what is new. Raises nothing for a store that is away."""
        async with self._lock:
            try:
                version = await asyncio.to_thread(self._store.version)
                snapshot = None if version == self._version else await asyncio.to_thread(self._store.snapshot)
                keys = None if snapshot is None else await asyncio.to_thread(self._keys, snapshot)
            except AccessError as error:
                self._away(error)
                return None
            if snapshot is not None and keys is not None:
                self._ring.replace(*keys, is_used=snapshot.is_used)
                self._version, self._snapshot = snapshot.version, snapshot
            if self._is_away:
                self._is_away = False
                _log.warning("the store of keys is read again")
            self._read_at, self._ring.is_trusted = self._clock(), True
            return snapshot

    def budgets(self) -> list[Budget]:
        """Return every limit of money that the store held when it was last read."""
        return [] if self._snapshot is None else stored_budgets(self._snapshot, self._currency)

    def _keys(self, snapshot: Snapshot) -> tuple[list[Key], list[Key]]:
        fixed = [
            Key(key.digest, with_stored(key.caller, snapshot, self._currency), key.expires_ns) for key in self._fixed
        ]
        return stored_keys(snapshot, self._rules, self._currency), fixed

    def _away(self, error: AccessError) -> None:
        """Say it once, and stop trusting what is known after the limit."""
        if self._version is None:  # nobody knows whether there are keys: then nobody is let in without one
            self._ring.replace((), self._fixed, is_used=True)
        if not self._is_away:
            self._is_away = True
            _log.error("the store of keys cannot be read; what is known of it holds: %s", error)
        limit_s = self._options.stale_limit_s
        if self._ring.is_trusted and limit_s is not None and self._clock() - self._read_at > limit_s:
            self._ring.is_trusted = False
            _log.error("the store of keys was away for %g s: stored keys are refused until it is back", limit_s)

    async def run(self) -> None:
        """Look every ``refresh_s``."""
        while True:
            await asyncio.sleep(self._options.refresh_s)
            await self.refresh()

"""The index in a file, so that a gateway that was killed in mid-traffic is exact again soon after its next start.

An engine can repeat its last 10,000 batches only, so a gateway that comes back knows what was said before from this
file alone. It is written in passing (``radix_index.snapshot``), to a new file that takes the old one's place when it is
whole and on the medium: whenever the process dies, one whole snapshot is there, or none. What it claims is
believed, source by source, once a replay from its number on has proved that the engine is still in the same life.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from msgspec import structs

from engine_adapter.base import EventSource
from gateway.feeds import Feed
from radix_index.base import Knowledge
from radix_index.errors import SnapshotError
from radix_index.index import RadixIndex
from radix_index.snapshot import Header, Snapshot, SnapshotWriter, SourceState, apply_part

_log = logging.getLogger(__name__)

RANK_MARK = ".dp"
"""Stands between a server's name and the rank, in the names of its ranks but the first."""

_WRITE_BYTES = 1 << 20
UNCLAIMED_S = 600.0
"""For so long what was restored of an instance waits for it to come."""


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """How often, how long, and how many rows of the index are read before others have their turn."""

    interval_s: float = 15.0
    byte_limit: int = 256 << 20
    rows_at_once: int = 2048


@dataclass(slots=True)
class SnapshotStats:
    """Counters since the start. ``void``: a source was forgotten while it was written."""

    written: int = 0
    void: int = 0
    failed: int = 0
    ignored: int = 0  # files that were no whole snapshot of this version
    restored_entries: int = 0
    bytes: int = 0  # of the last one written


class IndexSnapshots:
    """Writes the index's snapshots, and restores the last one before anything else knows of the index."""

    def __init__(
        self, path: Path, index: RadixIndex, clock: Callable[[], float], options: SnapshotOptions | None = None
    ) -> None:
        self.path, self.stats = path, SnapshotStats()
        self._index, self._clock, self._options = index, clock, options or SnapshotOptions()
        self._unclaimed: dict[str, SourceState] = {}
        self._restored_at = 0.0
        self._writing = asyncio.Lock()
        self._saved: list[tuple[str, int]] | None = None

    # --- reading ---

    async def restore(self, instances: Collection[str]) -> None:
        """Let the index know what the file says of these instances, and of data-parallel ranks of theirs, as claims
        that must still be proved. Once."""
        try:
            snapshot = await asyncio.to_thread(lambda: Snapshot(self.path.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, SnapshotError) as error:
            self._ignore(error)
            return
        states = {
            state.instance: state
            for state in snapshot.header.sources
            if state.instance in instances or state.instance.rpartition(RANK_MARK)[0] in instances
        }
        for state in states.values():
            self._index.add_instance(state.instance, block_size=state.block_size, pool=state.pool)
            self._index.set_knowledge(state.instance, Knowledge.STALE)
        holders = frozenset(holder for state in states.values() for holder in state.holders)
        try:
            for part in snapshot.parts():
                apply_part(part, self._index, holders)
                self.stats.restored_entries += len(part)
                await asyncio.sleep(0)
        except SnapshotError as error:
            self._ignore(error)
            for instance in states:
                self._index.remove_instance(instance)
            return
        self._unclaimed, self._restored_at = states, self._clock()
        _log.info("the index begins with %d entries of %d sources", self.stats.restored_entries, len(states))

    def _ignore(self, error: Exception) -> None:
        self.stats.ignored += 1
        _log.warning("the index's snapshot %s is ignored: %s", self.path, error)

    def claim(self, instance: str, source: EventSource, model: str, pool: str | None) -> SourceState | None:
        """Return, once, what was restored of this source. What was restored of another of that name is forgotten."""
        state = self._unclaimed.pop(instance, None)
        if state is None or (state.endpoint, state.model, state.pool) == (source.endpoint, model, pool):
            return state
        self.disown(instance)
        return None

    def disown(self, instance: str) -> None:
        """Forget what was restored of an instance that turns out to be another, or to publish nothing."""
        self._unclaimed.pop(instance, None)
        self._index.remove_instance(instance)

    # --- writing ---

    async def run(self, feeds: Callable[[], Sequence[Feed]]) -> None:
        """Save every so often until cancelled."""
        while True:
            await asyncio.sleep(self._options.interval_s)
            await self.save(feeds)

    async def save(self, feeds: Callable[[], Sequence[Feed]]) -> bool:
        """Write a snapshot unless nothing came since the last one; return whether the file is up to date.

        While a replay is under way none is written: it would forget a source of which the last one knows.
        """
        async with self._writing:
            return await self._save(feeds)

    async def _save(self, feeds: Callable[[], Sequence[Feed]]) -> bool:
        if self._clock() - self._restored_at > UNCLAIMED_S:
            for instance in list(self._unclaimed):
                self.disown(instance)
        followed = list(feeds())
        if any(feed.is_settling for feed in followed):
            return False
        pairs = [(feed, feed.state()) for feed in followed]
        known = [(feed, state) for feed, state in pairs if state is not None]
        doubtful = {feed.pool for feed, state in pairs if state is None} - {None}
        states = [*(state for _, state in known), *self._unclaimed.values()]
        states = [_without_pool(state) if state.pool in doubtful else state for state in states]
        reached = [(state.instance, state.next_sequence) for state in states]
        if reached == self._saved:
            return True
        lives = [(feed, feed.resets) for feed, _ in known]
        fresh = self.path.with_suffix(".new")
        try:
            with await asyncio.to_thread(_create, fresh) as file:
                written = await self._write(file, states)
                if [(feed, feed.resets) for feed in feeds() if feed in dict(lives)] != lives:
                    self.stats.void += 1
                    return False
                await asyncio.to_thread(_replace, file, fresh, self.path)
        except OSError as error:
            self._fail(error)
            return False
        finally:
            await asyncio.to_thread(_discard, fresh)
        self._saved = reached
        self.stats.written += 1
        self.stats.bytes = written
        return True

    async def _write(self, file: BinaryIO, states: Sequence[SourceState]) -> int:
        """Write all records. Raises ``OSError``, also for a snapshot that grows too long."""
        writer, options = SnapshotWriter(), self._options
        holders = frozenset(holder for state in states for holder in state.holders)
        pieces, waiting, written, start = [writer.begin(Header(self._clock(), tuple(states)))], 0, 0, 0
        while start < self._index.rows:
            part = self._index.part(start, options.rows_at_once, holders)
            start += options.rows_at_once
            if len(part):
                pieces.append(writer.part(part))
                waiting += len(pieces[-1])
            if written + waiting > options.byte_limit:
                raise OSError(f"it would be longer than {options.byte_limit} bytes")
            if waiting >= _WRITE_BYTES:
                written += await asyncio.to_thread(file.write, b"".join(pieces))
                pieces, waiting = [], 0
            else:
                await asyncio.sleep(0)
        pieces.append(writer.end())
        return written + await asyncio.to_thread(file.write, b"".join(pieces))

    def _fail(self, error: OSError) -> None:
        if not self.stats.failed:
            _log.warning("the index's snapshot cannot be written to %s: %s", self.path, error.strerror or error)
        self.stats.failed += 1


def _without_pool(state: SourceState) -> SourceState:
    """Leave a pool out of which another source says what nobody will repeat: so something of it is missing."""
    return structs.replace(state, keeps_pool=False, knowledge="partial")


def _create(path: Path) -> BinaryIO:
    return path.open("wb")


def _discard(path: Path) -> None:
    """Remove what did not take the old one's place, if it can be removed; the next one overwrites it."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass


def _replace(file: BinaryIO, fresh: Path, path: Path) -> None:
    """Put a file in another's place once all of it is on the medium, and the change with it."""
    file.flush()
    os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

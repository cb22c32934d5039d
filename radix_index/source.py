"""The fold of one source's events into the index.

A source (an engine, or one data-parallel rank of it) names its blocks by hashes of its own. The fold recomputes each
block's routing hash from the event's tokens, so any hash function will do, and leaves the source's names in the index
as aliases: content hashes such as SGLang's are the same on every instance, so one alias serves all of them.

Where a source's names turn out not to be content hashes (they clash with another's), the fold goes on with aliases of
the source's own. One adapter, one set of aliases: SGLang's hashes do not cover the adapter, its removals do not name
it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import xxhash

from kvstore.block import routing_hash_array, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier
from radix_index.base import LOCAL_TIERS, HashArray, PrefixIndex
from radix_index.orphans import OrphanRoom, Orphans

_UNSIGNED = 2**64 - 1
_seed = lru_cache(maxsize=4096)(routing_seed)


@dataclass(slots=True)
class FoldStats:
    """Counters since the source was added; ``ignored`` is by reason, in events."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_removed_blocks: int = 0
    orphaned_blocks: int = 0
    clears: int = 0
    ignored: Counter[str] = field(default_factory=Counter)


class SourceFold:
    """Applies one source's batches, in the order in which they are handed over, to ``index``.

    ``instance`` is added to the index by this constructor. ``model`` is the served name, the same that requests are
    hashed under. ``block_size`` is what the engine says of itself; the size in its events wins. With ``rank``, batches
    of other data-parallel ranks are ignored. ``orphan_room`` bounds what waits for its parent over all folds that share
    it.
    """

    def __init__(
        self,
        index: PrefixIndex,
        instance: str,
        *,
        model: str,
        block_size: int,
        pool: str | None = None,
        rank: int | None = None,
        orphan_room: OrphanRoom | None = None,
    ) -> None:
        self.index, self.instance, self.model = index, instance, model
        self.block_size, self.pool, self.rank = block_size, pool, rank
        self.stats = FoldStats()
        self.orphans = Orphans(orphan_room)
        self._block_size_seen = False
        self._domains: dict[
            str | None, list[int]
        ] = {}  # adapter → name domains, the source's own before the shared one
        index.add_instance(instance, block_size=block_size, pool=pool)

    def apply(self, batch: EventBatch) -> None:
        """Fold one batch. O(tokens in it). Never raises for what a source says."""
        if self.rank is not None and batch.rank != self.rank:
            self.stats.ignored["other rank"] += 1
            return
        self.stats.batches += 1
        if batch.ignored:
            self.stats.ignored.update(batch.ignored)
        for event in batch.events:
            self._apply(event)

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._stored(event)
        elif isinstance(event, BlocksRemoved):
            self._removed(event)
        else:
            self.stats.clears += 1
            self._cleared(event)

    @property
    def adapters(self) -> tuple[tuple[str | None, bool], ...]:
        """The adapters that this source named, and whether its names of their blocks clash with another's."""
        return tuple((adapter, len(domains) > 1) for adapter, domains in self._domains.items())

    def resume(self, adapters: Iterable[tuple[str | None, bool]]) -> None:
        """The index has this source's blocks already, from a snapshot that was taken with these ``adapters``."""
        self._block_size_seen = True
        for adapter, clashes in adapters:
            domains = self._domains_of(adapter)
            if clashes and len(domains) == 1:
                domains.insert(0, self._own_domain(domains[-1]))

    def _own_domain(self, shared: int) -> int:
        return xxhash.xxh3_64_intdigest(self.instance.encode(), shared)

    def reset(self, *, pool: bool = False) -> None:
        """Forget what this source has said, its block size too; with ``pool``, also what anyone said of its pool."""
        self._cleared(TierCleared(LOCAL_TIERS))
        self._block_size_seen = False  # an engine that began anew may have another
        self.orphans.clear(Tier)
        if pool and self.pool is not None:
            self.index.cleared(self.pool, (Tier.POOL,))

    def _holder(self, tier: Tier) -> str | None:
        return self.pool if tier is Tier.POOL else self.instance

    def _stored(self, event: BlocksStored) -> None:
        holder = self._holder(event.tier)
        if holder is None:
            self.stats.ignored["pool tier without a pool"] += 1
        elif not self._accepts(event.block_size):
            self.stats.ignored["block size"] += 1
        else:
            waiting = self._store_chain(event, holder)
            while waiting:
                orphan = waiting.pop()
                if (own_holder := self._holder(orphan.tier)) is not None:
                    waiting += self._store_chain(orphan, own_holder)

    def _accepts(self, block_size: int) -> bool:
        if block_size == self.block_size:
            self._block_size_seen = True
        elif not self._block_size_seen:
            self.index.add_instance(self.instance, block_size=block_size, pool=self.pool)
            self.block_size, self._block_size_seen = block_size, True
        return block_size == self.block_size

    def _store_chain(self, event: BlocksStored, holder: str) -> list[BlocksStored]:
        """Store one chain; return the parked chains that it was the parent of."""
        domains = self._domains_of(event.adapter)
        parent = None if event.parent is None else self._resolve(event.parent, domains)
        if event.parent is not None and parent is None:
            self.stats.orphaned_blocks += len(event.hashes)
            self.orphans.park(event)
            return []
        seed = _seed(self.model, event.adapter, event.salt)
        blocks = routing_hash_array(event.token_ids, event.block_size, seed, parent=parent)
        self._store_named(holder, event.tier, blocks, _name_array(event.hashes), domains)
        self.stats.stored_blocks += len(blocks)
        return self.orphans.claim(event.adapter, event.hashes) if self.orphans else []

    def _store_named(self, holder: str, tier: Tier, blocks: HashArray, names: HashArray, domains: list[int]) -> None:
        shared = domains[-1]
        clashes = self.index.stored(holder, tier, blocks, names ^ np.uint64(shared))
        if clashes and len(domains) == 1:
            domains.insert(0, self._own_domain(shared))
        if len(domains) == 2:
            self.index.stored(holder, tier, blocks, names ^ np.uint64(domains[0]), rebind=True)

    def _domains_of(self, adapter: str | None) -> list[int]:
        found = self._domains.get(adapter)
        if found is None:
            found = self._domains[adapter] = [routing_seed(self.model, adapter)]
        return found

    def _resolve(self, name: int, domains: Sequence[int]) -> int | None:
        for domain in domains:
            if (block := self.index.resolve(self.instance, (name & _UNSIGNED) ^ domain)) is not None:
                return block
        return None

    def _removed(self, event: BlocksRemoved) -> None:
        holder = self._holder(event.tier)
        if holder is None:
            self.stats.ignored["pool tier without a pool"] += 1
            return
        names = _name_array(event.hashes)
        known = [
            self.index.removed_names(holder, event.tier, names ^ np.uint64(domain))
            for domains in self._domains.values()
            for domain in domains
        ]
        removed = max(known, default=0)
        self.stats.removed_blocks += removed
        self.stats.unknown_removed_blocks += len(event.hashes) - removed
        if self.orphans:
            self.orphans.remove(event.hashes, event.tier)

    def _cleared(self, event: TierCleared) -> None:
        local = [tier for tier in event.tiers if tier is not Tier.POOL]
        self.index.cleared(self.instance, local)
        if Tier.POOL in event.tiers and self.pool is not None:
            self.index.cleared(self.pool, (Tier.POOL,))
        self.orphans.clear(event.tiers)


def _name_array(names: Sequence[int]) -> HashArray:
    """Return the names as unsigned 64-bit numbers, whether they came signed or not."""
    if isinstance(names, array) and names.typecode == "Q":
        return np.frombuffer(names, np.uint64)
    return np.array([name & _UNSIGNED for name in names], np.uint64)

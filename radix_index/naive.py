"""The oracle: the contract of ``radix_index.base`` in plain dictionaries, written to be obviously right.

It has no budget and is slow; tests hold ``RadixIndex`` against it and benchmarks show what cleverness buys.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from kvstore.page import Tier
from radix_index.base import LOCAL_TIERS, Hashes, IndexStats, InstanceMatch, Knowledge, Matches
from radix_index.errors import UnknownHolderError

Place = tuple[str, Tier | None]  # no tier: on its way


@dataclass(slots=True)
class _Instance:
    block_size: int
    pool: str | None
    knowledge: Knowledge = Knowledge.COMPLETE
    pending: Counter[int] = field(default_factory=Counter)


class NaiveIndex:
    """See ``radix_index.base.PrefixIndex``."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}
        self._places: defaultdict[int, set[Place]] = defaultdict(set)  # block → where it is
        self._names: dict[int, int] = {}
        self._reservations: dict[int, tuple[str, set[int]]] = {}
        self._tickets = 0

    def add_instance(self, instance: str, *, block_size: int, pool: str | None = None) -> None:
        """See ``PrefixIndex.add_instance``."""
        known = self._instances.get(instance)
        if known and known.block_size != block_size:
            self.remove_instance(instance)
            known = None
        if known:
            former, known.pool = known.pool, pool
            self._drop_pool_if_unused(former)
        else:
            self._instances[instance] = _Instance(block_size, pool)

    def remove_instance(self, instance: str) -> None:
        """See ``PrefixIndex.remove_instance``."""
        known = self._instances.pop(instance, None)
        if known is None:
            return
        self._forget(instance, (*LOCAL_TIERS, None))
        self._reservations = {t: r for t, r in self._reservations.items() if r[0] != instance}
        self._drop_pool_if_unused(known.pool)

    def _drop_pool_if_unused(self, pool: str | None) -> None:
        if pool is not None and not self._is_pool(pool):
            self._forget(pool, (Tier.POOL,))

    def _is_pool(self, name: str) -> bool:
        return any(known.pool == name for known in self._instances.values())

    def _require(self, holder: str, tier: Tier) -> None:
        if not (self._is_pool(holder) if tier is Tier.POOL else holder in self._instances):
            raise UnknownHolderError(holder)

    def instances(self) -> Mapping[str, int]:
        """See ``PrefixIndex.instances``."""
        return {name: known.block_size for name, known in self._instances.items()}

    def stored(
        self, holder: str, tier: Tier, hashes: Hashes, names: Hashes | None = None, *, rebind: bool = False
    ) -> int:
        """See ``PrefixIndex.stored``."""
        self._require(holder, tier)
        for block in hashes:
            self._places[int(block)].add((holder, tier))
        if names is None:
            return 0
        return sum(self._name(int(name), int(block), rebind) for name, block in zip(names, hashes, strict=True))

    def _name(self, name: int, block: int, rebind: bool) -> bool:
        """Make ``name`` an alias of ``block``; tell whether it meant another."""
        clash = self._names.setdefault(name, block) != block
        if clash and rebind:
            self._names[name] = block
        return clash

    def removed(self, holder: str, tier: Tier, hashes: Hashes) -> None:
        """See ``PrefixIndex.removed``."""
        self._require(holder, tier)
        for block in hashes:
            self._remove(int(block), (holder, tier))

    def _remove(self, block: int, place: Place) -> None:
        places = self._places.get(block, set())
        places.discard(place)
        if not places:
            self._places.pop(block, None)
            self._names = {name: named for name, named in self._names.items() if named != block}

    def removed_names(self, holder: str, tier: Tier, names: Hashes) -> int:
        """See ``PrefixIndex.removed_names``."""
        self._require(holder, tier)
        blocks = [block for block in self.named(names) if block is not None]
        self.removed(holder, tier, blocks)
        return len(blocks)

    def resolve(self, instance: str, name: int) -> int | None:
        """See ``PrefixIndex.resolve``."""
        self._known(instance)
        block = self._names.get(name)
        return block if block is not None and self._fastest(block, instance) is not None else None

    def named(self, names: Hashes) -> list[int | None]:
        """See ``PrefixIndex.named``."""
        return [self._names.get(int(name)) for name in names]

    def cleared(self, holder: str, tiers: Iterable[Tier]) -> None:
        """See ``PrefixIndex.cleared``."""
        for tier in tiers:
            self._require(holder, tier)
            self._forget(holder, (tier,))

    def _forget(self, holder: str, tiers: Iterable[Tier | None]) -> None:
        for tier in tiers:
            for block in [block for block, places in self._places.items() if (holder, tier) in places]:
                self._remove(block, (holder, tier))

    def set_knowledge(self, instance: str, knowledge: Knowledge) -> None:
        """See ``PrefixIndex.set_knowledge``."""
        self._known(instance).knowledge = knowledge

    def knowledge(self) -> Mapping[str, Knowledge]:
        """See ``PrefixIndex.knowledge``."""
        return {name: known.knowledge for name, known in self._instances.items()}

    def _known(self, instance: str) -> _Instance:
        try:
            return self._instances[instance]
        except KeyError:
            raise UnknownHolderError(instance) from None

    def match(self, hashes: Hashes, instances: Iterable[str] | None = None) -> Matches:
        """See ``PrefixIndex.match``."""
        blocks = [int(block) for block in hashes]
        names = dict.fromkeys(self._instances if instances is None else instances)
        found = {name: self._match(blocks, name) for name in names}
        counts = [[*each.tier_blocks, each.pending_blocks] for each in found.values()]
        knowledge = {name: each.knowledge for name, each in found.items()}
        positions = {name: at for at, name in enumerate(found)}
        return Matches(positions, np.array(counts, np.int32).reshape(len(found), 5), knowledge)

    def _match(self, blocks: list[int], instance: str) -> InstanceMatch:
        tiers = list(takewhile(lambda tier: tier is not None, (self._fastest(block, instance) for block in blocks)))
        coming = takewhile(lambda block: self._is_coming(block, instance), blocks[len(tiers) :])
        device, host, disk, pool = (tiers.count(tier) for tier in Tier)
        return InstanceMatch(
            instance, (device, host, disk, pool), sum(1 for _ in coming), self._instances[instance].knowledge
        )

    def _is_coming(self, block: int, instance: str) -> bool:
        return (instance, None) in self._places.get(block, ()) or self._fastest(block, instance) is not None

    def _fastest(self, block: int, instance: str) -> Tier | None:
        places = self._places.get(block, set())
        local = [tier for tier in LOCAL_TIERS if (instance, tier) in places]
        if local:
            return local[0]
        pool = self._instances[instance].pool
        return Tier.POOL if pool is not None and (pool, Tier.POOL) in places else None

    def reserve(self, instance: str, hashes: Hashes) -> int:
        """See ``PrefixIndex.reserve``."""
        pending, blocks = self._known(instance).pending, {int(block) for block in hashes}
        pending.update(blocks)
        for block in blocks:
            self._places[block].add((instance, None))
        self._tickets += 1
        self._reservations[self._tickets] = (instance, blocks)
        return self._tickets

    def release(self, ticket: int) -> None:
        """See ``PrefixIndex.release``."""
        instance, blocks = self._reservations.pop(ticket, ("", set()))
        for block in blocks:
            pending = self._instances[instance].pending
            pending[block] -= 1
            if not pending[block]:
                self._remove(block, (instance, None))

    def stats(self) -> IndexStats:
        """See ``PrefixIndex.stats``."""
        return IndexStats(
            blocks=len(self._places),
            names=len(self._names),
            holder_sets=len({frozenset(places) for places in self._places.values()}),
            instances=len(self._instances),
            reservations=len(self._reservations),
            used_bytes=0,
            byte_budget=0,
            evicted_blocks=0,
        )

    def check(self) -> None:
        """See ``PrefixIndex.check``."""
        assert all(self._places.values()), "a block without a holder"
        assert set(self._names.values()) <= self._places.keys(), "a name without a block"

"""The contract of a prefix index, and the values that it gives out.

An index maps *routing hashes* (``kvstore.block.routing_hashes``: one unsigned 64-bit number a block, chained, seeded by
model, adapter and salt) to the holders of that block and the tiers in which each has it. A *holder* is an instance, or
for ``Tier.POOL`` a pool that several instances read from.

Two implementations keep this contract: ``index.RadixIndex`` (the product's) and ``naive.NaiveIndex`` (dictionaries, the
oracle). They are pure and synchronous; nothing here is thread-safe, the event loop owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.page import Tier

HashArray: TypeAlias = npt.NDArray[np.uint64]
Hashes: TypeAlias = Sequence[int] | HashArray

LOCAL_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers that an instance has to itself; ``Tier.POOL`` belongs to a pool."""


class Knowledge(Enum):
    """How far an instance's entries can be trusted."""

    COMPLETE = "complete"
    """Every claim is true and every block that the instance holds is known (short of the byte budget)."""

    PARTIAL = "partial"
    """Every claim is true, but the instance may hold blocks that were announced before we listened."""

    STALE = "stale"
    """Events are missing: a claim may be false. A prediction at best, never to be scored as exact."""


class InstanceMatch(msgspec.Struct, frozen=True, gc=False):
    """What one instance has of a prompt's blocks. (A struct: 64 of them are made for every request.)

    ``tier_blocks`` counts the leading contiguous run by ``Tier``, each block once, in its fastest tier.
    ``pending_blocks`` is how many blocks beyond that run requests already routed there are about to bring.
    """

    instance: str
    tier_blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    pending_blocks: int = 0
    knowledge: Knowledge = Knowledge.COMPLETE

    @property
    def blocks(self) -> int:
        """The length of the leading run that is stored, over all tiers."""
        return sum(self.tier_blocks)

    @property
    def expected_blocks(self) -> int:
        """The leading run counting what is on its way."""
        return sum(self.tier_blocks) + self.pending_blocks


class Matches(Mapping[str, InstanceMatch]):
    """The matches of one prompt by instance, as counts; each ``InstanceMatch`` is made when it is asked for.

    ``counts`` is (instances, 5) in the order of iteration: blocks by tier, then pending ones, for those who compute on
    all at once.
    """

    __slots__ = ("_knowledge", "_positions", "_rows", "counts")

    def __init__(
        self, positions: Mapping[str, int], counts: npt.NDArray[np.int32], knowledge: Mapping[str, Knowledge]
    ) -> None:
        self._positions, self.counts, self._knowledge = positions, counts, knowledge
        self._rows: list[list[int]] | None = None

    def __getitem__(self, instance: str) -> InstanceMatch:
        if self._rows is None:
            self._rows = self.counts.tolist()
        device, host, disk, pool, pending = self._rows[self._positions[instance]]
        return InstanceMatch(instance, (device, host, disk, pool), pending, self._knowledge[instance])

    def found(self) -> list[tuple[int, list[int]]]:
        """Return who has any of the blocks, or is about to: the place in the order of iteration, and its counts."""
        counts = self.counts
        return [(place, counts[place].tolist()) for place in dict.fromkeys(counts.nonzero()[0].tolist())]

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes now, and counters since the index was made."""

    blocks: int
    names: int
    holder_sets: int
    instances: int
    reservations: int
    used_bytes: int
    byte_budget: int
    evicted_blocks: int


class PrefixIndex(Protocol):
    """Which instance holds which leading blocks, in which tier.

    Costs are given in blocks of the call. Methods that name a holder raise ``UnknownHolderError`` for a stranger.
    """

    def add_instance(self, instance: str, *, block_size: int, pool: str | None = None) -> None:
        """Make an instance known, and its pool with it. Again with other values: its entries are forgotten if the
        block size changed; a new pool replaces the old one."""

    def remove_instance(self, instance: str) -> None:
        """Forget an instance, its entries and reservations; a pool goes with the last of its instances. Idempotent."""

    def instances(self) -> Mapping[str, int]:
        """Return the block size of every instance; the same object only while nothing has changed."""

    def knowledge(self) -> Mapping[str, Knowledge]:
        """Return how far the entries of every instance can be trusted; the same object only while that holds."""

    def stored(
        self, holder: str, tier: Tier, hashes: Hashes, names: Hashes | None = None, *, rebind: bool = False
    ) -> int:
        """``holder`` has these blocks in ``tier`` from now on. Idempotent. ``names[i]`` becomes an alias of
        ``hashes[i]`` for ``resolve`` and ``removed_names``; it lives as long as the block is known. A name that
        already meant another block keeps that meaning, or loses it with ``rebind``; returns how many did. O(blocks)."""

    def removed(self, holder: str, tier: Tier, hashes: Hashes) -> None:
        """``holder`` no longer has these blocks in ``tier``. Blocks that it didn't have are ignored. O(blocks)."""

    def removed_names(self, holder: str, tier: Tier, names: Hashes) -> int:
        """Like ``removed``, by alias; returns how many names were known. O(names)."""

    def resolve(self, instance: str, name: int) -> int | None:
        """Return the block that ``name`` means, if ``instance`` has it in any tier, its pool included. O(1)."""

    def named(self, names: Hashes) -> list[int | None]:
        """Return the block that each name means, whoever holds it. O(names)."""

    def cleared(self, holder: str, tiers: Iterable[Tier]) -> None:
        """``holder`` has nothing in ``tiers`` any more. O(distinct holder sets), whatever the number of blocks."""

    def set_knowledge(self, instance: str, knowledge: Knowledge) -> None:
        """Say how far the instance's entries can be trusted; ``match`` hands it on."""

    def match(self, hashes: Hashes, instances: Iterable[str] | None = None) -> Matches:
        """Return for each of ``instances`` (default: all) what it has of these blocks. O(leading blocks known)."""

    def reserve(self, instance: str, hashes: Hashes) -> int:
        """Count these blocks as on their way to ``instance`` until ``release``; returns a ticket. Blocks that it
        already has may be left out. A burst that shares a cold prefix can so follow its first request. O(blocks)."""

    def release(self, ticket: int) -> None:
        """End a reservation. Idempotent; a ticket of a removed instance is ignored. O(blocks)."""

    def stats(self) -> IndexStats:
        """Return sizes and counters."""

    def check(self) -> None:
        """Verify every internal invariant; raises ``AssertionError``. For tests. O(everything)."""

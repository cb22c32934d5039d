"""What the index knows of its sources, as bytes: for a process that comes after this one. Sans I/O.

A snapshot is taken in passing, a few thousand rows at a time, while events go on changing the index. It is not the
state of one moment, and need not be: it begins with the number of the next batch of each source, and every change of a
source's blocks after that moment is in a batch that will be replayed, which ends in the same state whether the
snapshot had seen the change or not. So it holds as long as no source is forgotten while it is taken; then it is void.

Layout: ``MAGIC``, then records of ``length (u32) | xxh3 of the payload, seeded by the record's number (u64) |
payload``, little-endian, payloads in msgpack: a ``Header``, ``Part``s, an ``End``. Nothing in a file is believed before
all of it was verified.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import xxhash

from kvstore.block import ROUTING_HASH_VERSION
from kvstore.page import Tier
from radix_index.base import HashArray, PrefixIndex
from radix_index.errors import SnapshotError

MAGIC = b"keepwarm index 1, hashes %d\n" % ROUTING_HASH_VERSION
REMEMBERED_BATCHES = 64
"""Of each source's last batches the time stamps are kept: the last one proves the life, the others tell doubles."""

_FRAME = struct.Struct("<IQ")
_TIER_BITS = [(1 << tier, tier) for tier in Tier]
T = TypeVar("T")
HolderBits: TypeAlias = tuple[str, int]  # a holder's name, and 1 << Tier for each tier in which it has a block


class SourceState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source: who it is, how far its events were folded, and how its life is known again."""

    instance: str
    endpoint: str
    model: str
    block_size: int
    pool: str | None
    next_sequence: int
    seen: tuple[tuple[int, float], ...]  # number and time stamp of the last batches
    knowledge: Literal["complete", "partial"]
    adapters: tuple[tuple[str | None, bool], ...] = ()  # and whether the source's names of it clash with others'
    keeps_pool: bool = True

    @property
    def holders(self) -> tuple[str, ...]:
        """Under which names its blocks stand in the index."""
        return (self.instance,) if self.pool is None or not self.keeps_pool else (self.instance, self.pool)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a snapshot is of."""

    made_at_s: float
    sources: tuple[SourceState, ...]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some blocks: parallel arrays (little-endian) of routing hashes, names, and positions in ``holders``."""

    blocks: bytes
    names: bytes
    sets: bytes
    holders: tuple[tuple[HolderBits, ...], ...]

    def __len__(self) -> int:
        return len(self.blocks) // 8

    def arrays(self) -> tuple[HashArray, HashArray, HashArray]:
        """Return blocks, names and positions as arrays. Raises ``SnapshotError`` where they do not fit together."""
        blocks, names = np.frombuffer(self.blocks, "<u8"), np.frombuffer(self.names, "<u8")
        sets = np.frombuffer(self.sets, "<u2")
        if not len(blocks) == len(names) == len(sets) or (len(sets) and sets.max() >= len(self.holders)):
            raise SnapshotError("a part's arrays do not fit together")
        return blocks.astype(np.uint64), names.astype(np.uint64), sets.astype(np.uint64)


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What there must be before it."""

    parts: int
    entries: int


def make_part(
    blocks: HashArray, names: HashArray, numbers: HashArray, sets: Mapping[int, Sequence[HolderBits]]
) -> Part:
    """Return a part of entries whose set ``numbers`` are among ``sets``; others are left out."""
    known = np.array(sorted(sets), np.uint64)
    kept = np.isin(numbers, known)
    positions = np.searchsorted(known, numbers[kept]).astype("<u2")
    return Part(
        blocks=blocks[kept].astype("<u8").tobytes(),
        names=names[kept].astype("<u8").tobytes(),
        sets=positions.tobytes(),
        holders=tuple(tuple(sets[number]) for number in known.tolist()),
    )


def apply_part(part: Part, index: PrefixIndex, holders: frozenset[str]) -> None:
    """Let the index know what a part says of ``holders``, which it knows already. O(entries · holders of each).

    Raises ``SnapshotError``.
    """
    blocks, names, sets = part.arrays()
    for position, members in enumerate(part.holders):
        chosen = sets == position
        if not chosen.any():
            continue
        for holder, bits in members:
            if holder in holders:
                for bit, tier in _TIER_BITS:
                    if bits & bit:
                        index.stored(holder, tier, blocks[chosen], names[chosen])


class SnapshotWriter:
    """Numbers the records of one snapshot."""

    def __init__(self) -> None:
        self._number = self._parts = self._entries = 0

    def begin(self, header: Header) -> bytes:
        """Return the first bytes."""
        return MAGIC + self._record(header)

    def part(self, part: Part) -> bytes:
        """Return the bytes of one more part."""
        self._parts += 1
        self._entries += len(part)
        return self._record(part)

    def end(self) -> bytes:
        """Return the last bytes."""
        return self._record(End(self._parts, self._entries))

    def _record(self, value: Header | Part | End) -> bytes:
        payload = msgspec.msgpack.encode(value)
        checksum = xxhash.xxh3_64_intdigest(payload, self._number)
        self._number += 1
        return _FRAME.pack(len(payload), checksum) + payload


class Snapshot:
    """A whole, verified snapshot. ``parts`` are decoded as they are asked for."""

    def __init__(self, data: bytes) -> None:
        """Verify all of it. Raises ``SnapshotError``. O(bytes)."""
        first, *parts, last = self._payloads(data)
        self.header = _decode(first, Header)
        end = _decode(last, End)
        if end.parts != len(parts):
            raise SnapshotError(f"{len(parts)} parts of {end.parts}")
        self._parts = parts

    @staticmethod
    def _payloads(data: bytes) -> Iterable[memoryview]:
        if not data.startswith(MAGIC):
            raise SnapshotError("not a snapshot of this version")
        view, offset, payloads = memoryview(data), len(MAGIC), list[memoryview]()
        while offset < len(view):
            if offset + _FRAME.size > len(view):
                raise SnapshotError("it ends within a record")
            length, checksum = _FRAME.unpack_from(view, offset)
            offset += _FRAME.size
            payload = view[offset : offset + length]
            if len(payload) < length or xxhash.xxh3_64_intdigest(payload, len(payloads)) != checksum:
                raise SnapshotError(f"record {len(payloads)} is not what was written")
            payloads.append(payload)
            offset += length
        if len(payloads) < 2:
            raise SnapshotError("it has no end")
        return payloads

    def __len__(self) -> int:
        return len(self._parts)

    def parts(self) -> Iterator[Part]:
        """Go through the parts, once. Raises ``SnapshotError``."""
        while self._parts:
            yield _decode(self._parts.pop(0), Part)


def _decode(payload: memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SnapshotError(f"a record is no {kind.__name__}: {error}") from None

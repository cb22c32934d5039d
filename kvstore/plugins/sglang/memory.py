"""SGLang's host memory as pages of ours: pieces of memory, gathered into a page and scattered from one.

A host pool tells for token slots where the bytes of their pages lie: one piece a page (MLA), two (K and V), or two for
each layer. The store keeps them as one run of bytes in that order. Memory is the engine's and valid for a call only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvstore.codec import checksum
from kvstore.memory import ByteRows, copy_bytes

Pieces = Sequence[memoryview]


class HostPool(Protocol):
    """What is used of SGLang's ``HostKVCache``."""

    page_size: int
    layout: str

    def get_page_buffer_meta(self, indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Return addresses and lengths of the pieces of these token slots' pages, page after page."""


def memory_at(address: int, length: int) -> memoryview:
    """Return memory by its address; whoever calls keeps it alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def tensor_memory(tensor: Any) -> memoryview:
    """Return a contiguous CPU tensor's bytes. Raises ``ValueError`` for any other."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a contiguous tensor in CPU memory is needed, not {tensor.device} {tuple(tensor.stride())}")
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def pages_at(pool: HostPool, host_indices: Any, count: int) -> list[list[memoryview]]:
    """Return the pieces of each of ``count`` pages. Raises ``ValueError`` when the pool tells of other ones."""
    addresses, lengths = pool.get_page_buffer_meta(host_indices)
    if not count or len(addresses) % count or len(addresses) != len(lengths):
        raise ValueError(f"{len(addresses)} pieces of memory for {count} pages")
    pieces = [memory_at(address, length) for address, length in zip(addresses, lengths, strict=True)]
    each = len(pieces) // count
    return [pieces[start : start + each] for start in range(0, len(pieces), each)]


def gather(pieces: Pieces, row: ByteRows) -> int:
    """Copy a page's pieces into one row; return the checksum of it all, taken while it is in cache."""
    at = 0
    for piece in pieces:
        copy_bytes(row[at : at + len(piece)], piece)
        at += len(piece)
    return checksum(row.data)


@dataclass(frozen=True, slots=True)
class PiecesTarget:
    """Where pages are wanted: in the engine's memory, each in pieces. Satisfies ``kvstore.fetching.Target``."""

    pages: Sequence[Pieces]

    def view(self, place: int) -> memoryview | None:
        """See ``Target``."""
        pieces = self.pages[place]
        return pieces[0] if len(pieces) == 1 else None

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        """See ``Target``."""
        for place, one in zip(places, data, strict=True):
            at, whole = 0, np.frombuffer(one, dtype=np.uint8)
            for piece in self.pages[place]:
                copy_bytes(piece, whole[at : at + len(piece)])
                at += len(piece)
        return True

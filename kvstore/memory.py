"""Memory for pages: taken once, touched once, aligned for direct I/O.

The first touch of fresh memory costs five to seven times a copy, so no tier allocates anything of page size after it
has started: it takes one area here and cuts it into rows.
"""

from __future__ import annotations

import bisect
import mmap
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import MediumError

_compiled: Callable[[Sequence[memoryview], Sequence[memoryview]], list[int]] | None
try:  # where there was a C compiler at installation
    from kvstore._pages import copy as _compiled
except ImportError:
    _compiled = None

IS_COMPILED = _compiled is not None
"""Whether copying and hashing is one pass here; without it the same comes of two."""

_LEAST_COMPILED = 241  # bytes of a page

ALIGNMENT = mmap.PAGESIZE
ByteRows = npt.NDArray[np.uint8]


class _Areas:
    """Where memory lies that was taken here."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by where they begin
        self._begins: list[int] = []

    def note(self, area: mmap.mmap, memory: ByteRows) -> None:
        """Remember an area while it is there."""
        begin = memory.ctypes.data
        self._ends[begin] = begin + memory.nbytes
        self._begins = sorted(self._ends)
        weakref.finalize(area, self._forget, begin)

    def holds(self, address: int) -> bool:
        """Tell whether an address is within an area."""
        place = bisect.bisect_right(self._begins, address) - 1
        begins = self._begins
        return 0 <= place < len(begins) and address < self._ends.get(begins[place], 0)

    def _forget(self, begin: int) -> None:
        self._ends.pop(begin, None)
        self._begins = sorted(self._ends)


_areas = _Areas()


def is_own(buffer: memoryview) -> bool:
    """Tell whether a buffer lies in memory of ``page_rows``: in large pages of memory, where the machine has some."""
    return _areas.holds(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


def page_rows(rows: int, row_bytes: int) -> ByteRows:
    """Return zeroed memory of shape (rows, row_bytes), dtype uint8, page-aligned and already resident.

    Raises ``MediumError`` when the machine refuses. Costs about one second a GB, once.
    """
    try:
        area = mmap.mmap(-1, max(rows * row_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MediumError(f"no memory for {rows} pages of {row_bytes} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: same memory, more page-table entries
    memory = np.frombuffer(area, dtype=np.uint8)
    memory.fill(0)
    _areas.note(area, memory)
    return memory[: rows * row_bytes].reshape(rows, row_bytes)


def is_aligned(buffer: memoryview) -> bool:
    """Tell whether direct I/O may use this buffer as it is."""
    return len(buffer) % ALIGNMENT == 0 and np.frombuffer(buffer, dtype=np.uint8).ctypes.data % ALIGNMENT == 0


def copy_bytes(target: memoryview | ByteRows, source: memoryview | ByteRows) -> None:
    """Copy equal-sized buffers without holding the interpreter's lock."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def copy_and_hash(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> list[int]:
    """Copy each source to the target of the same size beside it; return the xxh3_64 of each.

    Compiled it is one pass, without the interpreter's lock, and cheaper than a plain copy (0.14 CPU s/GB against 0.18).
    """
    if _compiled is not None and all(len(source) >= _LEAST_COMPILED for source in sources):
        return _compiled(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        copy_bytes(target, source)
    return [xxhash.xxh3_64_intdigest(source) for source in sources]

"""Memory for pages: taken once, touched once, aligned for direct I/O.

The first touch of fresh memory costs five to seven times a copy, so no tier allocates anything of page size after it
has started: it takes one area here and cuts it into rows.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvstore.errors import MediumError

ALIGNMENT = mmap.PAGESIZE
ByteRows = npt.NDArray[np.uint8]


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
    return memory[: rows * row_bytes].reshape(rows, row_bytes)


def is_aligned(buffer: memoryview) -> bool:
    """Tell whether direct I/O may use this buffer as it is."""
    return len(buffer) % ALIGNMENT == 0 and np.frombuffer(buffer, dtype=np.uint8).ctypes.data % ALIGNMENT == 0


def copy_bytes(target: memoryview | ByteRows, source: memoryview | ByteRows) -> None:
    """Copy equal-sized buffers without holding the interpreter's lock."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))

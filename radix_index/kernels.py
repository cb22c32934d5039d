"""The index's inner loops over flat arrays: compiled where a C compiler was at hand when keepwarm was installed, else
here.

The functions below are the definition; ``_kernels.c`` does the same to the same arrays, some fifty times faster, and
the tests hold them against each other. ``COMPILED`` tells which ones run.

A table is an array of ``uint32`` *cells* over an array of ``uint64`` *keys*, one key a row: a cell is 0 when empty,
``ERASED`` when it was used, else six bits of the key's hash over the row's number plus 1. Open addressing, linear
probing; a key's first cell is the top bits of a multiplicative hash; the six bits spare most looks at the keys of
cells passed. A table that grows has two cell arrays for a while, ``old`` being drained into ``cells`` (``old`` is
empty otherwise); erasing leaves ``ERASED`` in ``old`` and closes the hole in ``cells``. At least one cell is always
empty. A free row's key is 0 and has no cell.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I32: TypeAlias = npt.NDArray[np.int32]

EMPTY, ERASED, NO_ROW = 0, 0xFFFF_FFFF, 0xFFFF_FFFF
STORED_BITS, PENDING_BIT, TALLY_WIDTH = 15, 16, 5
ROW_BITS = 26
ROW_LIMIT = 2**ROW_BITS - 2
"""The most rows of a table."""

_ROW_MASK = 2**ROW_BITS - 1
_MULTIPLIER, _MASK = 0x9E37_79B9_7F4A_7C15, 2**64 - 1


def _home(cells: int, key: int) -> int:
    return (key * _MULTIPLIER & _MASK) >> (65 - cells.bit_length())


def _cell(key: int, row: int) -> int:
    return ((key * _MULTIPLIER & _MASK) >> 20 & 63) << ROW_BITS | row + 1


def _row(cell: int) -> int:
    row: int = (cell & _ROW_MASK) - 1
    return row


def _probe(cells: memoryview, keys: memoryview, key: int) -> int:
    """Return the index of the key's cell, or of the empty cell that ends the search."""
    last, tag = len(cells) - 1, _cell(key, -1)
    i = _home(len(cells), key)
    while (cell := cells[i]) != EMPTY and (cell == ERASED or (cell ^ tag) >> ROW_BITS or keys[_row(cell)] != key):
        i = (i + 1) & last
    return i


def _lookup(cells: memoryview, old: memoryview, keys: memoryview, key: int) -> int:
    cell: int = cells[_probe(cells, keys, key)]
    if cell == EMPTY and len(old):
        cell = old[_probe(old, keys, key)]
    return _row(cell) if cell != EMPTY else NO_ROW


def find(cells: U32, old: U32, keys: U64, query: U64, out: U32) -> int:
    """Look up ``query``: ``out[i]`` becomes its row or ``NO_ROW``. Returns how many were found. O(query)."""
    views = cells.data, old.data, keys.data
    rows = [_lookup(*views, key) for key in query.tolist()]
    out[: len(rows)] = rows
    return len(rows) - rows.count(NO_ROW)


def upsert(cells: U32, old: U32, keys: U64, query: U64, stack: U32, out: U32, used: int, stacked: int) -> int:
    """Like ``find``, but give each key that is new a row (and set ``keys`` there).

    Rows from ``used`` on come first, then ``stack[stacked - 1]`` downwards. Returns how many were taken. Raises
    ``ValueError`` when there are none left; what was inserted stays.
    """
    slots, older, names, free = cells.data, old.data, keys.data, stack[:stacked].tolist()
    before = used + stacked
    for i, key in enumerate(query.tolist()):
        row = _lookup(slots, older, names, key)
        if row == NO_ROW:
            if used < len(keys):
                row, used = used, used + 1
            elif free:
                row = free.pop()
            else:
                raise ValueError("no free row")
            at = _probe(slots, names, key)
            names[row], slots[at] = key, _cell(key, row)
        out[i] = row
    return used - len(free) - before + 2 * stacked


def erase(cells: U32, old: U32, keys: U64, rows: U32) -> None:
    """Take the keys of ``rows`` out of the table; ``keys`` itself is left to the caller. O(rows)."""
    slots, older, names = cells.data, old.data, keys.data
    for key in keys[rows].tolist():
        if slots[at := _probe(slots, names, key)] != EMPTY:
            _close_hole(slots, names, at)
        if len(older) and older[at := _probe(older, names, key)] != EMPTY:
            older[at] = ERASED


def _close_hole(cells: memoryview, keys: memoryview, hole: int) -> None:
    """Empty the cell at ``hole`` and move back every cell behind it that could no longer be found."""
    last, j = len(cells) - 1, hole
    cells[hole] = EMPTY
    while (cell := cells[j := (j + 1) & last]) != EMPTY:
        home = _home(len(cells), keys[_row(cell)])
        if (j - home) & last >= (j - hole) & last:  # its way from home to j leads over the hole
            cells[hole], cells[j], hole = cell, EMPTY, j


def migrate(cells: U32, old: U32, keys: U64, start: int, stop: int) -> None:
    """Copy ``old[start:stop]`` into ``cells``. O(stop - start)."""
    slots, names = cells.data, keys.data
    for cell in old[start:stop].tolist():
        if cell not in (EMPTY, ERASED):
            slots[_probe(slots, names, names[_row(cell)])] = cell


def match(
    cells: U32,
    old: U32,
    keys: U64,
    query: U64,
    sets: U32,
    stamps: U32,
    presence: U8,
    columns: U32,
    out: I32,
    width: int,
    stamp: int,
) -> int:
    """Count the leading blocks of ``query`` that each of ``columns`` holds.

    ``sets[row]`` numbers a row of ``presence`` (``width`` bytes, one a holder: bits 0–3 a tier each, bit 4 pending).
    ``out[c]`` gains the run's blocks by fastest tier, then in its last item the pending or stored blocks beyond the
    stored run. Rows passed get ``stamp``. Returns how many leading blocks are in the table, as far as it had to look.
    """
    views, alive, i = (cells.data, old.data, keys.data), list(range(len(columns))), 0
    for i, key in enumerate(query.tolist()):
        row = _lookup(*views, key) if alive else NO_ROW
        if row == NO_ROW:
            return i
        held = presence.reshape(-1)[sets[row] * width :][:width]
        alive = [column for column in alive if _count(out[column], int(held[columns[column]]))]
        if alive:
            stamps[row] = stamp
    return i + 1 if len(query) and alive else i


def _count(counts: I32, bits: int) -> bool:
    """Count one block for one holder; tell whether its run goes on."""
    if bits & STORED_BITS and not counts[-1]:
        counts[(bits & -bits).bit_length() - 1] += 1
    elif bits & (STORED_BITS | PENDING_BIT):
        counts[-1] += 1
    else:
        return False
    return True


def runs(values: U32, stamps: U32, rows: U32, stamp: int) -> list[tuple[int, int]]:
    """Cut ``rows`` where ``values[rows]`` changes: the value and the first position of every run. O(rows).

    Every row gets ``stamp``.
    """
    stamps[rows] = stamp
    found: list[tuple[int, int]] = []
    for i, value in enumerate(values[rows].tolist()):
        if not found or value != found[-1][0]:
            found.append((value, i))
    return found


def recode(values: U32, rows: U32, before: int, after: int) -> int:
    """Turn ``values[row]`` from ``before`` into ``after`` wherever it is ``before``; return how often. O(rows)."""
    hit = np.unique(rows[values[rows] == before])
    values[hit] = after
    return len(hit)


def bind(owners: U32, following: U32, first: U32, names: U32, rows: U32) -> int:
    """Give each of ``names`` that has no owner the row beside it, and put it at the head of that row's list.

    ``owners[name]``, ``first[row]`` and ``following[name]`` are a number plus 1, or 0 for none. Returns how many names
    belong to another row and were left there. O(names).
    """
    clashes = 0
    for name, row in zip(names.tolist(), rows.tolist(), strict=True):
        if owners[name] == 0:
            owners[name], following[name], first[row] = row + 1, first[row], name + 1
        elif owners[name] != row + 1:
            clashes += 1
    return clashes


INTERPRETED = {function.__name__: function for function in (find, upsert, erase, migrate, match, runs, recode, bind)}
"""The functions above, whatever runs."""

COMPILED = False
try:
    from radix_index import _kernels
except ImportError:
    pass
else:
    COMPILED = True
    find, upsert, erase, migrate = _kernels.find, _kernels.upsert, _kernels.erase, _kernels.migrate
    match, runs, recode, bind = _kernels.match, _kernels.runs, _kernels.recode, _kernels.bind

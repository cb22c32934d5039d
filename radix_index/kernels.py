"""The index's inner loops over flat arrays, compiled (``_kernels.c``) or, without a C compiler at installation, here.

What differs is how keys find their rows: compiled, by open addressing in flat arrays (``table.FlatTable``); else by a
dictionary (``table.DictTable``), which takes more memory and, being counted in the same byte budget, holds fewer
blocks. The loops below have a compiled twin each and do the same to the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I32: TypeAlias = npt.NDArray[np.int32]

NO_ROW = 0xFFFF_FFFF
STORED_BITS, PENDING_BIT, TALLY_WIDTH = 15, 16, 5
_GONE = TALLY_WIDTH
_PLACES = np.array([_GONE, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 4, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0])
"""Where a block counts by its bits: the fastest tier, else pending, else it ends the run."""


def tally(rows: U32, sets: U32, stamps: U32, presence: U8, columns: U32, out: I32, stamp: int) -> None:
    """Count the leading blocks of a prompt, known to be in ``rows``, that each of ``columns`` holds.

    ``sets[row]`` numbers a row of ``presence`` (one byte a holder: bits 0–3 a tier each, bit 4 pending). ``out[c]``
    gains the run's blocks by fastest tier, then in its last item the pending or stored blocks beyond the stored run.
    Rows passed get ``stamp``. O(runs of equal sets · columns).
    """
    alive, numbers = np.ones(len(columns), bool), sets[rows]
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(rows)]
    for start, stop in pairwise(starts):
        if start == stop or not alive.any():
            return
        stamps[rows[start:stop]] = stamp
        places = _PLACES[presence[numbers[start], columns] & (STORED_BITS | PENDING_BIT)]
        alive &= places != _GONE
        going = np.flatnonzero(alive)
        out[going, np.where(out[going, -1] > 0, TALLY_WIDTH - 1, places[going])] += stop - start


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


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops that have two versions."""

    runs: Callable[[U32, U32, U32, int], list[tuple[int, int]]]
    recode: Callable[[U32, U32, int, int], int]
    bind: Callable[[U32, U32, U32, U32, U32], int]


INTERPRETED = Loops(runs, recode, bind)
COMPILED: Loops | None = None
try:
    from radix_index import _kernels
except ImportError:
    pass
else:
    COMPILED = Loops(_kernels.runs, _kernels.recode, _kernels.bind)

"""A process that opens indexes with damaged pages, one after the other, and uses them as a disk tier does.

Usage: python -m tests.samples.index_opener FOLDER PATTERNS. It makes an index of a few hundred records and hands out,
for each pattern, a copy in which a seeded choice of pages is all zeros, or all noise, as after a loss of power. It
prints a line for each copy that was used to its end: how many records were good. What is printed did not kill it.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

from kvstore.codec import IndexRecord, PageHeader
from kvstore.tiers.slab_index import SlabIndex
from tests.samples.pages import strangers

RECORDS = 400
_LMDB_PAGE = 4096
_META_PAGES = 2


def records(first: int, count: int) -> list[IndexRecord]:
    """Return records of pages that nobody wrote."""
    return [
        IndexRecord(PageHeader(key, 1, 0, meta), slot, 1, slot)
        for slot, (key, meta) in enumerate(strangers(count, first_token=1000 * first), first)
    ]


def fill(folder: Path) -> None:
    """Make an index that has grown and lost records, so that some of its pages are free ones."""
    index = SlabIndex(folder, slots=RECORDS)
    index.load()
    for first in range(0, RECORDS, 40):
        added = records(first, 40)
        index.update(added, [])
        index.update([], [record.header.key for record in added[::3]])
    index.close()


def damage(file: Path, seed: int) -> None:
    """Lose some pages that the index uses."""
    chance = random.Random(seed)
    content = bytearray(file.read_bytes())
    used = [at for at in range(_META_PAGES * _LMDB_PAGE, len(content), _LMDB_PAGE) if any(content[at : at + 16])]
    for at in chance.sample(used, k=min(chance.choice((1, 1, 2, 8)), len(used))):
        content[at : at + _LMDB_PAGE] = bytes(_LMDB_PAGE) if seed % 3 else chance.randbytes(_LMDB_PAGE)
    file.write_bytes(content)


def use(folder: Path) -> int:
    """Open an index, read it, write to it; return how many of its records were good."""
    index = SlabIndex(folder, slots=RECORDS)
    good, _ = index.load()
    more = records(RECORDS, 40)
    index.update(more, [record.header.key for record in good[:40]])
    index.update([], [record.header.key for record in more])
    index.sync()
    index.close()
    return len(good)


def main() -> None:
    """See the module."""
    folder, patterns = Path(sys.argv[1]), int(sys.argv[2])
    fill(folder / "whole")
    for seed in range(patterns):
        copy = folder / "copy"
        shutil.copytree(folder / "whole", copy)
        damage(copy / "data.mdb", seed)
        print(use(copy), flush=True)
        shutil.rmtree(copy)


if __name__ == "__main__":
    main()

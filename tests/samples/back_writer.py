"""A process that dies with pages that it keeps back from its disk.

Usage: python -m tests.samples.back_writer FOLDER. It puts four pages and flushes, puts three more, and kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kvstore.page_store import PageStore, PageStoreOptions, WritePolicy
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.pages import LAYOUT, chain, page


def main() -> None:
    """Put, flush, put, die."""
    size = 64 * LAYOUT.page_bytes
    tiers = [HostTier(LAYOUT, capacity_bytes=size), DiskTier(LAYOUT, Path(sys.argv[1]), capacity_bytes=size)]
    store = PageStore(tiers, PageStoreOptions(write_policy=WritePolicy.BACK))
    pages = [page(entry) for entry in chain(7)]
    assert all(store.put(pages[:4]))
    assert store.flush(60.0)
    assert all(store.put(pages[4:]))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

"""An engine's process that dies with pages of a shared host tier in its hands.

Usage: python -m tests.samples.shared_host_client SOCKET PAGES STAGE. It puts pages up to the tier's capacity, then
kills itself at STAGE.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kvstore.deadline import Allowance
from kvstore.tiers import shared_host
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier
from tests.samples.pages import LAYOUT, buffers, page, strangers

STAGES = ("while it reads", "while it writes", "with pages pinned", "with pages lent")


def die(*_: object) -> list[int]:
    """End as the kernel ends processes that take too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def main() -> None:
    """Put, print, die."""
    path, capacity, stage = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    options = SharedHostOptions(ask_s=Allowance(60.0))
    tier = SharedHostTier(LAYOUT, path, capacity_bytes=capacity * LAYOUT.page_bytes, options=options)
    pages = [page(entry) for entry in strangers(capacity)]
    assert all(tier.put(pages[:-2]))
    keys = [each.key for each in pages[:-2]]
    copy = shared_host.copy_and_hash
    print("ready", flush=True)
    if stage == STAGES[0]:
        shared_host.copy_and_hash = die
        tier.get(keys, buffers(len(keys)))
    if stage == STAGES[1]:

        def write_half(targets: list[memoryview], sources: list[memoryview]) -> list[int]:
            copy(targets[:1], sources[:1])
            targets[1][:100] = sources[1][:100]
            return die()

        shared_host.copy_and_hash = write_half
        tier.put(pages[-2:])
    if stage == STAGES[2]:
        assert all(tier.pin(keys))
    if stage == STAGES[3]:
        assert len(tier.lend(keys).pages) == len(keys)
    die()


if __name__ == "__main__":
    main()

"""Which pages are on their way between tiers, so that one that is being read or written is waited for, not asked for.

Two requests for one page cost one read, and a page whose write has been accepted is found as soon as it lands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from kvstore.page import PageKey


class InFlight:
    """Claims on pages. Whoever claims releases; nobody waits while holding a claim, so nobody waits for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[PageKey] = set()
        self._releases = 0

    @property
    def releases(self) -> int:
        """How often claims have ended. While it stays as it is nothing has come to another tier."""
        return self._releases

    def claim(self, keys: Sequence[PageKey]) -> tuple[list[PageKey], list[PageKey]]:
        """Return the keys that are the caller's to move now, and those that somebody is moving already."""
        with self._changed:
            mine = [key for key in dict.fromkeys(keys) if key not in self._claimed]
            own = set(mine)
            self._claimed |= own
            return mine, [key for key in keys if key not in own]

    def release(self, keys: Iterable[PageKey]) -> None:
        """The caller is done with these, whatever came of it."""
        with self._changed:
            self._claimed.difference_update(keys)
            self._releases += 1
            self._changed.notify_all()

    def claims(self, key: PageKey) -> bool:
        """Tell whether somebody is moving a page."""
        with self._changed:
            return key in self._claimed

    def wait(self, keys: Sequence[PageKey], deadline_s: float) -> None:
        """Return once nobody moves any of these, or at the deadline, of ``time.monotonic``."""
        with self._changed:
            while not self._claimed.isdisjoint(keys):
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    return

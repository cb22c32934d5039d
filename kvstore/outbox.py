"""Changes leave a tier in the order in which they happened, and outside its lock.

``append`` is called while the tier's lock is held, ``drain`` after it was let go. Whoever drains delivers what is
there, also what another thread appended; so delivery order is append order, and a subscriber may call back into the
tier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

ChangeT = TypeVar("ChangeT")


class Outbox(Generic[ChangeT]):
    """Values waiting for one subscriber at a time."""

    def __init__(self) -> None:
        self._waiting: deque[ChangeT] = deque()
        self._delivering = threading.Lock()

    def append(self, change: ChangeT) -> None:
        """Queue a change; the caller holds the lock that orders them."""
        self._waiting.append(change)

    def drain(self, deliver: Callable[[ChangeT], None]) -> None:
        """Deliver what waits, unless somebody is at it already: then it delivers this too. Never blocks."""
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    deliver(self._waiting.popleft())
            finally:
                self._delivering.release()

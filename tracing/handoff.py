"""Handing items from an event loop to one thread, many at a time.

A thread that is woken for every item competes with the loop for the interpreter, at the price of more than the work
itself. So handing over is an append; the thread is woken by the first item and then lets others gather for a moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

_POLL_S = 0.005

Item = TypeVar("Item")


class Handoff(Generic[Item]):
    """A bounded queue with one taker. Thread-safe."""

    def __init__(self, limit: int, gather_s: float) -> None:
        """``limit`` items at most wait; the taker lets them gather for ``gather_s``."""
        self._limit, self._gather_s = limit, gather_s
        self._items: deque[Item] = deque()
        self._filled, self._hurried = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> bool:
        """Hand an item over; ``False`` where there is no room. Returns at once."""
        if len(self._items) >= self._limit:
            return False
        self._items.append(item)
        if not self._filled.is_set():
            self._filled.set()
        return True

    def put_within(self, item: Item, timeout_s: float) -> bool:
        """Hand an item over, waiting for room; whether there was any in time. Not for an event loop."""
        deadline = time.monotonic() + timeout_s
        while not self.put(item):
            self.hurry()
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def hurry(self) -> None:
        """Have the taker take what there is now."""
        self._hurried.set()

    def take(self, most: int) -> list[Item]:
        """Wait for an item, let others gather, and take up to ``most``. For the one taker."""
        items = self._items
        if not items:
            self._filled.wait()
        if len(items) < most:
            self._hurried.wait(self._gather_s)
        taken = [items.popleft() for _ in range(min(most, len(items)))]
        if not items:
            self._filled.clear()
            self._hurried.clear()
            if items:  # one came in between
                self._filled.set()
        return taken

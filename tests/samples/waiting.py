"""Waiting for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Ask again until it holds."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)

"""How long a call may take: a fixed part, and what its bytes take at the least rate that is worth waiting for."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allowance:
    """The time of one call. A silent medium costs ``fixed_s``; one slower than ``least_bytes_per_s`` is late."""

    fixed_s: float = 0.1
    least_bytes_per_s: int = 100_000_000

    def seconds(self, moved_bytes: int = 0) -> float:
        """Return how long a call that moves so many bytes may take."""
        return self.fixed_s + moved_bytes / self.least_bytes_per_s

    def deadline_s(self, moved_bytes: int = 0) -> float:
        """Return when a call that begins now must end, in the time of ``time.monotonic``."""
        return time.monotonic() + self.seconds(moved_bytes)

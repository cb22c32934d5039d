"""A worker's place among the others: its number, its lines to them, and where they leave what counts for all."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One of ``count`` workers. ``port`` is the one they share; ``metrics`` the folder of their counters."""

    number: int
    count: int
    port: int
    metrics: Path
    lines: Mapping[int, socket.socket] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether it does what one must do for all, such as writing the index's snapshots."""
        return self.number == 0

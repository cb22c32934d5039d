"""Token ids and hashes as arrays, and ids in two pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.uint32]
Hashes: TypeAlias = npt.NDArray[np.uint64]
HashKey: TypeAlias = tuple[int, int]
"""A chain's seed and its block size."""


@dataclass(frozen=True, slots=True)
class JoinedIds:
    """Ids in two pieces: those that a memo holds, and the ones behind them. To join long ones takes time."""

    known: Ids
    new: Ids

    def __len__(self) -> int:
        return len(self.known) + len(self.new)

    def behind(self, start: int) -> Ids:
        """Return the ids from ``start`` on."""
        if start >= len(self.known):
            return self.new[start - len(self.known) :]
        return np.concatenate([self.known[start:], self.new])

    def up_to(self, end: int) -> JoinedIds:
        """Return the first ``end`` ids, which include all that are known."""
        return JoinedIds(self.known, self.new[: end - len(self.known)])

"""Instances that are away: how long they will be, which clients are told who find nobody, and when to look. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

SHORTEST_S, LONGEST_S = 1, 60
"""What a client is told at least and at most."""

_THERE, _AWAY, _LEAST = (0.8, 1.0), (0.5, 0.8), 0.05


class Absence:
    """The times at which one instance comes and goes, in seconds of one clock that never runs back.

    A restart is expected to take as long as the last one did. One that takes longer, or the first of all, is expected
    to take as long again as it has taken so far: the longer something has failed, the longer it tends to go on failing.
    """

    def __init__(self, now_s: float) -> None:
        """Nobody has found it yet."""
        self._since_s: float | None = now_s
        self._last_s = 0.0

    def left(self, now_s: float) -> None:
        """It is away from now on, if it was there."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def returned(self, now_s: float) -> None:
        """It is there."""
        if self._since_s is not None:
            self._last_s = now_s - self._since_s
            self._since_s = None

    def rest_s(self, now_s: float) -> float:
        """Return for how long it is expected to be away; 0 while it is there."""
        if self._since_s is None:
            return 0.0
        away_s = now_s - self._since_s
        return self._last_s - away_s if away_s < self._last_s else away_s


def retry_after_s(rests_s: Iterable[float], lag_s: float) -> int:
    """Return what a client is told who needs one of several instances: whole seconds, between the two limits.

    ``rests_s``: for how long each is expected to be away. ``lag_s``: how long it takes until a return is noticed.
    """
    soonest_s = min(rests_s, default=math.inf)
    return math.ceil(min(max(soonest_s + lag_s, SHORTEST_S), LONGEST_S))


def until_probe_s(interval_s: float, since_s: float, chance: random.Random, *, is_there: bool) -> float:
    """Return how long to wait until the next probe, where the last one began ``since_s`` ago and is over.

    Sooner where an instance is away, since what it says of itself must be read within the same interval, too; there a
    probe that was silent until its end has been the wait already. A little by chance: many gateways may probe it.
    """
    if is_there:
        return interval_s * chance.uniform(*_THERE)
    return max(interval_s * chance.uniform(*_AWAY) - since_s, interval_s * _LEAST)

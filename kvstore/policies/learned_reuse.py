"""Learned reuse: the page goes first that is least worth its room, by what pages like it did before.

Pages are alike when they were wanted equally often (never, once, twice, more), and age is counted in arrivals since a
page was last wanted. For each kind and age the policy estimates, from every page that it has seen in a while (those it
gave up are remembered by name, so that giving up does not hide what would have come), how likely the page is wanted
soon. Its worth is the best rate at which keeping it from now on can pay: the largest, over all times that one might go
on keeping it, of the chance of a hit by then over the room it would take until then (Gittins' index). So a page whose
run answers in half a minute may outlive a younger one that nobody comes back to, which no order by recency can say.

Until it has learned anything it is LRU.

Sources: Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, for the rate
and the kinds; Gittins, "Bandit processes and dynamic allocation indices", 1979, for the best of all horizons.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import msgspec

from kvstore.policies.lineage import PrefixPolicy
from kvstore.policy import KeyT

_KINDS = 4  # by hits: 0, 1, 2, more
_EDGES = [0.0, *(2 ** (step / 2) for step in range(1, 52))]  # of the ages' buckets: half an octave each
_BUCKETS = len(_EDGES)
_REMEMBERED = 4  # names of pages given up, for each page present
_FIRST_LESSON, _LESSON = 250, 2000  # hits between two estimates, at first and in the end
_KEEP = 0.9  # of what was counted, each time that it is learned from: the far past fades
_PRIOR_HITS, _PRIOR_PAGES = 0.02, 1.0


class _Seen(msgspec.Struct, gc=False):
    """A page, present or remembered. ``wanted_at`` is in arrivals."""

    kind: int
    wanted_at: int


class LearnedReuse(PrefixPolicy[KeyT]):
    """See the module. About 10 µs a page, and some 300 bytes; the estimate takes 5 ms every two thousand pages."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[KeyT, _Seen] = {}
        self._present = 0
        self._gone: OrderedDict[KeyT, None] = OrderedDict()  # oldest first
        self._resting: list[OrderedDict[KeyT, None]] = [OrderedDict() for _ in range(_KINDS)]  # least recent first
        self._now = 0
        self._hits = 0  # since the last estimate
        self._lesson = _FIRST_LESSON
        self._has_learned = False
        self._wanted = _table()  # hits by kind and age
        self._ended = _table()  # pages forgotten at that age without another hit
        self._worth = _table()

    def _arrive(self, key: KeyT, parent: KeyT | None) -> None:
        self._now += 1
        self._present += 1
        if key in self._gone:
            del self._gone[key]
            self._want(self._seen[key])
        else:
            self._seen[key] = _Seen(0, self._now)

    def _hit(self, key: KeyT) -> None:
        self._want(self._seen[key])

    def _enter(self, key: KeyT) -> None:
        self._resting[self._seen[key].kind][key] = None

    def _leave(self, key: KeyT) -> None:
        self._pass_over(key)

    def _pass_over(self, key: KeyT) -> None:
        self._resting[self._seen[key].kind].pop(key, None)

    def _depart(self, key: KeyT) -> None:
        self._pass_over(key)
        self._present -= 1
        self._gone[key] = None
        while len(self._gone) > _REMEMBERED * max(1, self._present):
            seen = self._seen.pop(self._gone.popitem(last=False)[0])
            self._ended[seen.kind][self._bucket(seen)] += 1

    def _candidate(self) -> KeyT | None:
        least, found = float("inf"), None
        for kind, resting in enumerate(self._resting):
            for key in _ends(resting):
                seen = self._seen[key]
                worth = self._worth[kind][self._bucket(seen)] if self._has_learned else seen.wanted_at
                if worth < least:
                    least, found = worth, key
        return found

    def _want(self, seen: _Seen) -> None:
        self._wanted[seen.kind][self._bucket(seen)] += 1
        seen.kind = min(seen.kind + 1, _KINDS - 1)
        seen.wanted_at = self._now
        self._hits += 1
        if self._hits >= self._lesson:
            self._hits, self._lesson = 0, min(2 * self._lesson, _LESSON)
            self._has_learned = True
            self._learn()

    def _bucket(self, seen: _Seen) -> int:
        return bisect_right(_EDGES, self._now - seen.wanted_at) - 1

    def _learn(self) -> None:
        """Estimate again what pages of each kind and age are worth. O(pages + kinds · ages²)."""
        waiting = _table()
        for seen in self._seen.values():
            waiting[seen.kind][self._bucket(seen)] += 1
        for kind in range(_KINDS):
            wanted, ended = self._wanted[kind], self._ended[kind]
            unknown = [a + b for a, b in zip(ended, waiting[kind], strict=True)]  # left the age in no known way
            self._worth[kind] = _worths(_hazards(wanted, unknown))
            self._wanted[kind] = [_KEEP * count for count in wanted]
            self._ended[kind] = [_KEEP * count for count in ended]


def _ends(resting: OrderedDict[KeyT, None]) -> tuple[KeyT, ...]:
    """Return the oldest and the youngest: which is worth less depends on how late pages of their kind return."""
    return (next(iter(resting)), next(reversed(resting))) if resting else ()


def _table() -> list[list[float]]:
    return [[0.0] * _BUCKETS for _ in range(_KINDS)]


def _hazards(wanted: list[float], unknown: list[float]) -> list[float]:
    """Return for each age the chance that a page that reaches it is wanted there (the actuarial estimate)."""
    hazards, reach = [0.0] * _BUCKETS, 0.0
    for age in reversed(range(_BUCKETS)):
        reach += wanted[age] + unknown[age]
        hazards[age] = min(1.0, (wanted[age] + _PRIOR_HITS) / (reach - unknown[age] / 2 + _PRIOR_PAGES))
    return hazards


def _worths(hazards: list[float]) -> list[float]:
    """Return for each age the best rate of hits for room that keeping a page from then on can have."""
    worths = [0.0] * _BUCKETS
    for start in range(_BUCKETS):
        left, hits, room, best = 1.0, 0.0, 0.0, 0.0
        for age in range(start, _BUCKETS - 1):
            hits += left * hazards[age]
            room += left * (_EDGES[age + 1] - _EDGES[age]) * (1 - hazards[age] / 2)
            left *= 1 - hazards[age]
            best = max(best, hits / room)
        worths[start] = best
    return worths

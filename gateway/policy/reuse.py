"""How likely it is that what a request pushes out would have been used again, and when a run's next step will come.

Two things are watched. For each instance the *frontier*: the age, since its last use, of what its cache gives up now,
read from the last blocks of the prompts that ended there and their fate in the index. For all of them together the gaps
between one step of a run and the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

_SMOOTHING = 0.1
_LOOKS, _LOOKS_SLOWER = 4, 1
TIERS = range(4)
_MOST_TIPS = 4096
_FIRST_AGE_S, _AGE_RATIO, _AGES = 1.0, 1.5, 24
_BOUNDS_S = [_FIRST_AGE_S * _AGE_RATIO**at for at in range(_AGES)]
_DECAY_EVERY, _DECAY = 4096.0, 0.5
_REMEMBERED_STEPS = 64


class Frontier:
    """The idle ages at which one instance gives up blocks, by tier; infinite while it gives up nothing.

    ``ages_s[t]``: the age of what now leaves tier ``t`` and all that are faster; where it goes to no slower one, it
    leaves them all at once.
    """

    __slots__ = ("_tips", "ages_s")

    def __init__(self) -> None:
        self._tips: tuple[OrderedDict[Hashable, tuple[int, float]], ...] = tuple(OrderedDict() for _ in TIERS)
        self.ages_s = [math.inf] * len(TIERS)  # by run, below: its last block, when it was last used

    def used(self, run: Hashable, tip: int, now_s: float, tier_of: Callable[[int], int | None]) -> None:
        """A step of ``run`` ended here, whose prompt's last full block is ``tip``. Looks after a few of the oldest.

        ``tier_of``: the fastest tier that has a block, ``None`` for none.
        """
        for tips in self._tips:
            tips.pop(run, None)
        for tier, tips in enumerate(self._tips):
            for _ in range(_LOOKS if tier == 0 else _LOOKS_SLOWER):
                if not tips or not self._look(tier, tips, now_s, tier_of):
                    break
        self._tips[0][run] = tip, now_s

    def _look(
        self,
        tier: int,
        tips: OrderedDict[Hashable, tuple[int, float]],
        now_s: float,
        tier_of: Callable[[int], int | None],
    ) -> bool:
        """See what became of the oldest; tell whether the next may have gone too."""
        run, (block, used_s) = next(iter(tips.items()))
        age_s, found = now_s - used_s, tier_of(block)
        if found is not None and found <= tier:
            if age_s <= 2 * self.ages_s[tier] and len(tips) < _MOST_TIPS:
                return False  # nothing younger can be gone
        else:
            lost_to = len(TIERS) if found is None else found
            for left in range(tier, lost_to):
                known_s = self.ages_s[left]
                self.ages_s[left] = age_s if known_s == math.inf else known_s + _SMOOTHING * (age_s - known_s)
            if lost_to < len(TIERS):
                self._tips[lost_to][run] = block, used_s
        del tips[run]  # gone, or kept alive by others, which tells nothing
        return True


class ReuseOdds:
    """What becomes of a run that is idle, from the gaps between the steps of all runs. O(age classes) a question."""

    __slots__ = ("_due", "_due_at", "_gaps", "_steps")

    def __init__(self) -> None:
        self._steps = 0.0
        self._gaps = [0.0] * (_AGES + 1)  # by age class
        self._due: list[float] = []
        self._due_at = (0.0, 0.0)

    def ended(self) -> None:
        """A step ended: another may follow, or never."""
        self._steps += 1
        if self._steps >= _DECAY_EVERY:
            self._steps *= _DECAY
            self._gaps = [count * _DECAY for count in self._gaps]

    def came_back(self, gap_s: float) -> None:
        """The next step of a run came so long after the one before had ended."""
        self._gaps[_age_class(gap_s)] += 1

    def after(self, age_s: float) -> float:
        """Return the odds, 0 … 1, that something idle for ``age_s`` is used again."""
        if age_s == math.inf:
            return 0.0
        at = _age_class(age_s)
        older = sum(self._gaps[at:])
        return (older + 1.0) / (self._idle_at(at, older) + 2.0)

    def within(self, age_s: float, horizon_s: float) -> float:
        """Return the odds that something idle for ``age_s`` is used within ``horizon_s``."""
        at, to = _age_class(age_s), _age_class(age_s + horizon_s)
        left = self._idle_at(at, sum(self._gaps[at:])) + 2.0
        if to > at:
            return (sum(self._gaps[at:to]) + 0.5 * self._gaps[to]) / left
        least = _FIRST_AGE_S * _AGE_RATIO ** (at - 1) if at else 0.0
        width = _FIRST_AGE_S * _AGE_RATIO**at - least
        return self._gaps[at] * min(horizon_s / width, 1.0) / left

    def due(self, ages_s: Iterable[float], horizon_s: float) -> float:
        """Return how many of the runs that have been idle for so long are expected to step within ``horizon_s``.

        O(runs), a fraction of a µs each; the odds behind it are some tens of steps old at most.
        """
        if not self._due or self._due_at[1] != horizon_s or abs(self._steps - self._due_at[0]) >= _REMEMBERED_STEPS:
            middles = [0.5 * (low + high) for low, high in zip([0.0, *_BOUNDS_S], _BOUNDS_S, strict=False)]
            self._due = [self.within(age_s, horizon_s) for age_s in (*middles, _BOUNDS_S[-1] * 2)]
            self._due_at = self._steps, horizon_s
        due = self._due
        return sum([due[bisect_left(_BOUNDS_S, age_s)] for age_s in ages_s])

    def further_steps(self) -> float:
        """Return how many steps follow a step, on average."""
        again = sum(self._gaps) / (self._steps + 2.0)
        return again / (1 - again) if again < 1 else self._steps

    def _idle_at(self, at: int, older: float) -> float:
        """Return the steps after which nothing had come by this age class."""
        return max(self._steps - sum(self._gaps[:at]), older)


def _age_class(age_s: float) -> int:
    return bisect_left(_BOUNDS_S, age_s)

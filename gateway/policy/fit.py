"""A line through what was seen: seconds as a sum of terms, learned one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

_FORGETTING = 0.99
_PRIOR_SPREAD = 25.0
_TRUSTED_AFTER = 20
_FASTEST = 0.2


class LinearFit:
    """Recursive least squares of the *relative* error, with forgetting; O(terms squared), some 10 µs a sample.

    ``weights``: where learning starts; a term that starts at w is believed to about its own size, one that starts at 0
    to about ``scales[i]``. Since errors are relative to what was seen, an answer that was stalled teaches next to
    nothing; one that was impossibly fast counts as a fifth of what was expected. What is not seen any more is never
    believed less than in the beginning, and nothing takes less than no time: a term that would falls to none, and the
    others take over what it explained, as far as they went together in what was seen.
    """

    __slots__ = ("_first", "_spread", "samples", "weights")

    def __init__(self, weights: Sequence[float], scales: Sequence[float]) -> None:
        self.weights = list(weights)
        self.samples = 0
        sizes = [max(weight, scale) for weight, scale in zip(weights, scales, strict=True)]
        self._first = [_PRIOR_SPREAD * size * size for size in sizes]
        self._spread = [
            [first if row == column else 0.0 for column in range(len(sizes))] for row, first in enumerate(self._first)
        ]

    def learn(self, terms: Sequence[float], seconds: float) -> None:
        """Take in that these terms took so many seconds (above 0)."""
        expected = sum([weight * term for weight, term in zip(self.weights, terms, strict=True)])
        if self.samples >= _TRUSTED_AFTER:
            seconds = max(seconds, _FASTEST * expected)
        x, places = [term / seconds for term in terms], range(len(terms))
        gains = [sum([row[at] * x[at] for at in places]) for row in self._spread]
        whole = _FORGETTING + sum([x[at] * gains[at] for at in places])
        step = (1.0 - expected / seconds) / whole
        weights = [weight + gain * step for weight, gain in zip(self.weights, gains, strict=True)]
        spread = [
            [(row[at] - gain * gains[at] / whole) / _FORGETTING for at in places]
            for row, gain in zip(self._spread, gains, strict=True)
        ]
        for at, first in enumerate(self._first):
            if spread[at][at] > first:
                shrink = sqrt(first / spread[at][at])
                for other in places:
                    spread[at][other] *= shrink
                    spread[other][at] *= shrink
        self._spread = spread
        self.weights = _none_below_zero(weights, spread)
        self.samples += 1


def _none_below_zero(weights: list[float], spread: list[list[float]]) -> list[float]:
    """Return the weights that fit about as well with no term below 0. Cut off alone, one that is traded for another
    leaves that other to grow without end."""
    for _ in weights:
        least = min(weights)
        if least >= 0:
            return weights
        at = weights.index(least)
        along, own = spread[at], spread[at][at]
        if own > 0:  # the others as they are where this one is known to be 0, and so is what is left of their spread
            weights = [weight - least / own * each for weight, each in zip(weights, along, strict=True)]
            spread = [
                [each - row[at] / own * with_it for each, with_it in zip(row, along, strict=True)] for row in spread
            ]
            spread[at] = [0.0] * len(weights)
        weights[at] = 0.0
    return [max(weight, 0.0) for weight in weights]

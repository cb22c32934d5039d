"""The limits at the door: a request takes what it may come to before an engine sees it, and settles after it.

A caller without limits never comes here. One with limits gets, with every answer, how much is left of the tightest one
of each kind, in the words of both big APIs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.errors import OverLimit
from gateway.limits.rules import WINDOW_S, CountStore, CountsUnavailable, LimitRule, Outage, Resource, Take, Taken

_SECOND_NS = 10**9


class Limited(OverLimit):
    """A request that found no room: what was found tells the client what is left and when to come again."""

    def __init__(self, message: str, found: Sequence[Taken], retry_after_s: int | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.found = tuple(found)


@dataclass(slots=True)
class LimitStatus:
    """Counters since the start."""

    admitted: int = 0
    denied: int = 0
    denied_by_outage: int = 0
    admitted_in_outage: int = 0  # uncounted


class Passage:
    """What one request took, until it is settled."""

    __slots__ = ("_counts", "taken")

    def __init__(self, counts: CountStore, taken: Sequence[Taken]) -> None:
        self._counts, self.taken = counts, taken

    def settle(self, tokens: int | None) -> None:
        """The request is over and came to so many tokens (``None``: nobody knows; what was taken stands). Once.

        It stays a request of its minute, whatever became of it: else one that is refused costs nothing to repeat.
        """
        taken, self.taken = self.taken, ()
        if taken:
            self._counts.settle(taken, [_came_to(one, tokens) for one in taken])


class Limiter:
    """Lets requests pass, or not."""

    def __init__(self, counts: CountStore, clock: Callable[[], int] = time.time_ns) -> None:
        self._counts, self._clock = counts, clock
        self.status = LimitStatus()

    async def enter(self, rules: Sequence[LimitRule], tokens: int) -> Passage:
        """Take what a request may come to under all of these rules. Raises ``Limited``, and then nothing is taken."""
        takes = [Take(rule, tokens if rule.resource is Resource.TOKENS else 1) for rule in rules]
        try:
            verdict = await self._counts.reserve(takes)
        except CountsUnavailable as error:
            return self._without_counts(rules, error)
        if verdict.full is not None:
            self.status.denied += 1
            raise self._refusal(verdict.full)
        self.status.admitted += 1
        return Passage(self._counts, verdict.taken)

    def _without_counts(self, rules: Sequence[LimitRule], error: CountsUnavailable) -> Passage:
        if any(rule.on_outage is Outage.DENY for rule in rules):
            self.status.denied_by_outage += 1
            raise Limited("the limits of this key cannot be judged now", (), 1) from error
        self.status.admitted_in_outage += 1
        return Passage(self._counts, ())

    def _refusal(self, full: Taken) -> Limited:
        rule, asked = full.take.rule, full.take.amount
        if asked > rule.amount and rule.amount:
            why = f"the request may come to {asked} tokens, over the limit of {rule.told()}"
            return Limited(why, [full], None)
        wait_s = 1
        if rule.resource is not Resource.CONCURRENCY:
            wait_s = max(math.ceil((full.start_ns + WINDOW_S * _SECOND_NS - self._clock()) / _SECOND_NS), 1)
        return Limited(f"over the limit of {rule.told()}", [full], wait_s)


def _came_to(one: Taken, tokens: int | None) -> int:
    match one.take.rule.resource:
        case Resource.CONCURRENCY:
            return 0
        case Resource.TOKENS if tokens is not None:
            return tokens
        case _:
            return one.take.amount


def limit_headers(taken: Iterable[Taken], now_ns: int) -> dict[str, str]:
    """Return what is left, of the tightest limit of each kind, as OpenAI's and as Anthropic's clients read it."""
    headers: dict[str, str] = {}
    tightest: dict[Resource, Taken] = {}
    for one in taken:
        known = tightest.get(one.take.rule.resource)
        if known is None or one.left < known.left:
            tightest[one.take.rule.resource] = one
    for resource, one in tightest.items():
        if resource is Resource.CONCURRENCY:
            headers["x-ratelimit-limit-concurrency"] = str(one.take.rule.amount)
            headers["x-ratelimit-remaining-concurrency"] = str(one.left)
            continue
        kind, end_ns = resource.value, one.start_ns + WINDOW_S * _SECOND_NS
        left_ms = max((end_ns - now_ns) // 10**6, 0)
        headers[f"x-ratelimit-limit-{kind}"] = str(one.take.rule.amount)
        headers[f"x-ratelimit-remaining-{kind}"] = str(one.left)
        headers[f"x-ratelimit-reset-{kind}"] = f"{left_ms // 1000}s" if left_ms >= 1000 else f"{left_ms}ms"
        headers[f"anthropic-ratelimit-{kind}-limit"] = str(one.take.rule.amount)
        headers[f"anthropic-ratelimit-{kind}-remaining"] = str(one.left)
        reset = datetime.fromtimestamp(end_ns // _SECOND_NS, UTC)
        headers[f"anthropic-ratelimit-{kind}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers

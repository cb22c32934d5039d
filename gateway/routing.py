"""Where a request goes: values in, values out. No clock, no I/O, no state but what the caller hands in.

The score is the expected time to the first token on each instance::

    (prompt tokens queued there + my uncached tokens) / its prefill rate + Σ tier: my hit tokens in it / its fetch rate

Hits in the device tier cost nothing; hits in slower tiers cost their fetch; what requests already routed there are
about to bring is queued with them and is not computed again for me. The smallest score wins, ties go by a seeded random
choice, so that equal instances share a burst. What is routed is reserved at once (``Load``), so that the next decision
sees it, and is released exactly once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from kvstore.page import Tier
from tracing.record import Candidate, Decision

NO_HITS = (0, 0, 0, 0)
_NANO = 1_000_000_000
_LEARNING_WEIGHT = 0.2
_LEAST_LEARNED_TOKENS = 64
"""Below this many computed tokens an answer's delay is overhead and says nothing about the prefill rate."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast an instance computes a prompt and reads pages of each tier, in tokens a second."""

    prefill: float
    host: float
    disk: float
    pool: float

    def fetch_s(self, hit_tokens: Sequence[int]) -> float:
        """Return the time to bring these hits (by tier) to the device."""
        return hit_tokens[Tier.HOST] / self.host + hit_tokens[Tier.DISK] / self.disk + hit_tokens[Tier.POOL] / self.pool

    def learned(self, computed_tokens: int, elapsed_s: float) -> Rates:
        """Return the rates after an answer whose first token came ``elapsed_s`` after it was sent.

        ``computed_tokens``: what the instance had to compute for it, its queue at that time included.
        """
        if computed_tokens < _LEAST_LEARNED_TOKENS or elapsed_s <= 0:
            return self
        sample = computed_tokens / elapsed_s
        return replace(self, prefill=self.prefill * (1 - _LEARNING_WEIGHT) + sample * _LEARNING_WEIGHT)


class InstanceView(
    msgspec.Struct, frozen=True, gc=False
):  # made for every instance at every decision: a dataclass costs tenfold
    """One instance at the moment of a decision. ``hit_tokens``: device, host, disk, pool.

    ``pending_tokens``: what requests already routed there bring beyond these hits, computed or told of any moment now.
    It moves the choice and is never claimed as a hit.
    """

    instance: str
    hit_tokens: tuple[int, int, int, int]
    queued_tokens: int
    running: int
    rates: Rates
    healthy: bool = True
    exact: bool = True
    pending_tokens: int = 0
    matched_blocks: int = 0  # of the prompt, found there by the index, whatever they are good for

    def fresh_tokens(self, prompt_tokens: int) -> int:
        """Return what would have to be computed there for this prompt alone."""
        return max(prompt_tokens - sum(self.hit_tokens) - self.pending_tokens, 0)

    def expected_ttft_s(self, prompt_tokens: int) -> float:
        """Return the score: see the module."""
        computed = self.queued_tokens + self.fresh_tokens(prompt_tokens)
        fetch_s = 0.0 if self.hit_tokens == NO_HITS else self.rates.fetch_s(self.hit_tokens)
        return computed / self.rates.prefill + fetch_s


class Policy(Protocol):
    """One way to choose."""

    @property
    def name(self) -> str:
        """What the settings call it."""

    def scores(self, views: Sequence[InstanceView], expected_ttft_s: Sequence[float]) -> Sequence[float]:
        """Return one number for each view, whose expected time to the first token is given; the smallest wins."""


class ExpectedTtft:
    """The smallest expected time to the first token."""

    name = "expected-ttft"

    def scores(self, views: Sequence[InstanceView], expected_ttft_s: Sequence[float]) -> Sequence[float]:
        """Return seconds."""
        return expected_ttft_s


class FewestRequests:
    """The fewest requests that are not answered yet."""

    name = "fewest-requests"

    def scores(self, views: Sequence[InstanceView], expected_ttft_s: Sequence[float]) -> Sequence[float]:
        """Return counts."""
        return [float(view.running) for view in views]


class RoundRobin:
    """In turn, by name; the only policy that remembers something."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def scores(self, views: Sequence[InstanceView], expected_ttft_s: Sequence[float]) -> Sequence[float]:
        """Return distances from whose turn it is."""
        order = sorted(range(len(views)), key=lambda position: views[position].instance)
        start, self._turn = self._turn % len(views), self._turn + 1
        distance = {position: (place - start) % len(views) for place, position in enumerate(order)}
        return [float(distance[position]) for position in range(len(views))]


POLICIES = {policy.name: policy for policy in (ExpectedTtft, FewestRequests, RoundRobin)}


def decide(
    views: Sequence[InstanceView],
    prompt_tokens: int,
    policy: Policy,
    chance: random.Random,
    *,
    hashed: bool = True,
    without: frozenset[str] = frozenset(),
) -> Decision | None:
    """Choose among the healthy views that are not in ``without``; ``None`` when there is none. O(instances).

    ``hashed``: the hits come from the prompt's token ids. The decision shows every view, unhealthy ones included.
    """
    expected = [view.expected_ttft_s(prompt_tokens) for view in views]
    able = [at for at, view in enumerate(views) if view.healthy and view.instance not in without]
    if not able:
        return None
    scores = policy.scores([views[at] for at in able], [expected[at] for at in able])
    least = min(scores)
    chosen = views[chance.choice([at for at, score in zip(able, scores, strict=True) if score == least])]
    return Decision(
        policy=policy.name,
        instance=chosen.instance,
        candidates=tuple(map(_candidate, views, expected)),
        predicted_hit_tokens=sum(chosen.hit_tokens),
        exact=hashed and chosen.exact,
    )


def usable_hits(tier_blocks: Sequence[int], block_size: int, prompt_tokens: int) -> tuple[int, int, int, int]:
    """Return hit tokens by tier for the leading run of matched blocks.

    An engine computes at least the last prompt token, so a match of the whole prompt loses its last block; slower tiers
    lose first, since nobody knows the order of tiers along the run.
    """
    if not any(tier_blocks):
        return NO_HITS
    left = max(prompt_tokens - 1, 0) // block_size
    taken = []
    for blocks in tier_blocks:
        taken.append(min(blocks, left) * block_size)
        left -= min(blocks, left)
    device, host, disk, pool = taken
    return device, host, disk, pool


def _candidate(view: InstanceView, expected_ttft_s: float) -> Candidate:
    return Candidate(view.instance, view.hit_tokens, view.queued_tokens, int(expected_ttft_s * _NANO), view.healthy)


class Load:
    """What was routed to one instance and is not answered yet. ``queued_tokens``: prompts with no first token yet."""

    __slots__ = ("on_idle", "queued_tokens", "running")

    def __init__(self, on_idle: Callable[[], None] | None = None) -> None:
        self.on_idle = on_idle
        self.queued_tokens = 0
        self.running = 0

    def reserve(self, uncached_tokens: int) -> Reservation:
        """Count a request from now on."""
        self.running += 1
        self.queued_tokens += uncached_tokens
        return Reservation(self, uncached_tokens, ahead_tokens=self.queued_tokens)


class Reservation:
    """One request's share of a load. ``ahead_tokens``: what was queued when it joined, itself included."""

    __slots__ = ("_load", "_queued", "_running", "ahead_tokens")

    def __init__(self, load: Load, queued: int, ahead_tokens: int) -> None:
        self._load, self._queued, self._running = load, queued, True
        self.ahead_tokens = ahead_tokens

    def answered(self) -> None:
        """The first token came: the prompt no longer queues. Idempotent."""
        self._load.queued_tokens -= self._queued
        self._queued = 0

    def release(self) -> None:
        """The request is over. Idempotent."""
        self.answered()
        if self._running:
            self._running = False
            self._load.running -= 1
            if not self._load.running and self._load.on_idle is not None:
                self._load.on_idle()


def total(loads: Iterable[Load]) -> tuple[int, int]:
    """Return requests running and prompt tokens queued over all loads."""
    listed = list(loads)
    return sum(load.running for load in listed), sum(load.queued_tokens for load in listed)

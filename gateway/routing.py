"""Where a request goes: values in, values out. No clock, no I/O, no state but what the caller hands in.

Every instance is priced (``gateway.policy.pricing``): the expected time to the first token there, and with it what
others would wait for this request. The default policy takes the smallest price; others look at other things and the
price stands beside their choice on the trace. Ties go by a seeded random choice, so that equal instances share a burst.
What is routed is reserved at once (``gateway.policy.load``), so that the next decision sees it, and is released exactly
once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec
import xxhash

from gateway.policy.costs import EngineCosts, Rates
from gateway.policy.load import Load, Reservation, total
from gateway.policy.pricing import Asked, Price, Surroundings, prices
from tracing.record import Candidate, Decision

__all__ = [
    "NO_HITS", "POLICIES", "Asked", "EngineCosts", "InstanceView", "Load", "Policy", "Rates", "Request", "Reservation",
    "Surroundings", "decide", "fastest_tier", "total", "usable_hits",
]  # fmt: skip

NO_HITS = (0, 0, 0, 0)
UNKNOWN = Surroundings()
_NANO = 1_000_000_000


class InstanceView(
    msgspec.Struct, frozen=True, gc=False
):  # made for every instance at every decision: a dataclass costs tenfold
    """One instance at the moment of a decision. ``hit_tokens``: device, host, disk, pool.

    ``pending_tokens``: what requests already routed there bring beyond these hits, computed or told of any moment now.
    It moves the choice and is never claimed as a hit.
    """

    instance: str
    hit_tokens: tuple[int, int, int, int]
    load: Load
    around: Surroundings = UNKNOWN
    healthy: bool = True
    exact: bool = True
    pending_tokens: int = 0
    matched_blocks: int = 0  # of the prompt, found there by the index, whatever they are good for

    def fresh_tokens(self, prompt_tokens: int) -> int:
        """Return what would have to be computed there for this prompt alone."""
        return max(prompt_tokens - sum(self.hit_tokens) - self.pending_tokens, 0)


class Request(msgspec.Struct, frozen=True):
    """What is to be routed. ``group``: what ``session-hash`` keeps together: a run, or an opening."""

    asked: Asked
    group: str = ""
    pulls: bool = False
    """Whether an instance can read pages from another's device."""


class Policy(Protocol):
    """One way to choose."""

    @property
    def name(self) -> str:
        """What the settings call it."""

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return one number for each view, whose price is given; the smallest wins."""


class ExpectedTtft:
    """The smallest price: the expected time to the first token, and what others would wait for this request."""

    name = "expected-ttft"

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return seconds."""
        return [each.cost_s for each in prices]


class FewestRequests:
    """The fewest requests that are not over yet."""

    name = "fewest-requests"

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return counts."""
        return [float(view.load.running) for view in views]


class FewestTokens:
    """The fewest tokens of prompts that wait, then of what is there at all."""

    name = "fewest-tokens"

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return tokens; those held weigh a thousandth, which decides between equals."""
        return [view.load.queued_tokens + view.load.held_tokens / 1000 for view in views]


class LongestPrefix:
    """The longest run of the prompt that is there or on its way, then the fewest requests. Heeds no load."""

    name = "prefix"

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return tokens that are missing; a request weighs a thousandth of one."""
        prompt = request.asked.prompt_tokens
        return [view.fresh_tokens(prompt) + view.load.running / 1000 for view in views]


class RoundRobin:
    """In turn, by name; the only policy that remembers something."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return distances from whose turn it is."""
        order = sorted(range(len(views)), key=lambda position: views[position].instance)
        start, self._turn = self._turn % len(views), self._turn + 1
        distance = {position: (place - start) % len(views) for place, position in enumerate(order)}
        return [float(distance[position]) for position in range(len(views))]


class SessionHash:
    """Always the same instance for the same run: the highest hash of both wins, so that few move when one goes."""

    name = "session-hash"

    def scores(self, views: Sequence[InstanceView], prices: Sequence[Price], request: Request) -> Sequence[float]:
        """Return hashes."""
        seed = xxhash.xxh3_64_intdigest(request.group.encode())
        return [-float(xxhash.xxh3_64_intdigest(view.instance.encode(), seed)) for view in views]


POLICIES = {
    policy.name: policy
    for policy in (ExpectedTtft, FewestRequests, FewestTokens, LongestPrefix, RoundRobin, SessionHash)
}


def decide(
    views: Sequence[InstanceView],
    request: Request,
    policy: Policy,
    chance: random.Random,
    now_s: float,
    *,
    hashed: bool = True,
    without: frozenset[str] = frozenset(),
) -> Decision | None:
    """Choose among the healthy views that are not in ``without``; ``None`` when there is none. O(instances).

    ``hashed``: the hits come from the prompt's token ids. The decision shows every view, unhealthy ones included.
    """
    able = [at for at, view in enumerate(views) if view.healthy and view.instance not in without]
    if not able:
        return None
    source = max(able, key=lambda at: views[at].hit_tokens[0]) if request.pulls else None
    found = prices(views, request.asked, now_s, source)
    are_all_able = len(able) == len(views)
    scores = policy.scores(
        views if are_all_able else [views[at] for at in able],
        found if are_all_able else [found[at] for at in able],
        request,
    )
    least = min(scores)
    best = chance.choice([at for at, score in zip(able, scores, strict=True) if score == least])
    chosen, fetch = views[best], found[best].fetch
    return Decision(
        policy=policy.name,
        instance=chosen.instance,
        candidates=_candidates(views, found),
        predicted_hit_tokens=sum(chosen.hit_tokens),
        exact=hashed and chosen.exact,
        fetch_tokens=(fetch.host, fetch.disk, fetch.pool, fetch.peer) if fetch is not None else None,
        fetch_from=views[source].instance if source is not None and fetch is not None and fetch.peer else None,
    )


def usable_hits(tier_blocks: Sequence[int], block_size: int, prompt_tokens: int) -> tuple[int, int, int, int]:
    """Return hit tokens by tier for the leading run of matched blocks.

    An engine computes at least the last prompt token, so a match of the whole prompt loses its last block; slower tiers
    lose first, since nobody knows the order of tiers along the run.
    """
    device, host, disk, pool = tier_blocks
    left = (prompt_tokens - 1) // block_size if prompt_tokens > 0 else 0
    if not (host or disk or pool):
        return (device if device < left else left) * block_size, 0, 0, 0
    taken = []
    for blocks in tier_blocks:
        taken.append(min(blocks, left) * block_size)
        left -= min(blocks, left)
    device, host, disk, pool = taken
    return device, host, disk, pool


def fastest_tier(tier_blocks: Sequence[int]) -> int | None:
    """Return the fastest tier that has any of these blocks."""
    return next((tier for tier, blocks in enumerate(tier_blocks) if blocks), None)


def _candidates(views: Sequence[InstanceView], found: Sequence[Price]) -> tuple[Candidate, ...]:
    return tuple(
        [
            Candidate(
                view.instance,
                view.hit_tokens,
                view.load.queued_tokens,
                int(price.ttft_s * _NANO),
                view.healthy,
                int(price.cost_s * _NANO),
            )
            for view, price in zip(views, found, strict=True)
        ]
    )

"""What it costs everybody to send a request to one instance: seconds that somebody waits.

::

    expected time to the first token   max(prompts queued there + the wait for memory, fetches queued there + its own)
                                       + its prompt
  + those who came and still fetch     they wait for its prompt where it has its pages before they have theirs
  + those who come while it is served  steps that are due there a second x its prompt x (queue + half its prompt)
  + those who wait for memory there    steps that are due there in an answer's time x what its prompt adds to that time
  + its own steps after this one       how many x steps that are due there a second x half the mean square of a prompt
  + what it pushes out of memory       its new tokens x the odds that they would have come back x what they'd take then:
                                       computed again, or fetched from the next slower tier
  + decoding                           its output's steps are lengthened by the contexts there, and theirs by its own;
                                       so are those of its own steps after this one
  + a little where much was done       a tenth of its first token's time x what was computed there lately / the mean,
                                       and as much again for each of two of its steps after this one

The first is what the request itself waits; the rest is what others will, and all of it follows from what binds there
at this moment: an idle instance has nobody who would come, an unfilled cache nothing that is pushed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from gateway.policy.costs import Fetch
from gateway.policy.load import Load

_LEAST_PULL_TOKENS = 1024
_MOST_FURTHER_STEPS, _MOST_EVENED = 10.0, 2.0
_MOST_UNEVEN = 3.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of each kind counts beside a second before the first token."""

    arrivals: float = 1.0
    own_share: float = 0.3  # of an instance's own due rate in its price for arrivals; the rest is the fleet's mean
    further: float = 1.0
    reuse: float = 1.0
    decode: float = 0.2  # for each step that is made where this one goes
    idle: float = 4.0
    balance: float = 0.1  # likewise, for the first three


WEIGHTS = Weights()
NOTHING = (0.0, 0.0, 0.0, 0.0)


class Asked(NamedTuple):
    """One request. ``further_steps``: how many will follow where this one goes; 0 if its run has a home already."""

    prompt_tokens: int
    output_tokens: float = 0.0
    further_steps: float = 0.0
    mean_square_s: float = 0.0


class Surroundings(NamedTuple):
    """What is known of an instance beside its load. ``capacity_tokens``: of its device; ``None``: unknown.

    ``push_s``: what a token costs that comes to a tier and the slower ones, device, host, disk, pool, by what it pushes
    out."""

    due_rate: float = 0.0
    push_s: tuple[float, float, float, float] = NOTHING
    capacity_tokens: float | None = None


class Price(msgspec.Struct, frozen=True, gc=False):  # one for every instance at every decision
    """``ttft_s``: the expected time to the first token; ``cost_s``: with what others will wait for it.

    ``fetch``: what is read instead of computed, ``None`` for nothing; ``new_tokens``: what is computed.
    """

    cost_s: float
    ttft_s: float
    new_tokens: int
    fetch: Fetch | None = None


class Offer(Protocol):
    """One instance as it offers itself. ``hit_tokens``: device, host, disk, pool; ``pending_tokens``: what others are
    about to compute there behind them."""

    @property
    def hit_tokens(self) -> tuple[int, int, int, int]:
        """Of the prompt."""

    @property
    def pending_tokens(self) -> int:
        """Of the prompt."""

    @property
    def load(self) -> Load:
        """What was routed there."""

    @property
    def around(self) -> Surroundings:
        """What else is known of it."""


def prices(
    offers: Sequence[Offer], asked: Asked, now_s: float, source: int | None = None, weights: Weights = WEIGHTS
) -> list[Price]:
    """Return for each instance the cheapest way to serve the request there. O(instances), a few µs each.

    ``source``: the position of the instance whose device others can pull pages from; ``None`` where they can't.
    """
    count, per_offer = len(offers), 1 / len(offers)
    due_rates = [offer.around.due_rate for offer in offers]
    lately_s = [offer.load.lately_s for offer in offers]
    mean_due = sum(due_rates) * per_offer
    idle_share = 1 - sum([offer.load.busy_share for offer in offers]) * per_offer
    further_steps = min(asked.further_steps, _MOST_FURTHER_STEPS)
    total_s = sum(lately_s)
    evenly = weights.balance * (1 + min(further_steps, _MOST_EVENED)) * count / total_s if total_s else 0.0
    uneven_s = total_s * per_offer * _MOST_UNEVEN
    pullable = offers[source].hit_tokens[0] if source is not None else 0
    mean_running = sum([offer.load.running for offer in offers]) * per_offer
    decode_weight = weights.decode * idle_share**weights.idle / (1 + 0.5 * mean_running) * asked.output_tokens
    decode_weight *= 1 + further_steps
    prompt, output = asked.prompt_tokens, asked.output_tokens
    further = weights.further * further_steps * 0.5 * asked.mean_square_s
    own_share, fleet_rate = weights.arrivals * weights.own_share, weights.arrivals * (1 - weights.own_share) * mean_due
    half_context = 0.5 * (prompt + 0.5 * output)
    of_costs, read_s, overhead_s, token_s, grown_s, beside_s = None, 0.0, 0.0, 0.0, 0.0, 0.0
    found = []
    for at, offer in enumerate(offers):
        load, hits, (due, push, capacity) = offer.load, offer.hit_tokens, offer.around
        if load.costs is not of_costs:
            of_costs, read_s = load.costs, load.costs.read_s
            overhead_s, token_s, grown_s, beside_s = load.costs.prompts.weights
        wait_s = backlog_s = load.backlog_s(now_s) if load.queued_s else 0.0
        stay_s = 0.0  # what a second in which a prompt is computed costs each who comes and waits for memory
        if capacity is not None and load.running and load.held_tokens + prompt + output > capacity:
            answer_s = _answer_s(load)
            memory_s = answer_s * min((load.held_tokens + prompt + output - capacity) / load.held_tokens, 1.0)
            wait_s += memory_s
            if memory_s > backlog_s and load.is_short_of_memory(now_s, answer_s):
                stay_s = load.costs.stall_share * answer_s
        context = hits[0] + offer.pending_tokens
        new, fetch = prompt - context, None
        # ``load.prompt_s(new, context)``, which is half of this loop where it is called
        work_s = overhead_s + new * (token_s + beside_s * load.context_tokens + grown_s * (context + 0.5 * new))
        work_s *= load.slowness
        ttft_s = wait_s + work_s
        if hits[1] or hits[2] or hits[3] or (at != source and pullable > context + _LEAST_PULL_TOKENS):
            pulled = pullable if at != source else 0
            ttft_s, work_s, new, fetch = _fetched(load, hits, context, pulled, prompt, wait_s, now_s)
        cost_s = 0.0
        if load.fetching:
            begins_s, cost_s = load.turn(now_s, backlog_s, ttft_s - work_s, work_s)
            ttft_s = begins_s + work_s
        rate = fleet_rate + own_share * due
        cost_s += ttft_s + work_s * rate * (backlog_s + 0.5 * work_s + stay_s) + further * due
        if push[0]:
            pushed_s = (prompt - context + output) * push[0]
            if hits[1] or hits[2] or hits[3]:
                pushed_s -= hits[1] * push[1] + hits[2] * push[2] + hits[3] * push[3]
            cost_s += weights.reuse * pushed_s
        if load.running:
            cost_s += decode_weight * read_s * (load.context_tokens + half_context * load.running)
        if evenly:
            done_s = lately_s[at]
            cost_s += evenly * ttft_s * (done_s if done_s < uneven_s else uneven_s)
        found.append(Price(cost_s, ttft_s, new, fetch))
    return found


def _fetched(
    load: Load,
    hits: tuple[int, int, int, int],
    context: int,
    pullable: int,
    prompt: int,
    wait_s: float,
    now_s: float,
) -> tuple[float, float, int, Fetch | None]:
    """Return the first token's time, the prompt's own, what is computed and what is read.

    An engine reads by itself what it finds in slower tiers where that is quicker than computing, whoever else reads
    there. It pulls from a peer if that is told to, hence where that is quicker as things are."""
    costs, link_s = load.costs, max(load.link_free_s - now_s, 0.0)
    work_s = load.prompt_s(prompt - context, context)
    best: tuple[float, float, int, Fetch | None] = (wait_s + work_s, work_s, prompt - context, None)
    _, host, disk, pool = hits
    there = context + host + disk + pool
    if there > context:
        own_s = costs.fetch_s(fetch := Fetch(host, disk, pool))
        if own_s < load.prompt_s(there - context, context):
            work_s = load.prompt_s(prompt - there, there)
            best = max(wait_s, link_s + own_s) + work_s, work_s, prompt - there, fetch
    if pullable > context + host + _LEAST_PULL_TOKENS:
        beyond = max(there - pullable, 0)  # of the slower tiers; the slowest are furthest
        fetch = Fetch(host, max(beyond - pool, 0), min(beyond, pool), pullable - context - host)
        there = max(there, pullable)
        work_s = load.prompt_s(prompt - there, there)
        ttft_s = max(wait_s, link_s + costs.fetch_s(fetch)) + work_s
        if ttft_s < best[0]:
            best = ttft_s, work_s, prompt - there, fetch
    return best


def _answer_s(load: Load) -> float:
    """Return how long the answers that run there take on average. Memory that they fill is free again after a share of
    it, were they all to end evenly over that time; what is cached and idle nobody waits for."""
    return max(load.held_output / load.running, 1.0) * load.costs.step_s(load.context_tokens)

"""What it costs everybody to send a request to one instance: seconds that somebody waits.

::

    expected time to the first token   max(prompts queued there + the wait for memory, fetches queued there + its own)
                                       + its prompt
  + those who come while it is served  steps that are due there a second x its prompt x (queue + half its prompt)
  + its own steps after this one       how many x steps that are due there a second x half the mean square of a prompt
  + its prompt once more             where its run has a home already: what is computed elsewhere is there twice
  + what it pushes out of memory       its new tokens x the odds that they would have come back x what they'd take
  + decoding                           its output's steps are lengthened by the contexts there, and theirs by its own

The first is what the request itself waits; the rest is what others will, and all of it follows from what binds there
at this moment: an idle instance has nobody who would come, an unfilled cache nothing that is pushed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.policy.costs import EngineCosts, Fetch
from gateway.policy.load import Load

_LEAST_PULL_TOKENS = 1024
_SAMPLE_TOKENS = 1024
_MOST_FURTHER_STEPS = 10.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of each kind counts beside a second before the first token."""

    arrivals: float = 1.0
    own_share: float = 0.3  # of an instance's own due rate in its price for arrivals; the rest is the fleet's mean
    moving: float = 1.0
    further: float = 1.0
    reuse: float = 1.0
    decode: float = 0.25
    beside: float = 1.0
    stall: float = 1.0
    idle: float = 4.0


WEIGHTS = Weights()


class Asked(NamedTuple):
    """One request. ``further_steps``: how many will follow where this one goes; 0 if its run ``has_home``."""

    prompt_tokens: int
    output_tokens: float = 0.0
    further_steps: float = 0.0
    mean_square_s: float = 0.0
    has_home: bool = False


class Held(NamedTuple):
    """What an instance has of the prompt, in tokens; ``coming``: what others are about to compute there."""

    device: int
    host: int = 0
    disk: int = 0
    pool: int = 0
    coming: int = 0


class Surroundings(NamedTuple):
    """What is known of an instance beside its load. ``capacity_tokens``: of its device; ``None``: unknown."""

    due_rate: float = 0.0
    reuse_odds: float = 0.0
    capacity_tokens: float | None = None


class Price(NamedTuple):
    """``ttft_s``: the expected time to the first token; ``cost_s``: with what others will wait for it.

    ``fetch``: what is read instead of computed, ``None`` for nothing; ``new_tokens``: what is computed.
    """

    cost_s: float
    ttft_s: float
    new_tokens: int
    fetch: Fetch | None = None


def price(
    load: Load,
    held: Held,
    asked: Asked,
    around: Surroundings,
    now_s: float,
    mean_due_rate: float = 0.0,
    busy_share: float = 0.0,
    pullable: int = 0,
    *,
    weights: Weights = WEIGHTS,
) -> Price:
    """Return the cheapest way to serve the request on this instance. O(1).

    ``mean_due_rate`` and ``busy_share``: means over the fleet of the steps that are due a second, and of the time that
    prompts are computed in. ``pullable``: leading tokens that could be had from another instance's device.
    """
    costs, prompt, output = load.costs, asked.prompt_tokens, asked.output_tokens
    backlog_s = wait_s = load.backlog_s(now_s)
    if around.capacity_tokens is not None and load.held_tokens + prompt + output > around.capacity_tokens:
        wait_s += _memory_wait_s(load, prompt + output, around.capacity_tokens)
    context = held.device + held.coming
    new, fetch, beside = prompt - context, None, load.context_tokens
    work_s, ready_s = load.prompt_s(new, context), 0.0
    ttft_s = wait_s + work_s
    if held.host or held.disk or held.pool:
        slower = Fetch(held.host, held.disk, held.pool)
        found = context + held.host + held.disk + held.pool
        ready_s = max(load.link_free_s - now_s, 0.0) + costs.fetch_s(slower)
        fetched_s = load.prompt_s(prompt - found, found)
        if (then_s := max(wait_s, ready_s) + fetched_s) < ttft_s:
            ttft_s, work_s, new, fetch = then_s, fetched_s, prompt - found, slower
    if pullable > prompt - new + _LEAST_PULL_TOKENS:
        pulled = Fetch(peer=pullable - context)
        ready_s = max(load.link_free_s - now_s, 0.0) + costs.fetch_s(pulled)
        fetched_s = load.prompt_s(prompt - pullable, pullable)
        if (then_s := max(wait_s, ready_s) + fetched_s) < ttft_s:
            ttft_s, work_s, new, fetch = then_s, fetched_s, prompt - pullable, pulled
    cost_s = ttft_s
    due = around.due_rate
    rate = mean_due_rate + weights.own_share * (due - mean_due_rate)
    cost_s += weights.arrivals * rate * work_s * (backlog_s + 0.5 * work_s)
    if asked.further_steps:
        further = min(asked.further_steps, _MOST_FURTHER_STEPS)
        cost_s += weights.further * further * due * 0.5 * asked.mean_square_s
    if asked.has_home:
        cost_s += weights.moving * work_s
    if around.reuse_odds:
        cost_s += weights.reuse * around.reuse_odds * (prompt - held.device + output) * _token_s(costs, prompt)
    if load.running:
        contexts = beside + weights.beside * 0.5 * (prompt + 0.5 * output) * load.running
        lost_s = output * costs.read_s * contexts + weights.stall * costs.stall_share * work_s * load.decoding
        cost_s += weights.decode * (1 - busy_share) ** weights.idle * lost_s
    return Price(cost_s, ttft_s, new, fetch)


def _token_s(costs: EngineCosts, prompt_tokens: int) -> float:
    """Return what a token takes in the middle of such a prompt."""
    return (costs.prompt_s(_SAMPLE_TOKENS, prompt_tokens // 2) - costs.prompt_s(0, 0)) / _SAMPLE_TOKENS


def _memory_wait_s(load: Load, needed: float, capacity: float) -> float:
    """Return the time until enough of what runs there has ended, were it all to end evenly over an answer's time."""
    if not load.running:
        return 0.0
    mean_output = max(load.held_output / load.running, 1.0)
    share = min((load.held_tokens + needed - capacity) / load.held_tokens, 1.0)
    return share * mean_output * load.costs.step_s(load.context_tokens)

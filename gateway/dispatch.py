"""Stages 5 and 6: what each instance has of a prompt, and where the request goes.

A chosen instance is expected to have the prompt's blocks from the decision on, not only from the engine's events on: so
a burst on one cold prefix goes to one instance, and an agent's next step finds the one before however fast it comes.
The expectation outlives the request by a moment, until the events have said what became of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.breaker import Ticket
from gateway.fleet import Fleet, Instance
from gateway.models import ModelOptions
from gateway.prompt_job import Prompt
from gateway.prompt_rules import PromptRules, rules_for
from gateway.protocols.base import Ask
from gateway.residency import Watch, watch_events, watch_prediction
from gateway.routing import NO_HITS, InstanceView, Policy, Reservation, decide, usable_hits
from gateway.workers.shared_loads import SharedLoads
from radix_index.base import InstanceMatch, Knowledge, PrefixIndex
from tracing.record import Decision

BYTES_PER_TOKEN = 4
"""What a body's length says of a prompt that cannot be tokenized; it weighs load and is never billed or shown."""

EVENTS_LAG_S = 2.0
"""How long after its end a request's blocks are still expected where events have not told of them yet."""

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds, as ``loop.call_later`` does."""


@dataclass(frozen=True, slots=True)
class Route:
    """A choice, with its load and its blocks reserved until ``release``."""

    instance: Instance
    decision: Decision
    reservation: Reservation
    ticket: Ticket
    forget_blocks: Callable[[], None]
    watch: Watch | None = None
    """Wants to know what the instance reports of this prompt."""

    def release(self) -> None:
        """The request is over there. Once."""
        self.reservation.release()
        self.instance.breaker.dropped(self.ticket)
        self.forget_blocks()


class Dispatcher:
    """Chooses instances. Pure policy on the fleet's and the index's state of this moment; nothing here waits."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        policy: Policy,
        seed: int,
        later: Later,
        shared: SharedLoads | None = None,
    ) -> None:
        """``shared``: the loads as other workers make them, too."""
        self._fleet, self._index, self._policy, self._later, self._shared = fleet, index, policy, later, shared
        self._chance = random.Random(seed)

    def block_sizes(self, model: str) -> set[int]:
        """Return the block sizes for which a prompt of this model must be hashed."""
        sizes = self._index.instances()
        return {sizes[instance.id] for instance in self._fleet.serving(model) if instance.id in sizes}

    def salt_of(self, model: str, salt: str | None) -> str | None:
        """Return the salt that its instances' caches are kept apart by: none, where no engine of them knows salts."""
        takes_salt = any(instance.capabilities.salt for instance in self._fleet.serving(model))
        return salt if takes_salt else None

    def rules(self, options: ModelOptions, ask: Ask) -> PromptRules:
        """Return what becomes of a request's prompt on its way to the instances of its model."""
        return rules_for(self._fleet.serving(options.name), options, ask)

    def unable(self, model: str, ask: Ask) -> frozenset[str]:
        """Return the instances that cannot answer, whatever their state. Raises the ask's refusal where all cannot."""
        if ask.refusal is None:
            return frozenset()
        instances = self._fleet.serving(model)
        unable = frozenset(instance.id for instance in instances if not instance.speaks(ask.endpoint))
        if instances and len(unable) == len(instances):
            raise ask.refusal
        return unable

    def without(self, model: str, can: Callable[[Instance], bool]) -> frozenset[str]:
        """Return the instances that cannot do what is asked of them."""
        return frozenset(instance.id for instance in self._fleet.serving(model) if not can(instance))

    def route(self, model: str, prompt: Prompt | None, body_bytes: int, tried: frozenset[str]) -> Route | None:
        """Choose and reserve; ``None`` when no instance that was not tried yet takes requests."""
        instances = self._fleet.serving(model)
        tokens = prompt.tokens if prompt is not None else body_bytes // BYTES_PER_TOKEN
        views = self._views(instances, prompt, tokens)
        decision = decide(
            views, tokens, self._policy, self._chance, hashed=prompt is not None and prompt.is_exact, without=tried
        )
        if decision is None:
            return None
        chosen = next(instance for instance in instances if instance.id == decision.instance)
        view = next(view for view in views if view.instance == decision.instance)
        reservation = self._reserve(chosen, view.fresh_tokens(tokens))
        watch = self._watch(chosen, prompt, decision)
        ticket = chosen.breaker.begin(time.monotonic())
        return Route(chosen, decision, reservation, ticket, self._expect(view, prompt), watch)

    def _reserve(self, chosen: Instance, *words: int) -> Reservation:
        """Reserve in the instance's load, in every worker if there are others."""
        if self._shared is None:
            return chosen.load.reserve(*words)
        shared: Reservation = self._shared.reserve(chosen.id, chosen.load, *words)
        return shared

    def foresee(self, model: str, prompt: Prompt | None, body_bytes: int, without: frozenset[str]) -> Decision | None:
        """Return what would be decided now; nothing is reserved, and chance may decide otherwise."""
        tokens = prompt.tokens if prompt is not None else body_bytes // BYTES_PER_TOKEN
        views = self._views(self._fleet.serving(model), prompt, tokens)
        is_hashed = prompt is not None and prompt.is_exact
        return decide(views, tokens, self._policy, random.Random(0), hashed=is_hashed, without=without)

    def _watch(self, chosen: Instance, prompt: Prompt | None, decision: Decision) -> Watch | None:
        """Return who wants to hear how true the prediction was; nobody where a prompt has no blocks to predict."""
        size = self._index.instances().get(chosen.id)
        hashes = prompt.hashes.get(size, ()) if prompt is not None and size is not None else ()
        if prompt is None or size is None or not len(hashes):
            return None
        if chosen.predicted is not None:
            # Chunks of text say how long the text is, in chunks; the ids that somebody counted beside it do not.
            tokens = prompt.tokens if prompt.is_exact or not prompt.is_counted else len(hashes) * size + size // 2
            expectation = chosen.predicted.expect(hashes, tokens, is_approximate=not prompt.is_exact)
            return watch_prediction(chosen.predicted, expectation)
        return watch_events(chosen.scores["events"], decision.predicted_hit_tokens, size) if decision.exact else None

    def _expect(self, chosen: InstanceView, prompt: Prompt | None) -> Callable[[], None]:
        """Let the index expect the prompt's blocks there, but for those that it finds there; return what ends that."""
        size = self._index.instances().get(chosen.instance)
        hashes = prompt.hashes.get(size, ()) if prompt is not None and size is not None else ()
        new = hashes[chosen.matched_blocks :]
        if not len(new):
            return _nothing
        ticket = self._index.reserve(chosen.instance, new)

        def forget() -> None:
            self._later(EVENTS_LAG_S, lambda: self._index.release(ticket))

        return forget

    def _views(self, instances: Sequence[Instance], prompt: Prompt | None, tokens: int) -> list[InstanceView]:
        sizes, matches = self._index.instances(), dict[str, InstanceMatch]()
        for size, hashes in (prompt.hashes if prompt is not None else {}).items():
            same = [instance.id for instance in instances if sizes.get(instance.id) == size]
            matches |= self._index.match(hashes, same)
        views, now_s = [], time.monotonic()
        held_back = _held_back(instances, now_s) if now_s < self._fleet.warm_at_s else ()
        for instance in instances:
            match = matches.get(instance.id)
            hits, pending, matched = NO_HITS, 0, 0
            if match is not None:
                matched = match.blocks
                size, blocks = sizes[instance.id], match.tier_blocks
                if instance.predicted is not None and prompt is not None:
                    tail = instance.predicted.tail_blocks(prompt.hashes[size], match.blocks)
                    blocks = (blocks[0] + tail, *blocks[1:])
                if any(blocks):
                    hits = usable_hits(blocks, size, tokens)
                if match.pending_blocks:
                    pending = min(match.pending_blocks * size, max((tokens - 1) // size * size - sum(hits), 0))
            views.append(
                InstanceView(
                    instance.id,
                    hits,
                    instance.load.queued_tokens,
                    instance.load.running,
                    instance.rates,
                    healthy=instance.takes_requests and instance not in held_back,
                    exact=match is not None and match.knowledge is Knowledge.COMPLETE,
                    pending_tokens=pending,
                    matched_blocks=matched,
                )
            )
        return views


def _held_back(instances: Sequence[Instance], now_s: float) -> Sequence[Instance]:
    """Return those that came up lately and have their share of requests already, while others take some."""
    shares = [instance.breaker.share(now_s) for instance in instances]
    steady = [i.load.running for i, share in zip(instances, shares, strict=True) if share == 1 and i.takes_requests]
    if not steady:
        return ()
    most = max(steady)
    return [i for i, share in zip(instances, shares, strict=True) if share < 1 and i.load.running > share * most]


def _nothing() -> None:
    """Nothing is to be forgotten."""

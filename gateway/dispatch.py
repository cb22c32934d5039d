"""Stages 5 and 6: what each instance has of a prompt, and where the request goes.

A chosen instance is expected to have the prompt's blocks from the decision on, not only from the engine's events on: so
a burst on one cold prefix goes to one instance, and an agent's next step finds the one before however fast it comes.
The expectation outlives the request by a moment, until the events have said what became of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.breaker import Ticket
from gateway.fleet import CachedAs, Fleet
from gateway.instance import Instance
from gateway.models import ModelOptions
from gateway.policy.load import Load
from gateway.policy.places import Places
from gateway.prompt_job import Prompt
from gateway.prompt_rules import PromptRules, kind_of, rules_for
from gateway.protocols.base import Ask
from gateway.residency import Watch, watch_events, watch_prediction
from gateway.routing import (
    NO_HITS,
    InstanceView,
    Policy,
    Request,
    Reservation,
    SessionHash,
    decide,
    fastest_tier,
    usable_hits,
)
from gateway.survey import Survey
from gateway.tier_use import Hits
from gateway.workers.shared_loads import SharedLoads
from radix_index.base import Hashes, PrefixIndex
from tracing.record import Decision, Usage, UsageSource

BYTES_PER_TOKEN = 4
"""What a body's length says of a prompt that cannot be tokenized; it weighs load and is never billed or shown."""

EVENTS_LAG_S = 2.0
"""How long after its end a request's blocks are still expected where events have not told of them yet."""

_BY_SEED = SessionHash()

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds, as ``loop.call_later`` does."""


class Route(msgspec.Struct, frozen=True):
    """A choice, with its load and its blocks reserved until ``release``."""

    instance: Instance
    decision: Decision
    reservation: Reservation
    ticket: Ticket
    forget_blocks: Callable[[], None]
    watch: Watch | None = None
    """Wants to know what the instance reports of this prompt."""

    def answered(self) -> None:
        """The first token came. Idempotent."""
        self.reservation.answered(time.monotonic())

    def release(self) -> None:
        """The request is over there. Once."""
        self.reservation.release(time.monotonic())
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
        through: str | None = None,
    ) -> None:
        """``shared``: the loads as other workers make them, too. ``through``: the instance that gets every request,
        while for the others it is only recorded which of them would have been chosen."""
        self._fleet, self._index, self._policy, self._later, self._shared = fleet, index, policy, later, shared
        self._chance, self._through = random.Random(seed), through
        self.places = Places()
        self._kinds: dict[str, tuple[Sequence[Instance], Sequence[Instance]]] = {}  # by model: of whom, one of each
        self._survey = Survey(fleet, index, self.places)

    def block_sizes(self, model: str) -> Set[int]:
        """Return the block sizes for which a prompt of this model must be hashed."""
        return self._survey.block_sizes(model)

    def cached_as(self, model: str) -> CachedAs:
        """Return the model and the adapter under which its instances' events tell what they hold for it."""
        return self._fleet.cached_as(model)

    def salt_of(self, model: str, salt: str | None) -> str | None:
        """Return the salt that its instances' caches are kept apart by: none, where no engine of them knows salts."""
        takes_salt = any(instance.capabilities.salt for instance in self._one_of_each(model))
        return salt if takes_salt else None

    def rules(self, options: ModelOptions, ask: Ask) -> PromptRules:
        """Return what becomes of a request's prompt on its way to the instances of its model."""
        return rules_for(self._one_of_each(options.name), options, ask)

    def retry_after_s(self, model: str) -> int:
        """Return after how many seconds a request that nobody takes now may be sent again."""
        return self._fleet.retry_after_s(model)

    def unable(self, model: str, ask: Ask) -> frozenset[str]:
        """Return the instances that cannot answer, whatever their state. Raises the ask's refusal where all cannot."""
        if ask.refusal is None or all(instance.reads(ask) for instance in self._one_of_each(model)):
            return frozenset()
        instances = self._fleet.serving(model)
        unable = frozenset(instance.id for instance in instances if not instance.reads(ask))
        if instances and len(unable) == len(instances):
            raise ask.refusal
        return unable

    def _one_of_each(self, model: str) -> Sequence[Instance]:
        """Return an instance of each kind that serves the model: what one of a kind can do, all can. O(1) mostly."""
        serving = self._fleet.serving(model)
        of_whom, found = self._kinds.get(model, ((), ()))
        if of_whom is not serving:
            found = list({kind_of(instance): instance for instance in serving}.values())
            if serving:
                self._kinds[model] = serving, found
        return found

    def without(self, model: str, can: Callable[[Instance], bool]) -> frozenset[str]:
        """Return the instances that cannot do what is asked of them."""
        return frozenset(instance.id for instance in self._fleet.serving(model) if not can(instance))

    def route(
        self,
        model: str,
        prompt: Prompt | None,
        body_bytes: int,
        tried: frozenset[str],
        run: str | None = None,
        seed: object = None,
    ) -> Route | None:
        """Choose and reserve; ``None`` when no instance that was not tried yet takes requests.

        ``seed``: that the client gave for its samples: the same one goes to the same instance while that is there.
        """
        instances, now_s = self._fleet.serving(model), time.monotonic()
        request = self._request(prompt, body_bytes, run)
        tokens = request.asked.prompt_tokens
        views = self._survey.views(model, prompt, tokens, now_s)
        is_hashed = prompt is not None and prompt.is_exact
        if self._through is not None:
            decision = self._observe(views, request, now_s, tried, is_hashed=is_hashed)
        else:
            policy = self._policy
            if seed is not None:
                policy, request = _BY_SEED, Request(request.asked, f"seed {seed}")
            decision = decide(views, request, policy, self._chance, now_s, hashed=is_hashed, without=tried)
        if decision is None:
            return None
        at = next(at for at, instance in enumerate(instances) if instance.id == decision.instance)
        chosen, view = instances[at], views[at]
        fetched = sum(decision.fetch_tokens or ())
        new = view.fresh_tokens(tokens) if fetched else max(tokens - view.hit_tokens[0] - view.pending_tokens, 0)
        reservation = self._reserve(
            chosen.id, chosen.load, tokens, new, now_s, request.asked.output_tokens, decision.fetch_tokens
        )
        if run is not None:
            self.places.begun(run, now_s)
        held = self._held(chosen, prompt, tokens) if chosen.tier_use.refuses else view.hit_tokens
        watch = self._learning(self._watch(chosen, prompt, decision), reservation, chosen, prompt, run, held)
        ticket = chosen.breaker.begin(now_s)
        return Route(chosen, decision, reservation, ticket, self._expect(view, prompt), watch)

    def _observe(
        self, views: Sequence[InstanceView], request: Request, now_s: float, tried: frozenset[str], *, is_hashed: bool
    ) -> Decision | None:
        """Send it where everything goes, and note where it would have gone."""
        through = self._through or ""
        others = frozenset(view.instance for view in views if view.instance != through)
        decision = decide(views, request, self._policy, self._chance, now_s, hashed=is_hashed, without=tried | others)
        if decision is None or not others:
            return decision
        without = frozenset((through,))
        wanted = decide(views, request, self._policy, self._chance, now_s, hashed=is_hashed, without=without)
        return replace(decision, preferred=None if wanted is None else wanted.instance)

    def _request(self, prompt: Prompt | None, body_bytes: int, run: str | None) -> Request:
        tokens = prompt.tokens if prompt is not None else body_bytes // BYTES_PER_TOKEN
        return Request(self.places.asked(run, tokens), run or "")

    def _reserve(self, instance: str, load: Load, *words: Any) -> Reservation:
        """Reserve in the instance's load, in every worker if there are others."""
        if self._shared is None:
            return load.reserve(*words)
        shared: Reservation = self._shared.reserve(instance, load, *words)
        return shared

    def foresee(self, model: str, prompt: Prompt | None, body_bytes: int, without: frozenset[str]) -> Decision | None:
        """Return what would be decided now; nothing is reserved, and chance may decide otherwise."""
        now_s, request = time.monotonic(), self._request(prompt, body_bytes, None)
        views = self._survey.views(model, prompt, request.asked.prompt_tokens, now_s)
        is_hashed = prompt is not None and prompt.is_exact
        return decide(views, request, self._policy, random.Random(0), now_s, hashed=is_hashed, without=without)

    def _watch(self, chosen: Instance, prompt: Prompt | None, decision: Decision) -> Watch | None:
        """Return who wants to hear how true the prediction was; nobody where a prompt has no blocks to predict."""
        hashes = self._hashes(chosen.id, prompt)
        if prompt is None or not len(hashes):
            return None
        size = self._index.instances()[chosen.id]
        if chosen.predicted is not None:
            # Chunks of text say how long the text is, in chunks; the ids that somebody counted beside it do not.
            tokens = prompt.tokens if prompt.is_exact or not prompt.is_counted else len(hashes) * size + size // 2
            expectation = chosen.predicted.expect(hashes, tokens, is_approximate=not prompt.is_exact)
            return watch_prediction(chosen.predicted, expectation)
        return watch_events(chosen.scores["events"], decision.predicted_hit_tokens, size) if decision.exact else None

    def _learning(
        self,
        watch: Watch | None,
        reservation: Reservation,
        chosen: Instance,
        prompt: Prompt | None,
        run: str | None,
        held: Hits,
    ) -> Watch:
        """Let the policy learn of an answer, too: how long it was, what a step took, where its run is now, and which of
        the tiers that ``held`` some of the prompt was read."""
        hashes = self._hashes(chosen.id, prompt)
        tip = int(hashes[-1]) if len(hashes) else None

        def answered(usage: Usage) -> None:
            if usage.source is UsageSource.ENGINE:
                reservation.counted(usage.output_tokens)
                self.places.served(reservation.prompt_tokens, reservation.prompt_s)
                self.places.outputs.seen(run, usage.output_tokens)
            if held[1] or held[2] or held[3]:
                chosen.tier_use.saw(held, usage)
            if run is not None and self._fleet.instances.get(chosen.id) is chosen:  # else it is out, and forgotten
                self.places.ended(run, chosen.id, tip, time.monotonic(), lambda block: self._tier_of(chosen.id, block))
            if watch is not None:
                watch.answered(usage)

        return Watch(watch.computed if watch is not None else _nothing, answered)

    def _held(self, chosen: Instance, prompt: Prompt | None, tokens: int) -> Hits:
        """Return what lies in each tier of an instance, whether it reads there or not."""
        hashes = self._hashes(chosen.id, prompt)
        if not len(hashes):
            return NO_HITS
        match = self._index.match(hashes, (chosen.id,))[chosen.id]
        return usable_hits(match.tier_blocks, self._index.instances()[chosen.id], tokens)

    def _tier_of(self, instance: str, block: int) -> int | None:
        if instance not in self._index.instances():
            return None
        return fastest_tier(self._index.match([block], (instance,))[instance].tier_blocks)

    def _hashes(self, instance: str, prompt: Prompt | None) -> Hashes:
        size = self._index.instances().get(instance)
        return prompt.hashes.get(size, ()) if prompt is not None and size is not None else ()

    def _expect(self, chosen: InstanceView, prompt: Prompt | None) -> Callable[[], None]:
        """Let the index expect the prompt's blocks there, but for those that it finds there; return what ends that."""
        new = self._hashes(chosen.instance, prompt)[chosen.matched_blocks :]
        if not len(new):
            return _nothing
        ticket = self._index.reserve(chosen.instance, new)

        def forget() -> None:
            self._later(EVENTS_LAG_S, lambda: self._index.release(ticket))

        return forget


def _nothing() -> None:
    """Nothing is to be forgotten."""

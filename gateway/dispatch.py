"""Stages 5 and 6: what each instance has of a prompt, and where the request goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.fleet import Fleet, Instance
from gateway.prompts import Prompt
from gateway.routing import InstanceView, Policy, Reservation, decide, usable_hits
from radix_index.base import InstanceMatch, Knowledge, PrefixIndex
from tracing.record import Decision

BYTES_PER_TOKEN = 4
"""What a body's length says of a prompt that cannot be tokenized; it weighs load and is never billed or shown."""

_NO_HITS = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Route:
    """A choice, with its load reserved until ``reservation`` is released."""

    instance: Instance
    decision: Decision
    reservation: Reservation


class Dispatcher:
    """Chooses instances. Pure policy on the fleet's and the index's state of this moment; nothing here waits."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, policy: Policy, seed: int) -> None:
        self._fleet, self._index, self._policy = fleet, index, policy
        self._chance = random.Random(seed)

    def block_sizes(self, model: str) -> set[int]:
        """Return the block sizes for which a prompt of this model must be hashed."""
        sizes = self._index.instances()
        return {sizes[instance.id] for instance in self._fleet.serving(model) if instance.id in sizes}

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
        reservation = chosen.load.reserve(max(tokens - decision.predicted_hit_tokens, 0))
        return Route(chosen, decision, reservation)

    def _views(self, instances: Sequence[Instance], prompt: Prompt | None, tokens: int) -> list[InstanceView]:
        sizes, matches = self._index.instances(), dict[str, InstanceMatch]()
        for size, hashes in (prompt.hashes if prompt is not None else {}).items():
            same = [instance.id for instance in instances if sizes.get(instance.id) == size]
            matches |= self._index.match(hashes, same)
        views = []
        for instance in instances:
            match = matches.get(instance.id)
            hits = usable_hits(match.tier_blocks, sizes[instance.id], tokens) if match is not None else _NO_HITS
            views.append(
                InstanceView(
                    instance=instance.id,
                    hit_tokens=hits,
                    queued_tokens=instance.load.queued_tokens,
                    running=instance.load.running,
                    rates=instance.rates,
                    healthy=instance.takes_requests,
                    exact=match is not None and match.knowledge is Knowledge.COMPLETE,
                )
            )
        return views

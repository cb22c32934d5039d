"""Runs whose prompts grow, and the engines that they are sent to: what is true, whatever the gateway believes of it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.breaker import Breaker, BreakerOptions, Ticket
from gateway.policy.costs import EngineCosts
from gateway.policy.load import Load, Reservation
from gateway.routing import InstanceView
from radix_index.base import HashArray


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of prompts that is new with one step of one run, or that many runs begin with: it comes and goes whole."""

    hashes: HashArray


@dataclass(slots=True, eq=False)
class Run:
    """One agent's run: its prompts grow."""

    number: int
    parts: list[Part]
    hashes: HashArray
    steps_left: int


@dataclass(slots=True, eq=False)
class Flight:
    """One request under way."""

    number: int
    run: Run
    output: int
    tried: set[str] = field(default_factory=set)
    at: str | None = None
    life: int = 0
    attempt: int = 0
    reservation: Reservation | None = None
    ticket: Ticket | None = None
    pending: int | None = None


class Engine:
    """One engine: computes prompts one after the other, keeps the parts used last."""

    def __init__(self, name: str, costs: EngineCosts, chance: random.Random) -> None:
        self.name = name
        self.load = Load(costs)
        self.breaker = Breaker(BreakerOptions(), chance)
        self.life = 0
        self.is_up = True  # somebody listens
        self.is_known_up = True  # as far as the gateway knows
        self.is_silent = False  # takes requests and answers none
        self.is_draining = False
        self.pace = 1.0
        self.free_s = 0.0
        self.parts: OrderedDict[Part, None] = OrderedDict()
        self.held_blocks = 0
        self.flights: dict[int, Flight] = {}
        self.bare_view: InstanceView | None = None  # as it was last seen by who has nothing here
        self.look_again_s = 0.0
        self.checked_running = 0  # its load's, when it was last checked

    @property
    def takes_requests(self) -> bool:
        """Whether the gateway may send it something."""
        return self.is_known_up and not self.is_draining

    def known_blocks(self, parts: Sequence[Part]) -> int:
        """Return how much of a prompt is here, from its beginning."""
        known = 0
        for part in parts:
            if part not in self.parts:
                break
            known += len(part.hashes)
        return known

    def keep(self, parts: Sequence[Part], capacity_blocks: int) -> tuple[list[Part], list[Part]]:
        """Keep a prompt, its beginning the longest; return what is new, and what went for it."""
        new = [part for part in parts if part not in self.parts]
        for part in reversed(parts):
            self.parts[part] = None
            self.parts.move_to_end(part)
        self.held_blocks += sum([len(part.hashes) for part in new])
        gone = []
        while self.held_blocks > capacity_blocks:
            part, _ = self.parts.popitem(last=False)
            self.held_blocks -= len(part.hashes)
            gone.append(part)
        return new, gone

    def lose_all(self) -> None:
        """Forget what was kept."""
        self.parts.clear()
        self.held_blocks = 0

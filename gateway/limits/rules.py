"""Rules and takes: how much of a resource somebody may take, and what one request takes of it.

Requests and tokens are counted in minutes that begin with those of the UTC clock, so that everybody who counts agrees
on the window without talking; requests at once are counted as they are. A request takes under all rules that hold for
it, or under none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

WINDOW_S = 60


class Resource(StrEnum):
    """What a rule limits."""

    REQUESTS = "requests"  # admitted in a minute
    TOKENS = "tokens"  # prompt and output, in a minute
    CONCURRENCY = "concurrency"  # requests at once


class Level(StrEnum):
    """Whose requests are counted together."""

    KEY = "key"
    TEAM = "team"
    TENANT = "tenant"


class Outage(StrEnum):
    """What a rule does where its count cannot be asked."""

    ADMIT = "admit"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class LimitRule:
    """At most ``amount`` of a resource. ``subject`` is a key's id, ``tenant/team``, or a tenant."""

    level: Level
    subject: str
    resource: Resource
    amount: int
    on_outage: Outage = Outage.ADMIT
    counter: str = field(init=False)
    """The name of the count, the same in every process and replica."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counter", f"{self.resource.value}|{self.level.value}|{self.subject}")

    def told(self) -> str:
        """Return it in words."""
        per = "at once" if self.resource is Resource.CONCURRENCY else "a minute"
        what = "requests" if self.resource is Resource.CONCURRENCY else self.resource.value
        return f"{self.amount} {what} {per} for this {self.level.value}"


@dataclass(slots=True)
class Take:
    """What one request wants under one rule."""

    rule: LimitRule
    amount: int


@dataclass(slots=True)
class Taken:
    """A take that was counted, or that found no room. ``used``: the count with it, or as it was found."""

    take: Take
    start_ns: int  # of the window that it was counted in; 0 for requests at once
    used: int

    @property
    def left(self) -> int:
        """How much is left of the limit."""
        return max(self.take.rule.amount - self.used, 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one request: everything was taken, or ``full`` is the first rule without room and nothing was."""

    taken: Sequence[Taken]
    full: Taken | None = None


class CountsUnavailable(Exception):
    """The counts cannot be asked."""


class CountStore(Protocol):
    """Where counts are kept. Reserving is atomic over all takes of a request, whichever process asks."""

    async def open(self) -> None:
        """Begin. Never fails for a server that is away."""

    async def reserve(self, takes: Sequence[Take]) -> Verdict:
        """Count all takes, or none. Raises ``CountsUnavailable``, within the store's deadline, and then at once."""

    def settle(self, taken: Sequence[Taken], amounts: Sequence[int]) -> None:
        """Replace each amount by what it came to (0: give it back), in the window that it was taken in.

        Returns at once and never raises: a settlement that is lost leaves the reservation, until its window ends.
        """

    async def close(self) -> None:
        """Let go, after what was settled is written."""

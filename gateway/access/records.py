"""What the store of keys holds, as values. Secrets are in none of them: a key's is shown once, where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.access.roles import Role
from gateway.limits.rules import Level, Outage

DEFAULT = "default"
"""The tenant, and the team of each tenant, that there is without making it."""


class LimitKind(StrEnum):
    """What a stored limit is about. Money is in nano-units of the price book's currency."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    MONEY = "money"


class Period(StrEnum):
    """The window of a stored limit: a minute for requests and tokens, none for concurrency, others for money."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose models, aliases or limits: a tenant, a team of it, or a key (by its id, whatever its tenant)."""

    level: Level
    name: str  # "acme", "acme/research", or a key's id

    @classmethod
    def team(cls, tenant: str, team: str) -> Subject:
        """Return a team of a tenant."""
        return cls(Level.TEAM, f"{tenant}/{team}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant: what keys, caches and bills are kept apart by."""

    name: str
    models: tuple[str, ...] | None
    disabled: bool
    created_ns: int


@dataclass(frozen=True, slots=True)
class Team:
    """A team of a tenant: who is billed."""

    tenant: str
    name: str
    models: tuple[str, ...] | None
    disabled: bool
    created_ns: int


@dataclass(frozen=True, slots=True)
class SecretNote:
    """One secret of a key, as far as it is known after it was shown: its first characters and its days."""

    prefix: str
    created_ns: int
    expires_ns: int | None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key. ``expires_ns`` is the key's; each secret may end before, when it was rotated."""

    id: str
    tenant: str
    team: str
    roles: tuple[Role, ...]
    models: tuple[str, ...] | None
    shows: tuple[str, ...] | None
    note: str
    created_ns: int
    expires_ns: int | None
    revoked_ns: int | None
    secrets: tuple[SecretNote, ...] = ()
    repairs: tuple[str, ...] = ()  # policies of prefix repair


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a key shall be. ``id`` is public, as bills and logs show it."""

    id: str
    tenant: str = DEFAULT
    team: str = DEFAULT
    roles: tuple[Role, ...] = (Role.USER,)
    models: tuple[str, ...] | None = None
    shows: tuple[str, ...] | None = None
    note: str = ""
    expires_ns: int | None = None
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredLimit:
    """A limit of a subject."""

    subject: Subject
    kind: LimitKind
    period: Period
    amount: int
    on_outage: Outage


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that means another model for one subject."""

    subject: Subject
    name: str
    model: str


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something: a key's id or a person of this machine, and from where."""

    name: str
    source: str  # "cli", or the client's address


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change: who, when, from where, what, to whom. ``detail`` holds no secret."""

    seq: int
    at_ns: int
    actor: str
    source: str
    action: str  # "key.create", "limit.set" …
    subject: str
    detail: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that decides who may do what, as it was at one version of the store."""

    version: int
    keys: tuple[
        tuple[str, int | None, StoredKey], ...
    ]  # digest, the secret's end, and the key; revoked ones are not in
    tenants: Mapping[str, Tenant]
    teams: Mapping[tuple[str, str], Team]
    limits: Mapping[Subject, tuple[StoredLimit, ...]]
    aliases: Mapping[Subject, Mapping[str, str]]
    is_used: bool  # there is a key, or was once

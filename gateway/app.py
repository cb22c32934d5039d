"""The composition root: every part is made, started, handed to the others, and brought down here, in this order:

home → pool → traces, ledger → client → engines, fleet → edge;  and on SIGTERM: readiness fails → new requests stop →
streams finish, up to a limit → what is left is cut with an error → edge, engines, pool, ledger, traces, spans close.
A second signal ends the process at once; what was billed is safe then too, since the ledger's journal survives that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from billing.counters import LedgerCounters
from billing.database import Place
from billing.ledger import Ledger
from engine_adapter.embedded.errors import WeightsError
from engine_adapter.embedded.launch import EmbeddedProcess
from engine_adapter.wire_client import WireClient
from gateway import assembly
from gateway.access.api import AccessApi
from gateway.admin import Admin
from gateway.answer_headers import AnswerHeaders
from gateway.asking import Asker
from gateway.attempt import Attempter
from gateway.console.mount import mounted_console
from gateway.cross_origin import allow_origins
from gateway.diagnosis.explain import Explainer
from gateway.diagnosis.watch import Build, PromptWatch
from gateway.diagnosis.watch_metrics import WatchCollector
from gateway.discovery.keeper import Keeper
from gateway.dispatch import Dispatcher
from gateway.doors import opened_keys, opened_spending
from gateway.engine_sessions import EngineSessions
from gateway.failover import Failover
from gateway.fleet import Fleet
from gateway.flights import Flights
from gateway.gauges import StateCollector
from gateway.home import claimed
from gateway.http import Edge, EdgeOptions, make_app
from gateway.instance import Instance
from gateway.ledger_metrics import LedgerCollector
from gateway.limits.metrics import LimitCollector
from gateway.listening import LAST_WORDS_S, listening, taken
from gateway.models import ModelDirectory
from gateway.otlp_receiver import OtlpReceiver
from gateway.peers import Peers
from gateway.pipeline import Pipeline
from gateway.pool import keep_alive, own_pool
from gateway.prompts import PromptBook
from gateway.protocols.responses.protocol import Responses
from gateway.protocols.responses.store import ResponseStore
from gateway.recorder import Recorder
from gateway.recovery import TraceFollower
from gateway.replies import Replies
from gateway.routing import POLICIES
from gateway.run_ends import RunEnds, Why, run_name
from gateway.scale import ScaleCollector
from gateway.separation import Separation
from gateway.settings import Settings
from gateway.snapshots import IndexSnapshots
from gateway.span_ends import SpanEnds
from gateway.span_export import span_export
from gateway.store_metrics import StoreCollector
from gateway.tokens import Tokens
from gateway.workers.place import WorkerPlace
from gateway.workers.worker import Worker
from radix_index.index import RadixIndex
from tracing.errors import TraceStoreUnavailable
from tracing.metrics import Metrics
from tracing.record import RequestRecord
from tracing.runs import RunLinker
from tracing.store import TraceStore

_log = logging.getLogger(__name__)
_FLUSH_S = 5.0
_RESTORED_RECORDS = 10_000


@dataclass(slots=True)
class Gateway:
    """A gateway that serves. ``url`` is where."""

    url: str
    flights: Flights
    fleet: Fleet
    index: RadixIndex
    snapshots: IndexSnapshots
    ledger: Ledger
    traces: TraceStore
    metrics: Metrics
    ledger_place: Place
    compared: PromptWatch | None = None
    processes: dict[str, EmbeddedProcess] = field(default_factory=dict)


async def serve(
    settings: Settings,
    on_listening: Callable[[Gateway], None] | None = None,
    among: WorkerPlace | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises ``SettingsError``, ``LaunchError``, ``BillingError`` …

    ``among``: the place of this process among several workers of one gateway.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with running(settings, among) as gateway:
            if on_listening is not None:
                on_listening(gateway)
            await stop.wait()
            _log.info("going down: %d requests in flight", gateway.flights.count)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def running(settings: Settings, among: WorkerPlace | None = None) -> AsyncIterator[Gateway]:
    """Be a whole gateway within the block, or one worker of it; leaving it drains. Fails with the first error of a part
    that must live."""
    async with AsyncExitStack() as stack:
        worker = None if among is None else Worker(among)
        if worker is None:  # else the supervisor has it
            stack.enter_context(claimed(settings.home))
        shelf = assembly.price_shelf(settings)
        keys = await opened_keys(settings, shelf, stack)  # without any, it listens to nobody beyond this machine
        door = await stack.enter_async_context(taken(assembly.listen_options(settings, among)))
        embedded, pool = settings.embedded, None
        if settings.runs_embedded and embedded.pool_bytes and embedded.pool_url is None:
            pool = await own_pool(embedded.pool_bytes, stack)
        pool_url = pool.url if pool is not None else embedded.pool_url if embedded.pool_bytes else None
        traces = TraceStore(assembly.trace_place(settings))
        stack.push_async_callback(asyncio.to_thread, traces.close, _FLUSH_S)
        place = assembly.ledger_place(settings)
        ledger = Ledger(place, assembly.ledger_options(settings), follower=TraceFollower(traces))
        await asyncio.to_thread(ledger.start)
        stack.push_async_callback(asyncio.to_thread, ledger.close, _FLUSH_S)
        for book in shelf.books:
            await asyncio.to_thread(ledger.register, book)
        kept_responses = ResponseStore(settings.response_path)
        stack.push_async_callback(asyncio.to_thread, kept_responses.close)
        spans = span_export(settings)
        if spans is not None:
            stack.push_async_callback(asyncio.to_thread, spans.close, _FLUSH_S)
        client = await stack.enter_async_context(WireClient())
        prompts = PromptBook()
        stack.callback(prompts.close)

        launches = assembly.launch_specs(settings, pool_url) if settings.runs_embedded else []
        processes = {launch.id: EmbeddedProcess(launch) for launch in launches}
        index = RadixIndex(byte_budget=settings.routing.index_bytes)
        snapshots = IndexSnapshots(
            settings.home / "index.snapshot", index, time.time, assembly.snapshot_options(settings)
        )
        compared = _watch(settings, traces, prompts, lambda: fleet)
        if compared is not None:
            stack.push_async_callback(asyncio.to_thread, compared.close, _FLUSH_S)
        flights, metrics = Flights(), Metrics()
        keys_changed = keys.keeper.refresh if worker is None else worker.changing(keys.keeper.refresh)

        def forget_place(name: str) -> None:
            for each in (dispatcher, by_load):
                each.places.forget(name)

        fleet = Fleet(
            [*map(assembly.embedded_spec, launches), *map(assembly.instance_spec, settings.instances)],
            client=client,
            index=index,
            rates=assembly.rates(settings),
            options=assembly.health_options(settings),
            on_described=lambda instance: _load_tokenizers(instance, models, prompts, settings),
            snapshots=snapshots,
            on_began=lambda name: traces.began(name, time.time_ns()),
            on_emptied=forget_place,
        )
        models = ModelDirectory(assembly.model_options(settings), fleet.models, fleet.knows_all_models)
        linker = RunLinker() if worker is None else worker.linker
        linker.restore(await asyncio.to_thread(_remembered, traces))
        recorder = Recorder(
            shelf=shelf,
            ledger=ledger,
            traces=traces,
            metrics=metrics,
            spans=spans,
            regions=fleet.regions,
        )
        StateCollector(fleet, flights, index, snapshots.stats).register(metrics.registry)
        metrics.registry.register(StoreCollector(ledger, traces, spans))
        if compared is not None:
            metrics.registry.register(WatchCollector(compared))
        counters = LedgerCounters(place)
        stack.callback(counters.close)
        of_all = metrics.registry if worker is None else CollectorRegistry()
        of_all.register(LedgerCollector(counters))
        shared_metrics = None if worker is None else worker.metrics(metrics.registry, of_all)
        spending = await opened_spending(settings, shelf, keys.keeper, stack, 0 if among is None else among.number)
        metrics.registry.register(LimitCollector(spending.limits))
        dispatcher = Dispatcher(
            fleet,
            index,
            POLICIES[settings.routing.policy](),
            settings.routing.seed,
            asyncio.get_running_loop().call_later,
            None if worker is None else worker.loads,
            settings.routing.through,
        )
        gate = assembly.admission_gate(settings, fleet)
        metrics.registry.register(ScaleCollector(fleet, gate))
        by_load = Dispatcher(
            fleet,
            index,
            POLICIES["fewest-requests"](),
            settings.routing.seed,
            asyncio.get_running_loop().call_later,
            None if worker is None else worker.loads,
        )
        sessions = EngineSessions(client, fleet.instances, metrics.registry)
        ends = RunEnds(
            [dispatcher.places, sessions, *([] if gate is None else [gate])],
            settings.routing.run_idle_s,
            metrics.registry,
            tell_others=(lambda run, why: None) if worker is None else worker.run_ended,
        )
        linker.tell(ends)

        def end_run(key_id: str, run_id: str) -> bool:
            ends.end(run_name(key_id, run_id), Why.TOLD)
            return linker.knows(key_id, run_id)

        separation = Separation(fleet, dispatcher, by_load)
        answer_headers = AnswerHeaders(
            recorder.settled,
            frozenset(settings.server.answer_headers),
            summarizes_streams=settings.server.stream_summary,
        )
        limits = assembly.attempt_options(settings)
        replies = Replies(answer_headers, limits.relay)
        attempter = Attempter(Asker(client, replies, limits), fleet, linker, prompts, replies)
        pipeline = Pipeline(
            keys=keys.ring,
            models=models,
            linker=linker,
            prompts=prompts,
            dispatcher=dispatcher,
            attempter=attempter,
            failover=Failover(dispatcher, attempter, prompts, replies, separation, assembly.failover_options(settings)),
            replies=replies,
            recorder=recorder,
            flights=flights,
            ends=ends,
            spending=spending,
            compared=compared,
            gate=gate,
        )
        sources = assembly.sources(settings)
        readiness = _Readiness(flights, fleet, recorder, waits_for=len(processes) or 1)
        admin = Admin(
            keys=keys.ring,
            fleet=fleet,
            traces=traces,
            render_metrics=metrics.render if shared_metrics is None else shared_metrics.render,
            why_not_ready=readiness.why_not,
            restarts={name: process.restart for name, process in processes.items()},
            end_run=end_run,
            drained=None if worker is None else worker.drained,
        )
        edge_options = EdgeOptions(
            body_cap_bytes=settings.server.body_cap_bytes, client_stall_s=settings.stream.client_stall_s
        )
        app = make_app(edge_options)
        allow_origins(app, settings.server.allowed_origins)
        responses = Responses(kept_responses)
        edge = Edge(
            pipeline,
            keys=keys.ring,
            models=models,
            tokens=Tokens(models, prompts, fleet, client, responses),
            responses=responses,
            options=edge_options,
        )
        app.add_routes(edge.routes())
        app.add_routes(admin.routes())
        explainer = Explainer(
            keys=keys.ring,
            models=models,
            prompts=prompts,
            dispatcher=dispatcher,
            compared=compared,
            protocols=edge.protocols,
            body_cap_bytes=edge_options.body_cap_bytes,
        )
        app.add_routes(explainer.routes())
        if settings.tracing.receive:
            span_ends = SpanEnds(ends, linker, by_root=settings.tracing.root_span_ends_run)
            app.add_routes(OtlpReceiver(keys.ring, traces, assembly.receiver_options(settings), span_ends).routes())
        peers = Peers(settings.server.trusted_proxies)
        access_api = AccessApi(
            keys.store,
            keys.ring,
            fixed=[key.id for key in settings.keys],
            changed=keys_changed,
            peer=lambda request: peers.client(request.remote, request.headers.get("x-forwarded-for")),
        )
        app.add_routes(access_api.routes())
        console = mounted_console(
            settings,
            traces=traces,
            place=place,
            keys=keys.ring,
            key_store=keys.store,
            keys_changed=keys_changed,
            fleet=fleet,
            index=index,
            flights=flights,
            client=client,
        )
        app.add_routes(console.routes())

        await snapshots.restore(fleet.instances)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(fleet.run(), name="fleet"),
                group.create_task(keys.keeper.run(), name="keys"),
                group.create_task(ends.run(), name="run ends"),
                group.create_task(Keeper(fleet, sources).run(), name="discovery"),
                group.create_task(console.run(), name="console"),
            ]
            if among is None or among.is_first:
                tasks.append(group.create_task(snapshots.run(fleet.feeds), name="index snapshots"))
            if worker is not None and shared_metrics is not None:
                worker.open(fleet.instances, ends, lambda: group.create_task(keys.keeper.refresh()))
                stack.callback(worker.mesh.close)
                tasks.append(group.create_task(shared_metrics.run(), name="metrics"))
            if pool is not None:
                tasks.append(group.create_task(keep_alive(pool), name="pool"))
            for name, process in processes.items():
                was_ready = _ever_healthy(fleet.instances[name])
                tasks.append(group.create_task(process.run(was_ready), name=f"engine {name}"))
            try:
                async with listening(app, edge, door) as (url, stop_listening):
                    yield Gateway(
                        url,
                        flights,
                        fleet,
                        index,
                        snapshots,
                        ledger,
                        traces,
                        metrics,
                        place,
                        compared,
                        processes,
                    )
                    await _drain(flights, settings, stop_listening)
                    if among is None or among.is_first:
                        await snapshots.save(fleet.feeds)
            finally:
                for task in tasks:
                    task.cancel()


async def _drain(flights: Flights, settings: Settings, stop_listening: Callable[[], object]) -> None:
    flights.is_leaving = True
    await asyncio.sleep(settings.server.drain_grace_s)
    flights.is_draining = True
    stop_listening()
    if not await flights.drain(settings.server.drain_limit_s):
        _log.warning("%d requests are cut at the drain limit", flights.count)
        flights.cut_all()
        await flights.drain(LAST_WORDS_S)


class _Readiness:
    """Ready once as many instances as are our own (or one) took requests; then while at least one does."""

    def __init__(self, flights: Flights, fleet: Fleet, recorder: Recorder, waits_for: int) -> None:
        self._flights, self._fleet, self._recorder, self._waits_for = flights, fleet, recorder, waits_for
        self._has_started = False

    def why_not(self) -> str | None:
        """Return why requests should go elsewhere, ``None`` when they are welcome."""
        if self._flights.is_leaving or self._flights.is_draining:
            return "draining"
        if self._recorder.ledger_failed:
            return "the ledger takes no rows"
        up = sum(instance.takes_requests for instance in self._fleet.instances.values())
        self._has_started = self._has_started or up >= self._waits_for
        if not self._has_started:
            return f"starting: {up} of {self._waits_for} instances are up"
        return None if up else "no instance takes requests"


def _ever_healthy(instance: Instance) -> Callable[[], bool]:
    return lambda: instance.facts is not None


def _remembered(traces: TraceStore) -> list[RequestRecord]:
    """Return the newest records, none where the store is away: then runs begin anew."""
    try:
        return traces.recent(_RESTORED_RECORDS)
    except TraceStoreUnavailable as error:
        _log.warning("runs are not taken up again: %s", error)
        return []


def _watch(
    settings: Settings, traces: TraceStore, prompts: PromptBook, fleet_of: Callable[[], Fleet]
) -> PromptWatch | None:
    """Return what compares each request with the one before it, ``None`` where that is switched off."""
    options = assembly.watch_options(settings)

    def build_of(record: RequestRecord) -> Build:
        instance = fleet_of().instances.get(record.instance or "")
        template = prompts.template_of(record.served_model)
        if instance is None:
            return Build(template=template)
        facts, name = instance.facts, instance.spec.adapter.name
        if facts is None:
            return Build(engine=name, template=template)
        engine = name if facts.version is None else f"{name} {facts.version}"
        return Build(engine, facts.weights_id or facts.model_path, template)

    return None if options is None else PromptWatch(traces.describe, build_of, options, traces.detail)


async def _load_tokenizers(instance: Instance, models: ModelDirectory, prompts: PromptBook, settings: Settings) -> None:
    for model in instance.models:
        options = models.options(model)
        path = instance.facts.model_path if instance.facts is not None else None
        try:
            folder = await asyncio.to_thread(assembly.tokenizer_folder, options.tokenizer, path)
        except ImportError as error:
            _log.warning("the tokenizer of %s needs the extra 'embedded': %s", model, error)
            continue
        except (WeightsError, OSError) as error:
            _log.warning("no tokenizer for %s (%s): its requests are routed by their text", model, error)
            continue
        if folder is not None:
            await prompts.load(model, folder, options.template or settings.embedded.template)
        elif options.tokenizer != "none":
            _log.warning("%s: no tokenizer on this machine; its requests are routed by load alone", model)

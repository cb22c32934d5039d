"""A question and its answer: which requests, what could have been otherwise, and how it would have come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from billing.calendar import HOUR_NS
from billing.prices import PriceBook
from gateway.replay.errors import ParameterError
from gateway.replay.performance import PRESETS
from gateway.routing import POLICIES
from gateway.whatif.compare import Comparison, compare
from gateway.whatif.fleets import FleetChange, SimulatedFleet, fleet_of
from gateway.whatif.scenarios import OtherPrices, PerfectPrefix, Repair, Retention, Scenario
from tracing.detail import BreakKind, StepDetail
from tracing.detail import Comparison as Compared
from tracing.record import RequestRecord
from tracing.store import TraceStore

RETENTIONS = {"5m": HOUR_NS // 12, "1h": HOUR_NS, "24h": 24 * HOUR_NS}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. A run is played with what came up to ``lookback_ns`` before it, which may have warmed it.

    ``policies`` and ``more_host_tokens`` are simulated on engines as fast as ``engine`` (of ``gateway.replay``'s
    presets) with ``device_tokens``; everything else follows from the records alone. ``limit``: requests to play.
    """

    run_id: str | None = None
    tenant: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    retentions: Mapping[str, int] | None = None
    policies: tuple[str, ...] = ()
    more_host_tokens: int = 0
    engine: str = "llama8b-h100"
    device_tokens: int | None = None
    other_books: tuple[tuple[str, PriceBook], ...] = ()
    lookback_ns: int = 24 * HOUR_NS
    limit: int = 50_000


def answer(question: Question, traces: TraceStore, books: Mapping[str, PriceBook]) -> Comparison:
    """Play it. Blocks: use a thread. Raises ``ParameterError``, ``TracingError``, ``PriceBookError``.

    Cost: about 100 µs a request and scenario, 500 µs where it is simulated.
    """
    _check(question)
    records, counted = _records(question, traces)
    details = traces.details(record.request_id for record in records if counted(record))

    def scenarios(known: list[RequestRecord], stride: int) -> list[Scenario]:
        found: list[Scenario] = [PerfectPrefix(books, stride)]
        for label, retention_ns in (RETENTIONS if question.retentions is None else question.retentions).items():
            found += [Retention(books, stride, retention_ns, label, shared=shared) for shared in (False, True)]
        found += _repairs(books, details)
        found += _fleets(question, known, stride, books)
        return found + [OtherPrices(book, label) for label, book in question.other_books]

    return compare(records, books, scenarios, counted)


def _check(question: Question) -> None:
    for policy in question.policies:
        if policy not in POLICIES:
            raise ParameterError(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")
    if question.engine not in PRESETS:
        raise ParameterError(f"there is no engine {question.engine!r}; there are {', '.join(PRESETS)}")
    if question.more_host_tokens < 0 or (question.device_tokens is not None and question.device_tokens < 1):
        raise ParameterError("sizes must not be below 0, and a device holds something")


def _records(question: Question, traces: TraceStore) -> tuple[list[RequestRecord], _Counted]:
    since_ns, until_ns = question.since_ns, question.until_ns
    tenant, counted = question.tenant, _Counted(None)
    if question.run_id is not None:
        outline = traces.outline(question.run_id, tenant)
        if outline is None:
            raise ParameterError(f"there is no run {question.run_id!r}")
        tenant = outline.summary.tenant
        since_ns = outline.summary.first_ns - question.lookback_ns
        until_ns = outline.summary.last_ns + 1
        counted = _Counted(question.run_id)
    records: list[RequestRecord] = []
    for record in traces.arrived(since_ns, until_ns):
        if tenant is None or record.identity.tenant == tenant:
            records.append(record)
        if len(records) > question.limit:
            raise ParameterError(f"there are more than {question.limit:,} requests in that time; ask for less of it")
    return records, counted


@dataclass(frozen=True, slots=True)
class _Counted:
    """Whether a record is of the run that is asked for (``None``: all are)."""

    run_id: str | None

    def __call__(self, record: RequestRecord) -> bool:
        return self.run_id is None or (record.link is not None and record.link.run_id == self.run_id)


def _repairs(books: Mapping[str, PriceBook], details: Mapping[str, StepDetail]) -> list[Scenario]:
    kinds = {
        detail.change.kind
        for detail in details.values()
        if detail.comparison is Compared.CHANGED and detail.change is not None
    }
    return [Repair(books, details, frozenset({kind}), kind.value) for kind in BreakKind if kind in kinds]


def _fleets(
    question: Question, records: list[RequestRecord], stride: int, books: Mapping[str, PriceBook]
) -> list[Scenario]:
    changes = [FleetChange(policy=policy) for policy in question.policies]
    if question.more_host_tokens:
        changes.append(FleetChange(more_host_tokens=question.more_host_tokens))
    if not changes:
        return []
    engine = PRESETS[question.engine]
    if question.device_tokens is not None:
        engine = replace(engine, device_tokens=question.device_tokens)
    fleet = fleet_of(records, engine)
    return [SimulatedFleet(records, stride, books, fleet, change) for change in (FleetChange(), *changes)]

"""Recorded requests as a workload, and what they would have cost on the same fleet with no shared routing.

The baseline: as many engines, each with a prefix cache of its own device memory, under round robin, with neither lower
tiers nor a pool. The same requests come at the same times; what each would have hit is priced by the same book at the
same instant, so that the difference is what routing and tiers made of it and nothing else. The production index and
policy run in the replay (``gateway.replay``); engines are simulated, so answers take as long as the model says.

Prompts are known to their marks' stride: a hit of the baseline ends at a mark, which understates it by half a stride on
average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from billing.meter import recharge
from billing.prices import PriceBook
from gateway.replay.engine_model import Flight
from gateway.replay.errors import ParameterError
from gateway.replay.formats import TraceHeader, TraceRow
from gateway.replay.performance import EnginePerformance
from gateway.replay.router import RouterOptions
from gateway.replay.simulation import FleetOptions, LoadOptions, Simulation
from gateway.replay.workload import build_workload
from tracing.record import HitSource, RequestRecord, Usage, UsageSource

ROUND_ROBIN = "round-robin"
_COUNTED = (UsageSource.ENGINE, UsageSource.RECOVERED)


@dataclass(frozen=True, slots=True)
class BaselineFleet:
    """The fleet of the baseline: ``instances`` of one kind. ``None``: as many as the records name, for each model."""

    performance: EnginePerformance
    instances: int | None = None
    policy: str = ROUND_ROBIN


@dataclass(slots=True)
class BaselineSums:
    """Sums over the requests that could be replayed, in one currency. Money is nano-units."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    baseline_hit_tokens: int = 0
    cost_nano: int = 0
    no_cache_nano: int = 0
    baseline_nano: int = 0
    baseline_saved_gpu_ns: int = 0  # GPU time that hits beyond the baseline's saved

    @property
    def saved_nano(self) -> int:
        """What was saved against no cache at all."""
        return self.no_cache_nano - self.cost_nano

    @property
    def saved_beyond_baseline_nano(self) -> int:
        """What was saved against the baseline."""
        return self.baseline_nano - self.cost_nano


@dataclass(slots=True)
class Baseline:
    """What came out, by unit and currency. ``left_out``: requests that cannot be replayed, by reason."""

    policy: str
    stride_tokens: int = 0
    instances: int = 0
    first_ns: int = 0
    last_ns: int = 0
    tier_cost_nano: dict[str, int] = field(default_factory=dict)  # by currency, for the time of the records
    left_out: Counter[str] = field(default_factory=Counter)
    sums: dict[tuple[str, str], BaselineSums] = field(default_factory=dict)

    def totals(self) -> dict[str, BaselineSums]:
        """Sum by currency."""
        found: dict[str, BaselineSums] = {}
        for (_, currency), sums in self.sums.items():
            _add(found.setdefault(currency, BaselineSums()), sums)
        return found


def round_robin(
    records: Iterable[RequestRecord],
    books: Mapping[str, PriceBook],
    fleet: BaselineFleet,
    unit_of: Callable[[RequestRecord], str],
) -> Baseline:
    """Replay records under the baseline and price it. Raises ``ParameterError`` where none can be replayed.

    Cost: that of a replay, some 500 µs a request; memory by the records.
    """
    result = Baseline(fleet.policy)
    usable = _usable(records, books, result)
    if not usable:
        raise ParameterError(f"no recorded request can be replayed: {dict(result.left_out)}")
    result.first_ns = min(record.stamps.arrived_ns for record in usable)
    result.last_ns = max(record.stamps.closed_ns for record in usable)
    by_model: dict[str, list[RequestRecord]] = {}
    for record in usable:
        by_model.setdefault(record.served_model, []).append(record)
    for model in sorted(by_model):
        _replay(by_model[model], books, fleet, unit_of, result)
    result.tier_cost_nano = _tier_costs(books, result)
    return result


def _usable(records: Iterable[RequestRecord], books: Mapping[str, PriceBook], result: Baseline) -> list[RequestRecord]:
    found = []
    for record in records:
        reason = None
        if record.usage.source not in _COUNTED:
            reason = "no usage"
        elif record.prefix is None:
            reason = "prompt not known"
        elif record.charge.amount_nano is None or record.charge.basis is None:
            reason = "no price"
        elif record.charge.price_version not in books:
            reason = "price version not stored"
        if reason is not None:
            result.left_out[reason] += 1
        else:
            found.append(record)
    strides = Counter(record.prefix.stride_tokens for record in found if record.prefix is not None)
    if not strides:
        return []
    result.stride_tokens = strides.most_common(1)[0][0]
    same = [r for r in found if r.prefix is not None and r.prefix.stride_tokens == result.stride_tokens]
    if len(same) < len(found):
        result.left_out["marked at another stride"] += len(found) - len(same)
    return sorted(same, key=lambda record: record.stamps.arrived_ns)


def _replay(
    records: Sequence[RequestRecord],
    books: Mapping[str, PriceBook],
    fleet: BaselineFleet,
    unit_of: Callable[[RequestRecord], str],
    result: Baseline,
) -> None:
    begin_ns = records[0].stamps.arrived_ns
    header = TraceHeader("recorded", records[0].served_model, result.stride_tokens, closed=False)
    workload = build_workload(header, (trace_row(n, record, begin_ns) for n, record in enumerate(records)))
    instances = fleet.instances or instances_of(records)
    result.instances += instances
    performance = replace(fleet.performance, host_tokens=0, disk_tokens=0)
    simulation = Simulation(workload, FleetOptions(performance, instances), LoadOptions(), RouterOptions(fleet.policy))
    for flight in simulation.run().flights:
        record = records[flight.request.number]
        if flight.was_refused:
            result.left_out["larger than the baseline's device"] += 1
            continue
        sums = result.sums.setdefault((unit_of(record), record.charge.currency), BaselineSums())
        _count(sums, record, flight, books[record.charge.price_version])


def instances_of(records: Sequence[RequestRecord]) -> int:
    """Count the instances that answered or could have."""
    names = {record.instance for record in records if record.instance is not None}
    names |= {each.instance for record in records if record.decision for each in record.decision.candidates}
    return max(len(names), 1)


def trace_row(number: int, record: RequestRecord, begin_ns: int) -> TraceRow:
    """Return a recorded request as a row of an open trace whose blocks are its prompt's marks."""
    return TraceRow(
        line=number,
        session=-1,
        context=0,
        at_s=(record.stamps.arrived_ns - begin_ns) / 1e9,
        think_s=0.0,
        prompt_tokens=max(record.usage.prompt_tokens, 1),
        output_tokens=max(record.usage.output_tokens, 1),
        keep=0,
        blocks=list(record.prefix.marks()) if record.prefix is not None else [],
    )


def _count(sums: BaselineSums, record: RequestRecord, flight: Flight, book: PriceBook) -> None:
    usage, basis = record.usage, record.charge.basis
    assert basis is not None  # those without were left out
    hits = min(sum(flight.hit_tokens), max(usage.prompt_tokens - 1, 0))
    bill = recharge(_with_hits(usage, hits), book, basis)
    none = recharge(_with_hits(usage, 0), book, basis)
    if bill.amount_nano is None or none.amount_nano is None:
        return
    sums.requests += 1
    sums.prompt_tokens += usage.prompt_tokens
    sums.hit_tokens += usage.hit_tokens
    sums.baseline_hit_tokens += hits
    sums.cost_nano += record.charge.amount_nano or 0
    sums.baseline_nano += bill.amount_nano
    sums.no_cache_nano += none.amount_nano
    if book.file.costs is not None:
        beyond = (usage.hit_tokens - hits) * book.file.costs.gpus_per_instance * 10**9
        sums.baseline_saved_gpu_ns += beyond // book.file.costs.prefill_tokens_per_s


def _with_hits(usage: Usage, hits: int) -> Usage:
    """The same answer with so many hits on the device, the rest computed and not billed as written."""
    return Usage(
        fresh_tokens=usage.prompt_tokens - hits,
        hit_device_tokens=hits,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        source=usage.source,
        hit_source=HitSource.REPORTED,
    )


def _tier_costs(books: Mapping[str, PriceBook], result: Baseline) -> dict[str, int]:
    """Return what the tiers cost in the time of the records, by the newest book of each currency that says so."""
    span_ns, found = result.last_ns - result.first_ns, dict[str, int]()
    for book in books.values():
        if (costs := book.file.costs) is not None:
            an_hour = (
                costs.host_gib * costs.host_gib_hour
                + costs.disk_gib * costs.disk_gib_hour
                + costs.pool_gib * costs.pool_gib_hour
            )
            numerator, denominator = an_hour.scaleb(9).as_integer_ratio()
            found[book.currency] = book.rounding.divide(numerator * span_ns, denominator * 3600 * 10**9)
    return found


def _add(sums: BaselineSums, other: BaselineSums) -> None:
    for name in BaselineSums.__dataclass_fields__:
        setattr(sums, name, getattr(sums, name) + getattr(other, name))

"""Scenarios beside what happened: exact sums over the requests in question.

All records are played, in the order of arrival, since any of them may have computed what a later one reads; those that
are ``counted`` are summed. What happened is summed from the records' own charges, so it equals the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from billing.prices import PriceBook
from gateway.replay.errors import ParameterError
from gateway.whatif.scenarios import HAPPENED, Scenario
from tracing.record import Charge, RequestRecord, Usage, UsageSource

_COUNTED = (UsageSource.ENGINE, UsageSource.RECOVERED)
_LEAST_TOKENS = 64
"""Fewer computed tokens say nothing of how fast an instance computes."""


@dataclass(slots=True)
class Sums:
    """Sums in one currency. Money is nano-units. ``unpriced``: requests that the scenario has no price for."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    cost_nano: int = 0
    unpriced: int = 0
    ttft_ns: int = 0  # summed; of scenarios estimated from what instances needed for a computed token
    with_ttft: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """One scenario, or what happened. ``sums`` by currency; ``hits`` by request; ``beside`` as the scenario's."""

    name: str
    title: str
    beside: str
    sums: dict[str, Sums]
    hits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What happened, and what would have. ``left_out``: counted requests that cannot be played, by reason."""

    recorded: Played
    scenarios: tuple[Played, ...]
    left_out: dict[str, int]
    stride_tokens: int
    first_ns: int = 0
    last_ns: int = 0


def playable(
    records: Sequence[RequestRecord], books: Mapping[str, PriceBook]
) -> tuple[list[RequestRecord], Counter[str], int]:
    """Return those that can be played, in the order of arrival, why others cannot, and the stride of their marks."""
    left_out: Counter[str] = Counter()
    found = []
    for record in records:
        reason = _unfit(record, books)
        if reason is None:
            found.append(record)
        else:
            left_out[reason] += 1
    strides = Counter(record.prefix.stride_tokens for record in found if record.prefix is not None)
    if not strides:
        return [], left_out, 0
    stride = strides.most_common(1)[0][0]
    same = [record for record in found if record.prefix is not None and record.prefix.stride_tokens == stride]
    if len(same) < len(found):
        left_out["marked at another stride"] += len(found) - len(same)
    return sorted(same, key=lambda record: record.stamps.arrived_ns), left_out, stride


def _unfit(record: RequestRecord, books: Mapping[str, PriceBook]) -> str | None:
    if record.usage.source not in _COUNTED:
        return "nobody counted its tokens"
    if record.prefix is None:
        return "its prompt is not known"
    if record.charge.amount_nano is None or record.charge.basis is None:
        return "it has no price"
    return None if record.charge.price_version in books else "its price version is not stored"


def compare(
    records: Sequence[RequestRecord],
    books: Mapping[str, PriceBook],
    make_scenarios: Callable[[list[RequestRecord], int], Sequence[Scenario]],
    counted: Callable[[RequestRecord], bool] = lambda _record: True,
) -> Comparison:
    """Play the scenarios. ``make_scenarios`` is given the playable records and the stride of their marks.

    Raises ``ParameterError`` where no counted request can be played.
    """
    all_playable, _, stride = playable(records, books)
    _, left_out, _ = playable([record for record in records if counted(record)], books)
    chosen = [record for record in all_playable if counted(record)]
    if not chosen:
        raise ParameterError(f"no recorded request can be replayed: {dict(left_out)}")
    rates = ns_per_token(all_playable)
    recorded = Played(HAPPENED, "What happened", HAPPENED, {})
    for record in chosen:
        _add(recorded, record, record.usage, record.charge, record.stamps.ttft_ns)
    played = tuple(
        _play(scenario, all_playable, counted, rates) for scenario in make_scenarios(all_playable, stride)
    )  # fmt: skip
    first, last = chosen[0].stamps.arrived_ns, max(record.stamps.closed_ns for record in chosen)
    return Comparison(recorded, played, dict(left_out), stride, first, last)


def ns_per_token(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return the median time that each instance took for a computed token, to its first token, over answers without
    hits in slower tiers. Instances that nothing is known of are left out."""
    found: dict[str, list[float]] = {}
    for record in records:
        usage, stamps = record.usage, record.stamps
        computed = usage.fresh_tokens + usage.written_tokens
        fetched = usage.hit_host_tokens + usage.hit_disk_tokens + usage.hit_pool_tokens
        if record.instance is None or stamps.sent_ns is None or stamps.first_token_ns is None:
            continue
        if computed >= _LEAST_TOKENS and not fetched:
            found.setdefault(record.instance, []).append((stamps.first_token_ns - stamps.sent_ns) / computed)
    return {instance: median(samples) for instance, samples in found.items()}


def _play(
    scenario: Scenario,
    records: Sequence[RequestRecord],
    counted: Callable[[RequestRecord], bool],
    rates: Mapping[str, float],
) -> Played:
    played = Played(scenario.name, scenario.title, scenario.beside, {})
    for record in records:
        usage = scenario.usage(record)
        if counted(record):
            charge = scenario.charge(record, usage)
            _add(played, record, usage, charge, _ttft_ns(scenario, record, usage, rates))
    return played


def _ttft_ns(scenario: Scenario, record: RequestRecord, usage: Usage, rates: Mapping[str, float]) -> int | None:
    own_ns, was_ns = scenario.ttft_ns(record), record.stamps.ttft_ns
    if own_ns is not None or was_ns is None:
        return own_ns
    spared_tokens = usage.hit_tokens - record.usage.hit_tokens
    return max(was_ns - round(spared_tokens * rates.get(record.instance or "", 0.0)), 0)


def _add(played: Played, record: RequestRecord, usage: Usage, charge: Charge, ttft_ns: int | None) -> None:
    sums = played.sums.setdefault(charge.currency, Sums())
    sums.requests += 1
    sums.prompt_tokens += usage.prompt_tokens
    sums.hit_tokens += usage.hit_tokens
    sums.cost_nano += charge.amount_nano or 0
    sums.unpriced += charge.amount_nano is None
    if ttft_ns is not None:
        sums.ttft_ns += ttft_ns
        sums.with_ttft += 1
    played.hits[record.request_id] = usage.hit_tokens

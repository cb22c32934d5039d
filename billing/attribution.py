"""Attribution: who computed what others then read, what was lost and why, what was wasted; from request records. Pure.

Records are folded in order of arrival into a memory of prefixes (``attribution_prefixes``): the marks that a record
keeps of its prompt say which parts of it had been computed before, by whom, and where they were last seen. Everything
is exact to the marks' stride (some 128 tokens); sums of money are exact to the nano-unit, since a request's saving and
cost are split by cumulative shares that end at the whole.

``unit_of`` says between whom accounts are kept: teams by default, or agents, keys, runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from billing.attribution_lost import Cause, LostHit, LostHits
from billing.attribution_prefixes import Flow, Prefixes, SharedPrefix
from billing.attribution_waste import Waste, WasteKind, Wastes
from billing.prices import PriceBook
from billing.rates import NoPrice, RateCard
from tracing.record import RequestRecord

K = TypeVar("K")

UNITS: dict[str, Callable[[RequestRecord], str]] = {
    "tenant": lambda record: record.identity.tenant,
    "team": lambda record: record.identity.team,
    "key": lambda record: record.identity.key_id,
    "agent": lambda record: record.labels.get("agent") or "-",
    "run": lambda record: "-" if record.link is None else record.link.run_id,
    "model": lambda record: record.served_model,
}


@dataclass(slots=True)
class UnitSums:
    """One unit's share, in one currency. Money is nano-units; ``transfer_nano`` sums to 0 over all units."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    cost_nano: int = 0
    saved_nano: int = 0  # against no cache at all
    saved_gpu_ns: int = 0  # GPU time that computing the hits would have taken
    own_hit_tokens: int = 0  # of what it computed itself
    others_hit_tokens: int = 0  # of what others computed for it
    given_tokens: int = 0  # what others read of what it computed
    transfer_nano: int = 0  # what it pays others (+) or gets (-) for prefixes, by the book's rule
    lost_tokens: int = 0
    lost_nano: int = 0
    credit_nano: int = 0
    wasted_tokens: int = 0
    wasted_nano: int = 0


@dataclass(slots=True)
class Attribution:
    """What came out. ``unmarked``: records whose prompts are not known; their hits are nobody's."""

    unit: str
    requests: int = 0
    unmarked: int = 0
    unpriced: int = 0
    units: dict[tuple[str, str], UnitSums] = field(default_factory=dict)  # (unit, currency)
    flows: dict[tuple[str, str, str], Flow] = field(default_factory=dict)  # (writer, reader, currency)
    lost: list[LostHit] = field(default_factory=list)
    waste: list[Waste] = field(default_factory=list)
    prefixes: list[SharedPrefix] = field(default_factory=list)

    def lost_by_cause(self) -> dict[tuple[Cause, str], tuple[int, ...]]:
        """Return of each cause and currency: requests, tokens, money, credit."""
        return _summed(
            ((each.cause, each.record.charge.currency), (1, each.tokens, each.amount_nano, each.credit_nano))
            for each in self.lost
        )

    def waste_by_kind(self) -> dict[tuple[WasteKind, str], tuple[int, ...]]:
        """Return of each kind and currency: requests, tokens, money."""
        return _summed(
            ((each.kind, each.record.charge.currency), (1, each.tokens, each.amount_nano)) for each in self.waste
        )


def attribute(
    records: Iterable[RequestRecord],
    books: Mapping[str, PriceBook],
    *,
    unit: str = "team",
    restarts: Mapping[str, tuple[int, ...]] | None = None,
) -> Attribution:
    """Fold records, in order of arrival, into an attribution.

    ``books``: every price version of the records; ``restarts``: when instances began anew, in ns. Cost: some 6 µs
    a mark; memory by distinct marks (some 1.3 kB each), losses and waste.
    """
    unit_of = UNITS[unit]
    result = Attribution(unit)
    prefixes, losses, wastes = Prefixes(), LostHits(restarts or {}), Wastes()
    for record in records:
        result.requests += 1
        result.unmarked += record.prefix is None and record.usage.prompt_tokens > 0
        name, currency = unit_of(record), record.charge.currency
        sums = result.units.setdefault((name, currency), UnitSums())
        book = books.get(record.charge.price_version)
        _count(sums, record, book)
        result.unpriced += record.charge.amount_nano is None
        card = card_of(record, book)
        found = prefixes.look_up(record)
        for loss in losses.of(record, found, book, card):
            result.lost.append(loss)
            sums.lost_tokens += loss.tokens
            sums.lost_nano += loss.amount_nano
            sums.credit_nano += loss.credit_nano
        for waste in wastes.of(record):
            result.waste.append(waste)
            sums.wasted_tokens += waste.tokens
            sums.wasted_nano += waste.amount_nano
        shares = book is not None and book.file.prefix_writes == "readers"
        prefixes.take(record, found, name, shares_writes=shares)
    prefixes.finish()
    result.flows, result.prefixes = prefixes.flows, prefixes.shared()
    for (writer, reader, currency), flow in result.flows.items():
        _move(result, writer, reader, currency, flow)
    return result


def _move(result: Attribution, writer: str, reader: str, currency: str, flow: Flow) -> None:
    mine = result.units.setdefault((reader, currency), UnitSums())
    if writer == reader:
        mine.own_hit_tokens += flow.tokens
        return
    theirs = result.units.setdefault((writer, currency), UnitSums())
    mine.others_hit_tokens += flow.tokens
    theirs.given_tokens += flow.tokens
    mine.transfer_nano += flow.transfer_nano
    theirs.transfer_nano -= flow.transfer_nano


def _count(sums: UnitSums, record: RequestRecord, book: PriceBook | None) -> None:
    sums.requests += 1
    sums.prompt_tokens += record.usage.prompt_tokens
    sums.hit_tokens += record.usage.hit_tokens
    sums.cost_nano += record.charge.amount_nano or 0
    sums.saved_nano += record.charge.saved_nano or 0
    if book is not None and (costs := book.file.costs) is not None:
        sums.saved_gpu_ns += record.usage.hit_tokens * costs.gpus_per_instance * 10**9 // costs.prefill_tokens_per_s


def card_of(record: RequestRecord, book: PriceBook | None) -> RateCard | None:
    """Return the rates by which a record was priced; ``None`` where it was not."""
    basis = record.charge.basis
    if book is None or basis is None:
        return None
    card = book.card(
        basis.model,
        basis.at_ns,
        record.usage.prompt_tokens,
        team=basis.team,
        region=basis.region,
        service_tier=basis.service_tier,
    )
    return None if isinstance(card, NoPrice) else card


def _summed(entries: Iterable[tuple[K, tuple[int, ...]]]) -> dict[K, tuple[int, ...]]:
    found: dict[K, tuple[int, ...]] = {}
    for key, values in entries:
        before = found.get(key)
        found[key] = values if before is None else tuple(a + b for a, b in zip(before, values, strict=True))
    return found

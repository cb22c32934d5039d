"""What several pages show, as plain values: sums of money, legends, lines of the runs list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.console.formats import Amount, ago, count, duration, iso_moment, moment, money, share
from gateway.console.scale import TOKEN_CLASSES, Segment, token_bar
from tracing.record import RequestRecord
from tracing.store import Money, RunSummary


@dataclass(frozen=True, slots=True)
class MoneyView:
    """A sum in one currency."""

    cost: Amount
    saved: Amount
    unpriced: int


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One token class with its total."""

    kind: str
    name: str
    tokens: str
    share: str
    meaning: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the runs list."""

    tenant: str
    run_id: str
    agent: str | None
    model: str
    when: str
    when_iso: str
    when_utc: str
    steps: str
    failed: int
    prompt: str
    hits: str
    hit_share: str
    bar: tuple[Segment, ...]
    ttft: str
    money: tuple[MoneyView, ...]


def money_views(sums: Sequence[Money]) -> tuple[MoneyView, ...]:
    """Sums as text, one a currency."""
    return tuple(
        MoneyView(money(each.cost_nano, each.currency), money(each.saved_nano, each.currency), each.unpriced)
        for each in sums
    )


def sum_money(records: Sequence[RequestRecord]) -> tuple[Money, ...]:
    """Exact sums over records, by currency; equal to the trace store's."""
    sums: dict[str, list[int]] = {}
    for record in records:
        each = sums.setdefault(record.charge.currency, [0, 0, 0])
        each[0] += record.charge.amount_nano or 0
        each[1] += record.charge.saved_nano or 0
        each[2] += record.charge.amount_nano is None
    return tuple(Money(currency, *values) for currency, values in sorted(sums.items()))


def run_row(summary: RunSummary, now_ns: int) -> RunRow:
    """One line of the runs list."""
    hits = sum(summary.hit_tokens)
    return RunRow(
        tenant=summary.tenant,
        run_id=summary.run_id,
        agent=summary.agent,
        model=summary.model,
        when=ago(summary.last_ns, now_ns),
        when_iso=iso_moment(summary.last_ns),
        when_utc=moment(summary.last_ns) + " UTC",
        steps=count(summary.steps),
        failed=summary.failed,
        prompt=count(summary.prompt_tokens),
        hits=count(hits),
        hit_share=share(hits, summary.prompt_tokens),
        bar=token_bar((*summary.hit_tokens, summary.prompt_tokens - hits), summary.prompt_tokens),
        ttft=duration(summary.ttft_p50_ns),
        money=money_views(summary.money),
    )


def summary_row(summary: RunSummary) -> dict[str, object]:
    """The same for machines: numbers as they are, money as nano-units by currency."""
    row: dict[str, object] = {
        "tenant": summary.tenant,
        "run_id": summary.run_id,
        "agent": summary.agent or "",
        "model": summary.model,
        "first_ns": summary.first_ns,
        "last_ns": summary.last_ns,
        "steps": summary.steps,
        "failed": summary.failed,
        "prompt_tokens": summary.prompt_tokens,
        "hit_tokens": sum(summary.hit_tokens),
        "output_tokens": summary.output_tokens,
        "ttft_p50_ns": summary.ttft_p50_ns,
    }
    row["currency"] = [each.currency for each in summary.money]
    row["cost_nano"] = [each.cost_nano for each in summary.money]
    row["saved_nano"] = [each.saved_nano for each in summary.money]
    row["unpriced"] = sum(each.unpriced for each in summary.money)
    return row


def legend(counts: Sequence[int]) -> tuple[LegendEntry, ...]:
    """The token classes that occur, with their totals."""
    total = sum(counts)
    return tuple(
        LegendEntry(kind, name, count(tokens), share(tokens, total), meaning)
        for (kind, name, meaning), tokens in zip(TOKEN_CLASSES, counts, strict=True)
        if tokens
    )

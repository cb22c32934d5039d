"""Corrections: further rows of a request, each the difference between what stands and what should.

Nothing in the ledger is ever changed. A correction has the request's id, the next revision, the charge period of the
request and the accounting instant of the correction; its tokens and money are differences, so that sums come out right
and a period that is closed keeps its sums. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add, sub
from typing import Any

import msgspec
from msgspec import structs

from billing.errors import CorrectionError
from billing.meter import recharge
from billing.prices import PriceBook
from billing.rates import TOOLS
from billing.row import LedgerRow, SqlValue
from tracing.record import ChargeBasis, Usage, UsageSource

COUNTS = (
    "fresh_tokens",
    "hit_device_tokens",
    "hit_host_tokens",
    "hit_disk_tokens",
    "hit_pool_tokens",
    "hit_unknown_tokens",
    "write_tokens",
    "write_5m_tokens",
    "write_1h_tokens",
    "output_tokens",
    "reasoning_tokens",
)
REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands of a request after all its rows. ``amount_nano`` is ``None`` while it has no price."""

    usage: Usage
    amount_nano: int | None
    saved_nano: int
    lines: Mapping[str, tuple[int, int]]  # token class -> quantity, nano-units


def standing(history: Sequence[LedgerRow]) -> Standing:
    """Sum the rows of one request, in order of their revisions."""
    usage = history[0].usage()
    for row in history[1:]:
        usage = _combined(usage, row.usage(), add, row.usage())
    lines: dict[str, tuple[int, int]] = {}
    for row in history:
        for line in row.charge().lines:
            quantity, amount = lines.get(line.token_class, (0, 0))
            lines[line.token_class] = (quantity + line.quantity, amount + line.amount_nano)
    amounts = [row.amount_nano for row in history if row.amount_nano is not None]
    tools = tuple((name, quantity) for name, (quantity, _) in lines.items() if name in TOOLS and quantity)
    return Standing(
        usage=structs.replace(usage, tool_uses=tools),
        amount_nano=sum(amounts) if amounts else None,
        saved_nano=sum(row.saved_nano or 0 for row in history),
        lines={name: line for name, line in lines.items() if line != (0, 0)},
    )


def correct(
    history: Sequence[LedgerRow],
    book: PriceBook,
    *,
    reason: str,
    at_ns: int,
    usage: Usage | None = None,
    basis: ChargeBasis | None = None,
) -> LedgerRow | None:
    """Return the correction that makes a request cost what ``book`` says; ``None`` when it does already.

    ``history``: all rows of the request. ``usage``: the right counts, by default those that stand; ``basis``: by what
    the price is looked up, by default as at first. Raises ``CorrectionError`` where there is no price then either.
    """
    first, now = history[0], standing(history)
    right_basis = basis or first.charge().basis
    if right_basis is None:
        raise CorrectionError(f"{first.request_id}: the row has no basis to look a price up by")
    if book.currency != first.currency:
        raise CorrectionError(f"{first.request_id}: its row is in {first.currency}, the book in {book.currency}")
    right_usage = now.usage if usage is None else usage
    right = recharge(right_usage, book, right_basis)
    if right.amount_nano is None:
        raise CorrectionError(f"{first.request_id}: {right.unpriced_reason} in {book.name} as well")
    wanted = {line.token_class: (line.quantity, line.amount_nano) for line in right.lines}
    if now.amount_nano == right.amount_nano and wanted == now.lines and _counts(right_usage) == _counts(now.usage):
        return None
    difference = _combined(right_usage, now.usage, sub, right_usage)
    lines = []
    for name in (*wanted, *(name for name in now.lines if name not in wanted)):
        (quantity, amount), (had_quantity, had_amount) = wanted.get(name, (0, 0)), now.lines.get(name, (0, 0))
        if (quantity, amount) != (had_quantity, had_amount):
            lines.append((name, quantity - had_quantity, amount - had_amount))
    used = right.basis or right_basis
    return replace(
        first,
        revision=len(history),
        posted_ns=max(at_ns, first.posted_ns),
        settles_unpriced=int(now.amount_nano is None),
        **{name: getattr(difference, name) for name in COUNTS},
        usage_source=right_usage.source.value,
        hit_source=right_usage.hit_source.value,
        price_version=book.version,
        amount_nano=right.amount_nano - (now.amount_nano or 0),
        saved_nano=(right.saved_nano or 0) - now.saved_nano,
        unpriced_reason=None,
        price_model=used.model,
        price_at_ns=used.at_ns,
        price_team=used.team,
        price_region=used.region,
        price_service_tier=used.service_tier,
        price_rule=used.rule,
        lines=msgspec.json.encode(lines).decode(),
        attempts="[]",
        usage_problems="[]",
        labels=msgspec.json.encode({"correction": reason[:REASON_CHARS]}).decode(),
    )


def explains(history: Sequence[LedgerRow], book: PriceBook) -> bool:
    """Tell whether the last row of a history is the correction that ``book`` and what stands then come to."""
    last, before, after = history[-1], standing(history[:-1]), standing(history)
    basis = last.charge().basis
    if basis is None or last.amount_nano is None or last.settles_unpriced != (before.amount_nano is None):
        return False
    right = recharge(structs.replace(after.usage, source=UsageSource(last.usage_source)), book, basis)
    lines = {line.token_class: (line.quantity, line.amount_nano) for line in right.lines}
    return (right.amount_nano, right.saved_nano, lines) == (after.amount_nano, after.saved_nano, after.lines)


def values_of(row: LedgerRow) -> tuple[SqlValue, ...]:
    """Return a row as the ledger writes it."""
    return tuple(astuple(row))


def _counts(usage: Usage) -> tuple[int, ...]:
    return tuple(getattr(usage, name) for name in COUNTS)


def _combined(usage: Usage, counts_of: Usage, operation: Callable[[int, int], int], source: Usage) -> Usage:
    """Return the counts put together, with the sources of ``source``."""
    counts: dict[str, Any] = {name: operation(getattr(usage, name), getattr(counts_of, name)) for name in COUNTS}
    return Usage(source=source.source, hit_source=source.hit_source, **counts)

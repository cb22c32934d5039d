"""Settling: what is free by the price book's allowances becomes credits in the ledger.

It may be done at any time and as often as one likes: each time only the difference is posted. What is settled is what
was committed when the settlement began; later rows are for the next one. Two that settle at once would post the same
ids and revisions, so one of them fails and is told to run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

from billing.allowances import grants_in_order, period_of
from billing.credits import ALLOWANCE, Grant, GrantKey, credit_rows, key_of, period_end, posted_grants
from billing.database import Place
from billing.ledger_read import LedgerReader, RowFilter
from billing.periods import post
from billing.prices import PriceBook
from billing.row import LedgerRow


def month_filter(month: str) -> RowFilter:
    """Return the rows posted in a UTC month (``2026-11``). Raises ``ValueError``."""
    start = datetime.fromisoformat(f"{month}-01").replace(tzinfo=UTC)
    return RowFilter(since_ns=int(start.timestamp()) * 10**9, until_ns=period_end(month))


def allowance_rows(reader: LedgerReader, month: str, now_ns: int) -> list[LedgerRow]:
    """Return the credits that a month's allowances still lack.

    Raises ``RowsRemoved`` when retention has removed rows of the month, ``LedgerError``, ``PriceBookError``.
    Memory by the month's corrections and credits; a ledger whose books have no allowance is not read.
    """
    books = reader.price_books()
    if not any(book.file.allowance for book in books.values()):
        return []
    reader.check_kept(month_filter(month))
    with reader.snapshot():
        return missing_credits(_granted(reader, month, books), reader.credits(), ALLOWANCE, month, now_ns)


def _granted(reader: LedgerReader, month: str, books: Mapping[str, PriceBook]) -> dict[GrantKey, Grant]:
    where = month_filter(month)
    return grants_in_order(reader.rows_by_posting(where), list(reader.corrections(where)), books)


def settle(place: Place, month: str, now_ns: int) -> list[LedgerRow]:
    """Post the credits that a month's allowances still lack; return them.

    Raises ``PeriodError`` when another settlement was faster, ``LedgerError``, ``PriceBookError``.
    """
    with LedgerReader(place) as reader:
        rows = allowance_rows(reader, month, now_ns)
    if rows:
        post(place, rows)
    return rows


def settle_open_months(place: Place, until_ns: int, now_ns: int) -> list[LedgerRow]:
    """Settle every month that has open rows before an instant: what is closed keeps its sums. Raises as ``settle``."""
    with LedgerReader(place) as reader:
        if not any(book.file.allowance for book in reader.price_books().values()):
            return []
        since_ns = max((closed_ns for closed_ns, _, _ in reader.closings()), default=None)
        found = reader.report(("month",), RowFilter(since_ns=since_ns, until_ns=until_ns))
    months = sorted({group.key[0] for group in found.groups})
    return [row for month in months for row in settle(place, month, now_ns)]


def missing_credits(
    granted: Mapping[GrantKey, Grant], credits: Iterable[LedgerRow], kind: str, month: str, now_ns: int
) -> list[LedgerRow]:
    """Return the rows that bring a month's credits of one kind to what is granted. Pure."""
    had = [row for row in credits if row.request_id.startswith(f"{kind}:{month}")]
    ids = {key.request_id for key in granted}
    taken_back = {key_of(row): Grant() for row in had if row.request_id not in ids}
    return credit_rows({**granted, **taken_back}, posted_grants(had), now_ns)


def unsettled(reader: LedgerReader, books: Mapping[str, PriceBook]) -> Iterator[str]:
    """Find months that are closed and were settled, whose credits are not what their rows come to.

    Raises ``LedgerError``.
    """
    closed_ns = max((until_ns for until_ns, _, _ in reader.closings()), default=0)
    removal = reader.removal()
    settled = {row.request_id.split(":")[1][:7] for row in reader.credits() if row.request_id.startswith(ALLOWANCE)}
    for month in sorted(settled):
        where = month_filter(month)
        is_open = period_of(closed_ns, "month")[0] <= month
        if is_open or where.since_ns is None or (removal is not None and where.since_ns < removal.before_ns):
            continue
        for row in missing_credits(_granted(reader, month, books), reader.credits(), ALLOWANCE, month, closed_ns):
            yield f"{row.request_id}: its credits are {-(row.amount_nano or 0)} nano-units less than its rows grant"

"""Verification: every amount in the ledger, computed again from its token counts and its stored price version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from billing.corrections import explains
from billing.database import Place
from billing.ledger_read import LedgerReader, RowFilter
from billing.meter import recharge
from billing.periods import closings
from billing.prices import PriceBook
from billing.row import LedgerRow
from billing.settlement import unsettled
from billing.storage import storage_faults
from billing.tables import counted
from tracing.record import Charge

#: Faults kept in a verification; beyond it they are only counted.
MAX_FAULTS_KEPT = 100


@dataclass(slots=True)
class Verification:
    """What was found: ``faults`` are the first of them in words."""

    rows: int = 0
    fault_count: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.fault_count == 0

    def told(self) -> str:
        """Return what was looked at and how much was found."""
        return f"{counted(self.rows, 'row')}: {counted(self.fault_count, 'fault')}"

    def fault(self, text: str) -> None:
        """Record a fault."""
        self.fault_count += 1
        if len(self.faults) < MAX_FAULTS_KEPT:
            self.faults.append(text)


def _money(charge: Charge) -> tuple[object, ...]:
    """Return all of a charge that must come out the same; the words of its rule may change."""
    return charge.currency, charge.lines, charge.amount_nano, charge.saved_nano, charge.unpriced_reason


def verify_rows(rows: Iterable[LedgerRow], books: Mapping[str, PriceBook]) -> Verification:
    """Compute the charge of each request's first row again and compare all of it. Pure; cost: some 50 µs a row."""
    result = Verification()
    for version, stored_book in books.items():
        if stored_book.version != version:
            result.fault(f"price version {version}: its content has the digest {stored_book.version}")
    for row in rows:
        result.rows += 1
        if row.revision:
            continue  # a difference, which follows from all rows of its request: ``verify_history``
        stored, book = row.charge(), books.get(row.price_version)
        if stored.basis is None:
            result.fault(f"{row.request_id}: the row has no basis to compute its amount from")
        elif book is None:
            result.fault(f"{row.request_id}: price version {row.price_version} is not stored")
        elif _money(again := recharge(row.usage(), book, stored.basis)) != _money(stored):
            result.fault(
                f"{row.request_id}: stored {stored.amount_nano} (saved {stored.saved_nano}, {stored.unpriced_reason}), "
                f"computed {again.amount_nano} (saved {again.saved_nano}, {again.unpriced_reason})"
            )
    return result


def verify_history(history: Sequence[LedgerRow], books: Mapping[str, PriceBook], result: Verification) -> None:
    """Compute every correction of a request again. Pure."""
    for count in range(2, len(history) + 1):
        row, book = history[count - 1], books.get(history[count - 1].price_version)
        if row.revision != count - 1:
            result.fault(f"{row.request_id}: revision {count - 1} is missing")
        elif book is None:
            result.fault(f"{row.request_id}: price version {row.price_version} is not stored")
        elif not explains(history[:count], book):
            result.fault(f"{row.request_id}: revision {row.revision} is not what its price and counts come to")


def verify_ledger(place: Place) -> Verification:
    """Verify the whole ledger: rows, corrections, free allowances, cache storage, rollups, closed periods, and that no
    row lies aside.

    Raises ``LedgerError``, ``PriceBookError``.
    """
    with LedgerReader(place) as reader:
        books = reader.price_books()
        result = verify_rows(reader.rows(), books)
        for request_id in reader.corrected():
            verify_history(reader.history(request_id), books, result)
        removal = reader.removal()
        for text in chain(unsettled(reader, books), storage_faults(reader.storage(), books, is_whole=removal is None)):
            result.fault(text)
        rolled = [(t.currency, t.sums.requests, t.sums.amount_nano) for t in reader.report().totals]
        summed = [(t.currency, t.requests, t.amount_nano) for t in reader.totals()]
        if rolled != summed:
            result.fault(f"the rollups say {rolled}, the rows {summed}")
        for closing in closings(reader):
            if removal is not None and closing.until_ns < removal.before_ns:
                continue  # its rows are gone; those sums are part of the removal's
            if (now := tuple(reader.totals(RowFilter(until_ns=closing.until_ns)))) != closing.totals:
                result.fault(f"the period until {closing.until_ns} was closed at {closing.totals} and now is {now}")
        if refused := reader.refused():
            result.fault(f"{refused} rows could not be held by the table and lie in its neighbour `refused`")
    return result

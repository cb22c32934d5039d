"""Cache storage by the hour: what keeping tokens cached costs, as rows of their own. Pure.

A *lease* is one prompt that a provider keeps cached for a price: so many tokens from one instant to another. It is
charged in slices, one row for each UTC hour that it touches, at the price of the hour's beginning. So a price that
changes, a month that ends and a FOCUS line of one hour need no special case. A slice is ``token seconds × rate per
million tokens and hour``, rounded once as the book says; without a cache nobody would pay it, so it is taken off what
the cache saved.

An hour is charged when it is over. Telling the same leases again posts nothing; of one that ended earlier or later than
was said, the difference: under the slice's id, with the next revision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter

from billing.calendar import HOUR_NS
from billing.errors import StorageError
from billing.meter import storage_charge
from billing.posting import STORAGE, Place, place_of, posting
from billing.prices import PriceBook
from billing.rates import NoPrice
from billing.row import LedgerRow
from tracing.record import ChargeLine

_SECOND_NS = 10**9


@dataclass(frozen=True, slots=True)
class Lease:
    """Tokens that are kept cached from ``since_ns`` to before ``until_ns``, and who pays for them."""

    id: str
    model: str
    tokens: int
    since_ns: int
    until_ns: int
    tenant: str
    team: str
    key_id: str
    region: str | None = None

    def slices(self, now_ns: int) -> Iterator[Slice]:
        """Yield what is over by now, hour by hour."""
        start_ns = self.since_ns
        while start_ns < self.until_ns:
            hour_end_ns = (start_ns // HOUR_NS + 1) * HOUR_NS
            end_ns = min(hour_end_ns, self.until_ns)
            if end_ns > now_ns:
                return
            yield Slice(self, start_ns, end_ns)
            start_ns = end_ns


@dataclass(frozen=True, slots=True)
class Slice:
    """What of a lease lies in one hour."""

    lease: Lease
    start_ns: int
    end_ns: int

    @property
    def request_id(self) -> str:
        """The id of the slice's rows: the hour's name is in it."""
        hour = datetime.fromtimestamp(self.start_ns // _SECOND_NS, UTC).strftime("%Y-%m-%dT%H")
        return f"{STORAGE}:{self.lease.id}:{hour}"

    @property
    def token_seconds(self) -> int:
        """The quantity that is charged."""
        return self.lease.tokens * (self.end_ns - self.start_ns) // _SECOND_NS


def storage_rows(
    leases: Iterable[Lease],
    book_for: Callable[[str], PriceBook],
    posted: Iterable[LedgerRow],
    now_ns: int,
    kept_ns: int = 0,
) -> list[LedgerRow]:
    """Return the rows that are missing for what is posted to come to what was kept.

    ``posted``: the storage rows there are; ``book_for``: the book of a model. Hours that begin before ``kept_ns``,
    whose rows retention may have removed, stay as they are. A quantity that is posted keeps the price that it had, and
    its hour stays with whom it was charged to, at their price, until it is taken back.
    Raises ``StorageError``, for all of them together, where one has no price or is told in two ways.
    """
    histories = _by_id(posted)
    told: dict[str, Lease] = {}
    wanted: dict[str, Slice] = {}
    for lease in leases:
        if told.setdefault(lease.id, lease) != lease:
            raise StorageError(f"{lease.id} is there twice, and not the same")
        wanted |= {each.request_id: each for each in lease.slices(now_ns) if each.start_ns >= kept_ns}
    rows: list[LedgerRow] = []
    for request_id, history in histories.items():
        lease_id = request_id.removeprefix(f"{STORAGE}:").rpartition(":")[0]
        if request_id not in wanted and lease_id in told and history[0].arrived_ns >= kept_ns:
            start_ns = history[-1].arrived_ns
            rows += _difference(Slice(told[lease_id], start_ns, start_ns), history, book_for, now_ns)
    for request_id, each in wanted.items():
        rows += _difference(each, histories.get(request_id, ()), book_for, now_ns)
    return rows


def _difference(
    wanted: Slice, history: Sequence[LedgerRow], book_for: Callable[[str], PriceBook], now_ns: int
) -> Iterator[LedgerRow]:
    had_quantity, had_nano = _sums(history)
    if wanted.token_seconds == had_quantity:
        return
    lease, region = wanted.lease, wanted.lease.region
    place = Place(lease.tenant, lease.team, lease.key_id, lease.model, lease.model, None, None, None, "", "")
    if had_quantity:
        place, region = place_of(history[-1]), history[-1].price_region  # whoever it is charged to
    book = book_for(place.served_model)
    rate = book.storage_rate(place.served_model, wanted.start_ns, place.team, region)
    if isinstance(rate, NoPrice):
        raise StorageError(f"{lease.id}: storage of {place.served_model} has no price in {book.name}: {rate.reason}")
    if had_quantity and place.currency != book.currency:
        raise StorageError(f"{lease.id} was charged in {place.currency}, {book.name} is in {book.currency}")
    place = replace(place, currency=book.currency, price_version=book.version)
    amount = storage_charge(wanted.token_seconds, _SECOND_NS, rate, book.rounding) - had_nano
    yield posting(
        STORAGE,
        wanted.request_id,
        len(history) + 1,
        place,
        ChargeLine(STORAGE, wanted.token_seconds - had_quantity, amount),
        rule=STORAGE,
        span_ns=(wanted.start_ns, wanted.end_ns),
        posted_ns=max(now_ns, wanted.start_ns) if history else wanted.start_ns,
        saved_nano=-amount,
        region=region,
    )


def storage_faults(rows: Iterable[LedgerRow], books: Mapping[str, PriceBook], *, is_whole: bool) -> Iterator[str]:
    """Compute every storage row again. ``is_whole``: retention has removed nothing."""
    for request_id, history in _by_id(rows).items():
        if not is_whole and history[0].revision != 1:
            continue  # what it changes is gone
        for count, row in enumerate(history, 1):
            if row.revision != count:
                yield f"{request_id}: revision {count} is missing"
                break
            quantity, amount = _sums(history[:count])
            right = _charge_again(row, quantity, books)
            if amount != right or row.saved_nano != -(row.amount_nano or 0):
                yield f"{request_id}: revision {count} makes it {amount}, computed {right}"


def _charge_again(row: LedgerRow, token_seconds: int, books: Mapping[str, PriceBook]) -> int | None:
    book = books.get(row.price_version)
    if book is None or row.price_at_ns is None:
        return None
    rate = book.storage_rate(row.price_model or "", row.price_at_ns, row.price_team, row.price_region)
    return None if isinstance(rate, NoPrice) else storage_charge(token_seconds, _SECOND_NS, rate, book.rounding)


def _sums(history: Iterable[LedgerRow]) -> tuple[int, int]:
    """Return what the rows of a slice come to: token seconds, nano-units."""
    lines = [line for row in history for line in row.charge().lines]
    return sum(line.quantity for line in lines), sum(line.amount_nano for line in lines)


def _by_id(rows: Iterable[LedgerRow]) -> dict[str, list[LedgerRow]]:
    by_id, ordered = attrgetter("request_id"), sorted(rows, key=attrgetter("request_id", "revision"))
    return {request_id: list(history) for request_id, history in groupby(ordered, key=by_id)}

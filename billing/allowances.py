"""Free allowances: the first so many tokens, requests or units of money of a period are given back as credits. Pure.

A request is charged in full when it ends, and what was free is settled afterwards from the committed rows. Taken at the
door, an allowance that several gateways share would need a counter that is exact through crashes, and a row's amount
would no longer follow from the row; taken from the rows, in one stated order, it is exact whoever wrote them and in
whatever order they came, and anyone can compute it again. Budgets therefore count gross amounts.

The order is that of the accounts: by ``posted_ns``, then id, then revision. The line that the limit falls into is free
in part: its money times the free share, rounded as the book says. Corrections of the same period count with their
request; what is posted in a later period counts there, and frees nothing where it changes the price alone. A month or
day is one of the UTC calendar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import translate

from billing.credits import ALLOWANCE, Grant, GrantKey, is_credit, period_end
from billing.posting import STORAGE, is_request, place_of
from billing.price_file import AllowanceEntry
from billing.prices import PriceBook
from billing.rates import TOOLS
from billing.row import LedgerRow

_NO_TOKENS = ("request", "minimum", STORAGE, *TOOLS)


def period_of(ns: int, period: str) -> tuple[str, int]:
    """Return the name of the UTC day or month of an instant, and its end in ns."""
    name = datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d" if period == "day" else "%Y-%m")
    return name, period_end(name)


@dataclass(slots=True)
class _Rule:
    """One allowance of one price version."""

    entry: AllowanceEntry
    book: PriceBook
    models: re.Pattern[str] = field(init=False)
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        entry = self.entry
        self.models = re.compile("|".join(translate(pattern) for pattern in entry.models))
        money = 0 if entry.money is None else int(entry.money.scaleb(9))
        self.limit = entry.tokens or entry.requests or money

    def fits(self, row: LedgerRow) -> bool:
        entry = self.entry
        return (
            self.models.fullmatch(row.served_model) is not None
            and (entry.teams is None or row.team in entry.teams)
            and (entry.keys is None or row.key_id in entry.keys)
        )

    def shares(self, row: LedgerRow) -> tuple[str, ...]:
        """Return whose allowance a row uses."""
        values = {"tenant": row.tenant, "team": row.team, "key": row.key_id, "model": row.served_model}
        return tuple(values[name] for name in self.entry.per)

    def uses(self, request: _Request) -> list[tuple[int, int, int]]:
        """Return what is free while something is left: (what it uses of the limit, quantity, money), class by class."""
        if self.entry.requests is not None:
            whole = sum(amount for _, amount in request.lines.values())
            return [(1, 1, whole)] if request.is_new else []
        classes = self.entry.classes
        chosen = [
            line
            for name, line in request.lines.items()
            if (name in classes if classes is not None else self.entry.money is not None or name not in _NO_TOKENS)
        ]
        if self.entry.tokens is not None:
            return [(quantity, quantity, amount) for quantity, amount in chosen]
        return [(amount, quantity, amount) for quantity, amount in chosen]


@dataclass(slots=True)
class _Request:
    """What the rows of one request in one period come to."""

    first: LedgerRow
    last: LedgerRow
    is_new: bool = False  # the request itself was posted in this period, not corrections alone
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, row: LedgerRow) -> None:
        self.last = row
        self.is_new = self.is_new or row.revision == 0
        for line in row.charge().lines:
            quantity, amount = self.lines.get(line.token_class, (0, 0))
            self.lines[line.token_class] = (quantity + line.quantity, amount + line.amount_nano)


def grants(rows: Iterable[LedgerRow], books: Mapping[str, PriceBook]) -> dict[GrantKey, Grant]:
    """Return what is free in rows of whole periods that come in any order. See ``grants_in_order``."""
    ordered = sorted(rows, key=lambda row: (row.posted_ns, row.request_id, row.revision))
    return grants_in_order(ordered, [row for row in ordered if row.revision and is_request(row)], books)


def grants_in_order(
    rows: Iterable[LedgerRow], corrections: Iterable[LedgerRow], books: Mapping[str, PriceBook]
) -> dict[GrantKey, Grant]:
    """Return what is free in the rows of whole periods.

    ``rows`` come by (``posted_ns``, ``request_id``, ``revision``); ``corrections`` are those among them that have a
    revision, in any order. Credits among the rows are left out. Cost: some 0.1 ms a row; memory by corrections and
    grants.
    """
    rules = {
        version: [_Rule(entry, book) for entry in book.file.allowance]
        for version, book in books.items()
        if book.file.allowance
    }
    periods = sorted({rule.entry.period for listed in rules.values() for rule in listed})
    later: dict[tuple[str, str], list[LedgerRow]] = {}
    for row in sorted(corrections, key=lambda row: (row.posted_ns, row.revision)):
        for period in periods:
            later.setdefault((period_of(row.posted_ns, period)[0], row.request_id), []).append(row)
    found: dict[GrantKey, Grant] = {}
    used: dict[_Account, int] = {}
    done: set[tuple[str, str]] = set()  # requests with corrections that were taken whole
    for row in rows:
        if is_credit(row) or row.amount_nano is None:
            continue
        for period in periods:
            span = period_of(row.posted_ns, period)
            place = (span[0], row.request_id)
            if place in done:
                continue
            more = later.get(place, ())
            if more:
                done.add(place)
            request = _Request(row, row)
            for each in (row, *(other for other in more if other.revision != row.revision)):
                request.add(each)
            for rule in rules.get(request.last.price_version, ()):
                if rule.entry.period == period and rule.fits(row):
                    _consume(rule, request, span, used, found)
    return found


_Account = tuple[str, str, str, tuple[str, ...]]


def _consume(
    rule: _Rule, request: _Request, span: tuple[str, int], used: dict[_Account, int], found: dict[GrantKey, Grant]
) -> None:
    period, end_ns = span
    account = (rule.book.name, rule.entry.name, period, rule.shares(request.first))
    before = used.get(account, 0)
    place = replace(place_of(request.first), price_version=request.last.price_version)
    for uses, quantity, amount in rule.uses(request):
        after = before + uses
        free = min(after, rule.limit) - min(before, rule.limit)
        if uses and free:
            key = GrantKey(ALLOWANCE, f"{ALLOWANCE} {rule.entry.name}", period, end_ns, place)
            grant = found.setdefault(key, Grant())
            divide = rule.book.rounding.divide
            sign = 1 if uses > 0 else -1
            grant.quantity += divide(sign * quantity * free, abs(uses))
            grant.amount_nano += divide(sign * amount * free, abs(uses))
        before = after
    used[account] = before

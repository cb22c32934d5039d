"""Credits: rows that take money back, each posted under an id that says what it is for, never changed afterwards.

A credit stands for what a rule grants to one *place* (who used which model, in which run) in one period. Its id is a
digest of rule, period and place. When the rule comes to more or less later, the difference is a row of the same id with
the next revision, so that the sum of an id's rows is what the rule grants by all that was known when it was last
settled. Two that settle at once write the same ids and revisions: the ledger takes one of them whole. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from billing.posting import CREDIT, Place, place_of, posting
from billing.row import LedgerRow
from tracing.record import ChargeLine

#: The line of a credit for free use, and of one for hits that the platform lost.
ALLOWANCE, LOST_HITS = "allowance", "lost_hits"
CREDIT_CLASSES = (ALLOWANCE, LOST_HITS)


@dataclass(slots=True)
class Grant:
    """What a rule grants to a place in a period: how much was free, and the money (positive) that it is worth."""

    quantity: int = 0
    amount_nano: int = 0


@dataclass(frozen=True, slots=True)
class GrantKey:
    """A rule, its period (ns, end exclusive) and a place. ``kind``: a value of ``CREDIT_CLASSES``."""

    kind: str
    rule: str
    period: str
    end_ns: int
    place: Place

    @property
    def request_id(self) -> str:
        """The id of the credit's rows."""
        body = msgspec.json.encode((self.rule, msgspec.to_builtins(self.place)))
        return f"{self.kind}:{self.period}:{hashlib.blake2b(body, digest_size=12).hexdigest()}"


def key_of(row: LedgerRow) -> GrantKey:
    """Return what a credit's row was granted for."""
    rule, _, period = (row.price_rule or "").rpartition(" ")
    return GrantKey(row.request_id.partition(":")[0], rule, period, period_end(period), place_of(row))


def period_end(period: str) -> int:
    """Return the end (ns) of a UTC day (``2026-11-30``) or month (``2026-11``). Raises ``ValueError``."""
    if len(period) == len("2026-11"):
        first = datetime.fromisoformat(f"{period}-01").replace(tzinfo=UTC)
        end = (first + timedelta(days=32)).replace(day=1)
    else:
        end = datetime.fromisoformat(period).replace(tzinfo=UTC) + timedelta(days=1)
    return int(end.timestamp()) * 10**9


def is_credit(row: LedgerRow) -> bool:
    """Tell whether a row is a credit."""
    return row.endpoint == CREDIT


def credit_rows(
    grants: Mapping[GrantKey, Grant], posted: Mapping[str, tuple[int, Grant]], now_ns: int
) -> list[LedgerRow]:
    """Return the rows that are missing for what is posted to come to what is granted.

    ``posted``: of each id the number of its rows and their sum (``posted_grants``). What nothing is granted for any
    more is taken back where ``grants`` says so, with an empty grant.
    """
    rows = []
    for key, grant in grants.items():
        count, had = posted.get(key.request_id, (0, Grant()))
        if (grant.quantity, grant.amount_nano) != (had.quantity, had.amount_nano):
            change = Grant(grant.quantity - had.quantity, grant.amount_nano - had.amount_nano)
            rows.append(_row(key, change, count + 1, min(now_ns, key.end_ns - 1)))
    return rows


def posted_grants(rows: Iterable[LedgerRow]) -> dict[str, tuple[int, Grant]]:
    """Sum the credits among rows by id: how many rows each has, and what they come to."""
    found: dict[str, tuple[int, Grant]] = {}
    for row in rows:
        if is_credit(row):
            count, grant = found.get(row.request_id, (0, Grant()))
            grant.quantity += sum(line.quantity for line in row.charge().lines)
            grant.amount_nano -= row.amount_nano or 0
            found[row.request_id] = (count + 1, grant)
    return found


def _row(key: GrantKey, change: Grant, revision: int, at_ns: int) -> LedgerRow:
    line = ChargeLine(key.kind, change.quantity, -change.amount_nano)
    rule = f"{key.rule} {key.period}"
    span_ns = (at_ns, at_ns)
    return posting(CREDIT, key.request_id, revision, key.place, line, rule=rule, span_ns=span_ns, posted_ns=at_ns)

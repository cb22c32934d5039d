"""Reading the ledger: rows, totals, reports, stored price versions. Any number of readers beside the writers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from itertools import chain, groupby
from operator import attrgetter, sub
from types import TracebackType
from typing import Literal

import msgspec

from billing.database import Line, Place, database_at
from billing.errors import RowsRemoved
from billing.posting import CREDIT, POSTED_ENDPOINTS, STORAGE
from billing.prices import PriceBook
from billing.reports import LABEL, TIME_HOURS, Report, build_report, check_dimensions, report_of
from billing.rollup import watermark
from billing.rollup_query import Question, queries
from billing.row import LedgerRow, columns


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which rows; ``None`` is any.

    The period is by ``posted_ns``: arrival, unless its period was closed already. Its end is exclusive.
    """

    since_ns: int | None = None
    until_ns: int | None = None
    run_id: str | None = None
    request_id: str | None = None

    def sql(self) -> tuple[str, dict[str, str | int]]:
        """Return a WHERE clause and its named values."""
        tests: dict[str, tuple[str, str | int | None]] = {
            "since": ("posted_ns >= :since", self.since_ns),
            "until": ("posted_ns < :until", self.until_ns),
            "run": ("run_id = :run", self.run_id),
            "request": ("request_id = :request", self.request_id),
        }
        values = {name: value for name, (_, value) in tests.items() if value is not None}
        clause = " AND ".join(tests[name][0] for name in values)
        return (f" WHERE {clause}" if clause else ""), values


ALL_ROWS = RowFilter()


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over rows in one currency. Money is nano-units; unpriced rows are counted and add none."""

    currency: str
    requests: int
    unpriced: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    amount_nano: int
    saved_nano: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What retention removed: all rows posted before ``before_ns``, from the beginning, and their sums by currency."""

    before_ns: int
    removed_ns: int
    totals: tuple[Totals, ...]


_HITS = "hit_device_tokens + hit_host_tokens + hit_disk_tokens + hit_pool_tokens + hit_unknown_tokens"
#: Rows that correct a request.
_CORRECTS = f"revision > 0 AND endpoint NOT IN ({', '.join(map(repr, POSTED_ENDPOINTS))})"
_TOTALS = f"""
SELECT currency, count(*) - count(CASE WHEN revision > 0 THEN 1 END),
  count(*) - count(amount_nano) - sum(settles_unpriced),
  sum(fresh_tokens + {_HITS} + write_tokens + write_5m_tokens + write_1h_tokens), sum({_HITS}), sum(output_tokens),
  coalesce(sum(amount_nano), 0), coalesce(sum(saved_nano), 0)
FROM requests{{where}} GROUP BY currency ORDER BY currency
"""


class LedgerReader:
    """One read-only session, used by one thread at a time."""

    def __init__(self, place: Place) -> None:
        """Open an existing ledger. Raises ``LedgerError``."""
        self._session = database_at(place).open_readonly()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the session. Idempotent."""
        self._session.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Within the block all is read of one state of the ledger. Not around ``report``, which does so itself."""
        return self._session.reading()

    def rows(self, where: RowFilter = ALL_ROWS) -> Iterator[LedgerRow]:
        """Go through the rows that are kept, in the order in which they were written. Raises ``LedgerError``."""
        return self._rows(where)

    def rows_by_posting(self, where: RowFilter = ALL_ROWS) -> Iterator[LedgerRow]:
        """Go through the rows that are kept in the order of the accounts: by ``posted_ns``, id and revision.

        The database sorts, so that memory is bounded. Raises ``LedgerError``.
        """
        for _, at_once in groupby(self._rows(where, order="posted_ns"), key=attrgetter("posted_ns")):
            yield from sorted(at_once, key=attrgetter("request_id", "revision"))  # as no database's locale has it

    def _rows(self, where: RowFilter, only: str = "", order: str = "seq") -> Iterator[LedgerRow]:
        clause, values = self._kept(where).sql()
        test = f"{clause or ' WHERE true'} AND {only}" if only else clause
        sql = f"SELECT {', '.join(columns())} FROM requests{test} ORDER BY {order}"
        for line in self._session.stream(sql, values):
            yield LedgerRow(*line)

    def totals(self, where: RowFilter = ALL_ROWS) -> list[Totals]:
        """Sum the rows, one total for each currency; what retention removed is in it where the period has all of it.

        Raises ``RowsRemoved`` when it has a part, ``LedgerError``.
        """
        removal = self.removal()
        removed: tuple[Totals, ...] = ()
        if removal is not None and where.run_id is None and where.request_id is None:
            if where.since_ns is None and (where.until_ns is None or where.until_ns >= removal.before_ns):
                removed = removal.totals
            else:
                self.check_kept(where)
        clause, values = self._kept(where).sql()
        found = [
            Totals(line[0], *map(int, line[1:])) for line in self._session.query(_TOTALS.format(where=clause), values)
        ]
        return _added(found, removed) if removed else found

    def report(self, by: Sequence[str] = (), where: RowFilter = ALL_ROWS) -> Report:
        """Sum what was asked for: from the rollups what they hold, from rows the rest; all in one snapshot.

        Equal to ``build_report(rows(where), by)``. Raises ``ReportError``, ``RowsRemoved``, ``LedgerError``.
        """
        check_dimensions(by)
        times = [TIME_HOURS[name] for name in by if name in TIME_HOURS]
        keys = [name for name in by if name not in TIME_HOURS]
        equal = {"run": where.run_id, "request": where.request_id}
        if sum(name.startswith(LABEL) for name in keys) > 1 or len(set(by)) < len(by):
            self.check_kept(where)
            return build_report(self.rows(where), by)
        question = Question(
            (*keys, "currency"),
            min(times) if times else None,
            where.since_ns,
            where.until_ns,
            {name: value for name, value in equal.items() if value is not None},
        )
        with self._session.reading():
            lines = self._lines(question)
            if question.label is not None:
                labelled = list(lines)
                lines = chain(labelled, self._unlabelled(question, labelled))
            return report_of(by, lines)

    def _lines(self, question: Question) -> Iterator[Line]:
        """Go through the lines of a question; those of one bucket and key may be several."""
        first, last = self._session.query("SELECT min(hour), max(hour) FROM rollups")[0]
        hours = None if first is None else (int(first), int(last))
        kept_ns = self._kept(ALL_ROWS).since_ns
        for query in queries(question, watermark(self._session), hours, self._session.labels_sql):
            if kept_ns is not None and query.oldest_row_ns is not None and query.oldest_row_ns < kept_ns:
                raise _removed(kept_ns)
            yield from self._session.stream(query.sql, query.parameters)

    def _unlabelled(self, question: Question, labelled: Sequence[Line]) -> list[Line]:
        """Return the lines of the rows that lack the label: all less those that have it."""
        place = next(at for at, name in enumerate(question.keys, 1) if name.startswith(LABEL))
        width = len(question.keys)  # of a line's bucket and the other keys
        rest: dict[Line, list[int]] = {}
        without = replace(question, keys=tuple(name for name in question.keys if not name.startswith(LABEL)))
        for line in self._lines(without):
            sums = rest.setdefault(line[:width], [0] * (len(line) - width))
            sums[:] = [a + int(b) for a, b in zip(sums, line[width:], strict=True)]
        for line in labelled:
            sums = rest[(*line[:place], *line[place + 1 : width + 1])]
            sums[:] = map(sub, sums, map(int, line[width + 1 :]))
        return [(*key[:place], "-", *key[place:], *sums) for key, sums in rest.items() if any(sums)]

    def refused(self) -> int:
        """Count the rows that the table could not hold and that lie aside. Raises ``LedgerError``."""
        return self.count("refused")

    def count(self, table: Literal["requests", "refused", "rollups", "closings"]) -> int:
        """Count the rows of a table. Raises ``LedgerError``."""
        return int(self._session.query(f"SELECT count(*) FROM {table}")[0][0])

    def closings(self) -> list[tuple[int, int, str]]:
        """Return the closed periods as they are stored, oldest first. Raises ``LedgerError``."""
        return [
            tuple(line) for line in self._session.query("SELECT until_ns, closed_ns, totals FROM closings ORDER BY 1")
        ]

    def removal(self) -> Removal | None:
        """Return what retention removed last, ``None`` when all rows are kept. Raises ``LedgerError``."""
        found = self._session.query("SELECT before_ns, removed_ns, totals FROM removals ORDER BY 1 DESC LIMIT 1")
        if not found:
            return None
        before_ns, removed_ns, totals = found[0]
        return Removal(before_ns, removed_ns, tuple(msgspec.json.decode(totals, type=list[Totals])))

    def check_kept(self, where: RowFilter) -> None:
        """Raise ``RowsRemoved`` when rows of the period have been removed."""
        kept_ns = self._kept(ALL_ROWS).since_ns
        if kept_ns is not None and (where.since_ns is None or where.since_ns < kept_ns):
            raise _removed(kept_ns)

    def corrected(self) -> list[str]:
        """Return the ids of the requests that have corrections and are kept. Raises ``LedgerError``."""
        clause, values = self._kept(ALL_ROWS).sql()
        sql = f"""SELECT DISTINCT request_id FROM requests{clause or " WHERE true"}
          AND {_CORRECTS} ORDER BY 1"""
        ids = [str(line[0]) for line in self._session.query(sql, values)]
        return [id for id in ids if self.history(id)[0].revision == 0] if values else ids

    def credits(self) -> Iterator[LedgerRow]:
        """Go through the credits that are kept, in the order in which they were posted. Raises ``LedgerError``."""
        return self._rows(ALL_ROWS, f"revision > 0 AND endpoint = '{CREDIT}'")

    def storage(self) -> Iterator[LedgerRow]:
        """Go through the rows of cache storage that are kept, as they were posted. Raises ``LedgerError``."""
        return self._rows(ALL_ROWS, f"revision > 0 AND endpoint = '{STORAGE}'")

    def corrections(self, where: RowFilter = ALL_ROWS) -> Iterator[LedgerRow]:
        """Go through the corrections of requests that are kept. Raises ``LedgerError``."""
        return self._rows(where, _CORRECTS)

    def history(self, request_id: str) -> list[LedgerRow]:
        """Return all rows of one request, in order of their revisions. Raises ``LedgerError``."""
        return sorted(self.rows(RowFilter(request_id=request_id)), key=lambda row: row.revision)

    def price_books(self) -> dict[str, PriceBook]:
        """Return every stored price version. Raises ``LedgerError``, ``PriceBookError``."""
        stored = self._session.query("SELECT version, body FROM prices")
        return {version: PriceBook.from_body(body, f"version {version}") for version, body in stored}

    def _kept(self, where: RowFilter) -> RowFilter:
        """Return the filter less what retention removed: it may not have been deleted yet."""
        ((before_ns,),) = self._session.query("SELECT max(before_ns) FROM removals")
        if before_ns is None:
            return where
        return replace(
            where, since_ns=max(int(before_ns), int(before_ns) if where.since_ns is None else where.since_ns)
        )


def _removed(kept_ns: int) -> RowsRemoved:
    since = datetime.fromtimestamp(kept_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return RowsRemoved(f"the rows posted before {since} have been removed; ask for a period that begins there or later")


def _added(found: Sequence[Totals], removed: Sequence[Totals]) -> list[Totals]:
    """Add totals by currency."""
    sums = {total.currency: total for total in found}
    for total in removed:
        other = sums.get(total.currency)
        if other is not None:
            counts = (a + b for a, b in zip(astuple(total)[1:], astuple(other)[1:], strict=True))
            total = Totals(total.currency, *counts)
        sums[total.currency] = total
    return [sums[currency] for currency in sorted(sums)]

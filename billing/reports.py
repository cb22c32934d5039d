"""Reports: rows in, groups and totals out, and their three renderings. Pure.

Every number in a report is an integer sum over rows; money is nano-units until a renderer prints it, and then with all
nine decimals. Amounts of different currencies are never added: the currency is part of every group.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from operator import add, attrgetter
from typing import Any, NamedTuple

import msgspec

from billing.errors import ReportError
from billing.meter import NANO_PER_UNIT
from billing.row import LedgerRow
from billing.tables import aligned, printable, spreadsheet_text
from tracing.record import HitSource

_NONE = "-"


def _utc(ns: int, pattern: str) -> str:
    return datetime.fromtimestamp(ns // 1_000_000_000, UTC).strftime(pattern)


#: What rows can be grouped by. ``label:NAME`` groups by one label as well.
DIMENSIONS: dict[str, Callable[[LedgerRow], str]] = {
    "model": lambda row: row.model,
    "served_model": lambda row: row.served_model,
    "tenant": lambda row: row.tenant,
    "team": lambda row: row.team,
    "key": lambda row: row.key_id,
    "agent": lambda row: row.agent or _NONE,
    "run": lambda row: row.run_id or _NONE,
    "step": lambda row: _NONE if row.step is None else str(row.step),
    "request": lambda row: row.request_id,
    "instance": lambda row: row.instance or _NONE,
    "endpoint": lambda row: row.endpoint,
    "outcome": lambda row: row.outcome,
    "status": lambda row: str(row.status),
    "usage_source": lambda row: row.usage_source,
    "hit_source": lambda row: row.hit_source,
    "price_version": lambda row: row.price_version,
    "unpriced": lambda row: row.unpriced_reason or _NONE,
    "hour": lambda row: _utc(row.posted_ns, "%Y-%m-%dT%H:00Z"),
    "day": lambda row: _utc(row.posted_ns, "%Y-%m-%d"),
    "month": lambda row: _utc(row.posted_ns, "%Y-%m"),
}
#: The dimensions of time: hours in a bucket that is wholly inside one of their values.
TIME_HOURS = {"hour": 1, "day": 24, "month": 24}
_TIME = frozenset(TIME_HOURS)
_TIME_PATTERN = {"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}
LABEL = "label:"


@lru_cache(10_000)
def time_key(name: str, hour: int) -> str:
    """Return what a time dimension says of an hour since the epoch."""
    return datetime.fromtimestamp(hour * 3600, UTC).strftime(_TIME_PATTERN[name])


@dataclass(slots=True)
class Sums:
    """What is summed, as ``billing.rollup.SUMS`` does in SQL.

    ``corrections`` counts all rows that are no request, credits and cache storage as well; ``hits_not_told`` requests
    whose engine told nothing about hits; ``unpriced`` those that have no price yet.
    """

    requests: int = 0
    corrections: int = 0
    unpriced: int = 0
    hits_not_told: int = 0
    prompt_tokens: int = 0
    fresh_tokens: int = 0
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_disk_tokens: int = 0
    hit_pool_tokens: int = 0
    hit_unknown_tokens: int = 0
    write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    amount_nano: int = 0
    saved_nano: int = 0

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return (
            self.hit_device_tokens
            + self.hit_host_tokens
            + self.hit_disk_tokens
            + self.hit_pool_tokens
            + self.hit_unknown_tokens
        )

    def add_row(self, row: LedgerRow) -> None:
        """Add one row; a correction adds money and tokens, but is no further request."""
        usage = row.usage()
        self.requests += row.revision == 0
        self.corrections += row.revision > 0
        self.unpriced += (row.amount_nano is None) - row.settles_unpriced
        self.hits_not_told += row.hit_source == HitSource.UNKNOWN and usage.prompt_tokens > 0
        self.prompt_tokens += usage.prompt_tokens
        self.fresh_tokens += usage.fresh_tokens
        self.hit_device_tokens += usage.hit_device_tokens
        self.hit_host_tokens += usage.hit_host_tokens
        self.hit_disk_tokens += usage.hit_disk_tokens
        self.hit_pool_tokens += usage.hit_pool_tokens
        self.hit_unknown_tokens += usage.hit_unknown_tokens
        self.write_tokens += usage.written_tokens
        self.output_tokens += usage.output_tokens
        self.reasoning_tokens += usage.reasoning_tokens
        self.amount_nano += row.amount_nano or 0
        self.saved_nano += row.saved_nano or 0

    def add(self, other: Sums) -> None:
        """Add other sums."""
        for name, value in zip(SUM_NAMES, map(add, _values(self), _values(other)), strict=True):
            setattr(self, name, value)


SUM_NAMES = tuple(field.name for field in fields(Sums))
_values = attrgetter(*SUM_NAMES)


class Group(NamedTuple):
    """The rows that share one value in each dimension, and one currency. A report may have half a million."""

    key: tuple[str, ...]
    currency: str
    sums: Sums


@dataclass(frozen=True, slots=True)
class Report:
    """Groups, and one total for each currency (a group with an empty key)."""

    by: tuple[str, ...]
    groups: tuple[Group, ...]
    totals: tuple[Group, ...]

    def first(self, count: int) -> Report:
        """Return the first groups alone: the costliest of each currency, or the earliest. Totals stay those of all."""
        return Report(self.by, self.groups[:count], self.totals)


def build_report(rows: Iterable[LedgerRow], by: Sequence[str] = ()) -> Report:
    """Group rows by the dimensions. Groups stand by time where one of them is a time, else the costliest first.

    Raises ``ReportError`` for an unknown dimension. Cost: linear in the rows, memory by the groups.
    """
    dimensions = [dimension_of(name) for name in by]
    found: dict[tuple[tuple[str, ...], str], Sums] = {}
    for row in rows:
        key = (tuple(dimension(row) for dimension in dimensions), row.currency)
        sums = found.get(key)
        if sums is None:
            sums = found[key] = Sums()
        sums.add_row(row)
    return assemble(by, found)


def assemble(by: Sequence[str], found: Mapping[tuple[tuple[str, ...], str], Sums]) -> Report:
    """Return the report over groups that are summed already, keyed by (key, currency)."""
    totals: dict[str, list[int]] = {}
    for (_, currency), sums in found.items():
        _add_to(totals, currency, _values(sums))
    return _report(by, found, totals)


def _add_to(totals: dict[str, list[int]], currency: str, numbers: Sequence[int]) -> None:
    total = totals.get(currency)
    if total is None:
        totals[currency] = list(numbers)
    else:
        total[:] = map(add, total, numbers)


def _report(
    by: Sequence[str], found: Mapping[tuple[tuple[str, ...], str], Sums], totals: Mapping[str, Sequence[int]]
) -> Report:
    """Put groups in their order. Two sorts by one kind of value each take half the time of one by all three."""
    groups = [Group(key, currency, sums) for (key, currency), sums in found.items()]
    if _TIME.intersection(by):
        groups.sort(key=attrgetter("key"))
    else:
        groups.sort(key=lambda group: (-group.sums.amount_nano, group.key))
    groups.sort(key=attrgetter("currency"))
    whole = (Group((), currency, Sums(*totals[currency])) for currency in sorted(totals))
    return Report(tuple(by), tuple(groups), tuple(whole))


def report_of(by: Sequence[str], lines: Iterable[Sequence[Any]]) -> Report:
    """Return the report over the lines of ``billing.rollup_query.queries``: time bucket, keys, currency, sums.

    Lines of the same group are added. Cost: some 5 µs a line; totals are added while a line is at hand, since half a
    million groups are in no processor's cache when they are gone through again.
    """
    times = [name for name in by if name in TIME_HOURS]
    hours = min((TIME_HOURS[name] for name in times), default=1)
    keys = [name for name in by if name not in TIME_HOURS]
    width = 1 + len(keys)  # then the currency, then the sums
    places = [0 if name in TIME_HOURS else 1 + keys.index(name) for name in by]
    found: dict[tuple[tuple[str, ...], str], Sums] = {}
    totals: dict[str, list[int]] = {}
    for line in lines:
        if times:
            words: tuple[str, ...] = tuple(
                line[place] if place else time_key(name, line[0] * hours)
                for name, place in zip(by, places, strict=True)
            )
        else:
            words = tuple(line[1:width])  # itself, where it is one
        currency, numbers = line[width], line[width + 1 :]
        if type(numbers[-1]) is not int:  # PostgreSQL adds integers to decimals; the last column is a sum in both
            numbers = tuple(map(int, numbers))
        _add_to(totals, currency, numbers)
        sums, key = Sums(*numbers), (words, currency)
        if key in found:
            found[key].add(sums)
        else:
            found[key] = sums
    return _report(by, found, totals)


def check_dimensions(by: Sequence[str]) -> None:
    """Raise ``ReportError`` for a dimension that there is none of."""
    for name in by:
        dimension_of(name)


def dimension_of(name: str) -> Callable[[LedgerRow], str]:
    """Return how a row says its value of a dimension. Raises ``ReportError``."""
    if name.startswith(LABEL) and len(name) > len(LABEL):
        label = name.removeprefix(LABEL)
        return lambda row: row.label(label) or _NONE
    if name not in DIMENSIONS:
        raise ReportError(f"cannot group by {name!r}; there are {', '.join(DIMENSIONS)} and {LABEL}NAME")
    return DIMENSIONS[name]


def format_money(nano: int) -> str:
    """Return nano-units as a decimal number with all nine decimals: ``-1`` is ``-0.000000001``."""
    whole, part = divmod(abs(nano), NANO_PER_UNIT)
    return f"{'-' if nano < 0 else ''}{whole}.{part:09d}"


def render_json(report: Report) -> str:
    """Return the report as one JSON object: ``{"by", "groups": […], "totals": […]}``."""

    def entry(group: Group) -> dict[str, object]:
        return {
            **dict(zip(report.by, group.key, strict=False)),
            "currency": group.currency,
            **dict(zip(SUM_NAMES, _values(group.sums), strict=True)),
            "hit_tokens": group.sums.hit_tokens,
            "amount": format_money(group.sums.amount_nano),
            "saved": format_money(group.sums.saved_nano),
        }

    content = {
        "by": list(report.by),
        "groups": [entry(group) for group in report.groups],
        "totals": [entry(group) for group in report.totals],
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def render_csv(report: Report) -> str:
    """Return one line for each group, with a header; totals are the sums of the columns."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*report.by, "currency", *SUM_NAMES, "amount", "saved"])
    for group in report.groups:
        money = (format_money(group.sums.amount_nano), format_money(group.sums.saved_nano))
        key = [spreadsheet_text(value) for value in group.key]
        writer.writerow([*key, group.currency, *_values(group.sums), *money])
    return out.getvalue()


def render_table(report: Report) -> str:
    """Return an aligned table for people, one line for each group and one for each currency's total."""
    head = [*report.by, "requests", "prompt", "hit", "device", "host", "disk", "pool", "other", "output"]
    head += ["cost", "saved", "currency", "unpriced"]
    lines = [head, *([*map(printable, group.key), *_cells(group)] for group in report.groups)]
    for group in report.totals:
        blank = ["total", *[""] * (len(report.by) - 1)] if report.by else []
        lines.append([*blank, *_cells(group)])
    if not report.by:
        lines = lines[: 1 + len(report.totals)]
    return aligned(lines, len(report.by))


def _cells(group: Group) -> list[str]:
    sums = group.sums
    hit = f"{100 * sums.hit_tokens / sums.prompt_tokens:.1f}%" if sums.prompt_tokens else _NONE
    tiers = (sums.hit_device_tokens, sums.hit_host_tokens, sums.hit_disk_tokens, sums.hit_pool_tokens)
    return [
        f"{sums.requests:,}",
        f"{sums.prompt_tokens:,}",
        hit,
        *(f"{tokens:,}" for tokens in (*tiers, sums.hit_unknown_tokens, sums.output_tokens)),
        format_money(sums.amount_nano),
        format_money(sums.saved_nano),
        group.currency,
        f"{sums.unpriced:,}",
    ]

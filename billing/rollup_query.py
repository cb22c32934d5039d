"""The queries of reports: which sums are read from which rollup, and which rows beside them.

A report takes whole days, then whole hours from the rollups and reads rows only for what lies beyond the watermark and
for the pieces of hours (or, by run, step or label, of days) at its period's ends. By hour it is asked day by day: the
database then sorts some thousand sums at a time, which stay in its cache, instead of a month of them. What no rollup
holds (requests, and runs, steps or labels combined with anything else) is summed from rows.

The SQL is what SQLite and PostgreSQL have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from billing.calendar import HOUR_NS
from billing.rollup import DAY_HOURS, KEYS, LABEL, ROW_HOUR, ROW_KEYS, SUM_COLUMNS, SUMS, VALUES

_DAY_NS = DAY_HOURS * HOUR_NS
#: All time, in whole days.
_EVER = (-(10**5) * _DAY_NS, 10**5 * _DAY_NS)
#: What an index can find.
_COLUMNS = {"run": "run_id", "request": "request_id"}
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in SUM_COLUMNS)


@dataclass(frozen=True, slots=True)
class Question:
    """What a report sums. The result has a time bucket (hours or days since the epoch, or 0), the keys, the sums.

    ``keys``: names of ``KEYS``, ``ROW_KEYS`` or ``label:NAME``, the currency among them; ``per_hours``: the length of a
    time bucket (``None``: all time is one); ``equal``: dimensions that must have one value.
    """

    keys: tuple[str, ...]
    per_hours: int | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    equal: Mapping[str, str] | None = None

    @property
    def label(self) -> str | None:
        """The label among the keys; rows that lack it are in no line of the result."""
        return next((name.removeprefix(LABEL) for name in self.keys if name.startswith(LABEL)), None)

    @property
    def value_key(self) -> str | None:
        """The key that is read from the sums by value, ``None`` where others are or rows must be."""
        rest = [name for name in self.keys if name != "currency"]
        is_value = len(rest) == 1 and (rest[0] in VALUES or rest[0].startswith(LABEL))
        return rest[0] if is_value and not self.equal and self.per_hours != 1 else None

    @property
    def needs_rows(self) -> bool:
        """Whether no rollup answers it."""
        named = (*self.keys, *(self.equal or {}))
        return self.value_key is None and any(name in ROW_KEYS or name.startswith(LABEL) for name in named)


@dataclass(frozen=True, slots=True)
class Query:
    """One statement. ``oldest_row_ns``: from when on it needs rows that may be in the rollups as well."""

    sql: str
    parameters: Mapping[str, int | str]
    oldest_row_ns: int | None = None


def queries(question: Question, watermark: int, hours: tuple[int, int] | None, labels_sql: str) -> Iterator[Query]:
    """Write the queries whose lines together answer a question; the same bucket and keys may come in several.

    ``hours``: the first and last hour in the rollups, ``None`` when they are empty.
    """
    low = _EVER[0] if question.since_ns is None else question.since_ns
    high = _EVER[1] if question.until_ns is None else question.until_ns
    source = _Rows(question, labels_sql)
    common = {f"is_{name}": value for name, value in (question.equal or {}).items()}
    if question.label is not None:
        common["label"] = question.label
    if question.needs_rows:
        span = {"low": low, "high": high}
        yield Query(source.sql("posted_ns >= :low AND posted_ns < :high"), {**common, **span}, low)
        return
    unit_ns = HOUR_NS if question.value_key is None else _DAY_NS
    first, last = -(-low // unit_ns), high // unit_ns
    if question.value_key is not None:
        yield Query(_value_sql(question), {"dimension": question.value_key, "first": first, "last": last})
    elif hours is not None:
        first_hour, last_hour = max(first, hours[0]), min(last, hours[1] + 1)
        for sql, span in _rollup_parts(question, first_hour, last_hour):
            yield Query(sql, {**_equal_only(common), **span})
    # A unary plus keeps a planner from a column's index: few rows lie beyond the watermark, few in pieces of hours.
    beyond = "seq > :watermark AND +posted_ns >= :low AND +posted_ns < :high"
    yield Query(source.sql(beyond), {**common, "watermark": watermark, "low": low, "high": high})
    for piece in _pieces(low, high, unit_ns):
        edge = "+seq <= :watermark AND posted_ns >= :low AND posted_ns < :high"
        yield Query(source.sql(edge), {**common, "watermark": watermark, "low": piece[0], "high": piece[1]}, piece[0])


def _equal_only(parameters: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if name != "label"}


def _pieces(low: int, high: int, unit_ns: int) -> list[tuple[int, int]]:
    """Return what of a period lies outside its whole hours or days."""
    after, before = -(-low // unit_ns) * unit_ns, high // unit_ns * unit_ns
    pieces = [(low, min(after, high)), (max(before, after), high)]
    return [(start, end) for start, end in pieces if start < end]


def _rollup_parts(question: Question, first: int, last: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Go through the parts that sum the hours from ``first`` to before ``last``: by days where hours do not matter."""
    if first >= last:
        return
    first_day, last_day = -(-first // DAY_HOURS), last // DAY_HOURS
    if question.per_hours == 1:
        by_hour = _rollup_sql(question, "hour", 1)
        for start in range(first // DAY_HOURS * DAY_HOURS, last, DAY_HOURS):
            yield by_hour, {"first": max(start, first), "last": min(start + DAY_HOURS, last)}
        return
    in_hours, in_days = _rollup_sql(question, "hour", question.per_hours), _rollup_sql(question, "day", 1)
    if question.per_hours is None:
        in_days = _rollup_sql(question, "day", None)
    if first_day >= last_day:
        yield in_hours, {"first": first, "last": last}
        return
    if first < first_day * DAY_HOURS:
        yield in_hours, {"first": first, "last": first_day * DAY_HOURS}
    yield in_days, {"first": first_day, "last": last_day}
    if last_day * DAY_HOURS < last:
        yield in_hours, {"first": last_day * DAY_HOURS, "last": last}


def _bucket(time: str, per: int | None) -> str:
    return "0" if per is None else time if per == 1 else f"{time} / {per}"


def _rollup_sql(question: Question, unit: str, per: int | None) -> str:
    """Sum by key id first where that makes fewer lines: integers are grouped faster than texts."""
    table = "rollups" if unit == "hour" else "day_rollups"
    tests = " AND ".join(f"k_{name} = :is_{name}" for name in question.equal or {})
    picked = f" AND key_id IN (SELECT id FROM rollup_keys WHERE {tests})" if tests else ""
    span = f"{unit} >= :first AND {unit} < :last{picked}"
    if per == 1:
        inner = f"SELECT {unit} AS t, key_id, {', '.join(SUM_COLUMNS)} FROM {table} WHERE {span}"
    else:
        inner = f"SELECT {_bucket(unit, per)} AS t, key_id, {_SUMS} FROM {table} WHERE {span} GROUP BY 1, 2"
    keys = "".join(f", k.k_{name}" for name in question.keys)
    groups = ", ".join(map(str, range(1, 2 + len(question.keys))))
    sums = ", ".join(f"sum(r.{name})" for name in SUM_COLUMNS)
    return f"SELECT r.t{keys}, {sums} FROM ({inner}) r JOIN rollup_keys k ON k.id = r.key_id GROUP BY {groups}"


def _value_sql(question: Question) -> str:
    """Read the sums by day as they are: whoever asks adds up the days of a value; the database would sort them."""
    columns = "".join(", currency" if name == "currency" else ", value" for name in question.keys)
    bucket = "0" if question.per_hours is None else "day"
    sums = ", ".join(SUM_COLUMNS)
    return (
        f"SELECT {bucket} AS t{columns}, {sums} FROM value_rollups"
        " WHERE dimension = :dimension AND day >= :first AND day < :last"
    )


class _Rows:
    """The sums of rows that pass a test."""

    def __init__(self, question: Question, labels_sql: str) -> None:
        def column(name: str) -> str:
            return "label.value" if name.startswith(LABEL) else (KEYS | ROW_KEYS)[name]

        keys = "".join(f", {column(name)} AS k{place}" for place, name in enumerate(question.keys))
        sums = ", ".join(f"sum({sql}) AS s_{name}" for name, sql in SUMS.items())
        self._head = f"SELECT {_bucket(ROW_HOUR, question.per_hours)} AS t{keys}, {sums} FROM requests"
        self._tests = [f"{_COLUMNS.get(name) or KEYS[name]} = :is_{name}" for name in question.equal or {}]
        self._groups = ", ".join(map(str, range(1, 2 + len(question.keys))))
        if question.label is not None:
            self._head += f", {labels_sql.format(table='requests')}"
            self._tests += ["label.key = :label", "label.value <> ''"]

    def sql(self, which: str) -> str:
        """Return the query over the rows that pass one more test."""
        return f"{self._head} WHERE {' AND '.join([which, *self._tests])} GROUP BY {self._groups}"

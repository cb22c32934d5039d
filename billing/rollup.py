"""Rollups: sums by hour, by day and by all that has few values, kept beside the rows, so that reports read no rows.

A rollup is exact and redundant: the sums of all rows up to one sequence number, the watermark ``rolled``. ``advance``
folds further rows in and moves the watermark in the same transaction, so that each row is in the sums exactly once
whoever does it and wherever it is killed. A report takes whole days, then whole hours from the rollups and reads rows
only for what lies beyond the watermark and for the pieces of hours at its period's ends. ``sums_sql`` writes that
query; what has many values (run, step, request) is summed from the rows.

The SQL here is what SQLite and PostgreSQL have in common; its parameters are named ``:name``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HOUR_NS = 3600 * 10**9
DAY_HOURS = 24

#: The columns of a rollup's key, and how each is read from a row.
KEYS: dict[str, str] = {
    "tenant": "tenant",
    "team": "team",
    "key": "key_id",
    "model": "model",
    "served_model": "served_model",
    "agent": "coalesce(agent, '-')",
    "instance": "coalesce(instance, '-')",
    "endpoint": "endpoint",
    "outcome": "outcome",
    "status": "CAST(status AS TEXT)",
    "usage_source": "usage_source",
    "hit_source": "hit_source",
    "price_version": "price_version",
    "unpriced": "coalesce(unpriced_reason, '-')",
    "currency": "currency",
}
KEY_COLUMNS = tuple(f"k_{name}" for name in KEYS)

#: Dimensions with too many values for a rollup.
ROW_KEYS: dict[str, str] = {
    "run": "coalesce(run_id, '-')",
    "step": "coalesce(CAST(step AS TEXT), '-')",
    "request": "request_id",
}

#: What an index can find of them.
_COLUMNS = {"run": "run_id", "request": "request_id"}

_HITS = "hit_device_tokens + hit_host_tokens + hit_disk_tokens + hit_pool_tokens + hit_unknown_tokens"
_WRITES = "write_tokens + write_5m_tokens + write_1h_tokens"
_PROMPT = f"fresh_tokens + {_HITS} + {_WRITES}"

#: What is summed (the fields of ``billing.reports.Sums``), and how each is read from a row.
SUMS: dict[str, str] = {
    "requests": "CASE WHEN revision = 0 THEN 1 ELSE 0 END",
    "corrections": "CASE WHEN revision > 0 THEN 1 ELSE 0 END",
    "unpriced": "CASE WHEN amount_nano IS NULL THEN 1 ELSE 0 END - settles_unpriced",
    "hits_not_told": f"CASE WHEN hit_source = 'unknown' AND {_PROMPT} > 0 THEN 1 ELSE 0 END",
    "prompt_tokens": _PROMPT,
    "fresh_tokens": "fresh_tokens",
    "hit_device_tokens": "hit_device_tokens",
    "hit_host_tokens": "hit_host_tokens",
    "hit_disk_tokens": "hit_disk_tokens",
    "hit_pool_tokens": "hit_pool_tokens",
    "hit_unknown_tokens": "hit_unknown_tokens",
    "write_tokens": _WRITES,
    "output_tokens": "output_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "amount_nano": "coalesce(amount_nano, 0)",
    "saved_nano": "coalesce(saved_nano, 0)",
}
SUM_COLUMNS = tuple(f"s_{name}" for name in SUMS)

#: All time, in whole days.
_EVER = (-(10**5) * DAY_HOURS * HOUR_NS, 10**5 * DAY_HOURS * HOUR_NS)
_ROW_HOUR = f"posted_ns / {HOUR_NS}"

#: Rows that are folded in at a time, so that the writer is not kept long.
ADVANCE_ROWS = 20_000

NEW_KEYS_SQL = f"""
INSERT INTO rollup_keys ({", ".join(KEY_COLUMNS)})
SELECT DISTINCT {", ".join(KEYS.values())} FROM requests WHERE seq > :after AND seq <= :upto
ON CONFLICT DO NOTHING
"""
FOLD_HOURS_SQL = f"""
INSERT INTO rollups (hour, key_id, {", ".join(SUM_COLUMNS)})
SELECT r.hour, k.id, {", ".join(f"r.{name}" for name in SUM_COLUMNS)} FROM (
  SELECT {_ROW_HOUR} AS hour, {", ".join(f"{sql} AS k_{name}" for name, sql in KEYS.items())},
    {", ".join(f"CAST(sum({sql}) AS BIGINT) AS s_{name}" for name, sql in SUMS.items())}
  FROM requests WHERE seq > :after AND seq <= :upto
  GROUP BY 1, {", ".join(map(str, range(2, 2 + len(KEYS))))}
) r JOIN rollup_keys k ON {" AND ".join(f"k.{name} = r.{name}" for name in KEY_COLUMNS)}
WHERE true
ON CONFLICT (hour, key_id) DO UPDATE SET
  {", ".join(f"{name} = rollups.{name} + excluded.{name}" for name in SUM_COLUMNS)}
"""
FOLD_DAYS_SQL = (
    FOLD_HOURS_SQL.replace("INTO rollups (hour", "INTO day_rollups (day")
    .replace("r.hour, k.id", "r.day, k.id")
    .replace(f"{_ROW_HOUR} AS hour", f"{_ROW_HOUR} / {DAY_HOURS} AS day")
    .replace("CONFLICT (hour", "CONFLICT (day")
    .replace("rollups.s_", "day_rollups.s_")
)


def advance(connection: sqlite3.Connection, limit: int = ADVANCE_ROWS) -> int:
    """Fold up to ``limit`` further rows into the rollups; return how many. Raises ``sqlite3.Error``, and then none is.

    Cost: one pass over these rows and a write for each hour and key among them, with the interpreter free meanwhile.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        after = connection.execute("SELECT seq FROM rolled").fetchone()[0]
        last = connection.execute("SELECT ifnull(max(seq), 0) FROM requests").fetchone()[0]
        span = {"after": after, "upto": min(last, after + limit)}
        if span["upto"] > after:
            connection.execute(NEW_KEYS_SQL, span)
            connection.execute(FOLD_HOURS_SQL, span)
            connection.execute(FOLD_DAYS_SQL, span)
            connection.execute("UPDATE rolled SET seq = ?", (span["upto"],))
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    return int(span["upto"]) - int(after)


@dataclass(frozen=True, slots=True)
class SumsQuery:
    """A query whose columns are the time bucket (hours or days since the epoch, or 0), the keys, the sums."""

    sql: str
    parameters: Mapping[str, int | str]
    uses_rollups: bool


def sums_sql(
    keys: Sequence[str],
    *,
    per_hours: int | None,
    since_ns: int | None,
    until_ns: int | None,
    equal: Mapping[str, str],
    watermark: int,
) -> SumsQuery:
    """Write the query of a report.

    ``keys``: names of ``KEYS`` or ``ROW_KEYS``; ``per_hours``: the length of a time bucket (``None``: all time is one);
    ``equal``: dimensions that must have one value. A report that groups or picks by ``ROW_KEYS`` reads rows.
    """
    low, high = (_EVER[0] if since_ns is None else since_ns), (_EVER[1] if until_ns is None else until_ns)
    parameters: dict[str, int | str] = {"low": low, "high": high, "watermark": watermark}
    parameters |= {f"is_{name}": value for name, value in equal.items()}
    row_tests = [f"{_COLUMNS.get(name) or KEYS[name]} = :is_{name}" for name in equal]
    from_rows = _from_rows(keys, per_hours, row_tests)
    period = "posted_ns >= :low AND posted_ns < :high"
    if any(name in ROW_KEYS for name in (*keys, *equal)):
        del parameters["watermark"]
        return SumsQuery(_grouped(from_rows.format(which=period), keys), parameters, uses_rollups=False)
    parts = _rollup_parts(keys, per_hours, equal, -(-low // HOUR_NS), high // HOUR_NS)
    # A unary plus keeps a planner from a column's index: few rows lie beyond the watermark, few in pieces of hours.
    parts.append(from_rows.format(which="seq > :watermark AND +posted_ns >= :low AND +posted_ns < :high"))
    edge = "+seq <= :watermark AND posted_ns >= {} AND posted_ns < {}"
    after_ns, before_ns = -(-low // HOUR_NS) * HOUR_NS, high // HOUR_NS * HOUR_NS
    if low % HOUR_NS:
        parts.append(from_rows.format(which=edge.format(low, min(after_ns, high))))
    if high % HOUR_NS and high > after_ns:
        parts.append(from_rows.format(which=edge.format(max(before_ns, after_ns), high)))
    return SumsQuery(_grouped(" UNION ALL ".join(parts), keys), parameters, uses_rollups=True)


def _bucket(hour: str, per_hours: int | None) -> str:
    return "0" if per_hours is None else f"{hour} / {per_hours}"


def _from_rows(keys: Sequence[str], per_hours: int | None, tests: Sequence[str]) -> str:
    key_sql = "".join(f", {(KEYS | ROW_KEYS)[name]} AS k_{name}" for name in keys)
    sums = ", ".join(f"sum({sql}) AS s_{name}" for name, sql in SUMS.items())
    groups = ", ".join(map(str, range(1, 2 + len(keys))))
    where = " AND ".join(["{which}", *tests])
    return f"SELECT {_bucket(_ROW_HOUR, per_hours)} AS t{key_sql}, {sums} FROM requests WHERE {where} GROUP BY {groups}"


def _rollup_parts(
    keys: Sequence[str], per_hours: int | None, equal: Mapping[str, str], first: int, last: int
) -> list[str]:
    """Return the parts that sum the hours from ``first`` to before ``last``: by days where hours do not matter."""
    first_day, last_day = -(-first // DAY_HOURS), last // DAY_HOURS
    if per_hours == 1 or first_day >= last_day:
        return [_from_rollups(keys, per_hours, equal, "hour", first, last)]
    return [
        _from_rollups(keys, per_hours, equal, "hour", first, first_day * DAY_HOURS),
        _from_rollups(keys, None if per_hours is None else 1, equal, "day", first_day, last_day),
        _from_rollups(keys, per_hours, equal, "hour", last_day * DAY_HOURS, last),
    ]


def _from_rollups(
    keys: Sequence[str], per: int | None, equal: Mapping[str, str], unit: str, first: int, last: int
) -> str:
    """Sum by key id first: integers are grouped faster than texts."""
    table = "rollups" if unit == "hour" else "day_rollups"
    sums = ", ".join(f"sum({name}) AS {name}" for name in SUM_COLUMNS)
    tests = " AND ".join(f"k_{name} = :is_{name}" for name in equal)
    picked = f" AND key_id IN (SELECT id FROM rollup_keys WHERE {tests})" if equal else ""
    key_sql = "".join(f", k.k_{name}" for name in keys)
    span = f"{unit} >= {first} AND {unit} < {last}{picked}"
    inner = (
        f"SELECT {unit} AS t, key_id, {', '.join(SUM_COLUMNS)} FROM {table} WHERE {span}"
        if per == 1
        else f"SELECT {_bucket(unit, per)} AS t, key_id, {sums} FROM {table} WHERE {span} GROUP BY 1, 2"
    )
    return f"""
SELECT r.t{key_sql}, {", ".join(f"r.{name}" for name in SUM_COLUMNS)}
FROM ({inner}) r JOIN rollup_keys k ON k.id = r.key_id"""


def _grouped(parts: str, keys: Sequence[str]) -> str:
    names = ["t", *(f"k_{name}" for name in keys)]
    sums = ", ".join(f"sum({name})" for name in SUM_COLUMNS)
    return f"SELECT {', '.join(names)}, {sums} FROM ({parts}) parts GROUP BY {', '.join(names)}"

"""Rollups: sums by hour, by day and by all that has few values, kept beside the rows, so that reports read no rows.

A rollup is exact and redundant: the sums of all rows up to one sequence number, the watermark ``rolled``. ``advance``
folds further rows in and moves the watermark in the same transaction, so that each row is in the sums exactly once
whoever does it and wherever it is killed. Three tables: by hour and by day for every combination of ``KEYS`` that
occurs, and by day for each value of what has too many of them to be combined (``VALUES``: run, step, each label).
``billing.rollup_query`` writes the queries of reports.

The SQL here is what SQLite and PostgreSQL have in common; its parameters are named ``:name``.
"""

from __future__ import annotations

from billing.calendar import HOUR_NS
from billing.database import LedgerSession

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

#: Dimensions with too many values to be combined with others, and how each is read from a row.
ROW_KEYS: dict[str, str] = {
    "run": "coalesce(run_id, '-')",
    "step": "coalesce(CAST(step AS TEXT), '-')",
    "request": "request_id",
}
#: Those that have sums by day of their own; labels, which have none where a row lacks them, as ``label:NAME``.
VALUES = ("run", "step")
LABEL = "label:"

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

ROW_HOUR = f"posted_ns / {HOUR_NS}"
_ROW_DAY = f"{ROW_HOUR} / {DAY_HOURS}"

#: Rows that are folded in at a time, so that no writer is kept long: not this one, nor others who wait for the lock.
ADVANCE_ROWS = 5_000

NEW_KEYS_SQL = f"""
INSERT INTO rollup_keys ({", ".join(KEY_COLUMNS)})
SELECT DISTINCT {", ".join(KEYS.values())} FROM requests WHERE seq > :after AND seq <= :upto
ON CONFLICT DO NOTHING
"""
FOLD_HOURS_SQL = f"""
INSERT INTO rollups (hour, key_id, {", ".join(SUM_COLUMNS)})
SELECT r.hour, k.id, {", ".join(f"r.{name}" for name in SUM_COLUMNS)} FROM (
  SELECT {ROW_HOUR} AS hour, {", ".join(f"{sql} AS k_{name}" for name, sql in KEYS.items())},
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
    .replace(f"{ROW_HOUR} AS hour", f"{ROW_HOUR} / {DAY_HOURS} AS day")
    .replace("CONFLICT (hour", "CONFLICT (day")
    .replace("rollups.s_", "day_rollups.s_")
)


_SUMMED = ", ".join(f"CAST(sum({sql}) AS BIGINT) AS s_{name}" for name, sql in SUMS.items())
_SPAN = "seq > :after AND seq <= :upto"


def fold_values_sql(labels_sql: str) -> str:
    """Return the statement that folds rows into the sums by run, by step and by each label.

    Steps and labels are few among the rows of a time, so those are summed by both first, and JSON is read once for
    all rows that have the same.
    """
    names = ", ".join(SUM_COLUMNS)
    added = ", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in SUM_COLUMNS)
    return f"""
WITH few AS MATERIALIZED (
  SELECT {_ROW_DAY} AS day, {ROW_KEYS["step"]} AS step, labels, currency, {_SUMMED}
  FROM requests WHERE {_SPAN} GROUP BY 1, 2, 3, 4
), parts AS (
  SELECT {_ROW_DAY} AS day, 'run' AS dimension, {ROW_KEYS["run"]} AS value, currency, {_SUMMED}
  FROM requests WHERE {_SPAN} GROUP BY 1, 3, 4
  UNION ALL SELECT day, 'step', step, currency, {added} FROM few GROUP BY 1, 3, 4
  UNION ALL SELECT day, '{LABEL}' || label.key, label.value, currency, {added}
  FROM few, {labels_sql.format(table="few")} WHERE label.value <> '' GROUP BY 1, 2, 3, 4
)
INSERT INTO value_rollups (day, dimension, value, currency, {names})
SELECT day, dimension, value, currency, {names} FROM parts
WHERE true
ON CONFLICT (dimension, day, value, currency) DO UPDATE SET
  {", ".join(f"{name} = value_rollups.{name} + excluded.{name}" for name in SUM_COLUMNS)}
"""


def advance(session: LedgerSession, limit: int = ADVANCE_ROWS) -> int:
    """Fold up to ``limit`` further rows into the rollups; return by how much the watermark rose.

    Raises ``LedgerError``, and then nothing is folded. Cost: one pass over these rows and a write for each hour and key
    among them, with the interpreter free meanwhile; nothing where there are none.
    """
    if not _behind(session):
        return 0
    with session.writing():
        after, last = _watermark_and_last(session)
        span = {"after": after, "upto": min(last, after + limit)}
        if span["upto"] > after:
            for sql in (NEW_KEYS_SQL, FOLD_HOURS_SQL, FOLD_DAYS_SQL, fold_values_sql(session.labels_sql)):
                session.execute(sql, span)
            session.execute("UPDATE rolled SET seq = :upto", {"upto": span["upto"]})
    return span["upto"] - after


def watermark(session: LedgerSession) -> int:
    """Return up to which sequence number rows are in the rollups."""
    return int(session.query("SELECT seq FROM rolled")[0][0])


def _watermark_and_last(session: LedgerSession) -> tuple[int, int]:
    after, last = session.query("SELECT seq, (SELECT max(seq) FROM requests) FROM rolled")[0]
    return int(after), int(last or 0)


def _behind(session: LedgerSession) -> bool:
    after, last = _watermark_and_last(session)
    return last > after

"""The trace store's tables: the record itself as JSON, beside it the columns that lists are filtered and summed by."""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec

from tracing.errors import UnstorableRecord
from tracing.record import RequestRecord

SCHEMA_VERSION: Final = 2
_INT64: Final = 2**63

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    run_id TEXT,
    step INTEGER,
    arrived_ns INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    model TEXT NOT NULL,
    agent TEXT,
    hit_device_tokens INTEGER NOT NULL,
    hit_host_tokens INTEGER NOT NULL,
    hit_disk_tokens INTEGER NOT NULL,
    hit_pool_tokens INTEGER NOT NULL,
    hit_unknown_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    ttft_ns INTEGER,
    currency TEXT NOT NULL,
    cost_nano INTEGER,
    saved_nano INTEGER,
    body BLOB NOT NULL,
    detail BLOB
) STRICT;
CREATE INDEX IF NOT EXISTS records_by_run ON records (tenant, run_id, step, seq) WHERE run_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_by_time ON records (arrived_ns);
CREATE TABLE IF NOT EXISTS runs (
    tenant TEXT NOT NULL,
    run_id TEXT NOT NULL,
    last_ns INTEGER NOT NULL,
    PRIMARY KEY (tenant, run_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS runs_by_time ON runs (last_ns);
"""

SPANS: Final = """
CREATE TABLE IF NOT EXISTS spans (
    tenant TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL,
    run_id TEXT,
    tool_call_id TEXT,
    received_ns INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (tenant, trace_id, span_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS spans_by_run ON spans (tenant, run_id) WHERE run_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS spans_by_call ON spans (tenant, tool_call_id) WHERE tool_call_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS spans_by_time ON spans (received_ns);
"""
"""What agents sent of their own, by OTLP."""

MIGRATIONS: Final = {1: "ALTER TABLE records ADD COLUMN detail BLOB;" + SPANS}
"""What brings the tables of a version to the next one."""

COLUMNS: Final = (
    "request_id, tenant, run_id, step, arrived_ns, outcome, model, agent, hit_device_tokens, hit_host_tokens,"
    " hit_disk_tokens, hit_pool_tokens, hit_unknown_tokens, prompt_tokens, output_tokens, ttft_ns, currency, cost_nano,"
    " saved_nano, body"
)
_ROW: Final = f"(?{', ?' * COLUMNS.count(',')})"
LIST_RUNS: Final = """
INSERT INTO runs SELECT tenant, run_id, max(arrived_ns) FROM records
WHERE run_id IS NOT NULL AND request_id IN ({}) GROUP BY tenant, run_id
ON CONFLICT (tenant, run_id) DO UPDATE SET last_ns = max(last_ns, excluded.last_ns)
"""
"""Lists the runs of these requests as they are stored, whatever else was handed in under their names."""

INSERT_DETAIL: Final = "UPDATE records SET detail = ? WHERE request_id = ?"
INSERT_SPAN: Final = "INSERT OR REPLACE INTO spans VALUES (?, ?, ?, ?, ?, ?, ?)"

Row = tuple[object, ...]
Statement = tuple[str, Row]
"""SQL and its values, run after the records of its batch."""


@cache
def insert_sql(rows: int) -> str:
    """The statement that stores so many records and leaves those that are there already."""
    return f"INSERT OR IGNORE INTO records ({COLUMNS}) VALUES {', '.join([_ROW] * rows)}"


def row_of(record: RequestRecord) -> Row:
    """The values of one row of :func:`insert_sql`. Raises :class:`UnstorableRecord`."""
    usage, charge, link = record.usage, record.charge, record.link
    row: Row = (
        record.request_id,
        record.identity.tenant,
        link.run_id if link else None,
        link.step if link else None,
        record.stamps.arrived_ns,
        record.outcome.value,
        record.model,
        record.labels.get("agent"),
        usage.hit_device_tokens,
        usage.hit_host_tokens,
        usage.hit_disk_tokens,
        usage.hit_pool_tokens,
        usage.hit_unknown_tokens,
        usage.prompt_tokens,
        usage.output_tokens,
        record.stamps.ttft_ns,
        charge.currency,
        charge.amount_nano,
        charge.saved_nano,
        encode_record(record),
    )
    if any(isinstance(value, int) and not -_INT64 <= value < _INT64 for value in row):
        raise UnstorableRecord(f"record {record.request_id!r} holds an integer of more than 64 bits")
    return row


def encode_record(record: RequestRecord) -> bytes:
    """The record as JSON; :func:`decode_record` gives an equal record. Raises :class:`UnstorableRecord`."""
    try:
        return msgspec.json.encode(record)
    except (UnicodeEncodeError, OverflowError) as error:
        raise UnstorableRecord(f"record {record.request_id!r} has no JSON form: {error}") from error


_DECODER: Final = msgspec.json.Decoder(RequestRecord)


def decode_record(body: bytes) -> RequestRecord:
    """The record of a JSON text; fields that it lacks take their defaults, fields that it has too many are ignored."""
    return _DECODER.decode(body)

"""The trace store's tables: the record itself as JSON, beside it the columns that lists are filtered and summed by.

Statements that make tables have places for what the databases call their types.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tracing.errors import UnstorableRecord
from tracing.record import RequestRecord
from tracing.store_database import Parameters, Row

SCHEMA_VERSION: Final = 3
_INT64: Final = 2**63

SCHEMA: Final = (
    """
CREATE TABLE records (
    seq {serial},
    request_id {text} NOT NULL UNIQUE,
    tenant {text} NOT NULL,
    run_id {text},
    step {int},
    arrived_ns {int} NOT NULL,
    outcome {text} NOT NULL,
    model {text} NOT NULL,
    agent {text},
    hit_device_tokens {int} NOT NULL,
    hit_host_tokens {int} NOT NULL,
    hit_disk_tokens {int} NOT NULL,
    hit_pool_tokens {int} NOT NULL,
    hit_unknown_tokens {int} NOT NULL,
    prompt_tokens {int} NOT NULL,
    output_tokens {int} NOT NULL,
    ttft_ns {int},
    currency {text} NOT NULL,
    cost_nano {int},
    saved_nano {int},
    body {bytes} NOT NULL,
    detail {bytes},
    team {text},
    parent_run_id {text},
    parent_request_id {text},
    parent_call_id {text}
){rows}""",
    "CREATE INDEX records_by_run ON records (tenant, run_id, step, seq) WHERE run_id IS NOT NULL",
    "CREATE INDEX records_by_time ON records (arrived_ns)",
    "CREATE TABLE runs (tenant {text} NOT NULL, run_id {text} NOT NULL, last_ns {int} NOT NULL,"
    " PRIMARY KEY (tenant, run_id)){keyed}",
    "CREATE INDEX runs_by_time ON runs (last_ns)",
)

SPANS: Final = (
    """
CREATE TABLE spans (
    tenant {text} NOT NULL,
    trace_id {text} NOT NULL,
    span_id {text} NOT NULL,
    run_id {text},
    tool_call_id {text},
    received_ns {int} NOT NULL,
    body {bytes} NOT NULL,
    PRIMARY KEY (tenant, trace_id, span_id)
){keyed}""",
    "CREATE INDEX spans_by_run ON spans (tenant, run_id) WHERE run_id IS NOT NULL",
    "CREATE INDEX spans_by_call ON spans (tenant, tool_call_id) WHERE tool_call_id IS NOT NULL",
    "CREATE INDEX spans_by_time ON spans (received_ns)",
)
"""What agents sent of their own, by OTLP."""

LIVES: Final = (
    "CREATE TABLE lives (instance {text} NOT NULL, began_ns {int} NOT NULL, PRIMARY KEY (instance, began_ns)){keyed}",
    "CREATE INDEX lives_by_time ON lives (began_ns)",
)
"""When engines began anew, with nothing in their caches."""

COLUMNS: Final = (
    "request_id, tenant, run_id, step, arrived_ns, outcome, model, agent, hit_device_tokens, hit_host_tokens,"
    " hit_disk_tokens, hit_pool_tokens, hit_unknown_tokens, prompt_tokens, output_tokens, ttft_ns, currency, cost_nano,"
    " saved_nano, team, parent_run_id, parent_request_id, parent_call_id, body"
)
"""What is stored of a record. The body comes last: it is the record, the others are what lists look for."""

LIST_RUNS: Final = """
INSERT INTO runs SELECT tenant, run_id, max(arrived_ns) FROM records
WHERE run_id IS NOT NULL AND request_id IN ({}) GROUP BY tenant, run_id
ON CONFLICT (tenant, run_id) DO UPDATE SET
    last_ns = CASE WHEN excluded.last_ns > runs.last_ns THEN excluded.last_ns ELSE runs.last_ns END
"""
"""Lists the runs of these requests as they are stored, whatever else was handed in under their names."""

INSERT_DETAIL: Final = "UPDATE records SET detail = :detail WHERE request_id = :request_id"
INSERT_SPAN: Final = """
INSERT INTO spans VALUES (:tenant, :trace_id, :span_id, :run_id, :tool_call_id, :received_ns, :body)
ON CONFLICT (tenant, trace_id, span_id) DO UPDATE SET run_id = excluded.run_id,
    tool_call_id = excluded.tool_call_id, received_ns = excluded.received_ns, body = excluded.body
"""
INSERT_LIFE: Final = "INSERT INTO lives VALUES (:instance, :began_ns) ON CONFLICT DO NOTHING"

Statement = tuple[str, Parameters]
"""SQL and its values, run after the records of its batch."""


def row_of(record: RequestRecord) -> Row:
    """What is stored of a record. Raises :class:`UnstorableRecord`."""
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
        record.identity.team,
        link.parent_run_id if link else None,
        link.parent_request_id if link else None,
        link.parent_call_id if link else None,
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

"""Runs as files that others read: OTLP in JSON, Chrome's trace events (Perfetto), workloads for ``keepwarm replay``.

Everything here is a function of records and of the spans that agents sent; see ``docs/tracing.md`` for the formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tracing.attributes import AttributeValue, SemanticConventions
from tracing.received import ReceivedSpan
from tracing.record import RequestRecord
from tracing.spans import SpanKind, SpanValue, request_spans, tool_spans
from tracing.tree import Node, run_tree, walk

_KINDS = {SpanKind.INTERNAL: 1, SpanKind.SERVER: 2, SpanKind.CLIENT: 3}


def otlp_json(
    records: Sequence[RequestRecord],
    received: Iterable[ReceivedSpan] = (),
    conventions: SemanticConventions = SemanticConventions.V0_1,
) -> bytes:
    """Return one ``ExportTraceServiceRequest`` in OTLP's JSON: our spans as they are exported, agents' own beside them.

    Inferred tool spans are left out where an agent's own tells of the call.
    """
    received = list(received)
    told = {span.tool_call_id for span in received if span.tool_call_id is not None}
    values = [span for record in records for span in request_spans(record, conventions)]
    by_id = {record.request_id: record for record in records}
    for record in records:
        before = by_id.get(record.link.previous_request_id or "") if record.link is not None else None
        if before is not None:
            spans = tool_spans(before, record)
            values += [span for span in spans if span.attributes.get("gen_ai.tool.call.id") not in told]
    scopes: list[dict[str, object]] = [_resource("keepwarm", [_own_span(value) for value in values])]
    by_service: dict[str, list[dict[str, object]]] = {}
    for span in received:
        by_service.setdefault(span.service, []).append(_their_span(span))
    scopes += [_resource(service, spans) for service, spans in by_service.items()]
    return msgspec.json.encode({"resourceSpans": scopes})


def chrome_trace(records: Sequence[RequestRecord], received: Iterable[ReceivedSpan] = ()) -> bytes:
    """Return trace events in Chrome's JSON, for Perfetto or ``chrome://tracing``: a process a run, a row a kind."""
    events: list[dict[str, object]] = []
    runs: dict[str, int] = {}
    by_id = {record.request_id: record for record in records}
    for _, node in walk(run_tree(records, received)):
        record = by_id.get(node.request_id or "")
        run = record.link.run_id if record is not None and record.link is not None else "agent"
        process = runs.setdefault(run, len(runs) + 1)
        events.append(_event(node, process, record))
        if record is not None and node.id == record.request_id:
            events += _phases(record, process)
    named: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": run}} for run, process in runs.items()
    ]
    return msgspec.json.encode({"traceEvents": named + events, "displayTimeUnit": "ms"})


def workload(records: Iterable[RequestRecord], name: str) -> Iterator[bytes]:
    """Yield the lines of a ``keepwarm-requests-1`` trace: what ``keepwarm replay`` reads. Without words or names.

    Records whose prompts are not known as tokens have no blocks and are left out; so are those marked at another stride
    than the first. Blocks are the marks of ``tracing.record.PrefixMarks``: equal at equal depth means equal content.
    """
    stride, begin_ns, sessions = 0, 0, dict[str, int]()
    for record in records:
        marks = record.prefix
        if marks is None or not record.usage.prompt_tokens or (stride and marks.stride_tokens != stride):
            continue
        if not stride:
            stride, begin_ns = marks.stride_tokens, record.stamps.arrived_ns
            header = {"format": "keepwarm-requests-1", "name": name, "block": stride, "closed": False}
            yield msgspec.json.encode(header) + b"\n"
        run = f"{record.identity.tenant}\0{record.link.run_id}" if record.link is not None else record.request_id
        row = {
            "t": round(max(record.stamps.arrived_ns - begin_ns, 0) / 1e9, 6),
            "session": sessions.setdefault(run, len(sessions)),
            "in": record.usage.prompt_tokens,
            "out": max(record.usage.output_tokens, 1),
            "blocks": list(marks.marks()),
        }
        yield msgspec.json.encode(row) + b"\n"


def _resource(service: str, spans: list[dict[str, object]]) -> dict[str, object]:
    attributes = [{"key": "service.name", "value": {"stringValue": service}}]
    return {"resource": {"attributes": attributes}, "scopeSpans": [{"scope": {"name": "keepwarm"}, "spans": spans}]}


def _own_span(value: SpanValue) -> dict[str, object]:
    span: dict[str, object] = {
        "traceId": f"{value.trace_id:032x}",
        "spanId": f"{value.span_id:016x}",
        "name": value.name,
        "kind": _KINDS[value.kind],
        "startTimeUnixNano": str(value.started_ns),
        "endTimeUnixNano": str(value.ended_ns),
        "attributes": _attributes(value.attributes.items()),
        "events": [
            {"name": e.name, "timeUnixNano": str(e.at_ns), "attributes": _attributes(e.attributes.items())}
            for e in value.events
        ],
    }
    if value.parent_span_id is not None:
        span["parentSpanId"] = f"{value.parent_span_id:016x}"
    if value.error:
        span["status"] = {"code": 2, "message": value.error}
    return span


def _their_span(span: ReceivedSpan) -> dict[str, object]:
    told: dict[str, object] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.started_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes.items()),
    }
    if span.parent_id is not None:
        told["parentSpanId"] = span.parent_id
    if span.error is not None:
        told["status"] = {"code": 2, "message": span.error}
    return told


def _attributes(items: Iterable[tuple[str, AttributeValue]]) -> list[dict[str, object]]:
    return [{"key": key, "value": _value(value)} for key, value in items]


def _value(value: AttributeValue) -> dict[str, object]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [_value(item) for item in value]}}


def _event(node: Node, process: int, record: RequestRecord | None) -> dict[str, object]:
    told: dict[str, object] = {"kind": node.kind, "inferred": node.is_inferred, **node.attributes}
    if record is not None and node.id == record.request_id:
        usage = record.usage
        told |= {
            "prompt_tokens": usage.prompt_tokens,
            "hit_tokens": usage.hit_tokens,
            "output_tokens": usage.output_tokens,
            "instance": record.instance,
            "amount_nano": record.charge.amount_nano,
        }
    return {
        "ph": "X",
        "name": node.name,
        "cat": node.kind,
        "pid": process,
        "tid": _ROWS.get(node.kind, 4),
        "ts": node.started_ns / 1000,
        "dur": max(node.ended_ns - node.started_ns, 0) / 1000,
        "args": told,
    }


_ROWS = {"step": 1, "tool": 3, "retrieval": 3, "wait": 3}


def _phases(record: RequestRecord, process: int) -> Iterator[dict[str, object]]:
    stamps = record.stamps
    edges = [
        ("queue", stamps.arrived_ns, stamps.sent_ns),
        ("prefill", stamps.sent_ns, stamps.first_token_ns),
        ("decode", stamps.first_token_ns, stamps.last_token_ns),
    ]
    for name, start, end in edges:
        if start is not None and end is not None:
            yield {
                "ph": "X", "name": name, "cat": "phase", "pid": process, "tid": 2, "ts": start / 1000,
                "dur": max(end - start, 0) / 1000, "args": {},
            }  # fmt: skip

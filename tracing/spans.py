"""A record as spans: the request as the gateway served it (SERVER), each try at an instance (CLIENT), what the engine
did in the one that answered (INTERNAL, as far as its stream shows), and inferred tools.

Pure: ids are digests of what they stand for, so the same record gives the same spans in every process and a span that
is sent twice is one span. Requests of one run share a trace (one waterfall in any backend) unless the client brought
its own context, which is then the parent. Token counts stand on the attempt that answered and only there, so no backend
adds them up twice; money stands on the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import pairwise
from typing import Final

from tracing.attributes import (
    Attributes,
    SemanticConventions,
    clean,
    clean_text,
    gateway_attributes,
    inference_attributes,
    openinference_attributes,
    operation_of,
    request_attributes,
)
from tracing.gaps import Gap, GapKind, gap_between
from tracing.record import Attempt, Outcome, RequestRecord

MAX_CANDIDATES: Final = 16  # in the event of a routing decision: a span's size doesn't grow with the fleet
MAX_ATTEMPTS: Final = 16
_ROUTES: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings",
                  "responses": "/v1/responses", "messages": "/v1/messages"}  # fmt: skip
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_ERRORS: Final = frozenset({Outcome.UPSTREAM_FAILED, Outcome.TRUNCATED})


class SpanKind(StrEnum):
    """The kinds of OpenTelemetry that occur here."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment within a span."""

    name: str
    at_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanValue:
    """A finished span: 128-bit trace id, 64-bit span ids, times in ns since the epoch."""

    name: str
    kind: SpanKind
    trace_id: int
    span_id: int
    parent_span_id: int | None
    remote_parent: bool
    sampled: bool
    started_ns: int
    ended_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None  # set when the span's status is an error


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a request's spans hang: a trace, and the client's span when it sent one."""

    trace_id: int
    parent_span_id: int | None
    sampled: bool


def context_of(record: RequestRecord) -> TraceContext:
    """The client's W3C context when it is well formed, else the trace of the run, else one of the request's own."""
    match = _TRACEPARENT.match(record.traceparent or "")
    if match:
        return TraceContext(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & 1))
    if record.link is not None:
        return TraceContext(_digest(16, "run", record.identity.tenant, record.link.run_id), None, True)
    return TraceContext(_digest(16, "request", record.request_id), None, True)


def request_spans(
    record: RequestRecord, conventions: SemanticConventions = SemanticConventions.V0_1
) -> tuple[SpanValue, ...]:
    """The SERVER span of the request, the CLIENT spans of its attempts and the engine's, parents first."""
    context = context_of(record)
    server_id = server_span_id(record.request_id)
    route = _ROUTES.get(record.endpoint, record.endpoint)
    server = SpanValue(
        name=clean_text(f"POST {route}"),
        kind=SpanKind.SERVER,
        trace_id=context.trace_id,
        span_id=server_id,
        parent_span_id=context.parent_span_id,
        remote_parent=context.parent_span_id is not None,
        sampled=context.sampled,
        started_ns=record.stamps.arrived_ns,
        ended_ns=max(record.stamps.closed_ns, record.stamps.arrived_ns),
        attributes=clean({
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": record.status,
            "error.type": _error_type(record),
            **gateway_attributes(record),
        }),
        events=_events(record),
        error=clean_text(_error_type(record) or "") if record.status >= 500 or record.outcome in _ERRORS else None,
    )  # fmt: skip
    attempts = record.attempts[-MAX_ATTEMPTS:]
    return (
        server,
        *(
            _attempt_span(record, attempt, number, context, conventions)
            for number, attempt in enumerate(attempts, len(record.attempts) - len(attempts) + 1)
        ),
        *_engine_span(record, context),
    )


def tool_spans(before: RequestRecord, after: RequestRecord) -> tuple[SpanValue, ...]:
    """The tools that ran between two steps, as far as can be told: one span a call, all with the same bounds."""
    gap = gap_between(before, after)
    if gap is None or gap.kind is not GapKind.TOOL:
        return ()
    context = context_of(before)
    return tuple(
        SpanValue(
            name=clean_text(f"execute_tool {call.name}"),
            kind=SpanKind.INTERNAL,
            trace_id=context.trace_id,
            span_id=_digest(8, "tool", before.request_id, call.id),
            parent_span_id=server_span_id(before.request_id),
            remote_parent=False,
            sampled=context.sampled,
            started_ns=gap.started_ns,
            ended_ns=gap.ended_ns,
            attributes=_tool_attributes(gap, call.id, call.name),
        )
        for call in gap.calls
    )


def upstream_traceparent(request_id: str, attempt: int, tenant: str, run_id: str | None, client: str | None) -> str:
    """The ``traceparent`` that an engine is sent, so that its own spans hang under our attempt (from 1)."""
    match = _TRACEPARENT.match(client or "")
    if match:
        return f"00-{match[1]}-{attempt_span_id(request_id, attempt):016x}-{match[3]}"
    trace = _digest(16, "run", tenant, run_id) if run_id is not None else _digest(16, "request", request_id)
    return f"00-{trace:032x}-{attempt_span_id(request_id, attempt):016x}-01"


def attempt_span_id(request_id: str, attempt: int) -> int:
    """The id of the span of a request's attempt, counted from 1."""
    return _digest(8, "attempt", request_id, str(attempt))


def server_span_id(request_id: str) -> int:
    """The id of a request's SERVER span."""
    return _digest(8, "server", request_id)


def _attempt_span(
    record: RequestRecord, attempt: Attempt, number: int, context: TraceContext, conventions: SemanticConventions
) -> SpanValue:
    answered = number == len(record.attempts) and attempt.error is None and (attempt.status or 500) < 400
    semantic = request_attributes(record)
    if answered:
        semantic = inference_attributes(record, conventions) | openinference_attributes(record)
    events: tuple[SpanEvent, ...] = ()
    if answered and record.stamps.first_token_ns is not None:
        events = (SpanEvent("keepwarm.first_token", record.stamps.first_token_ns, {}),)
    failure = attempt.error or (f"http_{attempt.status}" if (attempt.status or 0) >= 400 else None)
    return SpanValue(
        name=clean_text(f"{operation_of(record)} {record.model}".strip()),
        kind=SpanKind.CLIENT,
        trace_id=context.trace_id,
        span_id=attempt_span_id(record.request_id, number),
        parent_span_id=server_span_id(record.request_id),
        remote_parent=False,
        sampled=context.sampled,
        started_ns=attempt.started_ns,
        ended_ns=max(attempt.ended_ns, attempt.started_ns),
        attributes=clean({
            **semantic,
            "http.response.status_code": attempt.status,
            "error.type": failure,
            "keepwarm.instance": attempt.instance,
            "keepwarm.attempt": number,
            "keepwarm.attempt.role": attempt.role.value,
        }),
        events=events,
        error=clean_text(failure) if failure else None,
    )  # fmt: skip


def _engine_span(record: RequestRecord, context: TraceContext) -> tuple[SpanValue, ...]:
    """What the engine did, from sending to its last token: only where a stream showed it."""
    stamps, usage = record.stamps, record.usage
    if not record.attempts or stamps.sent_ns is None or stamps.first_token_ns is None:
        return ()
    number, last = len(record.attempts), stamps.last_token_ns or stamps.first_token_ns
    return (
        SpanValue(
            name=clean_text(f"engine {record.served_model}".strip()),
            kind=SpanKind.INTERNAL,
            trace_id=context.trace_id,
            span_id=_digest(8, "engine", record.request_id),
            parent_span_id=attempt_span_id(record.request_id, number),
            remote_parent=False,
            sampled=context.sampled,
            started_ns=stamps.sent_ns,
            ended_ns=max(last, stamps.sent_ns),
            attributes=clean({
                "keepwarm.instance": record.instance,
                "keepwarm.inferred": True,
                "keepwarm.engine.computed_tokens": usage.prompt_tokens - usage.hit_tokens,
                "keepwarm.engine.hit_tokens": usage.hit_tokens,
                "keepwarm.engine.to_first_token_ns": stamps.first_token_ns - stamps.sent_ns,
                "keepwarm.engine.decode_ns": last - stamps.first_token_ns,
            }),
            events=(SpanEvent("keepwarm.first_token", stamps.first_token_ns, {}),),
        ),
    )  # fmt: skip


def _events(record: RequestRecord) -> tuple[SpanEvent, ...]:
    events: list[SpanEvent] = []
    decision, stamps = record.decision, record.stamps
    if decision is not None:
        candidates = decision.candidates[:MAX_CANDIDATES]
        attributes = clean({
            "keepwarm.routing.policy": decision.policy,
            "keepwarm.routing.instance": decision.instance,
            "keepwarm.routing.exact": decision.exact,
            "keepwarm.routing.predicted_hit_tokens": decision.predicted_hit_tokens,
            "keepwarm.routing.preferred": decision.preferred,
            "keepwarm.routing.fetch_tokens": None if decision.fetch_tokens is None else sum(decision.fetch_tokens),
            "keepwarm.routing.fetch_from": decision.fetch_from,
            "keepwarm.routing.candidate_count": len(decision.candidates),
            "keepwarm.routing.candidates": tuple(
                f"{seen.instance}: hits {'/'.join(map(str, seen.hit_tokens))}, queued {seen.queued_tokens},"
                f" ttft {seen.expected_ttft_ns / 1e6:.1f} ms{'' if seen.healthy else ', unhealthy'}"
                for seen in candidates
            ),
        })  # fmt: skip
        events.append(SpanEvent("keepwarm.routing.decision", stamps.routed_ns or stamps.arrived_ns, attributes))
    attempts = record.attempts[-MAX_ATTEMPTS:]
    for failed, retried in pairwise(attempts):
        reason = failed.error or f"http_{failed.status}"
        attributes = clean({"keepwarm.from": failed.instance, "keepwarm.to": retried.instance, "error.type": reason})
        events.append(SpanEvent("keepwarm.failover", retried.started_ns, attributes))
    if stamps.first_token_ns is not None:
        events.append(SpanEvent("keepwarm.first_token", stamps.first_token_ns, {}))
    return tuple(events)


def _tool_attributes(gap: Gap, call_id: str, name: str) -> Attributes:
    return clean({
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": call_id,
        "gen_ai.tool.type": "function",
        "openinference.span.kind": "TOOL",
        "keepwarm.inferred": True,
        "keepwarm.duration.bound": "upper",
        "keepwarm.tool.parallel_calls": len(gap.calls),
    })  # fmt: skip


def _error_type(record: RequestRecord) -> str | None:
    return None if record.outcome is Outcome.OK else record.error or record.outcome.value


def _digest(size: int, *parts: str) -> int:
    """A content-defined id that is never 0 (which the W3C format reserves)."""
    joined = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(joined, digest_size=size).digest(), "big") or 1

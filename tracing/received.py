"""Spans that agents send of their own, as values: what OTLP brings, bounded, with what was said only as policy allows.

Both encodings of OTLP/HTTP are read: protobuf with OpenTelemetry's own messages, JSON as the OTLP specification maps it
(ids in hex, 64-bit integers as text). What is malformed is left out and counted, never guessed.

Source: OTLP 1.x, ``opentelemetry/proto/trace/v1/trace.proto`` and the JSON mapping of ``docs/specification.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from tracing.content import ContentPolicy, content_value, is_content

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

MAX_SPANS: Final = 10_000  # of one request
MAX_ATTRIBUTES: Final = 64
MAX_TEXT_CHARS: Final = 512
MAX_EVENTS: Final = 16
_HEX: Final = {16: re.compile(r"(?!0{32})[0-9a-fA-F]{32}"), 8: re.compile(r"(?!0{16})[0-9a-fA-F]{16}")}
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")
_CALL_IDS: Final = ("gen_ai.tool.call.id", "tool_call.id", "ai.toolCall.id")
_TOOL_NAMES: Final = ("gen_ai.tool.name", "tool.name", "ai.toolCall.name", "tool_call.function.name")
_ERROR: Final = 2

Value = str | int | float | bool


class UnreadableSpans(ValueError):
    """The body is no OTLP trace export. The message says why, and nothing of the content."""


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span as an agent sent it. Ids are hex; times in ns since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: int
    started_ns: int
    ended_ns: int
    service: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str | None = None

    @property
    def tool_call_id(self) -> str | None:
        """The tool call that the span is of."""
        return self._text(_CALL_IDS)

    @property
    def tool_name(self) -> str | None:
        """The tool that ran."""
        return self._text(_TOOL_NAMES)

    @property
    def run_id(self) -> str | None:
        """The run that the agent says it belongs to."""
        return self._text(("keepwarm.run.id",))

    @property
    def ends_run(self) -> bool:
        """Whether the agent says that its run ends with the span."""
        return self.attributes.get("keepwarm.run.end") is True

    def _text(self, names: Iterable[str]) -> str | None:
        values = (self.attributes.get(name) for name in names)
        return next((value for value in values if isinstance(value, str) and value), None)


_DECODER: Final = msgspec.json.Decoder(ReceivedSpan)


def encode_span(span: ReceivedSpan) -> bytes:
    """Return the span as JSON."""
    return msgspec.json.encode(span)


def decode_span(body: bytes) -> ReceivedSpan:
    """Return the span of a JSON text."""
    return _DECODER.decode(body)


def read_protobuf(body: bytes, policy: ContentPolicy) -> tuple[list[ReceivedSpan], int]:
    """Return the spans of an ``ExportTraceServiceRequest`` and how many were left out. Raises ``UnreadableSpans``."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise UnreadableSpans("the body is no ExportTraceServiceRequest") from None
    found, total = list[ReceivedSpan](), 0
    for resource in request.resource_spans:
        service = next((kv.value.string_value for kv in resource.resource.attributes if kv.key == "service.name"), "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                total += 1
                values = ((kv.key, _plain(kv.value)) for kv in span.attributes)
                made = _span(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    service,
                    values,
                    span.status.message or "error" if span.status.code == _ERROR else None,
                    policy,
                )
                if made is not None and len(found) < MAX_SPANS:
                    found.append(made)
    return found, total - len(found)


def read_json(body: bytes, policy: ContentPolicy) -> tuple[list[ReceivedSpan], int]:
    """Return the spans of the same in JSON, and how many were left out. Raises ``UnreadableSpans``."""
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise UnreadableSpans("the body is no JSON") from None
    resources = request.get("resourceSpans", []) if isinstance(request, dict) else None  # nothing to tell is no error
    if not isinstance(resources, list):
        raise UnreadableSpans("the body has no resourceSpans")
    found, total = list[ReceivedSpan](), 0
    for resource in _objects(resources):
        described = resource.get("resource")
        attributes = dict(_members(described.get("attributes") if isinstance(described, dict) else None))
        service = attributes.get("service.name")
        for scope in _objects(resource.get("scopeSpans")):
            for span in _objects(scope.get("spans")):
                total += 1
                status = span.get("status")
                told = status if isinstance(status, dict) else {}
                failed = told.get("code") in (_ERROR, "STATUS_CODE_ERROR")
                made = _span(
                    span.get("traceId"),
                    span.get("spanId"),
                    span.get("parentSpanId"),
                    span.get("name"),
                    span.get("kind"),
                    span.get("startTimeUnixNano"),
                    span.get("endTimeUnixNano"),
                    service if isinstance(service, str) else "",
                    _members(span.get("attributes")),
                    str(told.get("message") or "error") if failed else None,
                    policy,
                )
                if made is not None and len(found) < MAX_SPANS:
                    found.append(made)
    return found, total - len(found)


_KINDS: Final = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_SERVER": 2, "SPAN_KIND_CLIENT": 3, "SPAN_KIND_PRODUCER": 4,
                 "SPAN_KIND_CONSUMER": 5}  # fmt: skip


def _span(
    trace_id: object,
    span_id: object,
    parent_id: object,
    name: object,
    kind: object,
    started: object,
    ended: object,
    service: str,
    attributes: Iterable[tuple[str, Value]],
    error: str | None,
    policy: ContentPolicy,
) -> ReceivedSpan | None:
    begun, over = _instant(started), _instant(ended)
    if not (_is_id(trace_id, 16) and _is_id(span_id, 8)) or begun is None or over is None:
        return None
    kept: dict[str, Value] = {}
    for key, value in attributes:
        if len(kept) >= MAX_ATTRIBUTES:
            break
        held = _kept(key, value, policy)
        if held is not None:
            kept[_short(key)] = held
    return ReceivedSpan(
        trace_id=str(trace_id).lower(),
        span_id=str(span_id).lower(),
        parent_id=str(parent_id).lower() if _is_id(parent_id, 8) else None,
        name=_short(name if isinstance(name, str) else ""),
        kind=kind if isinstance(kind, int) else _KINDS.get(str(kind), 0),
        started_ns=begun,
        ended_ns=max(begun, over),
        service=_short(service),
        attributes=kept,
        error=None if error is None else _short(error),
    )


def _kept(key: str, value: Value, policy: ContentPolicy) -> Value | None:
    if is_content(key):
        return content_value(value if isinstance(value, str) else str(value), policy)
    return _short(value) if isinstance(value, str) else value


def _short(text: str) -> str:
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")


def _is_id(value: object, size: int) -> bool:
    return isinstance(value, str) and _HEX[size].fullmatch(value) is not None


def _instant(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _objects(value: object) -> Iterator[dict[str, object]]:
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            yield item


def _members(value: object) -> Iterator[tuple[str, Value]]:
    for item in _objects(value):
        key, held = item.get("key"), item.get("value")
        if isinstance(key, str) and isinstance(held, dict):
            plain = _of_json(held)
            if plain is not None:
                yield key, plain


def _of_json(value: Mapping[str, object]) -> Value | None:
    for name, held in value.items():
        if name == "intValue" and isinstance(held, str | int):
            return int(held) if _WHOLE.fullmatch(str(held)) else None
        if name in ("stringValue", "boolValue", "doubleValue") and isinstance(held, str | bool | int | float):
            return held
        if name in ("arrayValue", "kvlistValue", "bytesValue"):
            try:
                return msgspec.json.encode(held).decode()
            except RecursionError:  # as deep as could just be read
                return None
    return None


def _plain(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return msgspec.json.encode([_plain(item) for item in value.array_value.values]).decode()
        case "kvlist_value":
            return msgspec.json.encode({kv.key: _plain(kv.value) for kv in value.kvlist_value.values}).decode()
        case _:
            return ""

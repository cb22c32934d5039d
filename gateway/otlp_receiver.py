"""``POST /v1/traces``: spans that agents send of their own, over OTLP/HTTP, so that they stand in their run's tree.

An agent needs no more than ``OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:8400`` and its key in
``OTEL_EXPORTER_OTLP_HEADERS``. Spans are kept for the tenant of the key, within bounds; what was said in them only as
the content policy allows.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from aiohttp import hdrs, web

from gateway.bodies import whole_body
from gateway.errors import BadRequest, BodyTooLarge, GatewayError, UnsupportedEncoding
from gateway.identity import KeyRing
from gateway.paths import ROOTS
from gateway.span_ends import SpanEnds
from tracing.content import ContentPolicy
from tracing.received import ReceivedSpan, UnreadableSpans, read_json, read_protobuf
from tracing.store import TraceStore

_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
Read = Callable[[bytes, ContentPolicy], tuple[list[ReceivedSpan], int]]
_READERS: Final[dict[str, Read]] = {_PROTOBUF: read_protobuf, _JSON: read_json}


class Busy(GatewayError):
    """The trace store has no room now; an exporter tries again."""

    status, kind, code = 503, "overloaded_error", "traces_busy"


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Limits of what comes in."""

    content: ContentPolicy = ContentPolicy.HASHED
    body_cap_bytes: int = 8 << 20  # unpacked


class OtlpReceiver:
    """The route."""

    def __init__(self, keys: KeyRing, traces: TraceStore, options: ReceiverOptions, ends: SpanEnds) -> None:
        self._keys, self._traces, self._options, self._ends = keys, traces, options, ends
        self.received = self.left_out = 0

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, at all of ``paths.ROOTS``."""
        return [web.post(f"{root}/traces", self._traces_route) for root in ROOTS]

    async def _traces_route(self, request: web.Request) -> web.Response:
        identity = self._keys.authenticate(request.headers).identity
        kind = request.content_type.lower()
        read = _READERS.get(kind)
        if read is None:
            raise BadRequest(f"spans come as {_PROTOBUF} or {_JSON}", code="unsupported_media_type")
        packed = await whole_body(request, self._options.body_cap_bytes, may_be_packed=True)
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()
        spans, left_out = await asyncio.to_thread(self._spans, packed, encoding, read)
        if not self._traces.receive(identity.tenant, spans, time.time_ns()):
            raise Busy("the trace store has no room for spans now", retry_after_s=1)
        self._ends.received(identity.key_id, spans)
        self.received += len(spans)
        self.left_out += left_out
        return web.Response(body=_answer(kind, left_out), content_type=kind)

    def _spans(self, packed: bytes, encoding: str, read: Read) -> tuple[list[ReceivedSpan], int]:
        body = _unpacked(packed, encoding, self._options.body_cap_bytes)
        try:
            return read(body, self._options.content)
        except UnreadableSpans as error:
            raise BadRequest(str(error), code="unreadable_spans") from None


def _unpacked(packed: bytes, encoding: str, cap_bytes: int) -> bytes:
    if encoding in ("", "identity"):
        body = packed
    elif encoding in ("gzip", "deflate"):
        unpacker = zlib.decompressobj(wbits=31 if encoding == "gzip" else 15)
        try:
            body = unpacker.decompress(packed, cap_bytes + 1)
        except zlib.error:
            raise BadRequest("the body could not be unpacked", code="body_broken") from None
    else:
        raise UnsupportedEncoding("spans may be packed by gzip or deflate")
    if len(body) > cap_bytes:
        raise BodyTooLarge(f"spans are over the limit of {cap_bytes} bytes")
    return body


def _answer(kind: str, left_out: int) -> bytes:
    """Return an ``ExportTraceServiceResponse``: empty, or with how many spans were left out."""
    words = "spans without ids or times, or beyond the limit of one request"
    if kind == _JSON:
        told: dict[str, object] = {}
        if left_out:
            told = {"partialSuccess": {"rejectedSpans": str(left_out), "errorMessage": words}}
        return msgspec.json.encode(told)
    if not left_out:
        return b""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTracePartialSuccess,
        ExportTraceServiceResponse,
    )

    partial = ExportTracePartialSuccess(rejected_spans=left_out, error_message=words)
    return bytes(ExportTraceServiceResponse(partial_success=partial).SerializeToString())

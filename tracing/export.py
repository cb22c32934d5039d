"""Spans to an OpenTelemetry backend, through the SDK's own batch processor and exporters.

Spans are made when their request has ended, with the ids and times that :mod:`tracing.spans` gives, so no tracer and no
context is kept while requests run. Sending happens in the SDK's thread; the queue is bounded and drops. Flush and close
take as long as the caller allows and no longer, whatever the backend does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanKind as OtelSpanKind

from tracing.attributes import SemanticConventions
from tracing.errors import ExportUnavailable
from tracing.record import RequestRecord
from tracing.spans import SpanKind, SpanValue, request_spans, tool_spans

_KINDS: Final = {
    SpanKind.SERVER: OtelSpanKind.SERVER,
    SpanKind.CLIENT: OtelSpanKind.CLIENT,
    SpanKind.INTERNAL: OtelSpanKind.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class SpanExportOptions:
    """How spans are named and queued."""

    conventions: SemanticConventions = SemanticConventions.V0_1
    service_name: str = "keepwarm"
    service_version: str = ""
    queue_spans: int = 8192
    batch_spans: int = 512
    delay_s: float = 1.0
    remembered_records: int = 4096  # a step's tools are known when the next step comes
    resource: Mapping[str, str] = field(default_factory=dict)


def otlp_exporter(
    endpoint: str,
    *,
    protocol: Literal["http", "grpc"] = "http",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> SpanExporter:
    """An OTLP exporter for ``endpoint`` (HTTP: the full URL, ending in ``/v1/traces``).

    Raises :class:`ExportUnavailable` when the extra ``keepwarm[otlp]`` is not installed.
    """
    try:
        if protocol == "http":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter(endpoint=endpoint, headers=dict(headers or {}), timeout=timeout_s)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, headers=dict(headers or {}), timeout=timeout_s)
    except ImportError as error:
        raise ExportUnavailable("OTLP export needs the extra: pip install 'keepwarm[otlp]'") from error


class SpanExport:
    """Turns each record into spans and hands them to an exporter. ``export`` never blocks."""

    def __init__(self, exporter: SpanExporter, options: SpanExportOptions | None = None) -> None:
        self._options = options or SpanExportOptions()
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=self._options.queue_spans,
            schedule_delay_millis=self._options.delay_s * 1000,
            max_export_batch_size=min(self._options.batch_spans, self._options.queue_spans),
        )
        self._resource = Resource.create({
            **self._options.resource,
            "service.name": self._options.service_name,
            "service.version": self._options.service_version,
        })  # fmt: skip
        self._scope = InstrumentationScope("keepwarm", self._options.service_version)
        self._remembered: OrderedDict[str, RequestRecord] = OrderedDict()

    def export(self, record: RequestRecord) -> None:
        """Queue the spans of a finished request, and of the tools that ran since the step before it."""
        values = list(request_spans(record, self._options.conventions))
        previous = self._remembered.get(record.link.previous_request_id or "") if record.link else None
        if previous is not None:
            values += tool_spans(previous, record)
        if record.tool_calls:
            self._remembered[record.request_id] = record
            if len(self._remembered) > self._options.remembered_records:
                self._remembered.popitem(last=False)
        for value in values:
            self._processor.on_end(otel_span(value, self._resource, self._scope))

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued; whether that was done in time."""
        return _within(self._processor.force_flush, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send what is queued and stop; whether that was done in time."""
        return _within(self._processor.shutdown, timeout_s)


def otel_span(value: SpanValue, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    """The value as the SDK's finished span."""
    flags = TraceFlags(TraceFlags.SAMPLED if value.sampled else TraceFlags.DEFAULT)
    parent = None
    if value.parent_span_id is not None:
        parent = SpanContext(value.trace_id, value.parent_span_id, value.remote_parent, flags)
    return ReadableSpan(
        name=value.name,
        context=SpanContext(value.trace_id, value.span_id, False, flags),
        parent=parent,
        resource=resource,
        attributes=dict(value.attributes),
        events=[Event(event.name, dict(event.attributes), event.at_ns) for event in value.events],
        kind=_KINDS[value.kind],
        status=Status(StatusCode.ERROR, value.error) if value.error else Status(StatusCode.UNSET),
        start_time=value.started_ns,
        end_time=value.ended_ns,
        instrumentation_scope=scope,
    )


def _within(work: Callable[[], object], timeout_s: float) -> bool:
    """Run blocking work in a thread of its own and stop waiting at the limit: the SDK's own limits don't hold."""
    thread = threading.Thread(target=work, name="keepwarm-span-flush", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()

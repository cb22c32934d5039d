"""Spans to an OpenTelemetry backend, through the SDK's own batch processor and exporters.

Spans are made when their request has ended, with the ids and times that :mod:`tracing.spans` gives, so no tracer and no
context is kept while requests run. A record is handed to a thread that makes its spans and counts its metrics; sending
happens in the SDK's threads. Queues are bounded and drop. Flush and close take as long as the caller allows and no
longer, whatever the backend does.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanKind as OtelSpanKind

from tracing.attributes import SemanticConventions
from tracing.content import ContentPolicy, said_attributes
from tracing.errors import ExportUnavailable
from tracing.record import RequestRecord
from tracing.semantic_metrics import SemanticMetrics
from tracing.spans import SpanKind, SpanValue, request_spans, tool_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader

_log = logging.getLogger(__name__)

Said = Callable[[], tuple[str, str]]
"""Tells what was asked and what was answered."""

_Item = tuple[RequestRecord, Said | None] | threading.Event | None
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
    queue_records: int = 4096
    queue_spans: int = 8192
    batch_spans: int = 512
    delay_s: float = 1.0
    content: ContentPolicy = ContentPolicy.OFF  # what of prompts and answers stands on the span of the model call
    remembered_records: int = 4096  # a step's tools are known when the next step comes
    resource: Mapping[str, str] = field(default_factory=dict)


def signal_url(endpoint: str, signal: Literal["traces", "metrics"]) -> str:
    """The URL of one signal of an OTLP/HTTP endpoint, which may be given as a base or as the URL of its traces."""
    base = endpoint.rstrip("/").removesuffix("/v1/traces")
    return f"{base}/v1/{signal}"


def otlp_metric_reader(
    endpoint: str,
    *,
    protocol: Literal["http", "grpc"] = "http",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
    every_s: float = 30.0,
) -> MetricReader:
    """What reads metrics now and then and sends them by OTLP. Raises as :func:`otlp_exporter`."""
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    try:
        if protocol == "http":
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

            url = signal_url(endpoint, "metrics")
            exporter: MetricExporter = HttpExporter(endpoint=url, headers=dict(headers or {}), timeout=timeout_s)
        else:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

            exporter = GrpcExporter(
                endpoint=endpoint, headers=dict(headers or {}), timeout=timeout_s, insecure=_is_plain(endpoint)
            )
    except ImportError as error:
        raise ExportUnavailable("OTLP export needs the extra: pip install 'keepwarm[otlp]'") from error
    return PeriodicExportingMetricReader(exporter, every_s * 1000, timeout_s * 1000)


def _is_plain(endpoint: str) -> bool:
    return not endpoint.startswith("https://")


def otlp_exporter(
    endpoint: str,
    *,
    protocol: Literal["http", "grpc"] = "http",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> SpanExporter:
    """An OTLP exporter for ``endpoint`` (HTTP: a base URL, or the full one that ends in ``/v1/traces``).

    Raises :class:`ExportUnavailable` when the extra ``keepwarm[otlp]`` is not installed.
    """
    try:
        if protocol == "http":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            url = signal_url(endpoint, "traces")
            return HttpExporter(endpoint=url, headers=dict(headers or {}), timeout=timeout_s)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(
            endpoint=endpoint, headers=dict(headers or {}), timeout=timeout_s, insecure=_is_plain(endpoint)
        )
    except ImportError as error:
        raise ExportUnavailable("OTLP export needs the extra: pip install 'keepwarm[otlp]'") from error


class SpanExport:
    """Turns each record into spans and hands them to an exporter. ``export`` never blocks."""

    def __init__(
        self,
        exporter: SpanExporter,
        options: SpanExportOptions | None = None,
        metrics: Callable[[Resource], SemanticMetrics] | None = None,
    ) -> None:
        """``metrics``: makes what counts the same records by the conventions."""
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
        self._metrics = None if metrics is None else metrics(self._resource)
        self._remembered: OrderedDict[str, RequestRecord] = OrderedDict()
        self._handed = 0  # spans that the processor was given since it was emptied
        self.dropped = 0  # records that found the queue full
        self._queue: queue.Queue[_Item] = queue.Queue(self._options.queue_records)
        self._thread = threading.Thread(target=self._run, name="keepwarm-spans", daemon=True)
        self._thread.start()

    def export(self, record: RequestRecord, said: Said | None = None) -> None:
        """Queue a finished request for its spans and those of the tools that ran since the step before it.

        ``said``: what was asked and answered, called in the thread, and only where the content policy wants it.
        """
        try:
            self._queue.put_nowait((record, said))
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._export(*item)
            except Exception:  # the thread's boundary: one odd record must not end the export
                _log.exception("no spans of %s", item[0].request_id)

    def _export(self, record: RequestRecord, said: Said | None) -> None:
        values = list(request_spans(record, self._options.conventions))
        if said is not None and self._options.content is not ContentPolicy.OFF:
            values = _with_content(values, said, self._options.content)
        previous = self._remembered.get(record.link.previous_request_id or "") if record.link else None
        if previous is not None:
            values += tool_spans(previous, record)
        if record.tool_calls:
            self._remembered[record.request_id] = record
            if len(self._remembered) > self._options.remembered_records:
                self._remembered.popitem(last=False)
        # The processor's queue drops what it has no room for, and tells nobody. So it is emptied before it can be full:
        # a backend that is slow makes records wait here, in a queue that counts what it drops.
        if self._handed + len(values) > self._options.queue_spans // 2:
            self._processor.force_flush()
            self._handed = 0
        for value in values:
            self._processor.on_end(otel_span(value, self._resource, self._scope))
        self._handed += len(values)
        if self._metrics is not None:
            self._metrics.observe(record, previous)

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued; whether that was done in time."""

        def flush() -> None:
            made = threading.Event()
            self._queue.put(made)
            made.wait()
            self._processor.force_flush()
            if self._metrics is not None:
                self._metrics.flush(timeout_s)

        return _within(flush, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send what is queued and stop; whether that was done in time."""

        def close() -> None:
            self._queue.put(None)
            self._thread.join()
            self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it bare
            if self._metrics is not None:
                self._metrics.close(timeout_s)

        return _within(close, timeout_s)


def _with_content(values: list[SpanValue], said: Said, policy: ContentPolicy) -> list[SpanValue]:
    """The same spans, the one of the model call that answered with what was said."""
    last = max((n for n, value in enumerate(values) if value.kind is SpanKind.CLIENT), default=None)
    if last is not None:
        told = said_attributes(*said(), policy)
        values[last] = replace(values[last], attributes={**values[last].attributes, **told})
    return values


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

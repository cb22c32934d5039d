from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.samples.agent_runs import agent_run, plain_record
from tracing.content import ContentPolicy
from tracing.export import SpanExport, SpanExportOptions, otlp_exporter
from tracing.record import Outcome
from tracing.spans import request_spans, tool_spans


def test_spans_arrive_with_their_ids_times_and_tools() -> None:
    exporter = InMemorySpanExporter()
    export = SpanExport(exporter)
    records = agent_run()
    for record in records:
        export.export(record)
    assert export.flush(30)
    expected = [span for record in records for span in request_spans(record)]
    expected += [span for a, b in pairwise(records) for span in tool_spans(a, b)]
    exported = {span.context.span_id: span for span in exporter.get_finished_spans()}
    assert exported.keys() == {span.span_id for span in expected}
    for value in expected:
        span = exported[value.span_id]
        assert (span.name, span.start_time, span.end_time) == (value.name, value.started_ns, value.ended_ns)
        assert span.context.trace_id == value.trace_id
        assert dict(span.attributes) == value.attributes
        assert (span.parent.span_id if span.parent else None) == value.parent_span_id
        assert span.kind is SpanKind[value.kind.name]
    assert export.close(30)


def test_an_unsampled_request_is_not_exported() -> None:
    exporter = InMemorySpanExporter()
    export = SpanExport(exporter)
    export.export(plain_record(traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"))
    assert export.flush(30)
    assert exporter.get_finished_spans() == ()
    export.close(30)


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_trace_reaches_an_otlp_receiver_whole_even_with_hostile_text(
    collector: http.server.ThreadingHTTPServer,
) -> None:
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    export = SpanExport(otlp_exporter(url), SpanExportOptions(service_version="1", delay_s=60.0))
    records = agent_run()
    records[3] = replace(records[3], model="\ud800" * 100_000, outcome=Outcome.TRUNCATED, error="lost")
    for record in records:
        export.export(record)
    assert export.close(30)
    spans = [
        span
        for request in collector.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    wanted = {span.span_id for record in records for span in request_spans(record)}
    assert wanted <= {int.from_bytes(span.span_id, "big") for span in spans}
    names = {kv.key: kv.value.string_value for kv in collector.received[0].resource_spans[0].resource.attributes}
    assert names["service.name"] == "keepwarm"
    failed = [span for span in spans if span.status.code == StatusCode.ERROR.value]
    assert failed


class StuckExporter(SpanExporter):
    def __init__(self) -> None:
        self.release = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.release.wait()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_a_silent_backend_holds_neither_requests_nor_the_end() -> None:
    exporter = StuckExporter()
    export = SpanExport(exporter, SpanExportOptions(queue_spans=8, batch_spans=4))
    for number in range(100):
        export.export(plain_record(f"r{number}"))
    assert not export.flush(0.05)
    assert not export.close(0.05)
    exporter.release.set()


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        self.received.append(request)
        return ExportTraceServiceResponse()


def test_a_trace_reaches_a_grpc_receiver_whole() -> None:
    service, server = TraceService(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    export = SpanExport(otlp_exporter(f"http://127.0.0.1:{port}", protocol="grpc"), SpanExportOptions(delay_s=60.0))
    records = agent_run()
    for record in records:
        export.export(record)
    assert export.close(30)
    server.stop(None)
    found = {
        int.from_bytes(span.span_id, "big")
        for request in service.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert {span.span_id for record in records for span in request_spans(record)} <= found


def test_a_full_queue_drops_and_counts() -> None:
    exporter = StuckExporter()
    export = SpanExport(exporter, SpanExportOptions(queue_records=4, queue_spans=8, batch_spans=4))
    blocked = threading.Event()
    export._processor.on_end = lambda span: blocked.wait()  # type: ignore[method-assign]
    for number in range(20):
        export.export(plain_record(f"r{number}"))
    assert export.dropped >= 15
    blocked.set()
    exporter.release.set()
    assert export.close(30)


@pytest.mark.parametrize("policy", list(ContentPolicy))
def test_what_was_said_stands_on_the_call_as_far_as_policy_goes(policy: ContentPolicy) -> None:
    exporter = InMemorySpanExporter()
    export = SpanExport(exporter, SpanExportOptions(content=policy))
    export.export(plain_record(), lambda: ('"write to jo@example.com"', "\ud800 fine"))
    assert export.flush(30)
    spans = exporter.get_finished_spans()
    assert export.close(30)
    (attributes,) = [dict(span.attributes) for span in spans if span.kind is SpanKind.CLIENT]
    shown = attributes.get("gen_ai.input.messages")
    assert (shown is not None) == policy.shows_words
    assert ("keepwarm.input.digest" in attributes) == (policy is ContentPolicy.HASHED)
    if shown is not None:
        assert ("jo@example.com" in str(shown)) == (policy is ContentPolicy.FULL)
        assert attributes["output.value"] == "? fine"
    others = [dict(span.attributes) for span in spans if span.kind is not SpanKind.CLIENT]
    assert not any("input" in name for each in others for name in each)


def test_nothing_is_read_where_nothing_may_be_said() -> None:
    export = SpanExport(InMemorySpanExporter())
    asked: list[int] = []
    export.export(plain_record(), lambda: (str(asked.append(1)), ""))
    assert export.close(30)
    assert asked == []


def test_a_backend_that_is_slow_loses_no_span_that_was_made() -> None:
    gate = threading.Event()

    class Slow(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            gate.wait()
            return super().export(spans)

    exporter = Slow()
    export = SpanExport(exporter, SpanExportOptions(queue_spans=64, batch_spans=16, delay_s=0.001))
    records = [plain_record(f"r{number}") for number in range(300)]
    for record in records:
        export.export(record)
    gate.set()
    assert export.flush(30)
    arrived = {span.context.span_id for span in exporter.get_finished_spans()}
    assert arrived == {span.span_id for record in records for span in request_spans(record)}
    assert export.dropped == 0
    assert export.close(30)

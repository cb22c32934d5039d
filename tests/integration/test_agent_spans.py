"""Spans out and in over real HTTP: a backend gets the whole tree through the gateway's end, an agent's own spans join a
run, and a request is explained before it is sent."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.gateways import gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream
from tracing.tree import NodeKind, run_tree, walk

TRACE, PARENT, TOOL = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "00f067aa0ba902b8"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Backend(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def backend() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def exported(spans: list[dict[str, Any]]) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def span(span_id: str, parent: str | None, name: str, **attributes: str) -> dict[str, Any]:
    return {
        "traceId": TRACE,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": 1,
        "startTimeUnixNano": "1790000000000000000",
        "endTimeUnixNano": "1790000000500000000",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
    }


async def test_a_backend_gets_every_span_through_the_gateways_end(
    backend: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    tracing = {"otlp_endpoint": f"http://127.0.0.1:{backend.server_port}", "otlp_headers": {"x-auth": "s3cret"}}
    async with ScriptedEngine() as engine:
        engine.script = Script(events=stream(["a", "b", "c"]))
        async with gateway_for([engine], tmp_path, ready_limit_s=60, tracing=tracing) as client:
            for _ in range(20):
                async with client.chat(TRACEPARENT, stream=True) as response:
                    await response.read()
            await client.records(20)
        told = [asked.headers["traceparent"] for asked in engine.asked]
    received = backend.received  # type: ignore[attr-defined]
    found = [
        each
        for path, _, body in received
        if path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for each in scope.spans
    ]
    by_name: dict[str, list[Any]] = {}
    for each in found:
        by_name.setdefault(each.name, []).append(each)
    assert {name: len(spans) for name, spans in by_name.items()} == {
        "POST /v1/chat/completions": 20,
        "chat m": 20,
        "engine m": 20,
    }
    assert {each.trace_id.hex() for each in found} == {TRACE}
    assert {each.parent_span_id.hex() for each in by_name["POST /v1/chat/completions"]} == {PARENT}
    attempts = {each.span_id.hex() for each in by_name["chat m"]}
    assert {each.parent_span_id.hex() for each in by_name["engine m"]} == attempts
    assert {text.split("-")[2] for text in told} == attempts
    metrics = {
        metric.name
        for path, _, body in received
        if path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"gen_ai.server.time_to_first_token", "gen_ai.client.inference.usage.input_tokens"} <= metrics
    assert all(headers.get("x-auth") == "s3cret" for _, headers, _ in received)


async def test_an_agents_spans_join_its_run_and_nobody_elses(tmp_path: Path) -> None:
    keys = [{"id": "a", "secret": "sk-a", "tenant": "a"}, {"id": "b", "secret": "sk-b", "tenant": "b"}]
    call = {"id": "call_77aa", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, ready_limit_s=60, keys=keys) as client:
        whole = answer("")
        whole["choices"][0] |= {"message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "tool_calls"}
        engine.script = Script(body=whole)
        key = {"authorization": "Bearer sk-a"}
        async with client.chat({**TRACEPARENT, **key}) as response:
            assert response.status == 200
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_77aa", "content": "r"},
        ]
        async with client.chat({**TRACEPARENT, **key}, messages=history) as response:
            assert response.status == 200
        body = exported(
            [
                span(PARENT, None, "invoke_agent x"),
                span(TOOL, PARENT, "execute_tool look", **{"gen_ai.tool.call.id": "call_77aa"}),
                {"name": "no ids"},
            ]
        )
        url, kind = f"{client.url}/v1/traces", {"content-type": "application/json"}
        packed = {**kind, **key, "content-encoding": "gzip"}
        async with client.session.post(url, data=gzip.compress(body), headers=packed) as response:
            assert response.status == 200
            assert (await response.json())["partialSuccess"]["rejectedSpans"] == "1"
        for headers, data, status in (
            (kind, body, 401),
            ({**kind, **key}, b"[]", 400),
            ({**key, "content-type": "text/plain"}, body, 400),
            (packed, b"no gzip", 400),
            (packed, gzip.compress(b" " * (9 << 20)), 413),
        ):
            async with client.session.post(url, data=data, headers=headers) as response:
                assert response.status == status, await response.text()
        records = await client.records(2)
        assert client.gateway.traces.flush(10)
        spans = client.gateway.traces.spans_of(records)
        (root,) = run_tree(records, spans)
        nodes = [node for _, node in walk([root])]
        assert (root.name, [node.id for node in nodes if node.kind in (NodeKind.TOOL, NodeKind.RETRIEVAL)]) == (
            "invoke_agent x",
            [TOOL],
        )
        assert {record.request_id for record in records} <= {node.id for node in nodes}


async def test_a_request_is_explained_before_and_when_it_is_sent(tmp_path: Path) -> None:
    rules = "Be careful. " * 200
    first = [{"role": "system", "content": f"It is 8:15. {rules}"}, {"role": "user", "content": "go"}]
    edited = [{"role": "system", "content": f"It is 8:16. {rules}"}, *first[1:]]
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, ready_limit_s=60) as client:
        async with client.chat({"x-keepwarm-run": "r", "x-keepwarm-explain": "1"}, messages=first) as response:
            assert response.headers["x-keepwarm-break"] == "first"
        await client.records(1)
        url = f"{client.url}/keepwarm/v1/explain"
        async with client.session.post(url, json={"model": "m", "messages": edited}) as response:
            assert response.status == 200
            told = await response.json()
        assert len(engine.asked) == 1  # nothing was sent
        (against,) = told["against"]
        assert (against["run_id"], against["step"], against["comparison"]) == ("r", 1, "changed")
        change = against["change"]
        assert (change["kind"], change["path"]) == ("timestamp", "messages[0].content")
        assert (change["start"], change["end"], change["before"]) == (6, 10, None)
        assert "messages[0].content [6:10]" in against["repair"]
        assert [each["instance"] for each in told["instances"]] == ["e0"]
        async with client.session.post(f"{url}?endpoint=nonsense", json={"model": "m"}) as response:
            assert response.status == 400
        say = {"role": "assistant", "content": "hello"}
        grown = [*edited, say, {"role": "user", "content": "on"}]
        async with client.chat({"x-keepwarm-run": "r", "x-keepwarm-explain": "1"}, messages=grown) as response:
            said = response.headers["x-keepwarm-break"]
        assert said == "changed; kind=timestamp; path=messages[0].content; chars=6-10"
        async with client.chat({"x-keepwarm-run": "r"}, messages=grown) as response:
            assert "x-keepwarm-break" not in response.headers

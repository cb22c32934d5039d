"""Every span of every answered request arrives, though the gateway is told to go in the middle of the traffic."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from engine_adapter.embedded.launch import free_port
from tests.scripted_engine import Asked, Json, Script, ScriptedEngine, answer, stream
from tracing.record import RequestRecord
from tracing.spans import SpanValue, request_spans, tool_spans
from tracing.store import TraceStore

ROOT = Path(__file__).parents[2]
AGENTS = 12  # at once
ENOUGH = 300  # answers, after which the gateway is told to go
SETTINGS = """
home = "{home}"
[server]
port = {port}
[log]
access = false
[tracing]
otlp_endpoint = "{endpoint}"
otlp_protocol = "{protocol}"
[[models]]
name = "m"
tokenizer = "none"
[[instances]]
id = "e0"
url = "{engine}"
adapter = "openai"
models = ["m"]
"""


class Received:
    """The spans that came, by id; asked from any thread."""

    def __init__(self) -> None:
        self.spans: dict[str, str] = {}  # its trace
        self.twice = 0

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.twice += span.span_id.hex() in self.spans
                    self.spans[span.span_id.hex()] = span.trace_id.hex()


@contextmanager
def over_http(received: Received) -> Iterator[str]:
    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                received.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def over_grpc(received: Received) -> Iterator[str]:
    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            received.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def script_for(asked: Asked) -> Script:
    """Every second answer of a run asks for a tool, and the others are streams."""
    body = asked.json
    if body.get("stream"):
        return Script(events=stream(["all", " is", " well"]))
    number = len(body["messages"])
    call = {"id": f"call_{body['user']}_{number}x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    whole = answer("")
    whole["choices"][0] |= {"finish_reason": "tool_calls"}
    whole["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return Script(body=whole)


class Traffic:
    """Agents that ask until nobody answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered: list[str] = []  # whole answers' request ids
        self.enough = asyncio.Event()

    async def agent(self, name: str) -> None:
        messages: list[Json] = [{"role": "user", "content": f"I am {name}"}]
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    await self._step(session, name, messages)
                except (aiohttp.ClientError, ConnectionError):
                    return

    async def _step(self, session: aiohttp.ClientSession, name: str, messages: list[Json]) -> None:
        is_stream = len(messages) % 2 == 0
        body = {"model": "m", "user": name, "messages": messages, "stream": is_stream}
        headers = {"x-keepwarm-run": name}
        async with session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise aiohttp.ClientError("it goes down")
            text = await response.text()
            assert text.rstrip().endswith("[DONE]" if is_stream else "}")
            self.answered.append(response.headers["x-keepwarm-request-id"])
            if is_stream:
                messages += [{"role": "assistant", "content": "all is well"}, {"role": "user", "content": "more"}]
            else:
                call = (await response.json())["choices"][0]["message"]
                id_ = call["tool_calls"][0]["id"]
                messages += [
                    call,
                    {"role": "tool", "tool_call_id": id_, "content": "found"},
                    {"role": "user", "content": "so"},
                ]
            del messages[1:-6]
        if len(self.answered) >= ENOUGH:
            self.enough.set()


async def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError("the gateway ended")


@pytest.mark.parametrize(("protocol", "receiver"), [("http", over_http), ("grpc", over_grpc)], ids=["http", "grpc"])
async def test_every_span_of_every_answered_request_arrives(
    tmp_path: Path, protocol: str, receiver: Callable[[Received], AbstractContextManager[str]]
) -> None:
    received, port = Received(), free_port()
    async with ScriptedEngine() as engine:
        engine.script_for = script_for
        with receiver(received) as endpoint, (tmp_path / "log").open("wb") as log:
            config, home = tmp_path / "keepwarm.toml", tmp_path / "home"
            known = {"home": home, "port": port, "endpoint": endpoint, "protocol": protocol, "engine": engine.url}
            config.write_text(SETTINGS.format_map(known))
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, "-m", "gateway", "serve", "--config", str(config)],
                cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                traffic = Traffic(f"http://127.0.0.1:{port}")
                await _until_ready(traffic.url, process)
                async with asyncio.TaskGroup() as group:
                    for number in range(AGENTS):
                        group.create_task(traffic.agent(f"a{number}"))
                    await traffic.enough.wait()
                    process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 60) == 0, (tmp_path / "log").read_text()[-2000:]
            finally:
                if process.poll() is None:
                    process.kill()
    store = TraceStore(home / "traces.sqlite3", read_only=True)
    records = list(store.records())
    store.close()
    assert len(traffic.answered) >= ENOUGH
    assert {record.request_id for record in records} >= set(traffic.answered)
    expected = {f"{span.span_id:016x}" for span in _spans(records)}
    assert expected - received.spans.keys() == set()
    assert len(received.spans.keys() - expected) <= 2 * AGENTS  # what is refused while it goes has spans and no record
    assert received.twice == 0


def _spans(records: list[RequestRecord]) -> Iterator[SpanValue]:
    runs: dict[str, list[RequestRecord]] = {}
    for record in records:
        yield from request_spans(record)
        assert record.link is not None
        runs.setdefault(record.link.run_id, []).append(record)
    for run in runs.values():
        run.sort(key=lambda record: record.stamps.arrived_ns)
        for before, after in pairwise(run):
            yield from tool_spans(before, after)

"""R08: whatever slot a secret comes in, it goes nowhere: not upstream, into no log, span, metric, error or store."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream

pytestmark = pytest.mark.requirement("R08")

SECRET = "sk-kw-THE-SECRET-0123456789abcdef"
ENGINE_SECRET = "sk-engine-SECRET-of-its-own"
BASIC = base64.b64encode(f"anybody:{SECRET}".encode()).decode()
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SLOTS = {
    "bearer": {"authorization": f"Bearer {SECRET}"},
    "basic": {"authorization": f"Basic {BASIC}"},
    "x-api-key": {"x-api-key": SECRET},
    "api-key": {"api-key": SECRET},
}
ELSEWHERE = [
    "cookie", "proxy-authorization", "x-forwarded-authorization", "x-goog-api-key", "openai-organization", "referer",
    "user-agent", "x-request-id", "x-keepwarm-request-id", "x-client-request-id", "connection", "te", "via", "from",
    "baggage", "tracestate", "x-amz-security-token", "anthropic-dangerous-header", "x-stainless-arch", "origin",
]  # fmt: skip


class Spans:
    """Takes spans over OTLP/HTTP and keeps their bytes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Spans:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/{rest:.*}", self._take)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.received.append(await request.read())
        return web.Response(body=b"", content_type="application/x-protobuf")


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG):
        yield


def spoken(text: str) -> list[str]:
    """Return which secrets, in which spelling, stand in a text."""
    spellings = (SECRET, ENGINE_SECRET, BASIC, SECRET[3:], base64.b64encode(SECRET.encode()).decode())
    return [spelling for spelling in spellings if spelling in text]


async def said_by(client: Client, method: str, path: str, headers: dict[str, str], **more: object) -> str:
    """Return everything that an answer says."""
    async with client.session.request(method, client.url + path, headers=headers, **more) as response:  # type: ignore[arg-type]
        return f"{response.status} {dict(response.headers)} {(await response.read()).decode(errors='replace')}"


async def test_a_secret_is_said_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = tmp_path / "home"
    keys = [{"id": "k", "secret": SECRET, "admin": True}]
    async with Spans() as spans, ScriptedEngine() as engine:
        instances = [{"id": "e0", "url": engine.url, "adapter": "sglang", "api_key": ENGINE_SECRET}]
        async with gateway_for(
            [engine], home, keys=keys, instances=instances, tracing={"otlp_endpoint": spans.url},
            log={"level": "debug"},
        ) as client:  # fmt: skip
            said = []
            engine.script_for = lambda asked: Script(
                **({"events": stream(["a"])} if asked.json.get("stream") else {"body": answer("a")})
            )
            for slot in SLOTS.values():
                said.append(await said_by(client, "POST", "/v1/chat/completions", slot, json=BODY))
                said.append(
                    await said_by(client, "POST", "/c/x/v1/chat/completions", slot, json=BODY | {"stream": True})
                )
                said.append(await said_by(client, "GET", "/v1/models", slot))
                said.append(await said_by(client, "GET", "/console", slot))
                said.append(await said_by(client, "GET", "/admin/v1/keys", slot))
                said.append(await said_by(client, "POST", "/v1/messages", slot, data=b"{broken"))
                said.append(await said_by(client, "GET", f"/nowhere?key={SECRET}", slot))
                twice = [("authorization", f"Bearer {SECRET}"), ("x-api-key", SECRET)]
                said.append(await said_by(client, "DELETE", "/v1/models", dict(twice)))
            assert said[0].startswith("200")
            for name in ELSEWHERE:
                headers = {"x-api-key": SECRET, name: SECRET}
                said.append(await said_by(client, "POST", f"/v1/chat/completions?api_key={SECRET}", headers, json=BODY))
            engine.script_for = lambda asked: Script(status=500, body={"error": {"message": "boom"}})
            said.append(await said_by(client, "POST", "/v1/chat/completions", SLOTS["bearer"], json=BODY))
            said.append(await said_by(client, "POST", "/v1/chat/completions", {"x-api-key": SECRET + "x"}, json=BODY))
            said.append(await said_by(client, "GET", "/metrics", {}))
            said.append(await said_by(client, "GET", "/openapi.json", {}))
            assert [spoken(text) for text in said if spoken(text) not in ([], [SECRET, SECRET[3:]])] == []
            # only the error about a URL that is not there may quote that URL, to the client that made it
            assert all(text.startswith("404") for text in said if spoken(text))

            upstream = [f"{asked.path} {asked.headers} {asked.body!r}" for asked in engine.asked]
            assert len(upstream) > len(ELSEWHERE)
            assert all(SECRET not in text and BASIC not in text for text in upstream)
            assert all(asked.headers["authorization"] == f"Bearer {ENGINE_SECRET}" for asked in engine.asked)
            own = {"accept-encoding", "accept", "authorization", "content-length", "content-type", "host", "connection",
                   "user-agent", "traceparent", "x-request-id", "x-keepwarm-request-id", "x-override-rid"}  # fmt: skip
            assert {name for asked in engine.asked for name in asked.headers} <= own
    assert b"".join(spans.received)
    assert spoken(b"".join(spans.received).decode(errors="replace")) == []
    logged = "\n".join(f"{record.name} {record.getMessage()} {record.exc_text}" for record in caplog.records)
    assert "keepwarm.access" in logged
    assert spoken(logged) == []
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert {"ledger.sqlite3", "traces.sqlite3", "access.sqlite3"} <= {path.name for path in kept}
    assert [path for path in kept if spoken(path.read_bytes().decode(errors="replace"))] == []


async def test_hostile_request_ids_and_traces_are_not_believed(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path) as client:
        ids = set()
        for hostile in ("same", "same", "a" * 8000, "${jndi:ldap://x}", "'; DROP TABLE", "\u00e9", "../../etc"):
            headers = {"x-request-id": hostile, "x-keepwarm-request-id": hostile, "traceparent": hostile}
            async with client.chat(headers) as response:
                assert response.status == 200
                ids.add(response.headers["x-keepwarm-request-id"])
        assert len(ids) == 7  # ours, and unique
        for asked in engine.asked:
            assert "traceparent" not in asked.headers
            assert "jndi" not in json.dumps(asked.headers)

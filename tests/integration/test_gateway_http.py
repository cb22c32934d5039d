"""The gateway over real HTTP, in front of scripted engines."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.identity import Caller, effective_salt
from tests.gateways import Client, gateway_for
from tests.scripted_engine import DONE, Asked, Json, Script, ScriptedEngine, answer, chunk, event, stream
from tracing.record import Identity, Outcome, UsageSource


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def client(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Client]:
    async with gateway_for([engine], tmp_path) as client:
        yield client
        assert client.at_rest()


async def test_an_answer_comes_back_with_its_row(client: Client, engine: ScriptedEngine) -> None:
    detail = {"cached_tokens_details": {"device": 4, "host": 2, "storage": 0, "storage_backend": None}}
    engine.script = Script(body=answer("hello", prompt=10, output=2, cached=6, sglext=detail))
    async with client.chat({"x-keepwarm-run": "r1", "x-keepwarm-step-name": "plan"}) as response:
        assert response.status == 200
        shown = await response.json()
        headers = response.headers
    assert shown == answer("hello", prompt=10, output=2, cached=6)
    (record,) = await client.records(1)
    assert headers["x-keepwarm-request-id"] == record.request_id
    assert (headers["x-keepwarm-run"], headers["x-keepwarm-step"], headers["x-keepwarm-instance"]) == ("r1", "1", "e0")
    usage = record.usage
    assert (usage.fresh_tokens, usage.hit_device_tokens, usage.hit_host_tokens, usage.output_tokens) == (4, 4, 2, 2)
    assert (record.outcome, record.status, record.labels) == (Outcome.OK, 200, {"step_name": "plan"})
    assert [(a.instance, a.status, a.error) for a in record.attempts] == [("e0", 200, None)]
    assert record.decision is not None
    assert not record.decision.exact


async def test_the_engine_gets_the_clients_bytes_and_what_the_gateway_needs(
    client: Client, engine: ScriptedEngine
) -> None:
    body = (
        b'{ "messages": [{"role":"user","content":null,"name":"\\u00e9"}, {"role":"odd"}],"model" :"m",'
        b'"chat_template_kwargs": {"b":1,"a":[1e3,  2]}, "rid":"mine", "n":1.50,"x":123456789012345678901234567890}'
    )
    async with client.session.post(f"{client.url}/v1/chat/completions", data=body) as response:
        assert response.status == 200
    assert engine.asked[0].body == body[:-1] + b',"return_cached_tokens_details":true}'
    engine.script = Script(events=stream(["a"]))
    body = b'{"stream":true,"stream_options":{"continuous_usage_stats":true}, "model":"m","prompt":"x"}'
    async with client.session.post(f"{client.url}/v1/completions", data=body) as response:
        await response.read()
    assert engine.asked[1].path == "/v1/completions"
    assert engine.asked[1].body == (
        b'{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":true}, "model":"m",'
        b'"prompt":"x","return_cached_tokens_details":true}'
    )


async def test_only_allowlisted_headers_pass(client: Client, engine: ScriptedEngine) -> None:
    sent = {
        "authorization": "Bearer sk-secret",
        "x-api-key": "sk-secret",
        "cookie": "sk-secret",
        "x-anything": "sk-secret",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": "hostile\tid",
        "connection": "keep-alive, x-anything",
    }
    async with client.chat(sent) as response:
        assert response.status == 200
        request_id = response.headers["x-keepwarm-request-id"]
    got = engine.asked[0].headers
    assert set(got) <= {
        "host",
        "content-type",
        "content-length",
        "accept",
        "accept-encoding",
        "traceparent",
        "x-request-id",
        "x-override-rid",
    }
    assert got["x-request-id"] == got["x-override-rid"] == request_id
    assert got["traceparent"] == sent["traceparent"]
    assert got["accept-encoding"] == "identity"
    assert "sk-secret" not in str(got)


@pytest.mark.parametrize("asks", [False, True])
async def test_a_stream(client: Client, engine: ScriptedEngine, asks: bool) -> None:
    engine.script = Script(events=stream(["Hel", "lo"], prompt=12, cached=8))
    options = {"stream_options": {"include_usage": True}} if asks else {}
    async with client.chat(stream=True, **options) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        data = await response.read()
    assert data == b"".join(
        piece for piece in stream(["Hel", "lo"], prompt=12, cached=8) if asks or b'"usage"' not in piece
    )
    (record,) = await client.records(1)
    assert (record.usage.prompt_tokens, record.usage.hit_tokens, record.usage.output_tokens) == (12, 8, 2)
    assert record.stamps.ttft_ns is not None
    assert record.finish_reason == "stop"


async def test_connections_to_an_engine_are_kept(client: Client, engine: ScriptedEngine) -> None:
    for number in range(6):
        is_stream = number % 2 == 0
        engine.script = Script(events=stream(["a"])) if is_stream else Script(body=answer("a"))
        async with client.chat(stream=is_stream) as response:
            await response.read()
        await client.records(number + 1)
    assert len({asked.peer for asked in engine.asked}) <= 2  # a probe may have had the one when the next was needed


async def test_a_huge_prompt_goes_through_byte_for_byte(client: Client, engine: ScriptedEngine) -> None:
    messages = [{"role": "user", "content": "The quick brown fox. " * 100} for _ in range(12_000)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert len(body) > 25_000_000
    async with client.session.post(f"{client.url}/v1/chat/completions", data=io.BytesIO(body)) as response:
        assert response.status == 200
    assert engine.asked[0].body == body[:-1] + b',"return_cached_tokens_details":true}'


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{bad", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'{"messages":[]}', 400, "missing_model", "model"),
        (b'{"model":"m","stream":"yes"}', 400, "invalid_request", "stream"),
        (b'{"model":"m","cache_salt":1}', 400, "invalid_request", "cache_salt"),
        (b'{"model":"unheard-of"}', 404, "model_not_found", "model"),
        (b'{"model":"' + b"m" * 257 + b'"}', 400, "invalid_request", "model"),
        (rb'{"model":"m","messages":[{"role":"user","content":"\ud800"}]}', 400, "invalid_json", None),
        (b'{"model":"m","messages":[{"role":"user","x":' + b"[" * 500 + b"]" * 500 + b"}]}", 400, "invalid_json", None),
        (b'{"model":"m","x":"' + b"y" * 4000 + b'"}', 413, "body_too_large", None),
    ],
    ids=range(11),
)
async def test_bad_requests_end_at_the_gateway_in_openais_shape(
    engine: ScriptedEngine, tmp_path: Path, body: bytes, status: int, code: str, param: str | None
) -> None:
    async with gateway_for([engine], tmp_path, server={"body_cap_bytes": 4000}) as client:
        async with client.session.post(f"{client.url}/v1/chat/completions", data=body) as response:
            assert response.status == status
            error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["param"]) == (code, param)
        (record,) = await client.records(1)
        assert (record.outcome, record.status, record.error) == (Outcome.REJECTED, status, code)
        assert record.charge.amount_nano == 0
        assert engine.asked == []


async def test_a_compressed_body_is_refused_unopened(client: Client, engine: ScriptedEngine) -> None:
    bomb = gzip.compress(b"[" + b" " * (8 << 20))
    for encoding in ("gzip", "br", "zstd", "wizard"):
        async with client.session.post(
            f"{client.url}/v1/chat/completions", data=bomb, headers={"content-encoding": encoding}
        ) as response:
            assert response.status == 415
            assert (await response.json())["error"]["code"] == "unsupported_encoding"
    assert engine.asked == []
    assert [record.status for record in await client.records(4)] == [415] * 4


async def test_header_bytes_that_are_no_text_cost_a_request_nothing(client: Client, engine: ScriptedEngine) -> None:
    body = b'{"model":"m","messages":[]}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n"
        b"traceparent: \xff\xfe\r\nx-keepwarm-step-name: a\xffb\xc3\xa9\r\n\r\n" % len(body)
    )
    assert (await _exchange(client, head + body)).startswith(b"HTTP/1.1 200")
    (record,) = await client.records(1)
    assert (record.labels, record.traceparent) == ({"step_name": "a\ufffdbé"}, None)
    assert "traceparent" not in engine.asked[0].headers


async def test_malformed_http_is_refused_and_not_quoted_in_the_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = await _exchange(
            client, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-secret\x01\r\n\r\n"
        )
    assert answer.startswith(b"HTTP/1.0 400")
    assert "malformed" in caplog.text
    assert "sk-secret" not in caplog.text


async def _exchange(client: Client, data: bytes) -> bytes:
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


async def test_unknown_paths_and_methods_have_that_shape_too(client: Client) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/metrics", 405),
    ):
        async with client.session.request(method, client.url + path) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_an_engines_refusal_goes_through_untried_elsewhere(tmp_path: Path) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b, gateway_for([a, b], tmp_path) as client:
        refusal = {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}
        a.script = b.script = Script(status=400, body=refusal)
        async with client.chat() as response:
            assert response.status == 400
            assert (await response.json())["error"] == {
                "message": "too long",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        (record,) = await client.records(1)
        assert (record.outcome, len(record.attempts), record.usage.source) == (
            Outcome.UPSTREAM_REFUSED,
            1,
            UsageSource.NONE,
        )
        assert len(a.asked) + len(b.asked) == 1
        assert client.at_rest()


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_busy_engine_sends_the_request_elsewhere(tmp_path: Path, status: int, is_stream: bool) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b, gateway_for([a, b], tmp_path) as client:
        order: list[str] = []

        def script_for(asked: Asked) -> Script:
            order.append(asked.headers["host"])
            if len(order) == 1:
                return Script(status=status, body={"message": "busy"}, headers={"retry-after": "7"})
            return Script(events=stream(["x"])) if is_stream else Script(body=answer("x"))

        a.script_for = b.script_for = script_for
        async with client.chat(stream=is_stream) as response:
            assert response.status == 200
            await response.read()
        assert len(set(order)) == 2
        (record,) = await client.records(1)
        assert [attempt.status for attempt in record.attempts] == [status, 200]
        assert record.outcome is Outcome.OK
        assert client.at_rest()


async def test_when_all_are_busy_the_refusal_is_shown_with_its_retry_after(tmp_path: Path) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b, ScriptedEngine() as c:
        for engine in (a, b, c):
            engine.script = Script(status=429, body={"error": {"message": "slow down"}}, headers={"retry-after": "7"})
        async with gateway_for([a, b, c], tmp_path, retry={"attempts": 2}) as client:
            async with client.chat() as response:
                assert (response.status, response.headers["retry-after"]) == (429, "7")
                assert await response.json() == {"error": {"message": "slow down"}}
            (record,) = await client.records(1)
            assert len(record.attempts) == 2
            assert len(a.asked) + len(b.asked) + len(c.asked) == 2


async def test_a_dead_engine_is_left_out_after_its_first_refused_connection(tmp_path: Path) -> None:
    slow = {"health": {"interval_s": 60, "timeout_s": 1}}
    async with ScriptedEngine() as a, ScriptedEngine() as b, gateway_for([a, b], tmp_path, **slow) as client:
        await a.close()
        for _ in range(6):
            async with client.chat() as response:
                assert response.status == 200
        records = await client.records(6)
        refused = [attempt for record in records for attempt in record.attempts if attempt.error == "connect_failed"]
        assert len(refused) <= 1
        assert len(b.asked) == 6
        await b.close()
        async with client.chat() as response:
            assert response.status in (502, 503)
        async with client.chat() as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_instance"
        async with client.session.get(f"{client.url}/v1/models") as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["m"]
        assert client.at_rest()


async def test_an_engine_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async with ScriptedEngine() as a, gateway_for([a], tmp_path) as client:
        await a.close()
        async with client.chat() as response:
            assert response.status in (502, 503)
        await a.open()
        async with asyncio.timeout(10):
            await client.gateway.fleet.until_ready()
        async with client.chat() as response:
            assert response.status == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_may_have_run_is_never_sent_again(tmp_path: Path, is_stream: bool) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b, gateway_for([a, b], tmp_path) as client:
        a.script = b.script = Script(end="reset")
        async with client.chat(stream=is_stream) as response:
            assert response.status == 502
            assert (await response.json())["error"]["type"] == "upstream_error"
        (record,) = await client.records(1)
        assert (record.outcome, record.usage.source) == (Outcome.UPSTREAM_FAILED, UsageSource.MISSING)
        assert record.charge.amount_nano is None
        assert len(a.asked) + len(b.asked) == 1
        assert client.at_rest()


@pytest.mark.parametrize("end", ["clean", "reset"])
async def test_a_truncated_stream_ends_with_an_error_and_its_row_says_so(
    client: Client, engine: ScriptedEngine, end: Any
) -> None:
    engine.script = Script(events=stream(["a", "b", "c"])[:3], end=end)
    async with client.chat(stream=True) as response:
        assert response.status == 200
        data = await response.read()
    assert data.endswith(DONE)
    last = json.loads(data.split(b"\n\n")[-3].removeprefix(b"data: "))
    assert last["error"]["code"] == "stream_truncated"
    assert b'"finish_reason": "' not in data
    (record,) = await client.records(1)
    assert (record.outcome, record.error, record.finish_reason) == (Outcome.TRUNCATED, "stream_truncated", None)
    async with client.chat() as response:
        assert response.status == 200 or engine.script.events is not None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_stops_the_engine(client: Client, engine: ScriptedEngine, is_stream: bool) -> None:
    never = asyncio.Event()
    if is_stream:
        engine.script = Script(events=stream(["a", "b"]), pause=lambda number: never if number == 2 else None)
    else:
        engine.script = Script(wait_for=never)
    request = asyncio.ensure_future(client.chat(stream=is_stream).__aenter__())
    await engine.until(lambda: engine.in_flight == 1)
    if is_stream:
        response = await request
        await response.content.readuntil(b"\n\n")
        await response.content.readuntil(b"\n\n")
        response.close()
    else:
        request.cancel()
    await engine.until(lambda: engine.in_flight == 0)
    assert engine.hung_up == 1
    (record,) = await client.records(1)
    assert record.outcome is Outcome.ABORTED
    assert record.status == (200 if is_stream else 499)
    assert [attempt.error for attempt in record.attempts] == ["client_gone"]
    assert record.usage.source is UsageSource.MISSING  # no tokenizer here: nobody counted the prompt
    assert client.at_rest()


@pytest.mark.parametrize("missing", ["the end", "the count"])
async def test_a_client_that_leaves_at_the_last_word_has_got_its_answer(
    client: Client, engine: ScriptedEngine, missing: str
) -> None:
    never, held = asyncio.Event(), {"the end": 4, "the count": 3}[missing]  # of role, word, reason, count, end
    engine.script = Script(events=stream(["a"]), pause=lambda number: never if number == held else None)
    async with client.chat(stream=True, stream_options={"include_usage": True}) as response:
        for _ in range(held):
            await response.content.readuntil(b"\n\n")
        response.close()
    (first,) = await client.records(1)
    assert engine.hung_up == 1
    if missing == "the count":
        assert first.outcome is Outcome.ABORTED
        return
    assert (first.outcome, first.error, first.attempts[0].error) == (Outcome.OK, None, None)
    assert first.usage.source is UsageSource.ENGINE
    engine.script = Script(body=answer("b"))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    async with client.chat(messages=[*said, {"role": "user", "content": "go on"}]) as response:
        assert response.status == 200
    _, second = await client.records(2)
    assert first.link is not None
    assert second.link is not None
    assert (second.link.run_id, second.link.step, second.link.confidence) == (first.link.run_id, 2, 0.95)


_STOP: Json = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
_BROKE: Json = {"type": "error", "error": {"type": "api_error", "message": "out of pages"}}
_RESPONSE: Json = {"id": "resp_q", "object": "response", "output": [], "usage": {"input_tokens": 3, "output_tokens": 2}}


@pytest.mark.parametrize(
    ("path", "events", "error"),
    [
        ("chat/completions", [piece for piece in stream(["a"]) if b'"usage"' not in piece], None),
        ("messages", [event(_STOP)], None),
        ("messages", [event(_STOP), event({"type": "message_stop"})], None),
        ("messages", [event(_BROKE)], "api_error"),
        ("responses", [event({"type": "response.completed", "response": {**_RESPONSE, "status": "completed"}})], None),
        (
            "responses",
            [event({"type": "response.failed", "response": {**_RESPONSE, "status": "failed"}})],
            "upstream_error",
        ),
    ],
)
async def test_a_client_that_leaves_at_the_end_leaves_a_record_of_what_it_got(
    engine: ScriptedEngine, tmp_path: Path, path: str, events: list[bytes], error: str | None
) -> None:
    """The connection to the engine is open yet: agents that run a command once and exit are faster than its end."""
    instances = [{"id": "n", "url": engine.url, "adapter": "openai", "speaks": ["chat", "messages", "responses"]}]
    engine.script = Script(events=events, end="hang")
    asks = {
        "model": "m",
        "stream": True,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "input": "hi",
    }
    async with gateway_for([engine], tmp_path, instances=instances) as client:
        leaving = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))  # also at a stream's end
        async with leaving, leaving.post(f"{client.url}/v1/{path}", json=asks) as response:
            for _ in events:
                await response.content.readuntil(b"\n\n")
            response.close()
        (record,) = await client.records(1)
    assert (record.outcome, record.status) == (Outcome.OK if error is None else Outcome.TRUNCATED, 200)
    assert (record.error, record.attempts[0].error) == (error, error)


async def test_heartbeats_before_the_engines_first_byte_and_errors_after_them(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    engine.script = Script(wait_for=gate, events=stream(["a"]))
    async with gateway_for([engine], tmp_path, stream={"heartbeat_s": 0.02}) as client:
        async with client.chat(stream=True) as response:
            assert response.status == 200
            for _ in range(3):
                assert await response.content.readuntil(b"\n\n") == b": keepwarm\n\n"
            gate.set()
            data = (await response.read()).replace(b": keepwarm\n\n", b"")
            assert data == b"".join(piece for piece in stream(["a"]) if b'"usage"' not in piece)
        gate.clear()
        engine.script = Script(wait_for=gate, status=400, body={"message": "too long", "type": "x"})
        async with client.chat(stream=True) as response:
            assert await response.content.readuntil(b"\n\n") == b": keepwarm\n\n"
            gate.set()
            data = (await response.read()).replace(b": keepwarm\n\n", b"")
            assert json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))["error"]["message"] == "too long"
            assert data.endswith(DONE)
        ok, refused = await client.records(2)
        assert (ok.outcome, refused.outcome, refused.status) == (Outcome.OK, Outcome.UPSTREAM_REFUSED, 400)
        assert ok.stamps.first_token_ns is not None


async def test_silence_in_a_stream_is_cut_at_the_idle_limit(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.script = Script(events=stream(["a"])[:2], end="hang")
    async with gateway_for([engine], tmp_path, stream={"idle_timeout_s": 0.05}) as client:
        async with client.chat(stream=True) as response:
            data = await response.read()
        assert b'"upstream_timeout"' in data
        assert data.endswith(DONE)
        await engine.until(lambda: engine.in_flight == 0)
        (record,) = await client.records(1)
        assert (record.outcome, record.error) == (Outcome.TRUNCATED, "upstream_timeout")


_KEYS = [
    {"id": "ka", "secret": "sk-a", "tenant": "acme", "team": "red", "models": ["m"]},
    {"id": "kb", "secret": "sk-b", "tenant": "bolt", "models": ["other"]},
    {"id": "root", "secret": "sk-root", "admin": True},
]


async def test_keys_let_in_and_salts_keep_tenants_apart(engine: ScriptedEngine, tmp_path: Path) -> None:
    async with gateway_for([engine], tmp_path, keys=_KEYS) as client:
        for headers, status in (({}, 401), ({"authorization": "Bearer sk-x"}, 401), ({"x-api-key": "sk-b"}, 403)):
            async with client.chat(headers) as response:
                assert response.status == status
                assert "error" in await response.json()
        assert engine.asked == []
        for wish in (None, "acme", "mine"):
            async with client.chat({"x-api-key": "sk-a"}, **({} if wish is None else {"cache_salt": wish})) as response:
                assert response.status == 200
        caller = Caller(Identity("acme", "red", "ka"), is_salted=True)
        assert [asked.json["cache_salt"] for asked in engine.asked] == [
            effective_salt(caller, wish) for wish in (None, "acme", "mine")
        ]
        records = await client.records(4)  # strangers leave no row, a key's forbidden model does
        assert [record.outcome for record in records] == [Outcome.REJECTED, *[Outcome.OK] * 3]
        assert {record.identity.key_id for record in records[1:]} == {"ka"}
        async with client.session.get(f"{client.url}/metrics") as response:
            text = await response.text()
        assert 'outcome="rejected"} 3.0' in text
        for secret in ("sk-a", "sk-b", "sk-root"):
            assert secret not in text


async def test_administration_needs_an_admin_key(engine: ScriptedEngine, tmp_path: Path) -> None:
    async with gateway_for([engine], tmp_path, keys=_KEYS) as client:
        url = f"{client.url}/keepwarm/v1/instances"
        for headers, status in (({}, 401), ({"x-api-key": "sk-a"}, 403), ({"x-api-key": "sk-root"}, 200)):
            async with client.session.get(url, headers=headers) as response:
                assert response.status == status
        async with client.session.get(
            url, headers={"authorization": aiohttp.encode_basic_auth("any", "sk-root")}
        ) as response:
            assert (await response.json())["instances"][0]["healthy"] is True
        async with client.chat({"x-api-key": "sk-a", "x-keepwarm-run": "mine"}) as response:
            assert response.status == 200
        basic = {"authorization": aiohttp.encode_basic_auth("any", "sk-root")}
        for headers, status in (({}, 401), ({"x-api-key": "sk-a"}, 200), (basic, 200)):
            async with client.session.get(f"{client.url}/console", headers=headers) as response:
                assert response.status == status
                assert status == 200 or "Basic" in response.headers["www-authenticate"]
        await client.records(1)
        for key, status in (("sk-a", 200), ("sk-b", 404), ("sk-root", 200)):
            async with client.session.get(
                f"{client.url}/keepwarm/v1/runs/mine", headers={"x-api-key": key}
            ) as response:
                assert response.status == status


async def test_draining_an_instance_and_taking_it_back(tmp_path: Path) -> None:
    async with ScriptedEngine() as a, ScriptedEngine() as b, gateway_for([a, b], tmp_path) as client:
        async with client.session.post(f"{client.url}/keepwarm/v1/instances/e0/drain") as response:
            assert (await response.json())["draining"] is True
        for _ in range(8):
            async with client.chat() as response:
                assert response.headers["x-keepwarm-instance"] == "e1"
        async with client.session.post(f"{client.url}/keepwarm/v1/instances/e0/resume") as response:
            assert (await response.json())["draining"] is False
        async with client.session.post(f"{client.url}/keepwarm/v1/instances/e0/restart") as response:
            assert response.status == 400
        async with client.session.post(f"{client.url}/keepwarm/v1/instances/e9/drain") as response:
            assert response.status == 404


async def test_aliases_and_the_list_of_models(engine: ScriptedEngine, tmp_path: Path) -> None:
    models = [{"name": "m", "aliases": ["gpt-x"], "tokenizer": "none"}]
    async with gateway_for([engine], tmp_path, models=models) as client:
        async with client.session.get(f"{client.url}/v1/models") as response:
            assert [entry["id"] for entry in (await response.json())["data"]] == ["gpt-x", "m"]
        async with client.chat(model="gpt-x") as response:
            assert response.status == 200
        assert engine.asked[0].json["model"] == "m"
        (record,) = await client.records(1)
        assert (record.model, record.served_model) == ("gpt-x", "m")


async def test_an_agents_steps_are_one_run_without_being_told(client: Client, engine: ScriptedEngine) -> None:
    call = {"id": "call_7f3a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tools = [event(chunk({"tool_calls": [{"index": 0, **call}]})), event(chunk({}, finish="tool_calls")), DONE]
    engine.script = Script(events=tools)
    messages: list[Any] = [{"role": "user", "content": "look around"}]
    async with client.chat(stream=True, messages=messages) as response:
        run = response.headers["x-keepwarm-run"]
        await response.read()
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call_7f3a", "content": "a wall"}]
    engine.script = Script(body=answer("I see a wall."))
    async with client.chat(messages=messages) as response:
        assert (response.headers["x-keepwarm-run"], response.headers["x-keepwarm-step"]) == (run, "2")
    messages += [{"role": "assistant", "content": "I see a wall."}, {"role": "user", "content": "and now?"}]
    async with client.chat(messages=messages) as response:
        assert (response.headers["x-keepwarm-run"], response.headers["x-keepwarm-step"]) == (run, "3")
    first, second, third = await client.records(3)
    assert [c.name for c in first.tool_calls] == ["look"]
    assert second.tool_results == ("call_7f3a",)
    assert [r.link.method for r in (first, second, third) if r.link][:2] == ["new", "tool_call_id"]
    assert [r.message_tip is not None for r in (first, second, third)] == [True] * 3
    async with client.session.get(f"{client.url}/keepwarm/v1/runs/{run}") as response:
        assert (await response.json())["totals"]["requests"] == 3


async def test_a_conversation_is_one_run_by_its_messages(client: Client, engine: ScriptedEngine) -> None:
    messages = [{"role": "user", "content": "who are you?"}]
    for is_stream in (True, False, True):
        engine.script = Script(events=stream(["I am ", "me."])) if is_stream else Script(body=answer("I am me."))
        async with client.chat(stream=is_stream, messages=messages) as response:
            await response.read()
        messages += [{"role": "assistant", "content": "I am me."}, {"role": "user", "content": "really?"}]
    links = [record.link for record in await client.records(3) if record.link is not None]
    assert len({link.run_id for link in links}) == 1
    assert [(link.step, link.method) for link in links] == [(1, "new"), (2, "message_chain"), (3, "message_chain")]


async def test_shutdown_lets_streams_finish_and_cuts_what_stays(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with ScriptedEngine() as engine:
        engine.script = Script(events=stream(["a", "b"]), pause=lambda number: gate if number == 2 else None)
        async with aiohttp.ClientSession() as session:
            opened = asyncio.Event()
            finish = asyncio.Event()

            async def serve(limit_s: float) -> None:
                async with gateway_for([engine], tmp_path, server={"drain_limit_s": limit_s}) as client:
                    urls.append(client.url)
                    opened.set()
                    await finish.wait()

            for limit_s, ends_whole in ((10.0, True), (0.05, False)):
                gate.clear(), opened.clear(), finish.clear()
                urls: list[str] = []
                serving = asyncio.create_task(serve(limit_s))
                await opened.wait()
                body = {"model": "m", "stream": True, "messages": []}
                async with session.post(f"{urls[0]}/v1/chat/completions", json=body) as response:
                    await response.content.readuntil(b"\n\n")
                    finish.set()
                    if ends_whole:
                        gate.set()
                    data = await response.read()
                assert data.endswith(DONE)
                assert (b'"draining"' in data) is not ends_whole
                await serving
                await engine.until(lambda: engine.in_flight == 0)


async def test_health_readiness_and_metrics(client: Client, engine: ScriptedEngine) -> None:
    for path, status in (("/healthz", 200), ("/readyz", 200)):
        async with client.session.get(client.url + path) as response:
            assert response.status == status
    async with client.chat() as response:
        assert response.status == 200
    await client.records(1)
    async with client.session.get(f"{client.url}/metrics") as response:
        text = await response.text()
    assert 'keepwarm_instance_up{instance="e0"} 1.0' in text
    assert 'keepwarm_requests_total{endpoint="chat",model="m",outcome="ok"} 1.0' in text
    engine.is_healthy = False
    await client.until(lambda: not client.gateway.fleet.instances["e0"].takes_requests)
    async with client.session.get(f"{client.url}/readyz") as response:
        assert response.status == 503


async def test_clients_that_leave_at_any_point_leave_nothing_behind(engine: ScriptedEngine, tmp_path: Path) -> None:
    patient = {"interval_s": 0.05, "timeout_s": 60.0}  # so many at once may hold up a probe: that is another story
    async with gateway_for([engine], tmp_path, health=patient) as client:
        await _leave_at_any_point(client, engine)
        assert client.at_rest()


async def _leave_at_any_point(client: Client, engine: ScriptedEngine) -> None:
    chance = random.Random(20)
    engine.script_for = lambda asked: (
        Script(events=stream(list("abcdef"))) if asked.json["stream"] else Script(body=answer("x"))
    )

    async def visit(ticks: int, is_stream: bool) -> None:
        async with client.chat(stream=is_stream) as response:
            for _ in range(ticks):
                await asyncio.sleep(0)
            if is_stream:
                await response.content.readany()
            response.close()

    async def leave_early(ticks: int, is_stream: bool) -> None:
        visiting = asyncio.create_task(visit(ticks, is_stream))
        for _ in range(ticks):
            await asyncio.sleep(0)
        visiting.cancel()
        await asyncio.wait({visiting})

    visits = [
        (leave_early if chance.random() < 0.7 else visit)(chance.randrange(300), chance.random() < 0.5)
        for _ in range(150)
    ]
    await asyncio.gather(*visits)
    await client.until(lambda: client.at_rest() and not engine.in_flight)
    records = client.stored()
    assert len({record.request_id for record in records}) == len(records) >= len(engine.asked)
    assert {record.outcome for record in records} <= {Outcome.OK, Outcome.ABORTED}
    assert {record.outcome for record in records} >= {Outcome.ABORTED}
    assert await asyncio.to_thread(client.gateway.ledger.flush, 5.0)
    assert {row.request_id for row in client.gateway.ledger.rows()} == {record.request_id for record in records}
    async with client.chat(stream=True) as response:
        assert (await response.read()).endswith(DONE)

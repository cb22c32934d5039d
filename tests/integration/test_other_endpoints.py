"""Embeddings, models and tokens, the places where endpoints are, and whose error shape an answer has."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from gateway.openapi.document import document
from gateway.protocols.base import Sent, scan_body
from gateway.reading import LONG_BYTES
from tests.gateways import Client, gateway_for
from tests.samples.sdk import anthropic_client, openai_client, strictly
from tests.scripted_engine import Json, Script, ScriptedEngine, answer
from tracing.record import Outcome, UsageSource

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
VECTORS: Json = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -1.5]}],
    "model": "m",
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(running_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    models = [{"name": "m", "aliases": ["known-as"]}]
    async with gateway_for([running_engine], tmp_path_factory.mktemp("home"), models=models) as client:
        yield client
        assert client.at_rest()


async def test_embeddings_pass_and_are_billed_as_a_prompt(gateway: Client, engine: ScriptedEngine) -> None:
    engine.script = Script(body=VECTORS)
    async with openai_client(gateway.url) as gpt:
        made = strictly(await gpt.embeddings.create(model="m", input=["hi"], encoding_format="float"))
    assert made.data[0].embedding == [0.25, -1.5]
    asked = engine.asked[0]
    assert (asked.path, asked.json) == ("/v1/embeddings", {"model": "m", "input": ["hi"], "encoding_format": "float"})
    record = (await gateway.records(len(gateway.stored())))[-1]
    assert (record.endpoint, record.usage.prompt_tokens, record.usage.output_tokens) == ("embeddings", 5, 0)
    assert (record.usage.source, record.outcome) == (UsageSource.ENGINE, Outcome.OK)


async def test_embeddings_go_only_where_they_are(tmp_path: Path) -> None:
    async with ScriptedEngine() as plain, ScriptedEngine() as able:
        instances = [
            {"id": "p", "url": plain.url, "adapter": "openai"},
            {"id": "a", "url": able.url, "adapter": "openai", "speaks": ["embeddings"]},
        ]
        able.script = Script(body=VECTORS)
        async with (
            gateway_for([plain, able], tmp_path, instances=instances) as gateway,
            openai_client(gateway.url) as gpt,
        ):
            for _ in range(3):
                await gpt.embeddings.create(model="m", input="hi", encoding_format="float")
            await gpt.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert (len(able.asked), [asked.path for asked in plain.asked]) == (3, ["/v1/chat/completions"])


async def test_an_endpoint_that_no_engine_has_is_refused_by_name(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        instances = [{"id": "p", "url": engine.url, "adapter": "openai"}]
        async with (
            gateway_for([engine], tmp_path, instances=instances) as gateway,
            openai_client(gateway.url) as gpt,
        ):
            with pytest.raises(openai.BadRequestError, match="embeddings") as caught:
                await gpt.embeddings.create(model="m", input="hi")
            async with gateway.session.post(f"{gateway.url}/tokenize", json={"model": "m", "prompt": "x"}) as response:
                assert response.status == 400
    assert caught.value.code == "endpoint_not_supported"


async def test_models_are_listed_as_each_client_expects_them(gateway: Client) -> None:
    async with openai_client(gateway.url) as gpt:
        assert [strictly(model).id for model in (await gpt.models.list()).data] == ["known-as", "m"]
        assert strictly(await gpt.models.retrieve("known-as")).owned_by == "keepwarm"
        with pytest.raises(openai.NotFoundError):
            await gpt.models.retrieve("unheard-of")
    async with anthropic_client(gateway.url) as claude:
        assert [strictly(model).id for model in (await claude.models.list()).data] == ["known-as", "m"]
        assert strictly(await claude.models.retrieve("m")).display_name == "m"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await claude.models.retrieve("unheard-of")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize("root", ["", "/v1", "/c/label", "/c/label/v1"])
async def test_endpoints_are_with_and_without_v1_and_label(gateway: Client, engine: ScriptedEngine, root: str) -> None:
    asks: dict[str, Json] = {
        "/chat/completions": CHAT,
        "/completions": {"model": "m", "prompt": "x"},
        "/messages": {**CHAT, "max_tokens": 4},
        "/messages?beta=true": {**CHAT, "max_tokens": 4},
        "/responses": {"model": "m", "input": "hi"},
        "/embeddings": {"model": "m", "input": "hi"},
    }
    for path, body in asks.items():
        async with gateway.session.post(f"{gateway.url}{root}{path}", json=body) as response:
            assert response.status == 200, path
            request_id = response.headers["x-keepwarm-request-id"]
        record = await gateway.record(request_id)
        assert record.labels == ({"agent": "label"} if "label" in root else {})
    engine.script = Script(body={"tokens": [1], "count": 1})
    for path, body in (("/responses/input_tokens", asks["/responses"]), ("/messages/count_tokens", CHAT)):
        async with gateway.session.post(f"{gateway.url}{root}{path}", json=body) as response:
            assert (await response.json())["input_tokens"] == 1
    async with gateway.session.post(f"{gateway.url}{root}/responses/compact", json={}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "endpoint_not_supported")
    for path in ("/models", "/models/m"):
        async with gateway.session.get(f"{gateway.url}{root}{path}") as response:
            assert response.status == 200


@pytest.mark.parametrize("root", ["/", "/v1/", "//v1", "/v1/v1", "/c/label/v1/v1"])
async def test_a_base_url_with_a_slash_or_a_version_too_many_works(
    gateway: Client, engine: ScriptedEngine, root: str
) -> None:
    """As Anthropic's clients make ``/v1/v1/messages`` of one that ends like OpenAI's."""
    for path in ("/chat/completions", "/messages?beta=true", "/chat/completions/"):
        async with aiohttp.ClientSession() as fresh:  # at whose first request no connection is aiohttp's
            ask, url = {**CHAT, "max_tokens": 4}, f"{gateway.url}{root}{path}"
            async with fresh.post(url, json=ask, allow_redirects=False) as response:
                assert response.status == 200, path
                record = await gateway.record(response.headers["x-keepwarm-request-id"])
        assert record.labels == ({"agent": "label"} if "label" in root else {})
    engine.script = Script(body={"tokens": [1], "count": 1})
    async with gateway.session.post(f"{gateway.url}{root}/messages/count_tokens", json=CHAT) as response:
        assert (response.status, (await response.json())["input_tokens"]) == (200, 1)
    async with gateway.session.get(f"{gateway.url}{root}/models/?limit=9") as response:
        assert (response.status, response.url.query_string) == (200, "limit=9")


async def test_a_path_leads_nowhere_but_to_what_is_here(gateway: Client) -> None:
    for path, told in (("//elsewhere.example//v2/", (404, None)), ("//openapi.json", (308, "/openapi.json"))):
        async with gateway.session.get(gateway.url + path, allow_redirects=False) as response:
            assert (response.status, response.headers.get("location")) == told


async def test_a_client_of_azures_openai_is_served(gateway: Client, engine: ScriptedEngine) -> None:
    for place in ({"azure_endpoint": gateway.url}, {"base_url": f"{gateway.url}/v1"}):
        async with openai.AsyncAzureOpenAI(**place, api_version="2024-10-21", api_key="none") as azure:
            told = await azure.chat.completions.create(**CHAT)
            assert told.choices[0].message.content == "hello"
            assert [model.id async for model in azure.models.list()] == ["known-as", "m"]
    assert [asked.path for asked in engine.asked] == ["/v1/chat/completions"] * 2


async def test_b031_the_models_name_is_the_one_that_was_asked_for(gateway: Client, engine: ScriptedEngine) -> None:
    chunk = b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    usage = b'data: {"model":"m","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    asks: dict[str, Json] = {
        "/v1/chat/completions": CHAT,
        "/v1/messages": {**CHAT, "max_tokens": 4},
        "/v1/responses": {"model": "m", "input": "hi"},
    }
    for path, body in asks.items():
        for streams in (False, True):
            engine.script = Script(events=[chunk, usage]) if streams else Script(body=answer("x"))
            ask = {**body, "model": "known-as", "stream": streams}
            async with gateway.session.post(f"{gateway.url}{path}", json=ask) as response:
                text = await response.text()
            assert '"known-as"' in text.replace('": "', '":"').replace('"model":', '"model": ')
            assert '"model":"m"' not in text.replace('": "', '":"')
            assert json.loads(engine.asked[-1].body)["model"] == "m"


async def test_errors_have_the_shape_of_the_path_and_of_the_client(gateway: Client) -> None:
    for path, headers, is_anthropic in (
        ("/v1/nowhere", {}, False),
        ("/v1/nowhere", {"anthropic-version": "2023-06-01"}, True),
        ("/c/x/v1/messages/nowhere", {}, True),
    ):
        async with gateway.session.get(f"{gateway.url}{path}", headers=headers) as response:
            assert response.status == 404
            told = await response.json()
        assert (told.get("type") == "error") is is_anthropic
        assert told["error"]["message"]
    for path, allowed in (("/v1/messages", "POST"), ("/v1/responses", "POST"), ("/c/a/embeddings", "POST")):
        async with gateway.session.get(f"{gateway.url}{path}") as response:
            assert (response.status, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("sdk", [openai, anthropic])
async def test_what_is_not_served_is_named_to_whoever_asks(gateway: Client, sdk: ModuleType) -> None:
    """All that the official clients have methods for, as they are installed."""
    headers = {"anthropic-version": "2023-06-01"} if sdk is anthropic else {}
    paths = json.loads(document())["paths"].items()
    served = {(method, re.sub(r"{[^}]+}", "x", path)) for path, methods in paths for method in methods}
    called = {(method, path if path.startswith("/v1/") else f"/v1{path}") for method, path in called_by(sdk)}
    assert called & served
    assert len(called - served) > 20
    for method, path in sorted(called - served):
        body = None if method == "get" else {}
        async with gateway.session.request(method, gateway.url + path, json=body, headers=headers) as response:
            assert response.status in (404, 405), path
            told = await response.json()
        assert set(told) == ({"type", "error", "request_id"} if sdk is anthropic else {"error"}), path
        assert f"there is no {method.upper()} {path} here" in told["error"]["message"]


def called_by(sdk: ModuleType) -> list[tuple[str, str]]:
    """Return the methods and paths of a client's resources, with ``x`` for what stands in them."""
    pattern = re.compile(r"self\._(get|post|put|patch|delete|get_api_list)\(\s*(?:path_template\(\s*)?f?\"([^\"]+)\"")
    assert sdk.__file__ is not None
    files = (Path(sdk.__file__).parent / "resources").rglob("*.py")
    found = {called for file in files for called in pattern.findall(file.read_text("utf-8"))}
    return [(verb.removesuffix("_api_list"), re.sub(r"{[^}]+}", "x", path.partition("?")[0])) for verb, path in found]


async def test_a_socket_to_what_is_not_served_is_refused_by_name(gateway: Client) -> None:
    for path in ("/v1/realtime", "/v1/responses"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await gateway.session.ws_connect(gateway.url + path)
        assert caught.value.status in (404, 405)


async def test_a_prompt_of_responses_is_counted_as_that_of_messages(gateway: Client, engine: ScriptedEngine) -> None:
    engine.script = Script(body=answer("Paris"))
    async with openai_client(gateway.url) as gpt:
        first = await gpt.responses.create(model="m", input="capital of France?", instructions="be brief")
        engine.asked.clear()
        engine.script = Script(body={"tokens": [1, 2, 3], "count": 3, "max_model_len": 99})
        told = strictly(
            await gpt.responses.input_tokens.count(model="known-as", input="of Spain?", previous_response_id=first.id)
        )
        assert (told.object, told.input_tokens) == ("response.input_tokens", 3)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await gpt.responses.input_tokens.count(model="m", input="x", previous_response_id="resp_of_nobody")
        with pytest.raises(openai.BadRequestError, match="conversation"):
            await gpt.responses.input_tokens.count(model="m", input="x", conversation="conv_1")
    (asked,) = engine.asked
    assert (asked.path, asked.json["model"]) == ("/tokenize", "m")
    assert asked.json["messages"] == [
        {"role": "user", "content": "capital of France?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "of Spain?"},
    ]


async def test_a_compaction_is_refused_by_name(gateway: Client, engine: ScriptedEngine) -> None:
    async with openai_client(gateway.url) as gpt:
        with pytest.raises(openai.BadRequestError, match="responses/compact is not served") as caught:
            await gpt.responses.compact(model="m", input="hi")
    assert caught.value.code == "endpoint_not_supported"
    assert engine.asked == []


async def test_the_engine_is_asked_for_tokens_where_there_is_no_tokenizer(
    gateway: Client, engine: ScriptedEngine
) -> None:
    engine.script = Script(body={"tokens": [1, 2, 3], "count": 3, "max_model_len": 99})
    async with anthropic_client(gateway.url) as claude:
        told = await claude.messages.count_tokens(model="known-as", messages=[{"role": "user", "content": "hi"}])
    assert told.input_tokens == 3
    asked = engine.asked[0]
    assert asked.path == "/tokenize"
    assert (asked.json["model"], asked.json["messages"]) == ("m", [{"role": "user", "content": "hi"}])
    engine.script = Script(status=422, body={"detail": "no such thing"})
    async with gateway.session.post(f"{gateway.url}/v1/detokenize", json={"model": "m", "tokens": [1]}) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, "no such thing")
    assert engine.asked[1].path == "/detokenize"


async def test_long_bodies_of_token_endpoints_are_read_beside_the_loop(
    gateway: Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def noted(body: bytes) -> Sent:
        threads.add(threading.current_thread().name)
        return scan_body(body)

    monkeypatch.setattr("gateway.tokens.scan_body", noted)
    engine.script = Script(body={"tokens": [1], "count": 1, "text": "x"})
    long: dict[str, Json] = {
        "/tokenize": {"prompt": "x" * LONG_BYTES},
        "/detokenize": {"tokens": [1] * LONG_BYTES},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x" * LONG_BYTES}]},
        "/v1/responses/input_tokens": {"input": "x" * LONG_BYTES},
    }
    for path, body in long.items():
        async with gateway.session.post(f"{gateway.url}{path}", json={"model": "m", **body}) as response:
            assert response.status == 200
    assert threads
    assert threading.main_thread().name not in threads


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"prompt": 1}, {"messages": [1]}, {"prompt": "", "messages": []}]
)
async def test_tokens_are_of_a_text_or_of_messages(gateway: Client, engine: ScriptedEngine, body: Json) -> None:
    async with gateway.session.post(f"{gateway.url}/tokenize", json={"model": "m", **body}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt")
    assert engine.asked == []


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 20_000 + b"\r\n\r\n", "head_too_long"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 20_000 + b"\r\n\r\n", "head_too_long"),
        (b"GET /" + b"z" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", "head_too_long"),
        (b"NONSENSE\r\n\r\n", "malformed_http"),
        (b"GET / HTTP/9.9.9\r\nhost: x\r\n\r\n", "malformed_http"),
        (
            b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
            "malformed_http",
        ),
        (
            b"POST /messages HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "malformed_http",
        ),
    ],
    ids=range(7),
)
async def test_http_that_is_not_understood_is_refused_in_a_shape_that_all_clients_read(
    gateway: Client, head: bytes, code: str
) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    answer = await reader.read()
    writer.close()
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert lines.split(b" ")[1] == b"400"
    told = json.loads(body)
    assert (told["type"], told["error"]["type"], told["error"]["code"]) == ("error", "invalid_request_error", code)

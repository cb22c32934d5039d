"""The OpenAPI document: every route of the edge is in it, and what is answered is what it says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from gateway.openapi.document import document
from tests.gateways import Client, gateway_for
from tests.openapi_target import script_for
from tests.scripted_engine import Json, ScriptedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT: Json = json.loads(document())
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: list[tuple[str, str, Json | None]] = [
    ("post", "/v1/chat/completions", {"model": "m", "messages": HI}),
    ("post", "/v1/completions", {"model": "m", "prompt": "hi"}),
    ("post", "/v1/responses", {"model": "m", "input": "hi"}),
    ("post", "/v1/messages", {"model": "m", "max_tokens": 4, "messages": HI}),
    ("post", "/v1/messages/count_tokens", {"model": "m", "messages": HI}),
    ("post", "/v1/embeddings", {"model": "m", "input": "hi"}),
    ("post", "/tokenize", {"model": "m", "prompt": "hi"}),
    ("post", "/detokenize", {"model": "m", "tokens": [1]}),
    ("get", "/v1/models", None),
    ("get", "/v1/models/{id}", None),
    ("get", "/v1/responses/{id}", None),
    ("get", "/v1/responses/{id}/input_items", None),
    ("delete", "/v1/responses/{id}", None),
    ("get", "/healthz", None),
    ("get", "/readyz", None),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with ScriptedEngine() as engine:
        engine.script_for = script_for
        async with gateway_for([engine], tmp_path_factory.mktemp("home")) as client:
            yield client


def conforms(value: object, schema: Json) -> None:
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


async def test_it_is_served_to_everybody(gateway: Client) -> None:
    async with gateway.session.get(f"{gateway.url}/openapi.json") as response:
        assert (response.status, await response.json()) == (200, DOCUMENT)
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_answers_and_errors_are_what_it_says(gateway: Client) -> None:
    made = ""
    for method, path, body in ASKED:
        operation = DOCUMENT["paths"][path][method]
        if body is not None:
            conforms(body, operation["requestBody"]["content"]["application/json"]["schema"])
        url = gateway.url + path.replace("{id}", made if "responses" in path else "m")
        async with gateway.session.request(method, url, json=body) as response:
            assert response.status == 200, path
            told = await response.json()
        conforms(told, operation["responses"]["200"]["content"]["application/json"]["schema"])
        made = told["id"] if path == "/v1/responses" else made
        if body is not None:
            async with gateway.session.post(url, json={**body, "model": "unheard-of"}) as response:
                assert response.status == 404
                error = operation["responses"]["default"]["content"]["application/json"]["schema"]
                conforms(await response.json(), error)


async def test_every_endpoint_is_in_it(gateway: Client) -> None:
    told = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == {(method, path) for method, path, _ in ASKED} | {("post", "/v1/responses/{id}/cancel")}

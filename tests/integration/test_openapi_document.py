"""The OpenAPI document: every route of the edge is in it, and what is answered is what it says."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from aiohttp import web

from gateway.http import EdgeOptions, make_app
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
    ("post", "/v1/responses/input_tokens", {"model": "m", "input": "hi"}),
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


_TEAM = "/admin/v1/tenants/{tenant}/teams"
ADMINISTERED: list[tuple[str, str, Json | None]] = [
    ("put", "/admin/v1/tenants/{tenant}", {"models": ["m"]}),
    ("get", "/admin/v1/tenants", None),
    ("put", f"{_TEAM}/{{team}}", {}),
    ("get", _TEAM, None),
    ("post", "/admin/v1/keys", {"id": "m", "tenant": "acme", "team": "red", "expires_at": "90d"}),
    ("get", "/admin/v1/keys", None),
    ("get", "/admin/v1/keys/{id}", None),
    ("put", "/admin/v1/keys/{id}/repairs", {"repairs": ["sort-tools"]}),
    ("post", "/admin/v1/keys/{id}/rotate", {"overlap": "1h"}),
    ("put", "/admin/v1/limits", {"level": "key", "subject": "m", "kind": "tokens", "amount": 1000}),
    ("get", "/admin/v1/limits", None),
    ("delete", "/admin/v1/limits", None),
    ("put", "/admin/v1/aliases", {"level": "team", "subject": "acme/red", "name": "fast", "model": "m"}),
    ("get", "/admin/v1/aliases", None),
    ("delete", "/admin/v1/aliases", None),
    ("post", "/admin/v1/keys/{id}/revoke", None),
    ("get", "/admin/v1/audit", None),
]
_PLACES = {
    "/admin/v1/limits": {"level": "key", "subject": "m", "kind": "tokens"},
    "/admin/v1/aliases": {"level": "team", "subject": "acme/red", "name": "fast"},
}


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


async def test_the_admin_api_is_what_it_says(tmp_path: Path) -> None:
    key = {"id": "root", "secret": "sk-root", "admin": True}
    headers = {"x-api-key": "sk-root"}
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=[key]) as client:
        for method, path, body in ADMINISTERED:
            operation = DOCUMENT["paths"][path][method]
            if body is not None:
                conforms(body, operation["requestBody"]["content"]["application/json"]["schema"])
            url = client.url + path.replace("{id}", "m").replace("{tenant}", "acme").replace("{team}", "red")
            params = _PLACES.get(path, {}) if method == "delete" else {}
            async with client.session.request(method, url, json=body, headers=headers, params=params) as response:
                told = await response.json()
                said = operation["responses"][str(response.status)]
            conforms(told, said["content"]["application/json"]["schema"])
            async with client.session.request(method, url) as response:
                error = operation["responses"]["default"]["content"]["application/json"]["schema"]
                assert response.status == 401
                conforms(await response.json(), error)


async def test_every_route_of_the_gateway_is_in_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[web.Application] = []

    def noted(options: EdgeOptions) -> web.Application:
        made.append(make_app(options))
        return made[-1]

    monkeypatch.setattr("gateway.app.make_app", noted)
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path):
        routes = {(route.method.lower(), _unnamed(route.resource)) for route in made[0].router.routes()}
    told = {
        (method, re.sub(r"{[^}]+}", "{}", path))
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
        if method != "parameters"
    }
    assert told == {route for route in routes if route[0] != "head"} - {("get", "/console/{}")}  # the page of no page


def _unnamed(resource: web.AbstractResource | None) -> str:
    assert resource is not None
    return re.sub(r"{[^}]+}", "{}", resource.canonical)


async def test_what_stands_in_a_path_is_described(gateway: Client) -> None:
    for path, methods in DOCUMENT["paths"].items():
        shared = methods.get("parameters", [])
        for operation in (told for method, told in methods.items() if method != "parameters"):
            named = {each["name"] for each in [*shared, *operation["parameters"]] if each["in"] == "path"}
            assert named == set(re.findall(r"{([^}]+)}", path)), path

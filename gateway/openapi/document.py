"""The document: each endpoint, what it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

import msgspec

from gateway.openapi.admin import ADMIN_SCHEMAS, admin_paths
from gateway.openapi.schemas import SCHEMAS, STRING, Schema, ref

_AT = "Each endpoint is also there without /v1, and behind /c/{label}, which names the agent of its runs."
_KEYED: list[dict[str, list[str]]] = [{"bearer": []}, {"apiKey": []}, {}]
"""Without any key configured everybody on this machine may ask."""

_HEADERS: Mapping[str, Schema] = {
    "x-keepwarm-request-id": {"description": "The request's id, as in bill and trace.", "schema": STRING},
    "x-keepwarm-run": {"description": "The agent run that it is a step of.", "schema": STRING},
    "x-keepwarm-step": {"description": "Which step.", "schema": STRING},
    "x-keepwarm-instance": {"description": "The engine that answered.", "schema": STRING},
    "x-keepwarm-predicted-hit": {"description": "Prompt tokens that were expected to be cached.", "schema": STRING},
    "x-keepwarm-hit": {"description": "Prompt tokens that were cached, of a whole answer.", "schema": STRING},
    "x-keepwarm-cost": {"description": "What a whole answer cost, if shown: amount;currency.", "schema": STRING},
}


@cache
def document() -> bytes:
    """Return the document as JSON."""
    paths: dict[str, dict[str, Schema]] = {
        "/v1/chat/completions": {"post": _generates("ChatRequest", "ChatCompletion", "OpenAI's Chat Completions")},
        "/v1/completions": {"post": _generates("CompletionRequest", "ChatCompletion", "OpenAI's Completions")},
        "/v1/responses": {"post": _generates("ResponsesRequest", "Response", "OpenAI's Responses")},
        "/v1/responses/{id}": {
            "get": _about("Response", "A response that is kept"),
            "delete": _about("DeletedResponse", "Forget a response"),
        },
        "/v1/responses/{id}/input_items": {"get": _about("ItemList", "What a response was asked with")},
        "/v1/responses/{id}/cancel": {"post": _about("Response", "Refused: nothing runs in the background")},
        "/v1/messages": {"post": _generates("MessagesRequest", "Message", "Anthropic's Messages")},
        "/v1/messages/count_tokens": {"post": _asks("CountTokensRequest", "TokenCount", "Count a prompt")},
        "/v1/embeddings": {"post": _asks("EmbeddingsRequest", "Embeddings", "OpenAI's Embeddings", _HEADERS)},
        "/v1/models": {"get": _tells("ModelList", "The models that the key may use")},
        "/v1/models/{id}": {"get": _about("Model", "One model")},
        "/tokenize": {"post": _asks("TokenizeRequest", "Tokens", "A text, or a conversation, as tokens")},
        "/detokenize": {"post": _asks("DetokenizeRequest", "Detokenized", "Tokens as text")},
        "/healthz": {"get": _tells("Status", "Is the process alive", keyed=False)},
        "/readyz": {"get": _ready()},
        **admin_paths(),
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "keepwarm", "version": version("keepwarm"), "description": _AT},
            "paths": paths,
            "components": {
                "schemas": {**SCHEMAS, **ADMIN_SCHEMAS},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _ready() -> Schema:
    operation = _tells("Status", "May requests come here", keyed=False)
    why = {"description": "Why not", "content": {"application/json": {"schema": ref("Status")}}}
    responses = operation["responses"]
    assert isinstance(responses, dict)
    return {**operation, "responses": {**responses, "503": why}}


def _generates(request: str, answer: str, summary: str) -> Schema:
    operation = _asks(request, answer, summary, _HEADERS)
    responses = operation["responses"]
    assert isinstance(responses, dict)
    responses["200"]["content"]["text/event-stream"] = {"schema": {}}  # events of the protocol
    return operation


def _asks(request: str, answer: str, summary: str, headers: Mapping[str, Schema] | None = None) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    return {**_tells(answer, summary, headers), "requestBody": body}


def _about(answer: str, summary: str) -> Schema:
    parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {**_tells(answer, summary), "parameters": [parameter]}


def _tells(answer: str, summary: str, headers: Mapping[str, Schema] | None = None, *, keyed: bool = True) -> Schema:
    said = {"description": summary, "content": {"application/json": {"schema": ref(answer)}}}
    error = {"description": "What went wrong", "content": {"application/json": {"schema": ref("Error")}}}
    return {
        "summary": summary,
        "security": _KEYED if keyed else [],
        "responses": {"200": {**said, **({"headers": headers} if headers else {})}, "default": error},
    }

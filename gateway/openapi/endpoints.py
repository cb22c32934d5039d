"""The part of the document that agents use: each endpoint, what it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.openapi.operations import JSON, in_header, in_path, in_query, json_of, operation
from gateway.openapi.schemas import EVENT, OBJECT, STRING, TEXT, Schema

_OPENAI, _ANTHROPIC, _TOKENS, _TRACING = "OpenAI", "Anthropic", "tokens", "tracing"
_EVENTS: Schema = {"schema": EVENT}

_TOLD: Final[Mapping[str, Schema]] = {
    "x-keepwarm-request-id": {"description": "The request's id, as in bill and trace.", "schema": STRING},
    "x-keepwarm-run": {"description": "The agent run that it is a step of.", "schema": STRING},
    "x-keepwarm-step": {"description": "Which step.", "schema": STRING},
    "x-keepwarm-instance": {"description": "The engine that answered.", "schema": STRING},
    "x-keepwarm-predicted-hit": {"description": "Prompt tokens that were expected to be cached.", "schema": STRING},
    "x-keepwarm-hit": {"description": "Prompt tokens that were cached, of a whole answer.", "schema": STRING},
    "x-keepwarm-cost": {"description": "What a whole answer cost, if shown: amount;currency.", "schema": STRING},
    "x-keepwarm-break": {"description": "What broke the prefix, if that was asked for.", "schema": STRING},
}
_WORD: Schema = {"type": "string", "maxLength": 128, "pattern": "^[ -~]*$"}
_SAID: Final[Sequence[Schema]] = (
    in_header("x-keepwarm-run", _WORD, "The agent run that this is a step of."),
    in_header("x-keepwarm-step-name", STRING, "A label of the step, for trace and bill."),
    in_header("x-keepwarm-parent-run", STRING, "The run that this one works for."),
    in_header("x-keepwarm-run-end", {"enum": ["true", "false", "1", "0"]}, "true: the run's last request."),
    in_header(
        "x-keepwarm-priority",
        {"enum": ["interactive", "normal", "batch"]},
        "Where requests wait for their turn, here or in an engine: which goes first.",
    ),
    in_header(
        "x-keepwarm-min-hit",
        {"type": "string", "pattern": r"^([0-9]{1,9}|0?\.[0-9]{1,6}|[0-9]{1,2}(\.[0-9]{1,4})?%)$"},
        "How much of the prompt must be cached, in tokens or as a share: else the answer is 412.",
    ),
    in_header("x-keepwarm-explain", STRING, "1: tell in x-keepwarm-break what broke the prefix."),
)
_ID = in_path("id")


def endpoint_paths() -> dict[str, dict[str, Schema]]:
    """Return the paths as they are below ``/v1``, and what each takes and answers."""
    response = "/responses/{id}"
    return {
        "/chat/completions": {"post": _generates("ChatRequest", "ChatCompletion", "Chat Completions", _OPENAI)},
        "/completions": {"post": _generates("CompletionRequest", "ChatCompletion", "Completions", _OPENAI)},
        "/responses": {"post": _generates("ResponsesRequest", "Response", "Responses", _OPENAI)},
        response: {
            "get": operation(
                "A response that is kept", _OPENAI, {"200": json_of("Response")},
                parameters=[_ID, in_query("stream", STRING, "Refused where it is true: events are not kept.")],
            ),
            "delete": operation("Forget a response", _OPENAI, {"200": json_of("DeletedResponse")}, parameters=[_ID]),
        },
        f"{response}/input_items": {
            "get": operation(
                "What a response was asked with", _OPENAI, {"200": json_of("ItemList")},
                parameters=[
                    _ID,
                    in_query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "20 where it is not said."),
                    in_query("order", {"enum": ["asc", "desc"]}, "desc where it is not said."),
                    in_query("after", TEXT, "The item before the page."),
                ],
            )
        },
        "/responses/input_tokens": {
            "post": _asks("CountInputRequest", "InputTokens", "Count what a response would be asked with", _OPENAI)
        },
        "/responses/compact": {"post": operation("Refused: no engine could read what it would return", _OPENAI, {})},
        f"{response}/cancel": {
            "post": operation("Refused: nothing runs in the background", _OPENAI, {}, parameters=[_ID])
        },
        "/embeddings": {"post": _asks("EmbeddingsRequest", "Embeddings", "Embeddings", _OPENAI, is_billed=True)},
        "/messages": {"post": _generates("MessagesRequest", "Message", "Messages", _ANTHROPIC)},
        "/messages/count_tokens": {
            "post": _asks("CountTokensRequest", "TokenCount", "Count a prompt", _ANTHROPIC)
        },
        "/models": {"get": operation("The models that the key may use", _OPENAI, {"200": json_of("ModelList")})},
        "/models/{id}": {"get": operation("One model", _OPENAI, {"200": json_of("Model")}, parameters=[_ID])},
        "/tokenize": {"post": _asks("TokenizeRequest", "Tokens", "A text, or a conversation, as tokens", _TOKENS)},
        "/detokenize": {"post": _asks("DetokenizeRequest", "Detokenized", "Tokens as text", _TOKENS)},
    }  # fmt: skip


def span_paths() -> dict[str, dict[str, Schema]]:
    """Return where agents send spans of their own, below ``/v1``: only where the settings have that on."""
    either: dict[str, Schema] = {JSON: {"schema": OBJECT}, "application/x-protobuf": {"schema": {}}}
    return {"/traces": {"post": operation("Spans of agents, OTLP/HTTP", _TRACING, {"200": either}, body=either)}}


LABEL: Final = in_path("label", TEXT, "What the agent calls its runs.")


def _generates(request: str, answer: str, summary: str, tag: str) -> Schema:
    whole_or_streamed = {**json_of(answer), "text/event-stream": _EVENTS}
    return operation(
        f"{tag}'s {summary}",
        tag,
        {"200": whole_or_streamed},
        body=json_of(request),
        headers=_TOLD,
        parameters=_SAID,
    )


def _asks(request: str, answer: str, summary: str, tag: str, *, is_billed: bool = False) -> Schema:
    return operation(
        summary,
        tag,
        {"200": json_of(answer)},
        body=json_of(request),
        headers=_TOLD if is_billed else None,
        parameters=_SAID if is_billed else (),
    )

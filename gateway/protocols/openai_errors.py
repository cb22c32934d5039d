"""Errors in OpenAI's shape, which is also what most engines answer in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gateway.errors import GatewayError, UpstreamUnusable
from gateway.protocols.decode import json_object


@dataclass(frozen=True, slots=True)
class EngineWords:
    """What an engine says of its refusal, whatever shape it said it in."""

    message: str
    kind: str | None = None
    param: object = None
    code: object = None
    envelope: Mapping[str, object] | None = None  # the whole answer, where it is an object


def engine_words(status: int, body: bytes) -> EngineWords:
    """Read an engine's error. Known shapes: OpenAI's and Anthropic's envelopes, SGLang's bare object, FastAPI's."""
    answer = json_object(body)
    if answer is not None:
        inner = answer.get("error")
        told = inner if isinstance(inner, dict) else answer
        message = told.get("message") or told.get("error") or _detail(told.get("detail"))
        if isinstance(message, str):
            kind = told.get("type")
            named = kind if isinstance(kind, str) and kind != "error" else None
            return EngineWords(message, named, told.get("param"), told.get("code"), answer)
        if isinstance(inner, dict):
            return EngineWords(_unexplained(status), envelope=answer)
    return EngineWords(_unexplained(status))


def _detail(detail: object) -> object:
    """Return what FastAPI says of a request that does not validate, as one text: places and what is wrong there."""
    if not isinstance(detail, list):
        return detail
    told = [f"{'.'.join(map(str, d.get('loc') or ()))}: {d.get('msg')}" for d in detail[:8] if isinstance(d, dict)]
    return "; ".join(told) or None


def error_body(error: GatewayError) -> bytes:
    """Return the error as OpenAI's clients expect it."""
    return _body(error.message, error.kind, error.param, error.code)


def engine_error_body(status: int, body: bytes) -> bytes:
    """Return an engine's error in OpenAI's shape; its own body goes through where it has that shape already.

    SGLang answers ``{"object": "error", "message", "type", "param", "code"}`` without the envelope.
    """
    words = engine_words(status, body)
    if words.envelope is not None and isinstance(words.envelope.get("error"), dict) and "type" not in words.envelope:
        return body
    return _body(words.message, words.kind or error_kind(status), words.param, words.code)


class OpenAIShape:
    """What the endpoints of OpenAI's API have in common (a part of ``EndpointProtocol``)."""

    __slots__ = ()
    chat_names: ClassVar[Mapping[str, str]] = {}

    def error_body(self, error: GatewayError, request_id: str | None = None) -> bytes:
        """Return the error as OpenAI's clients expect it."""
        return error_body(error)

    def engine_error_body(self, status: int, body: bytes, request_id: str | None = None) -> bytes:
        """Return an engine's error in OpenAI's shape."""
        return engine_error_body(status, body)

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Return the header that OpenAI's clients show as the request's id."""
        return {"x-request-id": request_id}


def error_class(error: object) -> str:
    """Return a short class for records out of an error object in a stream."""
    kind = (error.get("type") or error.get("code")) if isinstance(error, dict) else None
    return kind[:64] if isinstance(kind, str) else "upstream_error"


def named_status(body: bytes) -> int | None:
    """Return the status that an engine's error names, as engines do that had begun their stream before they knew."""
    error = (json_object(body) or {}).get("error")
    status = error.get("code") if isinstance(error, dict) else None
    return status if isinstance(status, int) else None


def _body(message: str, kind: str, param: object, code: object) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def error_kind(status: int) -> str:
    """Return OpenAI's name for a class of errors."""
    return "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "upstream_error"


def _unexplained(status: int) -> str:
    return f"the engine answered {status} without an explanation that could be read"


GAVE_UP = UpstreamUnusable("the engine gave up on this answer", code="engine_gave_up")
GAVE_UP_BODY = error_body(GAVE_UP)
GAVE_UP_REASONS = frozenset({"abort", "error"})
"""Finish reasons that are no part of OpenAI's API: the engine ended the answer for a reason of its own."""

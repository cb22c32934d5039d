"""Errors as Anthropic's clients expect them: ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.errors import GatewayError, NoThreads
from gateway.protocols.openai_errors import engine_words
from gateway.protocols.sse import named_event

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
NATIVE_KINDS = frozenset({*_KINDS.values(), "api_error"})


def kind_of(status: int) -> str:
    """Return the API's name for a class of errors."""
    return _KINDS.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def error_body(error: GatewayError, request_id: str | None = None) -> bytes:
    """Return an error of the gateway's."""
    details = {"error_code": error.code} if isinstance(error, NoThreads) else None
    return _body(kind_of(error.status), error.message, request_id, details)


def engine_error_body(status: int, body: bytes, request_id: str | None = None) -> bytes:
    """Return an engine's error; its own body goes through where it has the shape already."""
    words = engine_words(status, body)
    if words.envelope is not None and words.envelope.get("type") == "error" and words.kind in NATIVE_KINDS:
        return body
    return _body(kind_of(status), words.message, request_id)


def error_event(body: bytes) -> bytes:
    """Return an error as the last event of a stream."""
    return named_event("error", body)


def _body(kind: str, message: str, request_id: str | None, details: Mapping[str, str] | None = None) -> bytes:
    error = {"type": kind, "message": message, **({} if details is None else {"details": details})}
    return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()

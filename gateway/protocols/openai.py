"""OpenAI's Chat Completions and Completions: what the gateway reads of a request and of an answer, and nothing more.

Everything that isn't read here goes through as it came. What an engine adds to an answer only because the gateway asked
for it (the usage of a stream, hits by tier) is taken out again unless the client asked for it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine_adapter.base import EngineAdapter, Merge
from gateway.errors import BadRequest, GatewayError
from gateway.protocols.form import Form, FormError, Raw, scan, scan_text
from gateway.protocols.sse import data_of, event_of, with_data
from tracing.record import ToolCall

DONE = b"[DONE]"
DONE_EVENT = event_of(DONE)


@dataclass(frozen=True, slots=True)
class Ask:
    """What the gateway needs of a request. ``form`` is the whole of it."""

    form: Form
    endpoint: str  # "chat" or "completions"
    model: str
    stream: bool
    shows_usage: bool  # the client asked for the usage chunk
    shows_detail: bool  # the client asked for hits by tier
    cache_salt: str | None
    messages: Sequence[Mapping[str, object]] | None  # None where they are not a list of objects: the engine will judge
    tools: Sequence[Mapping[str, object]] | None
    prompt: str | Sequence[int] | None

    @property
    def tool_results(self) -> tuple[str, ...]:
        """Ids of the calls whose results came with this request: those after the last assistant message."""
        ids: list[str] = []
        for message in reversed(self.messages or ()):
            if message.get("role") == "assistant":
                break
            if message.get("role") == "tool" and isinstance(identity := message.get("tool_call_id"), str):
                ids.append(identity)
        return tuple(reversed(ids))


def read_ask(body: bytes, endpoint: str) -> Ask:
    """Read a request. Raises ``BadRequest`` for what the gateway cannot work with; the engine judges the rest."""
    try:
        form = scan(body)
    except FormError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    values = form.values
    model, stream, salt = values.get("model"), values.get("stream"), values.get("cache_salt")
    if not isinstance(model, str) or not model:
        raise BadRequest("you must provide a model parameter", param="model", code="missing_model")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("'stream' must be true or false", param="stream")
    if salt is not None and not isinstance(salt, str):
        raise BadRequest("'cache_salt' must be a string", param="cache_salt")
    options = values.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("'stream_options' must be an object", param="stream_options")
    return Ask(
        form=form,
        endpoint=endpoint,
        model=model,
        stream=bool(stream),
        shows_usage=bool(options and options.get("include_usage")),
        shows_detail=bool(values.get("return_cached_tokens_details")),
        cache_salt=salt,
        messages=_objects(values.get("messages")) if endpoint == "chat" else None,
        tools=_objects(values.get("tools")),
        prompt=_prompt(values.get("prompt")) if endpoint == "completions" else None,
    )


def _objects(value: object) -> Sequence[Mapping[str, object]] | None:
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else None


def _prompt(value: object) -> str | Sequence[int] | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    return None


def upstream_body(ask: Ask, members: Mapping[str, object | Merge], original: bytes) -> bytes:
    """Return the body for an engine: the client's bytes with these members set. O(body)."""
    edits: dict[str, object] = {}
    for name, value in members.items():
        if isinstance(value, Merge):
            inner = ask.form.nested(name)
            edits[name] = dict(value.members) if inner is None else Raw(inner.edited(value.members))
        else:
            edits[name] = value
    if not edits:
        return original
    return ask.form.edited(edits).encode()


def error_body(error: GatewayError) -> bytes:
    """Return the error as OpenAI's clients expect it."""
    return json.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    ).encode()


def engine_error_body(status: int, body: bytes) -> bytes:
    """Return an engine's error in OpenAI's shape; its own body goes through where it has that shape already.

    SGLang answers ``{"object": "error", "message", "type", "param", "code"}`` without the envelope.
    """
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    if isinstance(answer, dict):
        if isinstance(answer.get("error"), dict):
            return body
        message = answer.get("message") or answer.get("error") or answer.get("detail")
        if isinstance(message, str):
            inner = {"message": message, "type": answer.get("type") or _kind(status), "param": answer.get("param")}
            return json.dumps({"error": inner | {"code": answer.get("code")}}).encode()
    message = f"the engine answered {status} without an explanation that could be read"
    return json.dumps({"error": {"message": message, "type": _kind(status), "param": None, "code": None}}).encode()


def _kind(status: int) -> str:
    return "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "upstream_error"


@dataclass(slots=True)
class Seen:
    """What was seen of an answer so far."""

    usage: Mapping[str, object] | None = None
    extension: Mapping[str, object] | None = None
    pieces: int = 0  # of a stream: events that brought output
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None  # an error event's class
    _calls: dict[tuple[int, int], list[str]] = field(default_factory=dict)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the model asked for, in order."""
        return tuple(ToolCall(id=i, name=name) for _, (i, name) in sorted(self._calls.items()) if name)

    def call(self, choice: int, index: int, part: Mapping[str, object]) -> None:
        """Add what this piece tells of a call."""
        call = self._calls.setdefault((choice, index), ["", ""])
        function = part.get("function")
        if isinstance(identity := part.get("id"), str):
            call[0] = call[0] or identity
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            call[1] = call[1] or name


class AnswerReader:
    """Follows one answer: remembers what the record needs, and gives the client what it asked for."""

    def __init__(self, adapter: EngineAdapter, *, shows_usage: bool, shows_detail: bool) -> None:
        self._adapter = adapter
        self._shows_usage = shows_usage
        self._hidden = frozenset() if shows_detail else adapter.private_members
        self.seen = Seen()

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Take one event of a stream; return what the client gets of it, and whether it brought output."""
        data = data_of(event)
        if data is None:
            return event, False
        if data.strip() == DONE:
            self.seen.is_done = True
            return event, False
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return event, False
        if not isinstance(chunk, dict):
            return event, False
        if "error" in chunk and "choices" not in chunk:
            self.seen.error = _error_class(chunk["error"])
        has_output = self._choices(chunk.get("choices"), "delta")
        self.seen.pieces += has_output
        return self._shown(event, data, chunk), has_output

    def answer(self, body: bytes) -> bytes:
        """Take a whole answer; return what the client gets of it."""
        try:
            answer = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body
        if not isinstance(answer, dict):
            return body
        self._count(answer)
        self._choices(answer.get("choices"), "message")
        hidden = self._hidden & answer.keys()
        return scan(body).edited({}, drop=frozenset(hidden)).encode() if hidden else body

    def _count(self, answer: Mapping[str, object]) -> None:
        parts = self._adapter.read_usage(answer)
        if parts is not None:
            self.seen.usage = parts.usage or self.seen.usage
            self.seen.extension = parts.extension or self.seen.extension

    def _choices(self, choices: object, part_name: str) -> bool:
        has_output = False
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            if isinstance(reason := choice.get("finish_reason"), str):
                self.seen.finish_reason = reason
            part = choice.get(part_name)
            if isinstance(part, dict):
                has_output = self._message(choice.get("index"), part) or has_output
            elif choice.get("text"):
                has_output = True
        return has_output

    def _message(self, choice_index: object, part: Mapping[str, object]) -> bool:
        calls = part.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                index = call.get("index")
                where = choice_index if isinstance(choice_index, int) else 0
                self.seen.call(where, index if isinstance(index, int) else position, call)
        return bool(part.get("content") or part.get("reasoning_content") or part.get("reasoning") or calls)

    def _shown(self, event: bytes, data: bytes, chunk: Mapping[str, object]) -> bytes:
        self._count(chunk)
        hidden = {name for name in self._hidden if name in chunk}
        if not self._shows_usage and chunk.get("usage") is not None:
            hidden.add("usage")
            if not chunk.get("choices"):
                return b""
        if not hidden:
            return event
        text = data.decode()
        return with_data(event, scan_text(text).edited({}, drop=frozenset(hidden)).encode())


def _error_class(error: object) -> str:
    kind = (error.get("type") or error.get("code")) if isinstance(error, dict) else None
    return kind[:64] if isinstance(kind, str) else "upstream_error"

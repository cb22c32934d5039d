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

MAX_REMEMBERED_CHARS = 1 << 20
"""An answer longer than this isn't remembered for linking the request that will quote it."""

MAX_CALLS = 256
MAX_MODEL_CHARS = 256
_OUTPUT_MEMBERS = ("content", "tool_calls", "reasoning_content", "reasoning")
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
    if len(model) > MAX_MODEL_CHARS:
        raise BadRequest(f"the model's name is longer than {MAX_MODEL_CHARS} characters", param="model")
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
    except (msgspec.DecodeError, RecursionError):
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
class _Call:
    """A tool call as its pieces came."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """What was seen of an answer so far."""

    usage: Mapping[str, object] | None = None
    extension: Mapping[str, object] | None = None
    pieces: int = 0  # of a stream: events that brought output
    finish_reason: str | None = None
    is_done: bool = False
    is_shown: bool = (
        False  # its finish reason went to the client, and the engine's count is here: only the end is missing
    )
    error: str | None = None  # an error event's class
    _calls: dict[tuple[int, int], _Call] = field(default_factory=dict)
    _text: list[str] = field(default_factory=list)
    _remembered_chars: int = 0
    _is_whole: bool = True  # all of the first choice's message is remembered, and there is no other choice

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the model asked for, in order."""
        return tuple(ToolCall(id=call.id, name=call.name) for _, call in sorted(self._calls.items()) if call.name)

    def message(self) -> Mapping[str, object] | None:
        """Return the assistant's message as a client would send it back; ``None`` where it isn't known whole."""
        if not self._is_whole or self.finish_reason is None:
            return None
        message: dict[str, object] = {"role": "assistant", "content": "".join(self._text)}
        if self._calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(c.arguments)}}
                for _, c in sorted(self._calls.items())
            ]
        return message

    def take(self, choice: int, part: Mapping[str, object]) -> None:
        """Add a message, or a piece of one."""
        self._is_whole = self._is_whole and choice == 0
        if isinstance(content := part.get("content"), str) and content:
            self._remember(self._text, content)
        calls = part.get("tool_calls")
        for position, piece in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(piece, dict):
                index = piece.get("index")
                self._take_call(choice, index if isinstance(index, int) else position, piece)

    def _take_call(self, choice: int, index: int, piece: Mapping[str, object]) -> None:
        if len(self._calls) >= MAX_CALLS and (choice, index) not in self._calls:
            self._is_whole = False
            return
        call = self._calls.setdefault((choice, index), _Call())
        if isinstance(identity := piece.get("id"), str):
            call.id = call.id or identity
        function = piece.get("function")
        if isinstance(function, dict):
            if isinstance(name := function.get("name"), str):
                call.name = call.name or name
            if isinstance(arguments := function.get("arguments"), str):
                self._remember(call.arguments, arguments)

    def _remember(self, pieces: list[str], text: str) -> None:
        self._remembered_chars += len(text)
        if self._remembered_chars <= MAX_REMEMBERED_CHARS:
            pieces.append(text)
        else:
            self._is_whole = False


class AnswerReader:
    """Follows one answer: remembers what the record needs, and gives the client what it asked for."""

    def __init__(self, adapter: EngineAdapter, *, shows_usage: bool, shows_detail: bool) -> None:
        self.adapter = adapter
        self._shows_usage = shows_usage
        self._hidden = frozenset() if shows_detail else adapter.private_members
        self.seen = Seen()

    def has_ended(self) -> bool:
        """Tell whether the stream's last event was seen."""
        return self.seen.is_done

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
        except (msgspec.DecodeError, RecursionError):
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
        except (msgspec.DecodeError, RecursionError):
            return body
        if not isinstance(answer, dict):
            return body
        self._count(answer)
        self._choices(answer.get("choices"), "message")
        hidden = self._hidden & answer.keys()
        return scan(body).edited({}, drop=frozenset(hidden)).encode() if hidden else body

    def _count(self, answer: Mapping[str, object]) -> None:
        parts = self.adapter.read_usage(answer)
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
                index = choice.get("index")
                self.seen.take(index if isinstance(index, int) else 0, part)
                has_output = has_output or any(part.get(name) for name in _OUTPUT_MEMBERS)
            elif choice.get("text"):
                has_output = True
        return has_output

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

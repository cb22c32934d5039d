"""What an OpenAI request asks of the engine: bodies decoded, checked, and made one ``Call``.

Everything that a request may name and this engine cannot do is refused by name; fields that it does not know are
ignored, as SGLang does. Source: OpenAI's API reference; SGLang 0.5.23 for ``rid``, ``cache_salt``, ``input_ids``,
``priority``, ``session_id``, ``return_cached_tokens_details`` and ``return_output_ids_in_sglext``. Of our own:
``given_output_ids`` and ``given_parts``, with which an answer that another engine began goes on here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from engine_adapter.embedded.constraint import (
    MAX_PARALLEL_CALLS,
    Grammar,
    ToolSchema,
    json_grammar,
    tool_grammar,
)
from engine_adapter.embedded.errors import RequestError
from engine_adapter.messages import check_tools

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
_FIELD = re.compile(r"`\$\.(\w+)")  # msgspec ends its messages with the place: at `$.messages[0].role`
_MAX_SEED = 2**63 - 1

Json = dict[str, Any]  # decoded JSON at the wire's edge


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What chat and completions share. The defaults are OpenAI's."""

    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    rid: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    return_cached_tokens_details: bool = False
    return_output_ids_in_sglext: bool = False
    given_output_ids: list[int] = []
    given_parts: int = 0
    # what is understood only well enough to refuse it
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    logit_bias: Json | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    regex: str | None = None
    ebnf: str | None = None


class ChatBody(_Body, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    max_completion_tokens: int | None = None
    input_ids: list[int] | None = None
    continue_final_message: bool = False


class CompletionBody(_Body, kw_only=True):
    """The body of ``POST /v1/completions``: one prompt, as text or as token ids."""

    prompt: str | list[Any]  # a text, token ids, or a list of one of these
    echo: bool | None = None
    suffix: str | None = None


ToolUse = Literal["none", "free", "forced"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request, checked. Of ``token_ids``, ``text`` and ``messages`` the first that is there is the prompt.

    ``given_ids``: the answer's first tokens, which another engine generated; ``given_parts``: how many pieces of text
    and calls the client has got of them.
    """

    request_id: str
    model: str
    stream: bool
    include_usage: bool
    cached_details: bool
    output_ids: bool
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    max_tokens: int | None
    salt: str | None
    priority: int
    session: str | None = None
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: Sequence[Json] = ()
    tools: Sequence[Json] | None = None
    tool_use: ToolUse = "none"
    tool_names: frozenset[str] = field(default_factory=frozenset)
    grammar: Grammar | None = None
    given_ids: tuple[int, ...] = ()
    given_parts: int = 0


def read_chat(data: bytes, *, request_id: str | None = None, wants_ids: bool = False) -> Call:
    """Return the call of a chat body. Raises ``RequestError``.

    Of headers: ``request_id`` wins over the body's; ``wants_ids`` asks for the ids of the output like its member does.
    """
    body = _decode(data, ChatBody)
    if body.continue_final_message:
        raise _refused("continue_final_message")
    tools = check_tools(body.tools)
    tool_use, grammar = _tool_use(body, tools)
    if grammar is None:
        grammar = _format_grammar(body.response_format)
        if grammar is not None and tool_use == "free":
            tool_use = "none"  # the format leaves no room for a call
    return _call(
        body,
        request_id,
        wants_ids,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        token_ids=None if body.input_ids is None else tuple(body.input_ids),
        messages=body.messages,
        tools=tools,  # with tool_choice "none" too: a prompt that loses its tools loses its cached prefix with them
        tool_use=tool_use,
        tool_names=frozenset(_tool_schema(tool).name for tool in tools or ()),
        grammar=grammar,
    )


def read_completion(data: bytes, *, request_id: str | None = None, wants_ids: bool = False) -> Call:
    """Return the call of a completion body. Raises ``RequestError``, also for more than one prompt."""
    body = _decode(data, CompletionBody)
    for name, refused in (("echo", body.echo), ("suffix", body.suffix)):
        if refused:
            raise _refused(name)
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise RequestError("one prompt a request; send several requests", param="prompt")
        prompt = prompt[0]
    return _call(
        body,
        request_id,
        wants_ids,
        max_tokens=16 if body.max_tokens is None else body.max_tokens,  # OpenAI's default for completions
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else tuple(_ids(prompt)),
    )


_Decoded = TypeVar("_Decoded", ChatBody, CompletionBody)


def _decode(data: bytes, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = _FIELD.search(str(error))
        raise RequestError(f"the body is not a request: {error}", param=where[1] if where else None) from error


def _call(body: _Body, request_id: str | None, wants_ids: bool, *, max_tokens: int | None, **prompt: Any) -> Call:
    _refuse_unknown_arts(body)
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    _require(0.0 <= temperature <= 2.0, "temperature", "must be between 0 and 2")
    _require(0.0 < top_p <= 1.0, "top_p", "must be above 0 and at most 1")
    _require(max_tokens is None or max_tokens >= 1, "max_tokens", "must be at least 1")
    _require(body.seed is None or abs(body.seed) <= _MAX_SEED, "seed", "must fit 64 bits")
    _require(body.given_parts >= 0, "given_parts", "must not be negative")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _require(len(stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings")
    _require(
        all(len(text) <= MAX_STOP_CHARS for text in stop), "stop", f"takes at most {MAX_STOP_CHARS} characters each"
    )
    return Call(
        request_id=request_id or body.rid or secrets.token_hex(16),
        model=body.model,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        cached_details=body.return_cached_tokens_details,
        output_ids=body.return_output_ids_in_sglext or wants_ids,
        temperature=temperature,
        top_p=top_p,
        seed=body.seed,
        stop=stop,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        max_tokens=max_tokens,
        salt=body.cache_salt or None,
        priority=body.priority or 0,
        session=body.session_id or None,
        given_ids=tuple(body.given_output_ids),
        given_parts=body.given_parts,
        **prompt,
    )


def _refuse_unknown_arts(body: _Body) -> None:
    """Refuse what would change the answer and is not built, so that nobody gets another answer than asked for."""
    arts = {
        "n": body.n not in (None, 1),
        "best_of": body.best_of not in (None, 1),
        "logprobs": body.logprobs not in (None, False),
        "top_logprobs": body.top_logprobs not in (None, 0),
        "logit_bias": bool(body.logit_bias),
        "presence_penalty": body.presence_penalty not in (None, 0.0),
        "frequency_penalty": body.frequency_penalty not in (None, 0.0),
        "repetition_penalty": body.repetition_penalty not in (None, 1.0),
        "top_k": body.top_k not in (None, -1, 0),
        "min_p": body.min_p not in (None, 0.0),
        "min_tokens": body.min_tokens not in (None, 0),
        "ignore_eos": body.ignore_eos,
        "regex": body.regex is not None,
        "ebnf": body.ebnf is not None,
    }
    for name, asked in arts.items():
        if asked:
            raise _refused(name)


def _tool_use(body: ChatBody, tools: Sequence[Json] | None) -> tuple[ToolUse, Grammar | None]:
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError("tool_choice must be none, auto, required or a function", param="tool_choice")
    if not tools:
        _require(choice in (None, "none", "auto"), "tool_choice", "names a tool, but there are no tools")
        return "none", None
    if choice == "none":
        return "none", None
    if choice in (None, "auto"):
        return "free", None
    schemas = [_tool_schema(tool) for tool in tools]
    if choice == "required":
        return "forced", tool_grammar(schemas, max_calls=1 if body.parallel_tool_calls is False else MAX_PARALLEL_CALLS)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    named = [schema for schema in schemas if schema.name == name]
    _require(bool(named), "tool_choice", "names no tool of this request")
    return "forced", tool_grammar(named[:1], max_calls=1)


def _tool_schema(tool: Mapping[str, Any]) -> ToolSchema:
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise RequestError("a tool's parameters must be a schema", param="tools", code="invalid_schema")
    return ToolSchema(function["name"], parameters, strict=bool(function.get("strict")))


def _format_grammar(wanted: Json | None) -> Grammar | None:
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return json_grammar(None)
    if wanted.get("type") != "json_schema":
        raise RequestError("response_format.type must be text, json_object or json_schema", param="response_format")
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("response_format.json_schema.schema must be a schema", param="response_format")
    return json_grammar(schema)


def _ids(prompt: object) -> list[int]:
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise RequestError("the prompt must be text or token ids", param="prompt")
    return prompt


def _refused(name: str) -> RequestError:
    return RequestError(f"this engine does not support {name}", param=name, code="unsupported")


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise RequestError(f"{param} {message}", param=param)

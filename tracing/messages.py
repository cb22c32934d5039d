"""A conversation's identity: one chained hash a message, equal for every client spelling of the same message.

Clients send the same history again and again and spell it a little differently each time: a cache marker moves, a null
content becomes absent, reasoning is stripped, tool arguments are re-serialized, calls get ids of the client's own. The
canonical form keeps what the model was told (role, name, text, tool calls, tool results) and nothing else, so that step
k+1's list starts with step k's list whenever the client only appended. Hashes are one-way and carry no text (privacy),
and content-defined, so equal in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec

DIGEST_BYTES = 16
_LEAST_SAID_BYTES = 60  # "Done." and the like are said by many
_SPELLING = bytes(sign for sign in range(128) if not chr(sign).isalnum())
_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder()
_ROLE_ALIASES = {"developer": "system"}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_NOT_SAID = frozenset({"cache_control", "id", "tool_use_id"})  # no model writes an id, and some clients make their own
_ITEM_LABELS = _NOT_SAID | {"call_id", "status"}
_PLAIN_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning"})  # of Responses; else: as is
_CALLS_AS_TEXT = "Calling tools:\n["  # smolagents sends calls back as the text of a list of Python dictionaries
_CODE_END = "</code>"  # of smolagents' code agent
_ID_IN_TEXT = re.compile(r"\{'id': '([^'\\]{1,128})', 'type': 'function'")


class ChainLink(msgspec.Struct, frozen=True, gc=False):
    """One message of a chain: its role, and the hash of it and of everything before it."""

    role: str
    digest: bytes


MessageChain = tuple[ChainLink, ...]


def message_chain(messages: Iterable[Mapping[str, object]], after: MessageChain = ()) -> MessageChain:
    """The chain of ``messages`` continuing ``after`` (which is part of the result). Cost: linear in the text.

    Messages are OpenAI chat messages, Anthropic messages or Responses items, as decoded from JSON. Never raises on odd
    content: whatever JSON holds has a canonical form.
    """
    links = list(after)
    digest = links[-1].digest if links else b""
    for message in messages:
        role = _role(message)
        digest = blake2b(digest + _ENCODER.encode(_canonical(message, role)), digest_size=DIGEST_BYTES).digest()
        links.append(ChainLink(role, digest))
    return tuple(links)


def tool_result_ids(messages: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """The ids of all tool results in the history, oldest first, and of calls that the assistant is quoted with as text.

    A client that writes calls out as text sends the results as a user's words, without an id.
    """
    found: list[str] = []
    for message in messages:
        candidates = [message.get("tool_call_id") if message.get("role") == "tool" else None]
        if item_role(message.get("type")) == "tool":
            candidates.append(message.get("call_id"))
        content = message.get("content")
        if message.get("role") == "assistant":
            candidates += _ids_in_text(content)
        if isinstance(content, list):
            candidates += [
                part.get("tool_use_id")
                for part in content
                if isinstance(part, Mapping) and part.get("type") == "tool_result"
            ]
        found += [value for value in candidates if isinstance(value, str) and value]
    return tuple(found)


def _ids_in_text(content: object) -> list[str]:
    parts = (
        [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else [content]
    )
    found: list[str] = []
    for text in parts:
        if isinstance(text, str) and (start := text.find(_CALLS_AS_TEXT)) >= 0:
            found += _ID_IN_TEXT.findall(text, start)
    return found


def new_tool_result_ids(messages: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """The ids of the results that this request brings: those after the last word of the assistant."""
    start = len(messages)
    while start and _role(messages[start - 1]) != "assistant":
        start -= 1
    return tool_result_ids(messages[start:])


def last_answer(messages: Sequence[Mapping[str, object]]) -> Mapping[str, object] | None:
    """The assistant's last message."""
    return next((message for message in reversed(messages) if _role(message) == "assistant"), None)


def said_name(message: Mapping[str, object]) -> bytes | None:
    """What an answer is known by whatever stands before it; ``None`` where it is too short to be anybody's own.

    Letters and digits alone: an agent that reads calls in a text may write them anew, with other quotes and spaces.
    """
    encoded = _ENCODER.encode(_canonical(message, "assistant")).translate(None, _SPELLING)
    if len(encoded) < _LEAST_SAID_BYTES:
        return None
    return blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _role(message: Mapping[str, object]) -> str:
    role = message.get("role")
    if isinstance(role, str):
        return _ROLE_ALIASES.get(role, role)
    return item_role(message.get("type"))


def item_role(kind: object) -> str:
    """Whose a Responses item of this type is that isn't a message and so has no role: ``assistant``, ``tool``, or
    nobody's. Each tool has types of its own: ``function_call`` and its ``_output``, ``custom_tool_call``, and so on."""
    if not isinstance(kind, str):
        return ""
    if kind == "reasoning" or kind.endswith("_call"):
        return "assistant"
    return "tool" if kind.endswith("_call_output") else ""


def _canonical(message: Mapping[str, object], role: str) -> list[object]:
    if isinstance(message.get("type"), str) and "role" not in message and message["type"] not in _PLAIN_ITEMS:
        return [role, {name: value for name, value in message.items() if name not in _ITEM_LABELS}]
    content = _content(message.get("content"))
    if role == "assistant":
        content = [words for part in content if (words := _own_words(part) if isinstance(part, str) else part)]
    return [
        role,
        message.get("name") or "",
        content,
        [_call(call) for call in _calls(message)],
        [_arguments(message.get("arguments")), _content(message.get("output"))],
    ]


def _calls(message: Mapping[str, object]) -> Sequence[object]:
    """The calls of a message; ``function_call`` is the one call of the API before there were tools."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        return calls
    function = message.get("function_call")
    return () if function is None else [{"function": function}]


def _content(content: object) -> list[object]:
    """Text as one stripped string, other parts as they are without cache markers and ids, reasoning left out."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [stripped] if (stripped := content.strip()) else []
    if not isinstance(content, list):
        return [content]
    parts: list[object] = []
    for part in content:
        if not isinstance(part, Mapping):
            parts.append(part)
            continue
        kind = str(part.get("type"))  # whatever JSON holds
        if kind in _TEXT_PARTS:
            parts += _content(part.get("text"))
        elif kind not in _REASONING_PARTS:
            kept = {name: value for name, value in part.items() if name not in _NOT_SAID and name != "content"}
            parts.append([kept, _content(part.get("content"))])
    return parts


def _own_words(text: str) -> str:
    """What the model said of a text that it is quoted with: not the calls that an agent appends to it as text, nor the
    mark that ends code, which a model that stops there leaves to the agent."""
    return text.partition(_CALLS_AS_TEXT)[0].strip().removesuffix(_CODE_END).strip()


def _call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping):
        return {name: value for name, value in call.items() if name not in _NOT_SAID}
    return [function.get("name") or "", _arguments(function.get("arguments"))]


def _arguments(arguments: object) -> object:
    """Arguments by value when they are JSON text, so that a client's re-serialization changes nothing."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return _DECODER.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments

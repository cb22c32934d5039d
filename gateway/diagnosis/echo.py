"""Whether a client gives an answer back as it got it: reasoning, words and the spelling of tool calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from gateway.diagnosis.difference import Difference, How
from gateway.diagnosis.sections import Kept
from tracing.detail import BreakKind
from tracing.messages import item_role

Echoed = tuple[str, Difference, int, int, BreakKind]
"""Section, difference, characters kept before and repeated behind it, and its kind: what ``compare.Found`` holds."""

_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")
_TEXT_PARTS = ("text", "output_text", "input_text")


def echo_difference(former: Kept, latter: Kept) -> Echoed | None:
    """Return in what the latter quotes the answer to the former otherwise than it was given; ``None``: in nothing, or
    it is not known. O(conversation)."""
    if former.answer is None:
        return None
    name = latter.conversation_name() or "messages"
    messages, index = latter.conversation(), len(former.conversation())
    quoted = _quoted(messages[index:])
    if not quoted:
        return None
    path, kept = f"{name}[{index}]", sum(len(json.dumps(message)) for message in messages[:index])
    for kind, inner in _differences(former.answer, quoted, path):
        size = len(inner.after) if isinstance(inner.after, str) else 0
        return path, inner, kept, size, kind
    return None


def _quoted(messages: Sequence[object]) -> list[Mapping[str, object]]:
    """Return the messages or items that are the answer's, up to what somebody else says."""
    found: list[Mapping[str, object]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            break
        is_own = "assistant" in (message.get("role"), item_role(message.get("type")))
        if not is_own:
            break
        found.append(message)
    return found


def _differences(
    answer: Mapping[str, object], quoted: Sequence[Mapping[str, object]], path: str
) -> Iterable[tuple[BreakKind, Difference]]:
    thought, said = answer.get("reasoning_content"), answer.get("content")
    if isinstance(thought, str) and thought and not any(map(_has_thought, quoted)):
        yield BreakKind.ECHO_REASONING, Difference(f"{path}.reasoning_content", thought, None, How.REMOVED)
    words = "".join(map(_words, quoted))
    if isinstance(said, str) and said.strip() != words.strip():
        yield BreakKind.ECHO_TEXT, Difference(f"{path}.content", said, words, How.VALUE)
    calls = answer.get("tool_calls")
    given = {call[0]: call[1:] for message in quoted for call in _calls(message, path) if isinstance(call[0], str)}
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        call_id = call.get("id") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(call_id, str) or call_id not in given:
            continue
        where, back = given[call_id]
        arguments = function.get("arguments")
        if isinstance(arguments, str) and isinstance(back, str) and arguments != back:
            kind = BreakKind.ECHO_TOOL_JSON if _value(arguments) == _value(back) else BreakKind.HISTORY_REWRITTEN
            yield kind, Difference(where, arguments, back, How.VALUE)
        elif isinstance(arguments, str) and isinstance(back, Mapping) and _value(arguments) != back:
            yield BreakKind.HISTORY_REWRITTEN, Difference(where, arguments, json.dumps(back), How.VALUE)


def _has_thought(message: Mapping[str, object]) -> bool:
    if message.get("type") == "reasoning":
        return True
    if any(message.get(name) for name in ("reasoning_content", "reasoning", "thinking", "reasoning_details")):
        return True
    content = message.get("content")
    if isinstance(content, str):
        return "</think>" in content
    return any(isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS for part in _parts(content))


def _words(message: Mapping[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [
        part.get("text") for part in _parts(content) if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
    ]
    return "".join(text for text in texts if isinstance(text, str))


def _calls(message: Mapping[str, object], path: str) -> Iterable[tuple[object, str, object]]:
    if message.get("type") == "function_call":
        yield message.get("call_id"), f"{path}.arguments", message.get("arguments")
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield call.get("id"), f"{path}.tool_calls[{index}].function.arguments", function.get("arguments")
    for index, part in enumerate(_parts(message.get("content"))):
        if isinstance(part, Mapping) and part.get("type") == "tool_use":
            yield part.get("id"), f"{path}.content[{index}].input", part.get("input")


def _parts(content: object) -> Sequence[object]:
    return content if isinstance(content, list) else ()


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

"""Messages: OpenAI's chat messages, checked, and brought into the one form that chat templates understand.

What a request may hold and most templates cannot read is settled here, once: ``content`` as a list of text parts,
``null`` content, reasoning under three names, tool-call arguments as a string of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine_adapter.prompt_errors import PromptError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
PART_SEPARATOR = "\n"
"""What stands between the text parts of one message."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def check_messages(
    messages: Sequence[Mapping[str, object]], *, first: int = 0, joins_parts: bool = True
) -> list[dict[str, object]]:
    """Return the messages, their text parts joined. Raises ``PromptError`` for what no template could read.

    ``first`` is the place of ``messages[0]`` in its conversation, for the error's text. Without ``joins_parts`` parts
    stay a list, of text parts in their plainest form: some templates write each by itself.
    """
    if not messages:
        raise PromptError("messages must not be empty")
    return [_check_message(message, f"messages[{at}]", joins_parts) for at, message in enumerate(messages, first)]


def check_tools(tools: Sequence[Mapping[str, object]] | None) -> list[dict[str, object]] | None:
    """Return the tools in the client's order, or ``None``. Raises ``PromptError`` for malformed ones."""
    if not tools:
        return None
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(f"tools[{index}] must be a function with a name", param="tools")
    return [dict(tool) for tool in tools]


def for_model_template(
    messages: Sequence[Mapping[str, object]], *, null_as_empty: bool, parse_arguments: bool = True
) -> list[dict[str, object]]:
    """Return messages as a published template expects them.

    Keys with ``None`` are dropped, as transformers does (``null_as_empty`` keeps an empty ``content``); a reasoning
    text is found under each of its names; arguments are objects where their string is JSON, as SGLang and vLLM pass
    them.
    """
    shaped = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        if null_as_empty:
            kept.setdefault("content", "")
        reasoning = next((message[field] for field in _REASONING_FIELDS if message.get(field) is not None), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        if parse_arguments and isinstance(calls := kept.get("tool_calls"), list):
            kept["tool_calls"] = [_with_object_arguments(call) for call in calls]
        shaped.append(kept)
    return shaped


def tag_end(message: Mapping[str, object], tag: str) -> dict[str, object]:
    """Return the message with ``tag`` behind its content, for ``up_to_tag``. Raises ``PromptError`` without content."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + tag + " "}
    if isinstance(content, list) and content:
        last = {**content[-1], "text": content[-1]["text"] + tag + " "}
        return {**message, "content": [*content[:-1], last]}
    raise PromptError("continue_final_message needs a last message with text")


def up_to_tag(text: str, tag: str) -> str:
    """Cut a rendered chat where the last message's text ends. Raises ``PromptError`` where the template dropped it.

    White space before it stays if the template kept the blank behind the tag, and goes if not (transformers' rule).
    """
    at = text.rfind(tag)
    if at < 0:
        raise PromptError("continue_final_message: the chat template does not show the last message")
    return text[:at] if text.startswith(tag + " ", at) else text[:at].rstrip()


def _check_message(message: Mapping[str, object], where: str, joins_parts: bool) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} must be an object")
    if str(message.get("role")) not in ROLES:  # whatever JSON holds
        raise PromptError(f"{where}.role must be one of {', '.join(sorted(ROLES))}")
    checked = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        checked["content"] = (
            PART_SEPARATOR.join(texts) if joins_parts else [{"type": "text", "text": text} for text in texts]
        )
    elif content is not None and not isinstance(content, str):
        raise PromptError(f"{where}.content must be a string, a list of parts or null")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise PromptError(f"{where}.tool_calls must be a list")
        for index, call in enumerate(calls):
            _check_call(call, f"{where}.tool_calls[{index}]")
    return checked


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise PromptError(f"{where} must be an object")
    if part.get("type") == "refusal" and isinstance(refusal := part.get("refusal"), str):
        return refusal
    if str(part.get("type")) not in _TEXT_PARTS:
        raise PromptError(f"{where}: a part of type {part.get('type')!r} needs a model that reads more than text")
    if not isinstance(text := part.get("text"), str):
        raise PromptError(f"{where}.text must be a string")
    return text


def _check_call(call: object, where: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where}.function must have a name")
    if not isinstance(function.get("arguments", ""), (str, Mapping)):
        raise PromptError(f"{where}.function.arguments must be a string of JSON")


def _with_object_arguments(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call

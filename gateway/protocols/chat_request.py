"""A dialog as the chat completion that engines take.

Text-only content becomes one string, which every engine and every template reads alike; parts stay parts where there
is anything else among them. Members are written in one order, always, so that equal dialogs are equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.protocols.dialog import Answered, Call, Choice, Dialog, File, Format, Image, Part, Said, Text, Tool, Turn
from gateway.protocols.form import Form, form_of

PART_SEPARATOR = "\n"
"""Between the text parts of one message, as ``engine_adapter.messages`` joins parts that arrive as such."""

Json = dict[str, object]


def chat_form(dialog: Dialog) -> Form:
    """Return the dialog as a chat completion's body."""
    members: Json = {"model": dialog.model, "messages": [message_of(turn) for turn in dialog.turns]}
    optional: Json = {
        "tools": [_tool(tool) for tool in dialog.tools] or None,
        "tool_choice": None if dialog.choice is None or _is_idle(dialog) else _choice(dialog.choice),
        "parallel_tool_calls": dialog.is_parallel if dialog.tools else None,
        "max_tokens": dialog.max_tokens,
        "stop": list(dialog.stops) or None,
        "response_format": None if dialog.format is None else _format(dialog.format),
        "reasoning_effort": dialog.effort,
        "user": dialog.user,
        **dialog.sampling,
        **dialog.extras,
        "stream": dialog.stream or None,
    }
    return form_of(members | {name: value for name, value in optional.items() if value is not None})


def message_of(turn: Turn) -> Json:
    """Return a turn as a chat message."""
    if isinstance(turn, Said):
        return {"role": turn.role, "content": content_of(turn.parts)}
    if isinstance(turn, Answered):
        return _assistant(turn)
    return {"role": "tool", "tool_call_id": turn.call_id, "content": content_of(turn.parts)}


def content_of(parts: Sequence[Part]) -> str | list[Json]:
    """Return parts as a message's content."""
    if all(isinstance(part, Text) for part in parts):
        return PART_SEPARATOR.join(part.text for part in parts if isinstance(part, Text))
    return [_part(part) for part in parts]


def _part(part: Part) -> Json:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Image):
        detail = {} if part.detail is None else {"detail": part.detail}
        return {"type": "image_url", "image_url": {"url": part.url, **detail}}
    assert isinstance(part, File)
    name = {} if part.name is None else {"filename": part.name}
    return {"type": "file", "file": {**name, "file_data": part.data}}


def _assistant(turn: Answered) -> Json:
    message: Json = {"role": "assistant", "content": turn.text if turn.text or not turn.calls else None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_call(call) for call in turn.calls]
    return message


def _call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    function |= {"strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _is_idle(dialog: Dialog) -> bool:
    """Tell whether a choice of tools says nothing, since there are none. Responses allow that; engines refuse it."""
    return not dialog.tools and dialog.choice in (Choice("auto"), Choice("none"))


def _choice(choice: Choice) -> str | Mapping[str, object]:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode


def _format(wanted: Format) -> Json:
    if wanted.schema is None:
        return {"type": "json_object"}
    described: Json = {"name": wanted.name, "schema": wanted.schema}
    described |= {} if wanted.strict is None else {"strict": wanted.strict}
    described |= {} if wanted.description is None else {"description": wanted.description}
    return {"type": "json_schema", "json_schema": described}

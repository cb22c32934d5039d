"""Custom tools, whose input is text and no JSON (Codex's ``apply_patch``). No chat completion has a word for them.

An engine gets each as a function of one string; a client gets a call of it, and gives it back, as the tool's own kind.
A grammar for the input is told to the model; an engine holds nobody to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.protocols.dialog import Json, Reading, Tool, arguments_text

CUSTOM: Final = "custom"
CUSTOM_CALL: Final = "custom_tool_call"
"""The types of such a tool, and of an item that calls it."""

_INPUT: Final = "input"
_PARAMETERS: Final[Json] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def function_of(tool: Reading, name: str) -> Tool:
    """Return a custom tool as a function."""
    told, form = tool.maybe_text("description"), tool.object("format")
    if form is not None and form.text("type") == "grammar":
        rule = f"The input is text of this {form.text('syntax')} grammar:\n{form.text('definition')}"
        told = rule if told is None else f"{told}\n\n{rule}"
    return Tool(name, _PARAMETERS, told)


def arguments_of(text: str) -> str:
    """Return a custom tool's input as the function's arguments."""
    return arguments_text({_INPUT: text})


def input_of(arguments: str) -> str:
    """Return what the tool is given when its function is called with these: all of it where a model wrote no object of
    one string."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    given = value.get(_INPUT) if isinstance(value, Mapping) else value
    return given if isinstance(given, str) else arguments

"""The tools of a Responses request: as functions to an engine, under their own names to a client.

A tool may stand in a namespace (``look_up`` in ``crm``), which no chat completion has a word for. An engine gets
a function whose name says both, ``crm__look_up``; a client gets a call of it as it would from the API: the tool's own
name, and the namespace beside it. And tools may be given by an item of the conversation instead of the request. Codex
does both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.protocols.dialog import Json, Reading, Tool
from gateway.protocols.responses.custom_tools import CUSTOM, function_of

FUNCTION: Final = "function"
NAMESPACE: Final = "namespace"
ADDITIONAL: Final = "additional_tools"
"""The type of an item that gives tools, and says nothing."""

_KINDS: Final = (FUNCTION, CUSTOM)
_JOINT: Final = "__"


def functions_of(values: Json, items: Sequence[Json]) -> tuple[Tool, ...]:
    """Return all tools of a request and of the items of its conversation. Of two that an engine would know by one name
    the later counts. Raises ``BadRequest`` for a tool that is no function and cannot be made one."""
    functions = list(_functions(Reading(values)))
    added = [
        function
        for index, item in enumerate(items)
        if item.get("type") == ADDITIONAL
        for function in _functions(Reading(item, f"input[{index}]"))
    ]
    return tuple({tool.name: tool for tool in (*functions, *added)}.values()) if added else tuple(functions)


def given_tools(values: Json, items: Sequence[Json]) -> Sequence[Json]:
    """Return the same tools as they came."""
    giving = [values, *(item for item in items if item.get("type") == ADDITIONAL)]
    return [tool for each in giving for tool in _objects(each.get("tools"))]


def whole_name(namespace: str | None, name: str) -> str:
    """Return what an engine calls a function."""
    return name if namespace is None else f"{namespace}{_JOINT}{name}"


def own_names(tools: Sequence[Json], name: str) -> Mapping[str, object]:
    """Return a called tool's type and name, and its namespace if it has one, from what an engine calls it.

    ``tools``: see ``given_tools``. What is none of them is a function. O(tools).
    """
    for tool in tools:
        if tool.get("type") in _KINDS and tool.get("name") == name:
            return {"type": tool["type"], "name": name}
    for tool in tools:
        if tool.get("type") == NAMESPACE and isinstance(space := tool.get("name"), str):
            for inner in _objects(tool.get("tools")):
                own = inner.get("name")
                if isinstance(own, str) and whole_name(space, own) == name:
                    return {"type": inner.get("type"), "name": own, NAMESPACE: space}
    return {"type": FUNCTION, "name": name}


def _functions(giving: Reading) -> Iterator[Tool]:
    for tool in giving.objects("tools"):
        if tool.values.get("type") == NAMESPACE:
            yield from (_function(inner, tool.text("name")) for inner in tool.objects("tools"))
        else:
            yield _function(tool)


def _function(tool: Reading, namespace: str | None = None) -> Tool:
    kind = tool.text("type")
    if kind not in _KINDS:
        raise tool.refused("type", f"engines here can be given functions and custom tools, and none of type {kind!r}")
    name = whole_name(namespace, tool.text("name"))
    if kind == CUSTOM:
        return function_of(tool, name)
    parameters = tool.object("parameters")
    return Tool(
        name,
        None if parameters is None else parameters.values,
        tool.maybe_text("description"),
        tool.flag("strict"),
    )


def _objects(value: object) -> Sequence[Json]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else ()

"""Functions that stand in a namespace (``crm`` of ``crm``'s ``look_up``), which no chat completion has a word for.

An engine gets each as a function whose name says both, ``crm__look_up``; a client gets a call of it as it would from
the API: the function's own name, and the namespace beside it. Codex sends its tools for sub-agents that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.protocols.responses.custom_tools import CUSTOM

NAMESPACE: Final = "namespace"
FUNCTION: Final = "function"
_KINDS: Final = (FUNCTION, CUSTOM)
_JOINT: Final = "__"


def whole_name(namespace: str | None, name: str) -> str:
    """Return what an engine calls a function."""
    return name if namespace is None else f"{namespace}{_JOINT}{name}"


def own_names(tools: object, name: str) -> Mapping[str, object]:
    """Return a called tool's type and name, and its namespace if it has one, from what an engine calls it.

    ``tools``: a request's, as they came. What is none of them is a function. O(tools).
    """
    given = _objects(tools)
    for tool in given:
        if tool.get("type") in _KINDS and tool.get("name") == name:
            return {"type": tool["type"], "name": name}
    for tool in given:
        if tool.get("type") == NAMESPACE and isinstance(space := tool.get("name"), str):
            for inner in _objects(tool.get("tools")):
                own = inner.get("name")
                if isinstance(own, str) and whole_name(space, own) == name:
                    return {"type": inner.get("type"), "name": own, NAMESPACE: space}
    return {"type": FUNCTION, "name": name}


def _objects(value: object) -> Sequence[Mapping[str, object]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else ()

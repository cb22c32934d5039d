"""Functions that stand in a namespace (``crm`` of ``crm``'s ``look_up``), which no chat completion has a word for.

An engine gets each as a function whose name says both, ``crm__look_up``; a client gets a call of it as it would from
the API: the function's own name, and the namespace beside it. Codex sends its tools for sub-agents that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

NAMESPACE: Final = "namespace"
_JOINT: Final = "__"


def whole_name(namespace: str | None, name: str) -> str:
    """Return what an engine calls a function."""
    return name if namespace is None else f"{namespace}{_JOINT}{name}"


def own_names(tools: object, name: str) -> Mapping[str, object]:
    """Return a called function's name, and its namespace if it has one, from what an engine calls it.

    ``tools``: a request's, as they came. O(tools).
    """
    given = _objects(tools)
    if any(tool.get("type") == "function" and tool.get("name") == name for tool in given):
        return {"name": name}
    for tool in given:
        if tool.get("type") == NAMESPACE and isinstance(space := tool.get("name"), str):
            for inner in _objects(tool.get("tools")):
                own = inner.get("name")
                if isinstance(own, str) and whole_name(space, own) == name:
                    return {"name": own, NAMESPACE: space}
    return {"name": name}


def _objects(value: object) -> Sequence[Mapping[str, object]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else ()

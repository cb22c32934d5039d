"""What engines say in a message, or a delta of one, in each of the ways in which they say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.protocols.dialog import arguments_text

Json = Mapping[str, object]


def finish_reason_of(choice: Json) -> str | None:
    """Return how a choice ended, if it has. An empty reason is none: some engines send that with every chunk."""
    reason = choice.get("finish_reason")
    return reason if isinstance(reason, str) and reason else None


def told_parts(content: object) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a content that is a list of parts, as Mistral's reasoning models write it, and whether each is
    reasoning."""
    for part in _objects(content):
        for thought in _objects(part.get("thinking")):
            if isinstance(text := thought.get("text"), str) and text:
                yield text, True
        if isinstance(text := part.get("text"), str) and text:
            yield text, False


def told_calls(part: Json) -> Sequence[tuple[int, Json]]:
    """Return the calls, or pieces of calls, that a message or delta has, each with its index. A ``function_call`` is
    the one call of the API before there were tools."""
    calls = part.get("tool_calls")
    if isinstance(calls, list):
        pieces = enumerate(_objects(calls))
        return [(index if isinstance(index := piece.get("index"), int) else at, piece) for at, piece in pieces]
    function = part.get("function_call")
    return [(0, {"function": function})] if isinstance(function, dict) else ()


def told_arguments(function: Json) -> str | None:
    """Return the arguments of a call that an engine tells, as JSON text or a piece of it; some engines write them as
    the object that they are."""
    given = function.get("arguments")
    return given if isinstance(given, str) else arguments_text(given) if isinstance(given, dict) else None


def begins_another(call_id: str, name: str, piece: Json) -> bool:
    """Tell whether a piece of a call begins another one than the call of this id and name, at whose index it comes.

    Some engines give all calls of an answer the index 0. Others make up a new id for each piece, but name the call only
    once.
    """
    function, identity = piece.get("function"), piece.get("id")
    is_new = bool(call_id and name and isinstance(identity, str) and identity) and identity != call_id
    return is_new and isinstance(function, dict) and bool(function.get("name"))


def _objects(value: object) -> Sequence[Json]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else ()

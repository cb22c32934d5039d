"""Items of a Responses request as turns of a dialog.

An answer is several items there (reasoning, messages, calls) and one turn here, as engines wrote it. Items of tools
that run at the vendor are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.protocols.dialog import Answered, Call, File, Image, Json, Part, Reading, Result, Said, Text, Turn
from gateway.protocols.responses.custom_tools import CUSTOM_CALL, arguments_of
from gateway.protocols.responses.tools import ADDITIONAL, NAMESPACE, whole_name

_ROLES = frozenset({"user", "system", "developer"})


def turns_of(items: Sequence[Json], where: str = "input") -> Iterator[Turn]:
    """Yield the items' turns. Raises ``BadRequest``, which names the item."""
    for index, item in enumerate(items):
        if item.get("type") != ADDITIONAL:
            yield _turn(Reading(item, f"{where}[{index}]"))


def input_items(values: Json) -> list[dict[str, object]]:
    """Return a request's input as items; a bare text is a user's message."""
    given = values.get("input")
    if given is None and values.get("previous_response_id") is None:
        raise Reading(values).wrong("input", "Field required")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [dict(item.values) for item in Reading(values).objects("input")]


def references(items: Sequence[Json]) -> list[str]:
    """Return the ids of the items that are referred to instead of sent."""
    return [str(item["id"]) for item in items if _is_reference(item)]


def resolved(items: Sequence[Json], found: Mapping[str, Json]) -> list[dict[str, object]]:
    """Return the items with the referred ones in their places. Raises ``BadRequest`` for one that is not kept here."""
    out = []
    for index, item in enumerate(items):
        if _is_reference(item):
            kept = found.get(str(item["id"]))
            if kept is None:
                raise Reading(item, f"input[{index}]").wrong("id", f"Item with id '{str(item['id'])[:128]}' not found.")
            item = kept
        out.append(dict(item))
    return out


def _is_reference(item: Json) -> bool:
    is_bare = item.get("type") is None and "role" not in item
    return (item.get("type") == "item_reference" or is_bare) and isinstance(item.get("id"), str)


def _turn(item: Reading) -> Turn:
    kind = item.maybe_text("type") or "message"
    if kind == "message":
        return _message(item)
    if kind == "function_call":
        name = whole_name(item.maybe_text(NAMESPACE), item.text("name"))
        return Answered(calls=(Call(item.text("call_id"), name, item.text("arguments")),))
    if kind == CUSTOM_CALL:
        name = whole_name(item.maybe_text(NAMESPACE), item.text("name"))
        return Answered(calls=(Call(item.text("call_id"), name, arguments_of(item.text("input"))),))
    if kind in ("function_call_output", f"{CUSTOM_CALL}_output"):
        return Result(item.text("call_id"), _parts(item, "output"))
    if kind == "reasoning":
        told = item.objects("content") or item.objects("summary")
        return Answered(reasoning="".join(part.text("text") for part in told))
    raise item.refused("type", f"engines behind this gateway cannot read an item of type {kind!r}")


def _message(item: Reading) -> Turn:
    role = item.text("role")
    if role == "assistant":
        return Answered("".join(_own_words(item)))
    if role not in _ROLES:
        raise item.wrong("role", "must be user, assistant, system or developer")
    return Said(
        "system" if role == "system" else "developer" if role == "developer" else "user", _parts(item, "content")
    )


def _own_words(item: Reading) -> Iterator[str]:
    content = item.values.get("content")
    if isinstance(content, str):
        yield content
        return
    if content is None:
        raise item.wrong("content", "Field required")
    for part in item.objects("content"):
        kind = part.text("type")
        if kind not in ("output_text", "refusal", "input_text", "text"):
            raise part.refused("type", f"an assistant's part of type {kind!r} cannot be translated")
        yield part.text("refusal" if kind == "refusal" else "text")


def _parts(item: Reading, name: str) -> tuple[Part, ...]:
    content = item.values.get(name)
    if isinstance(content, str):
        return (Text(content),)
    if content is None:
        raise item.wrong(name, "must be a string or a list of parts")
    return tuple(map(_part, item.objects(name)))


def _part(part: Reading) -> Part:
    kind = part.text("type")
    if kind in ("input_text", "output_text", "text"):
        return Text(part.text("text"))
    if kind == "input_image":
        if part.values.get("image_url") is None:
            raise part.refused("file_id", "files that lie at a vendor cannot be read here: send an image_url")
        return Image(part.text("image_url"), part.maybe_text("detail"))
    if kind == "input_file":
        if part.values.get("file_data") is None:
            raise part.refused("file_data", "files that lie elsewhere cannot be read here: send file_data")
        return File(part.text("file_data"), part.maybe_text("filename"))
    raise part.refused("type", f"engines behind this gateway cannot read a part of type {kind!r}")

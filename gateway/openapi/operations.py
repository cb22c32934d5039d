"""What the document's paths are made of: operations with their parameters, bodies and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.openapi.schemas import STRING, TEXT, Schema, ref

JSON: Final = "application/json"
HTML: Final = "text/html"

Content = Mapping[str, Schema]
"""Schemas by media type."""

OPEN: Final[Sequence[Mapping[str, Sequence[str]]]] = ()
"""No key is needed."""
KEYED: Final[Sequence[Mapping[str, Sequence[str]]]] = ({"bearer": ()}, {"apiKey": ()}, {})
"""Without any key configured everybody on this machine may ask."""
PAGED: Final[Sequence[Mapping[str, Sequence[str]]]] = (*KEYED, {"basic": ()})
"""A browser gives the key as its password."""


def json_of(name: str) -> Content:
    """Return JSON of a named schema."""
    return {JSON: {"schema": ref(name)}}


ERROR: Final = json_of("Error")


def in_path(name: str, schema: Schema = TEXT, description: str = "") -> Schema:
    """Return a parameter that is a part of the path."""
    return _parameter(name, "path", schema, description, required=True)


def in_query(name: str, schema: Schema = STRING, description: str = "", *, required: bool = False) -> Schema:
    """Return a parameter behind the question mark."""
    return _parameter(name, "query", schema, description, required=required)


def in_header(name: str, schema: Schema, description: str) -> Schema:
    """Return a header that may be sent."""
    return _parameter(name, "header", schema, description, required=False)


def _parameter(name: str, place: str, schema: Schema, description: str, *, required: bool) -> Schema:
    told: Schema = {"name": name, "in": place, "required": required, "schema": schema}
    return {**told, "description": description} if description else told


def operation(
    summary: str,
    tag: str,
    answers: Mapping[str, Content],
    *,
    security: Sequence[Mapping[str, Sequence[str]]] = KEYED,
    parameters: Sequence[Schema] = (),
    body: Content | None = None,
    body_required: bool = True,
    errors: Content = ERROR,
    headers: Mapping[str, Schema] | None = None,
    why: Mapping[str, str] | None = None,
) -> Schema:
    """Return an operation.

    ``answers``: contents by status, none for an answer without a body; every other status is told in ``errors``.
    ``headers``: of each of the answers. ``why``: what a status means, where that is not the summary.
    """
    told: dict[str, object] = {"default": {"description": "What went wrong", "content": errors}}
    for status, content in answers.items():
        answer: dict[str, object] = {"description": (why or {}).get(status, summary)}
        told[status] = answer | ({"content": content} if content else {}) | ({"headers": headers} if headers else {})
    made: Schema = {
        "summary": summary, "tags": [tag], "security": security, "parameters": parameters, "responses": told,
    }  # fmt: skip
    if body is not None:
        made["requestBody"] = {"required": body_required, "content": body}
    return made

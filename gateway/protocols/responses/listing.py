"""Kept items in pages, as this API lists them: ``limit``, ``order`` and ``after`` stand in the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.errors import BadRequest, NotFound

Json = Mapping[str, object]

USUAL: Final = 20
MOST: Final = 100


def page_of(items: Sequence[Json], query: Mapping[str, str]) -> dict[str, object]:
    """Return a page of items that all have ids, the newest first unless the query says ``asc``.

    Raises ``BadRequest``, and ``NotFound`` for an item to go on behind that is not there.

    Source: OpenAI's API reference, list input items.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit"), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest("'order' must be asc or desc", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise NotFound("'after' is not the id of an item of this response", param="after")
        ordered = ordered[place + 1 :]
    shown = ordered[: USUAL if limit is None else _limit_of(limit)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, "has_more": len(shown) < len(ordered), **ends}


def _limit_of(told: str) -> int:
    number = int(told) if told.isascii() and told.isdigit() and len(told) <= 3 else 0
    if not 1 <= number <= MOST:
        raise BadRequest(f"'limit' must be from 1 to {MOST}", param="limit")
    return number

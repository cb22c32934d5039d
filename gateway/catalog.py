"""The models that a key may use, as OpenAI's and as Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import Sequence

Json = dict[str, object]

_NO_DATE = "1970-01-01T00:00:00Z"  # what is here today may run elsewhere tomorrow: a model has no birthday


def model_list(names: Sequence[str], *, is_anthropic: bool = False) -> Json:
    """Return all of them, in one page."""
    cards = [model_card(name, is_anthropic=is_anthropic) for name in names]
    if not is_anthropic:
        return {"object": "list", "data": cards}
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": cards, "has_more": False, **ends}


def model_card(name: str, *, is_anthropic: bool = False) -> Json:
    """Return one."""
    if not is_anthropic:
        return {"id": name, "object": "model", "created": 0, "owned_by": "keepwarm"}
    return {"type": "model", "id": name, "display_name": name, "created_at": _NO_DATE, "lifecycle": "active"}

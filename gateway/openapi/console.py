"""The part of the document that is for browsers: the console's pages, most of them also as files for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.openapi.operations import ERROR, HTML, JSON, OPEN, PAGED, Content, in_path, in_query, operation
from gateway.openapi.schemas import EVENT, OBJECT, STRING, Schema, listed, members

_TAG = "console"
_HTML: Content = {HTML: {"schema": STRING}}
_FILES: Content = {**_HTML, "text/csv": {"schema": STRING}, JSON: {"schema": OBJECT}}
_ASSETS: Content = {kind: {"schema": STRING} for kind in ("text/css", "text/javascript", "image/svg+xml")}
_ERRORS: Content = {**_HTML, **ERROR}
_FORM: Final = in_query("form", {"enum": ["csv", "json"]}, "What the page shows, as a file.")
_TENANT: Final = in_query("tenant", STRING, "Whose; for administrators.")
_RUN: Final = in_path("run_id")
_WINDOW: Final = in_query("window", {"enum": ["1h", "24h", "7d"]}, "How far back.")
_WORD: Final[Mapping[str, Schema]] = {"word": {"type": "string", "description": "What the page's own form holds."}}


def console_paths() -> dict[str, dict[str, Schema]]:
    """Return the paths and what each takes and answers."""
    root = "/console"
    runs = ("q", "model", "agent", "team", "status", "hit_below", "cost_above", "last", "last_tenant", "last_run")
    return {
        root: {"get": _page("Figures, fleet and what runs now", [_FORM, _windows("15m", "1h", "24h", "7d")])},
        f"{root}/": {"get": operation("Leads there", _TAG, {"308": {}}, security=OPEN)},
        f"{root}/live": {"get": _live()},
        f"{root}/runs": {"get": _page("Runs", [_FORM, _WINDOW, *map(in_query, runs)])},
        f"{root}/runs/{{run_id}}": {
            "get": _page("One run", [_RUN, _TENANT, in_query("page"), in_query("step")], is_file=False)
        },
        f"{root}/runs/{{run_id}}/diff": {
            "get": _page("Two of its steps", [_RUN, _TENANT, in_query("a"), in_query("b")], is_file=False)
        },
        f"{root}/runs/{{run_id}}/records.jsonl": {
            "get": operation(
                "Its records, one a line", _TAG, {"200": {**_HTML, "application/x-ndjson": {"schema": STRING}}},
                security=PAGED, parameters=[_RUN, _TENANT], errors=_ERRORS,
            )
        },
        f"{root}/requests/{{request_id}}": {"get": _page("One request", [in_path("request_id")], is_file=False)},
        f"{root}/breaks": {"get": _page("Lost hits", [_FORM, _TENANT, _WINDOW, in_query("run")])},
        f"{root}/what-if": {
            "get": _page(
                "What would have been hit",
                [_FORM, _TENANT, _WINDOW, *map(in_query, ("run", "policy", "host", "engine"))],
            )
        },
        f"{root}/cost": {"get": _page("Costs", [_FORM, in_query("by"), _windows("24h", "7d", "30d", "all")])},
        **{f"{root}/{name}": {"get": _page(name.capitalize(), [_FORM])}
           for name in ("instances", "stores", "index", "prefixes", "settings")},
        f"{root}/keys": {
            "get": _page("Keys", is_file=False),
            "post": _change("Make a key", _create_form()),
        },
        f"{root}/keys/{{key_id}}/revoke": {
            "post": _change("End a key", members(_WORD), [in_path("key_id")])
        },
        f"{root}/static/{{name}}": {
            "get": operation(
                "Styles and the script", _TAG, {"200": _ASSETS},
                security=OPEN, parameters=[in_path("name")], errors=_ERRORS,
            )
        },
    }  # fmt: skip


def _windows(*names: str) -> Schema:
    return in_query("window", {"enum": list(names)}, "How far back.")


def _page(summary: str, parameters: Sequence[Schema] = (), *, is_file: bool = True) -> Schema:
    answers = {"200": _FILES if is_file else _HTML, "303": {}}
    return operation(
        summary, _TAG, answers, security=PAGED, parameters=parameters, errors=_ERRORS, why={"303": "Another page"}
    )


def _live() -> Schema:
    topics = [in_query("view", {"enum": ["run"]}), in_query("run"), in_query("after"), in_query("window"), _TENANT]
    return operation(
        "What changes of an open page, as server-sent events without an end",
        _TAG,
        {"200": {"text/event-stream": {"schema": EVENT}}},
        security=PAGED,
        parameters=topics,
        errors={**_ERRORS, "text/plain": {"schema": STRING}},
    )


def _create_form() -> Schema:
    words: Mapping[str, Schema] = dict.fromkeys(("id", "tenant", "team", "note"), STRING)
    return members({**_WORD, "id": STRING}, {**words, "role": listed(STRING)})


def _change(summary: str, form: Schema, parameters: Sequence[Schema] = ()) -> Schema:
    return operation(
        summary,
        _TAG,
        {"200": _HTML, "303": {}},
        security=PAGED,
        parameters=parameters,
        body={"application/x-www-form-urlencoded": {"schema": form}},
        errors=_ERRORS,
        why={"303": "It is done: back to the page"},
    )

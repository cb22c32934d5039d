"""The part of the document that is for operators: health, metrics, instances, runs, and requests explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.openapi.operations import JSON, OPEN, in_path, in_query, json_of, operation
from gateway.openapi.schemas import COUNT, FLAG, OBJECT, STRING, TEXT, Schema, listed, maybe, members, ref

_TAG = "operators"
_NAMES = listed(STRING)
_TOKENS_OF_A_RUN: Schema = {"type": ["integer", "null"]}
_ENDPOINTS: Final = {
    "chat": "ChatRequest",
    "completions": "CompletionRequest",
    "responses": "ResponsesRequest",
    "messages": "MessagesRequest",
    "embeddings": "EmbeddingsRequest",
}

OPERATOR_SCHEMAS: Mapping[str, Schema] = {
    "Status": members({"status": STRING}),
    "Instance": members(
        {
            "id": TEXT, "url": STRING, "adapter": STRING, "models": _NAMES, "healthy": FLAG, "draining": FLAG,
            "breaker": STRING, "role": STRING, "trouble": {"type": ["string", "null"]}, "running": COUNT,
            "queued_tokens": COUNT, "tiers": _NAMES,
        },
        {
            "told_load": maybe(OBJECT), "events": {"type": ["string", "null"]}, "predicted": maybe(OBJECT),
            "prediction": OBJECT, "tiers_not_read": _NAMES,
        },
    ),
    "Instances": members({"instances": listed(ref("Instance"))}),
    "Run": members(
        {
            "totals": members(
                {"requests": COUNT, "prompt_tokens": COUNT, "hit_tokens": COUNT, "output_tokens": COUNT,
                 "amount_nano": _TOKENS_OF_A_RUN}
            ),
            "records": listed(members({"request_id": TEXT})),
        }
    ),
    "Explained": members(
        {
            "model": TEXT, "prompt_tokens": maybe(COUNT), "exact": FLAG, "instance": {"type": ["string", "null"]},
            "predicted_hit_tokens": maybe(COUNT), "instances": listed(members({"instance": TEXT})),
            "against": listed(members({"run_id": TEXT, "step": COUNT, "request_id": TEXT, "comparison": STRING})),
        }
    ),
}  # fmt: skip


def operator_paths() -> dict[str, dict[str, Schema]]:
    """Return the paths and what each takes and answers."""
    status, root = json_of("Status"), "/keepwarm/v1"
    instances = {"get": operation("State, load and learned rates", _TAG, {"200": json_of("Instances")})}
    acts = {"post": _acts()}
    either = {"anyOf": [ref(name) for name in _ENDPOINTS.values()]}
    return {
        "/healthz": {"get": operation("Is the process alive", _TAG, {"200": status}, security=OPEN)},
        "/readyz": {
            "get": operation(
                "May requests come here", _TAG, {"200": status, "503": status}, security=OPEN, why={"503": "Why not"}
            )
        },
        "/metrics": {
            "get": operation("Prometheus' text", _TAG, {"200": {"text/plain": {"schema": STRING}}}, security=OPEN)
        },
        "/openapi.json": {"get": operation("This", _TAG, {"200": {JSON: {"schema": OBJECT}}}, security=OPEN)},
        f"{root}/instances": instances,
        "/admin/v1/instances": instances,
        f"{root}/instances/{{id}}/{{action}}": acts,
        "/admin/v1/instances/{id}/{action}": acts,
        f"{root}/runs/{{id}}": {
            "get": operation(
                "One run as JSON", _TAG, {"200": json_of("Run")},
                parameters=[in_path("id"), in_query("tenant", STRING, "Whose; for administrators.")],
            )
        },
        f"{root}/runs/{{id}}/end": {
            "post": operation(
                "A run of this key has ended: what it holds is given to others", _TAG, {"200": json_of("Status")},
                parameters=[in_path("id")],
            )
        },
        f"{root}/explain": {
            "post": operation(
                "Where a request would hit, and where it differs from those before it", _TAG,
                {"200": json_of("Explained")}, body={JSON: {"schema": either}},
                parameters=[in_query("endpoint", {"enum": list(_ENDPOINTS)}, "Whose request it is; chat by default.")],
            )
        },
    }  # fmt: skip


def _acts() -> Schema:
    limit: Schema = {"type": "number", "minimum": 0, "maximum": 86_400}
    return operation(
        "Take an instance out, or back; start one again that this gateway started",
        _TAG,
        {"200": json_of("Instance")},
        parameters=[
            in_path("id"),
            in_path("action", {"enum": ["drain", "resume", "restart"]}),
            in_query("limit_s", limit, "After how many seconds a drain breaks off what still runs."),
        ],
    )

"""The part of the document that is for administrators: ``/admin/v1``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.access.records import LimitKind, Period
from gateway.access.roles import Role
from gateway.limits.rules import Level, Outage
from gateway.openapi.operations import in_path, in_query, json_of, operation
from gateway.openapi.schemas import STRING, TEXT, Schema, listed, maybe, members, ref
from gateway.repair.policies import POLICIES

_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}
_MOMENT = maybe(STRING)
_WHEN: Schema = {
    "anyOf": [
        {"type": "string", "pattern": "^[0-9]{1,6}[smhdw]$", "description": "A span from now."},
        {"type": "string", "format": "date-time"},
        {"type": "null"},
    ]
}
_MODELS = maybe(listed(STRING))
_SHOWN: Schema = {"enum": ["run", "step", "instance", "hit", "predicted-hit", "cost"]}
_LEVEL: Schema = {"enum": [level.value for level in Level]}
_KIND: Schema = {"enum": [kind.value for kind in LimitKind]}
_PERIOD: Schema = {"enum": [period.value for period in Period]}
_OUTAGE: Schema = {"enum": [outage.value for outage in Outage]}
_REPAIR: Schema = {"enum": list(POLICIES)}
_FLAG: Schema = {"type": "boolean"}
_ROLES = listed({"enum": [role.value for role in Role]}, minItems=1)
_AMOUNT: Schema = {
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": 10**9}, {"type": "string", "pattern": "^[0-9]{1,9}$"}]
}


def _strict(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return members(required, optional, additionalProperties=False)


ADMIN_SCHEMAS: Mapping[str, Schema] = {
    "NewKey": _strict(
        {"id": _NAME},
        {
            "tenant": _NAME, "team": _NAME, "roles": _ROLES, "models": _MODELS,
            "answer_headers": maybe(listed(_SHOWN)), "repairs": listed(_REPAIR), "note": STRING,
            "expires_at": _WHEN,
        },
    ),
    "Repairs": _strict({"repairs": listed(_REPAIR)}),
    "Rotation": _strict({}, {"overlap": {"type": "string", "pattern": "^[0-9]{1,6}[smhdw]?$"}}),
    "Group": _strict({}, {"models": _MODELS, "disabled": _FLAG}),
    "NewLimit": _strict(
        {"level": _LEVEL, "subject": TEXT, "kind": _KIND, "amount": _AMOUNT},
        {"period": maybe(_PERIOD), "on_outage": maybe(_OUTAGE)},
    ),
    "Alias": _strict({"level": _LEVEL, "subject": TEXT, "name": TEXT, "model": TEXT}),
    "Key": members(
        {
            "id": _NAME, "tenant": STRING, "team": STRING, "roles": _ROLES, "models": _MODELS,
            "repairs": listed(_REPAIR), "note": STRING,
            "created_at": STRING, "expires_at": _MOMENT, "revoked_at": _MOMENT,
            "secrets": listed(members({"prefix": STRING, "created_at": STRING, "expires_at": _MOMENT})),
        }
    ),
    "Tenant": members({"name": STRING, "models": _MODELS, "disabled": _FLAG, "created_at": STRING}),
    "Team": members({"tenant": STRING, "name": STRING, "models": _MODELS, "disabled": _FLAG, "created_at": STRING}),
    "Limit": members(
        {"level": _LEVEL, "subject": STRING, "kind": _KIND, "period": _PERIOD, "amount": STRING, "on_outage": _OUTAGE}
    ),
    "AuditEntry": members(
        {
            "seq": {"type": "integer"}, "at": STRING, "actor": STRING, "source": STRING, "action": STRING,
            "subject": STRING, "detail": {"type": "object"},
        }
    ),
    "Keys": members({"keys": listed(ref("Key")), "settings": listed(STRING)}),
    "OneKey": members({"key": ref("Key")}),
    "KeyWithSecret": members({"key": ref("Key"), "secret": TEXT}),
    "Tenants": members({"tenants": listed(ref("Tenant"))}),
    "OneTenant": members({"tenant": ref("Tenant")}),
    "Teams": members({"teams": listed(ref("Team"))}),
    "OneTeam": members({"team": ref("Team")}),
    "Limits": members({"limits": listed(ref("Limit"))}),
    "OneLimit": members({"limit": ref("Limit")}),
    "Aliases": members({"aliases": listed(ref("Alias"))}),
    "OneAlias": members({"alias": ref("Alias")}),
    "Removed": members({"removed": {"const": True}}),
    "AuditEntries": members({"entries": listed(ref("AuditEntry"))}),
}  # fmt: skip

_ID, _TENANT, _TEAM = in_path("id"), in_path("tenant"), in_path("team")
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_ON = (in_query("level", _LEVEL, required=True), in_query("subject", TEXT, required=True))
_LIMIT_PLACE = (*_ON, in_query("kind", _KIND, required=True), in_query("period", _PERIOD))
_ALIAS_PLACE = (*_ON, in_query("name", TEXT, required=True))
_PART = (in_query("limit", _COUNT), in_query("before", _COUNT), in_query("subject"))


def admin_paths() -> dict[str, dict[str, Schema]]:
    """Return the paths and what each takes and answers."""
    team = "/admin/v1/tenants/{tenant}/teams"
    return {
        "/admin/v1/keys": {
            "get": _says("Keys", "All keys, without their secrets", [in_query("tenant")]),
            "post": _says("KeyWithSecret", "Make a key; its secret is shown this once", body="NewKey", status="201"),
        },
        "/admin/v1/keys/{id}": {"get": _says("OneKey", "One key", [_ID])},
        "/admin/v1/keys/{id}/repairs": {
            "put": _says("OneKey", "Set the policies of prefix repair for what it sends", [_ID], body="Repairs")
        },
        "/admin/v1/keys/{id}/rotate": {
            "post": _says("KeyWithSecret", "Give it a new secret; what it has stays good for a while", [_ID],
                          body="Rotation")
        },
        "/admin/v1/keys/{id}/revoke": {"post": _says("OneKey", "End it for good", [_ID])},
        "/admin/v1/tenants": {"get": _says("Tenants", "All tenants")},
        "/admin/v1/tenants/{tenant}": {"put": _says("OneTenant", "Make or change one", [_TENANT], body="Group")},
        team: {"get": _says("Teams", "The teams of a tenant", [_TENANT])},
        f"{team}/{{team}}": {"put": _says("OneTeam", "Make or change one", [_TENANT, _TEAM], body="Group")},
        "/admin/v1/limits": {
            "get": _says("Limits", "All limits in the store"),
            "put": _says("OneLimit", "Set what a key, team or tenant may take", body="NewLimit"),
            "delete": _says("Removed", "Remove a limit", _LIMIT_PLACE),
        },
        "/admin/v1/aliases": {
            "get": _says("Aliases", "Names that mean other models"),
            "put": _says("OneAlias", "Let a name mean a model, for a key, team or tenant", body="Alias"),
            "delete": _says("Removed", "Remove an alias", _ALIAS_PLACE),
        },
        "/admin/v1/audit": {"get": _says("AuditEntries", "Every change, newest first", _PART)},
    }  # fmt: skip


def _says(
    answer: str, summary: str, parameters: Sequence[Schema] = (), *, body: str | None = None, status: str = "200"
) -> Schema:
    return operation(
        summary,
        "admin",
        {status: json_of(answer)},
        parameters=parameters,
        body=None if body is None else json_of(body),
        body_required=body is not None and bool(ADMIN_SCHEMAS[body]["required"]),
    )

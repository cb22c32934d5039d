"""What the store holds, as plain values for JSON: the API's answers and the command's ``--json``."""

from __future__ import annotations

from gateway.access.records import Alias, AuditEntry, StoredKey, StoredLimit, Team, Tenant
from gateway.access.words import amount_text, moment_text

Json = dict[str, object]


def shown_key(key: StoredKey) -> Json:
    """Return a key, with the first characters of its secrets."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "team": key.team,
        "roles": [role.value for role in key.roles],
        "models": None if key.models is None else list(key.models),
        "answer_headers": None if key.shows is None else list(key.shows),
        "repairs": list(key.repairs),
        "note": key.note,
        "created_at": moment_text(key.created_ns),
        "expires_at": moment_text(key.expires_ns),
        "revoked_at": moment_text(key.revoked_ns),
        "secrets": [
            {
                "prefix": secret.prefix,
                "created_at": moment_text(secret.created_ns),
                "expires_at": moment_text(secret.expires_ns),
            }
            for secret in key.secrets
        ],
    }


def shown_tenant(tenant: Tenant) -> Json:
    """Return a tenant."""
    models = None if tenant.models is None else list(tenant.models)
    return {
        "name": tenant.name, "models": models, "disabled": tenant.disabled,
        "created_at": moment_text(tenant.created_ns),
    }  # fmt: skip


def shown_team(team: Team) -> Json:
    """Return a team."""
    models = None if team.models is None else list(team.models)
    return {
        "tenant": team.tenant, "name": team.name, "models": models, "disabled": team.disabled,
        "created_at": moment_text(team.created_ns),
    }  # fmt: skip


def shown_limit(limit: StoredLimit) -> Json:
    """Return a limit; money as a decimal number in a text."""
    return {
        "level": limit.subject.level.value,
        "subject": limit.subject.name,
        "kind": limit.kind.value,
        "period": limit.period.value,
        "amount": amount_text(limit.kind, limit.amount),
        "on_outage": limit.on_outage.value,
    }


def shown_alias(alias: Alias) -> Json:
    """Return an alias."""
    return {
        "level": alias.subject.level.value, "subject": alias.subject.name, "name": alias.name, "model": alias.model,
    }  # fmt: skip


def shown_entry(entry: AuditEntry) -> Json:
    """Return a line of the audit log."""
    return {
        "seq": entry.seq,
        "at": moment_text(entry.at_ns),
        "actor": entry.actor,
        "source": entry.source,
        "action": entry.action,
        "subject": entry.subject,
        "detail": dict(entry.detail),
    }

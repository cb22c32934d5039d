"""Reading the store's tables into values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from gateway.access.database import AccessSession
from gateway.access.records import (
    Alias,
    AuditEntry,
    LimitKind,
    Period,
    SecretNote,
    Snapshot,
    StoredKey,
    StoredLimit,
    Subject,
    Team,
    Tenant,
)
from gateway.access.roles import Role
from gateway.limits.rules import Level, Outage
from gateway.repair.policies import in_order

_KEY_COLUMNS = "id, tenant, team, roles, models, shows, note, created_ns, expires_ns, revoked_ns"


def words(roles: Iterable[Role]) -> str:
    """Write roles as one text."""
    return " ".join(sorted({role.value for role in roles}))


def read_keys(session: AccessSession, *, key_id: str | None = None, tenant: str | None = None) -> list[StoredKey]:
    """Return keys by id, with what is known of their secrets."""
    where, values = "", dict[str, str | int | None]()
    if key_id is not None:
        where, values = " WHERE id = :id", {"id": key_id}
    elif tenant is not None:
        where, values = " WHERE tenant = :tenant", {"tenant": tenant}
    notes = defaultdict[str, list[SecretNote]](list)
    one = " WHERE key_id = :id" if key_id is not None else ""
    for owner, prefix, created_ns, expires_ns in session.query(
        f"SELECT key_id, prefix, created_ns, expires_ns FROM access_secrets{one} ORDER BY created_ns, digest",
        {"id": key_id} if key_id is not None else {},
    ):
        notes[owner].append(SecretNote(prefix, created_ns, expires_ns))
    repairs = defaultdict[str, list[str]](list)
    for owner, policy in session.query(
        f"SELECT key_id, policy FROM access_repairs{one}", {"id": key_id} if key_id is not None else {}
    ):
        repairs[owner].append(policy)
    lines = session.query(f"SELECT {_KEY_COLUMNS} FROM access_keys{where} ORDER BY id", values)
    return [
        StoredKey(
            id=line[0],
            tenant=line[1],
            team=line[2],
            roles=tuple(Role(word) for word in line[3].split()),
            models=_list(line[4]),
            shows=_list(line[5]),
            note=line[6],
            created_ns=line[7],
            expires_ns=line[8],
            revoked_ns=line[9],
            secrets=tuple(notes[line[0]]),
            repairs=in_order(repairs[line[0]]),
        )
        for line in lines
    ]


def read_tenants(session: AccessSession) -> list[Tenant]:
    """Return the tenants by name."""
    lines = session.query("SELECT name, models, disabled, created_ns FROM access_tenants ORDER BY name")
    return [Tenant(name, _list(models), bool(disabled), at_ns) for name, models, disabled, at_ns in lines]


def read_teams(session: AccessSession) -> list[Team]:
    """Return the teams by tenant and name."""
    sql = "SELECT tenant, name, models, disabled, created_ns FROM access_teams ORDER BY tenant, name"
    return [
        Team(tenant, name, _list(models), bool(off), at_ns) for tenant, name, models, off, at_ns in session.query(sql)
    ]


def read_limits(session: AccessSession) -> list[StoredLimit]:
    """Return the limits by subject."""
    columns = "level, subject, kind, period"
    sql = f"SELECT {columns}, amount, on_outage FROM access_limits ORDER BY {columns}"
    return [
        StoredLimit(Subject(Level(level), name), LimitKind(kind), Period(period), amount, Outage(outage))
        for level, name, kind, period, amount, outage in session.query(sql)
    ]


def read_aliases(session: AccessSession) -> list[Alias]:
    """Return the aliases by subject."""
    sql = "SELECT level, subject, name, model FROM access_aliases ORDER BY level, subject, name"
    return [Alias(Subject(Level(level), who), name, model) for level, who, name, model in session.query(sql)]


def read_snapshot(session: AccessSession) -> Snapshot:
    """Return everything that decides who may do what. Within one ``reading``."""
    keys = {key.id: key for key in read_keys(session)}
    live = []
    for digest, key_id, expires_ns in session.query("SELECT digest, key_id, expires_ns FROM access_secrets"):
        key = keys.get(key_id)
        if key is not None and key.revoked_ns is None:
            ends = [end for end in (expires_ns, key.expires_ns) if end is not None]
            live.append((digest, min(ends, default=None), key))
    limits = defaultdict[Subject, list[StoredLimit]](list)
    for limit in read_limits(session):
        limits[limit.subject].append(limit)
    aliases = defaultdict[Subject, dict[str, str]](dict)
    for alias in read_aliases(session):
        aliases[alias.subject][alias.name] = alias.model
    return Snapshot(
        version=int(session.query("SELECT version FROM access_state WHERE id = 1")[0][0]),
        keys=tuple(live),
        tenants={tenant.name: tenant for tenant in read_tenants(session)},
        teams={(team.tenant, team.name): team for team in read_teams(session)},
        limits={subject: tuple(some) for subject, some in limits.items()},
        aliases=dict(aliases),
        is_used=bool(keys),
    )


def audit_entries(session: AccessSession, limit: int, before: int | None, subject: str | None) -> list[AuditEntry]:
    """Return entries, newest first."""
    lines = session.query(
        "SELECT seq, at_ns, actor, source, action, subject, detail FROM access_audit"
        " WHERE seq < :before AND (:subject = '' OR subject = :subject) ORDER BY seq DESC LIMIT :limit",
        {"before": 2**62 if before is None else before, "subject": subject or "", "limit": limit},
    )
    return [
        AuditEntry(seq, at_ns, actor, source, action, about, msgspec.json.decode(detail))
        for seq, at_ns, actor, source, action, about, detail in lines
    ]


def _list(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(msgspec.json.decode(text, type=list[str]))

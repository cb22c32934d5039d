"""Keys for people: what the page lists, and what its forms do, through the store of keys and its audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.access.errors import AccessRefused
from gateway.access.records import Actor, AuditEntry, NewKey, StoredKey
from gateway.access.roles import Role
from gateway.access.store import AccessStore
from gateway.console.formats import NOTHING, moment

MAX_AUDIT = 50


@dataclass(frozen=True, slots=True)
class KeyDesk:
    """The store of keys, the ids of those that the settings hold, and what makes a change count at once."""

    store: AccessStore
    fixed: tuple[str, ...] = ()
    changed: Callable[[], Awaitable[object]] | None = None

    def create(self, key_id: str, tenant: str, team: str, roles: Sequence[str], note: str, actor: Actor) -> str:
        """Make a key and return its secret, which is shown this once. Raises ``AccessError``."""
        known = {role.value: role for role in Role}
        if unknown := set(roles) - known.keys():
            raise AccessRefused(f"there is no role {min(unknown)!r}")
        chosen = tuple(known[role] for role in roles)
        new = NewKey(key_id, tenant or "default", team or "default", chosen, note=note)
        return self.store.create_key(new, actor)[1]

    def rows(self, now_ns: int) -> list[KeyRow]:
        """Return the stored keys, those that work first. Raises ``AccessError``."""
        stored = self.store.keys()
        return sorted((key_row(key, now_ns) for key in stored), key=lambda row: (not row.works, row.id))

    def audit(self) -> list[AuditRow]:
        """Return the newest changes. Raises ``AccessError``."""
        return [_audit_row(entry) for entry in self.store.audit(MAX_AUDIT)]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key; nothing of its secret but the first characters."""

    id: str
    tenant: str
    team: str
    roles: str
    models: str
    note: str
    secrets: str
    created: str
    state: str
    works: bool


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One change."""

    when: str
    actor: str
    source: str
    action: str
    subject: str


def key_row(key: StoredKey, now_ns: int) -> KeyRow:
    """Return what the page shows of a key."""
    if key.revoked_ns is not None:
        state = f"revoked {moment(key.revoked_ns)}"
    elif key.expires_ns is not None:
        state = f"{'expired' if key.expires_ns <= now_ns else 'until'} {moment(key.expires_ns)}"
    else:
        state = "good"
    return KeyRow(
        id=key.id,
        tenant=key.tenant,
        team=key.team,
        roles=", ".join(role.value for role in key.roles),
        models="all" if key.models is None else ", ".join(key.models) or "none",
        note=key.note,
        secrets=", ".join(f"{secret.prefix}…" for secret in key.secrets) or NOTHING,
        created=moment(key.created_ns),
        state=state,
        works=key.revoked_ns is None and (key.expires_ns is None or key.expires_ns > now_ns),
    )


def _audit_row(entry: AuditEntry) -> AuditRow:
    return AuditRow(moment(entry.at_ns), entry.actor, entry.source, entry.action, entry.subject)

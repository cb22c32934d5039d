"""The store of keys: tenants, teams, keys, aliases, limits, and what was ever changed in them.

Of a secret the SHA-256 is kept and its first characters, by which people tell keys apart; secrets have 256 random
bits, so that a slow hash would protect nothing. Every change is one transaction with its line in the audit log, and
makes the version larger. Every method blocks (use a thread) and raises ``AccessError``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from gateway.access.database import AccessDatabase, AccessSession
from gateway.access.errors import AccessError, AccessRefused, AccessUnavailable
from gateway.access.reading import (
    audit_entries,
    read_aliases,
    read_keys,
    read_limits,
    read_snapshot,
    read_teams,
    read_tenants,
    words,
)
from gateway.access.records import (
    DEFAULT,
    Actor,
    Alias,
    AuditEntry,
    LimitKind,
    NewKey,
    Period,
    Snapshot,
    StoredKey,
    StoredLimit,
    Subject,
    Team,
    Tenant,
)
from gateway.identity import digest_of, new_secret
from gateway.limits.rules import Level
from gateway.repair.policies import in_order

PREFIX_CHARS = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOTE_CHARS = 256
_MONEY_PERIODS = frozenset({Period.HOUR, Period.DAY, Period.WEEK, Period.MONTH})


class AccessStore:
    """The store. Thread-safe; any number of processes may have it open."""

    def __init__(self, database: AccessDatabase, *, clock: Callable[[], int] = time.time_ns) -> None:
        """Opened at the first use. ``clock`` tells the time in ns."""
        self._database, self._clock = database, clock
        self._lock = threading.Lock()
        self._session: AccessSession | None = None
        self.name = database.name

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._drop()

    # --- reading ---

    def version(self) -> int:
        """Return a number that grows with every change. Cheap."""
        with self._connected() as session:
            return int(session.query("SELECT version FROM access_state WHERE id = 1")[0][0])

    def snapshot(self) -> Snapshot:
        """Return everything that decides who may do what. Cost: linear in what there is."""
        with self._connected() as session, session.reading():
            return read_snapshot(session)

    def keys(self, tenant: str | None = None) -> list[StoredKey]:
        """Return all keys, revoked ones included, by id."""
        with self._connected() as session, session.reading():
            return read_keys(session, tenant=tenant)

    def key(self, key_id: str) -> StoredKey:
        """Return one key. Raises ``AccessRefused`` where there is none."""
        with self._connected() as session, session.reading():
            return _the_key(session, key_id)

    def tenants(self) -> list[Tenant]:
        """Return all tenants that were made, by name."""
        with self._connected() as session:
            return read_tenants(session)

    def teams(self, tenant: str | None = None) -> list[Team]:
        """Return all teams that were made."""
        with self._connected() as session:
            return [team for team in read_teams(session) if tenant in (None, team.tenant)]

    def limits(self) -> list[StoredLimit]:
        """Return every limit, by subject."""
        with self._connected() as session:
            return read_limits(session)

    def aliases(self) -> list[Alias]:
        """Return every alias, by subject."""
        with self._connected() as session:
            return read_aliases(session)

    def audit(self, limit: int = 100, before: int | None = None, subject: str | None = None) -> list[AuditEntry]:
        """Return the newest entries, newest first; ``before``: only those with a smaller number."""
        with self._connected() as session:
            return audit_entries(session, limit, before, subject)

    # --- keys ---

    def create_key(self, new: NewKey, actor: Actor) -> tuple[StoredKey, str]:
        """Make a key; return it and its secret, which is kept nowhere."""
        _check_name(new.id, "key")
        if not new.roles:
            raise AccessRefused("a key needs at least one role")
        with self._changing(actor) as change:
            if change.session.query("SELECT 1 FROM access_keys WHERE id = :id", {"id": new.id}):
                raise AccessRefused(f"there is a key {new.id!r} already")
            _check_team(change.session, new.tenant, new.team)
            change.session.execute(
                "INSERT INTO access_keys (id, tenant, team, roles, models, shows, note, created_ns, expires_ns)"
                " VALUES (:id, :tenant, :team, :roles, :models, :shows, :note, :now, :expires)",
                {
                    "id": new.id, "tenant": new.tenant, "team": new.team, "roles": words(new.roles),
                    "models": _json(new.models), "shows": _json(new.shows), "note": new.note[:_NOTE_CHARS],
                    "now": change.at_ns, "expires": new.expires_ns,
                },
            )  # fmt: skip
            secret = _add_secret(change, new.id)
            repairs = _put_repairs(change.session, new.id, new.repairs)
            roles = [role.value for role in new.roles]
            change.told("key.create", new.id, tenant=new.tenant, team=new.team, roles=roles, repairs=repairs,
                        expires_ns=new.expires_ns)  # fmt: skip
            return _the_key(change.session, new.id), secret

    def rotate_key(self, key_id: str, overlap_s: float, actor: Actor) -> tuple[StoredKey, str]:
        """Give a key a new secret; the ones it has are good for ``overlap_s`` more, or as long as they were."""
        with self._changing(actor) as change:
            if _the_key(change.session, key_id).revoked_ns is not None:
                raise AccessRefused(f"the key {key_id!r} is revoked")
            until = change.at_ns + int(overlap_s * 1e9)
            change.session.execute(
                "UPDATE access_secrets SET expires_ns = :until"
                " WHERE key_id = :id AND (expires_ns IS NULL OR expires_ns > :until)",
                {"id": key_id, "until": until},
            )
            secret = _add_secret(change, key_id)
            change.told("key.rotate", key_id, overlap_s=overlap_s)
            return _the_key(change.session, key_id), secret

    def revoke_key(self, key_id: str, actor: Actor) -> StoredKey:
        """End a key for good. Idempotent; its name is not free again, since bills bear it."""
        with self._changing(actor) as change:
            _the_key(change.session, key_id)
            change.session.execute(
                "UPDATE access_keys SET revoked_ns = :now WHERE id = :id AND revoked_ns IS NULL",
                {"id": key_id, "now": change.at_ns},
            )
            change.told("key.revoke", key_id)
            return _the_key(change.session, key_id)

    def set_repairs(self, key_id: str, repairs: Collection[str], actor: Actor) -> StoredKey:
        """Let these policies of prefix repair, and no others, see to what a key sends."""
        with self._changing(actor) as change:
            _the_key(change.session, key_id)
            change.told("key.repair", key_id, repairs=_put_repairs(change.session, key_id, repairs))
            return _the_key(change.session, key_id)

    # --- tenants and teams ---

    def put_tenant(self, name: str, models: Sequence[str] | None, *, disabled: bool, actor: Actor) -> Tenant:
        """Make or change a tenant. ``models``: what its keys may use at most (``None``: all)."""
        _check_name(name, "tenant")
        with self._changing(actor) as change:
            change.session.execute(
                "INSERT INTO access_tenants (name, models, disabled, created_ns) VALUES (:name, :models, :off, :now)"
                " ON CONFLICT (name) DO UPDATE SET models = excluded.models, disabled = excluded.disabled",
                {"name": name, "models": _json(models), "off": int(disabled), "now": change.at_ns},
            )
            change.told("tenant.put", name, models=models, disabled=disabled)
            return next(tenant for tenant in read_tenants(change.session) if tenant.name == name)

    def put_team(self, tenant: str, name: str, models: Sequence[str] | None, *, disabled: bool, actor: Actor) -> Team:
        """Make or change a team of a tenant."""
        _check_name(name, "team")
        with self._changing(actor) as change:
            _check_tenant(change.session, tenant)
            change.session.execute(
                "INSERT INTO access_teams (tenant, name, models, disabled, created_ns)"
                " VALUES (:tenant, :name, :models, :off, :now) ON CONFLICT (tenant, name)"
                " DO UPDATE SET models = excluded.models, disabled = excluded.disabled",
                {"tenant": tenant, "name": name, "models": _json(models), "off": int(disabled), "now": change.at_ns},
            )
            change.told("team.put", f"{tenant}/{name}", models=models, disabled=disabled)
            teams = read_teams(change.session)
            return next(team for team in teams if (team.tenant, team.name) == (tenant, name))

    # --- limits and aliases ---

    def set_limit(self, limit: StoredLimit, actor: Actor) -> None:
        """Set a limit of a subject, in the place of one of its kind and period."""
        _check_period(limit)
        with self._changing(actor) as change:
            _check_subject(change.session, limit.subject)
            change.session.execute(
                "INSERT INTO access_limits (level, subject, kind, period, amount, on_outage)"
                " VALUES (:level, :subject, :kind, :period, :amount, :outage)"
                " ON CONFLICT (level, subject, kind, period)"
                " DO UPDATE SET amount = excluded.amount, on_outage = excluded.on_outage",
                {
                    **_place(limit.subject), "kind": limit.kind.value, "period": limit.period.value,
                    "amount": limit.amount, "outage": limit.on_outage.value,
                },
            )  # fmt: skip
            said = {"kind": limit.kind.value, "period": limit.period.value, "amount": limit.amount}
            change.told("limit.set", _shown(limit.subject), **said, on_outage=limit.on_outage.value)

    def remove_limit(self, subject: Subject, kind: LimitKind, period: Period, actor: Actor) -> None:
        """Remove a limit. Raises ``AccessRefused`` where there is none."""
        with self._changing(actor) as change:
            found = change.session.execute(
                "DELETE FROM access_limits WHERE level = :level AND subject = :subject AND kind = :kind"
                " AND period = :period",
                {**_place(subject), "kind": kind.value, "period": period.value},
            )
            if not found:
                raise AccessRefused("there is no such limit", is_missing=True)
            change.told("limit.remove", _shown(subject), kind=kind.value, period=period.value)

    def set_alias(self, subject: Subject, name: str, model: str | None, actor: Actor) -> None:
        """Let a name mean a model for a subject; ``None``: no longer."""
        if not name or len(name) > 256 or (model is not None and not model):
            raise AccessRefused("an alias has a name and a model, of at most 256 characters")
        with self._changing(actor) as change:
            _check_subject(change.session, subject)
            at = {**_place(subject), "name": name}
            where = "level = :level AND subject = :subject AND name = :name"
            found = change.session.execute(f"DELETE FROM access_aliases WHERE {where}", at)
            if model is not None:
                change.session.execute(
                    "INSERT INTO access_aliases (level, subject, name, model) VALUES (:level, :subject, :name, :model)",
                    {**at, "model": model},
                )
            elif not found:
                raise AccessRefused("there is no such alias", is_missing=True)
            change.told("alias.remove" if model is None else "alias.set", _shown(subject), name=name, model=model)

    # --- how ---

    @contextmanager
    def _connected(self) -> Iterator[AccessSession]:
        """Use the connection; one that failed is not used again."""
        with self._lock:
            try:
                if self._session is None:
                    self._session = self._database.open()
                yield self._session
            except AccessRefused:
                raise
            except AccessError:
                self._drop()
                raise

    @contextmanager
    def _changing(self, actor: Actor) -> Iterator[_Change]:
        with self._connected() as session, session.writing():
            if not session.execute("UPDATE access_state SET version = version + 1 WHERE id = 1"):
                raise AccessUnavailable(f"the store of keys {self.name} is not whole")
            yield _Change(session, self._clock(), actor)

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class _Change:
    """A transaction that changes something, and notes it."""

    def __init__(self, session: AccessSession, at_ns: int, actor: Actor) -> None:
        self.session, self.at_ns, self._actor = session, at_ns, actor

    def told(self, action: str, subject: str, **detail: object) -> None:
        self.session.execute(
            "INSERT INTO access_audit (at_ns, actor, source, action, subject, detail)"
            " VALUES (:at, :actor, :source, :action, :subject, :detail)",
            {
                "at": self.at_ns, "actor": self._actor.name[:128], "source": self._actor.source[:128],
                "action": action, "subject": subject, "detail": msgspec.json.encode(detail).decode(),
            },
        )  # fmt: skip


def _add_secret(change: _Change, key_id: str) -> str:
    secret = new_secret()
    change.session.execute(
        "INSERT INTO access_secrets (digest, key_id, prefix, created_ns) VALUES (:digest, :id, :prefix, :now)",
        {"digest": digest_of(secret), "id": key_id, "prefix": secret[:PREFIX_CHARS], "now": change.at_ns},
    )
    return secret


def _put_repairs(session: AccessSession, key_id: str, repairs: Collection[str]) -> tuple[str, ...]:
    policies = in_order(repairs)
    if unknown := set(repairs).difference(policies):
        raise AccessRefused(f"there is no policy {min(unknown)!r} of prefix repair")
    session.execute("DELETE FROM access_repairs WHERE key_id = :id", {"id": key_id})
    for policy in policies:
        row = {"id": key_id, "policy": policy}
        session.execute("INSERT INTO access_repairs (key_id, policy) VALUES (:id, :policy)", row)
    return policies


def _the_key(session: AccessSession, key_id: str) -> StoredKey:
    found = read_keys(session, key_id=key_id)
    if not found:
        raise AccessRefused(f"there is no key {key_id!r}", is_missing=True)
    return found[0]


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise AccessRefused(
            f"a {what}'s name has up to 64 letters, digits, '.', '_', '-' and begins with one of the first two"
        )


def _check_tenant(session: AccessSession, tenant: str) -> None:
    if tenant != DEFAULT and not session.query("SELECT 1 FROM access_tenants WHERE name = :name", {"name": tenant}):
        raise AccessRefused(f"there is no tenant {tenant!r}", is_missing=True)


def _check_team(session: AccessSession, tenant: str, team: str) -> None:
    _check_tenant(session, tenant)
    sql = "SELECT 1 FROM access_teams WHERE tenant = :tenant AND name = :name"
    if team != DEFAULT and not session.query(sql, {"tenant": tenant, "name": team}):
        raise AccessRefused(f"the tenant {tenant!r} has no team {team!r}", is_missing=True)


def _check_subject(session: AccessSession, subject: Subject) -> None:
    """Keys of the settings file can be subjects too, so that a key need not be in the store."""
    if subject.level is Level.TENANT:
        _check_tenant(session, subject.name)
    elif subject.level is Level.TEAM:
        tenant, _, team = subject.name.partition("/")
        _check_team(session, tenant, team)
    else:
        _check_name(subject.name, "key")


def _check_period(limit: StoredLimit) -> None:
    if not 0 <= limit.amount < 1 << 53:
        raise AccessRefused("a limit is at least 0 and below 2**53")
    fits = {LimitKind.MONEY: _MONEY_PERIODS, LimitKind.CONCURRENCY: {Period.NONE}}.get(limit.kind, {Period.MINUTE})
    if limit.period not in fits:
        raise AccessRefused(f"a limit of {limit.kind.value} is for {' or '.join(sorted(p.value for p in fits))}")


def _place(subject: Subject) -> dict[str, str]:
    return {"level": subject.level.value, "subject": subject.name}


def _shown(subject: Subject) -> str:
    return f"{subject.level.value} {subject.name}"


def _json(values: Collection[str] | None) -> str | None:
    return None if values is None else msgspec.json.encode(sorted(values)).decode()

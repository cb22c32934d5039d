"""What every store of keys keeps, in a file and in a server: one suite over both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.access.database import AccessDatabase, SqliteAccess
from gateway.access.errors import AccessError, AccessRefused, AccessUnavailable
from gateway.access.keys import stored_keys
from gateway.access.postgres import postgres_access
from gateway.access.records import Actor, LimitKind, NewKey, Period, StoredLimit, Subject
from gateway.access.roles import Right, Role
from gateway.access.store import AccessStore
from gateway.identity import digest_of
from gateway.limits.rules import Level, Outage, Resource
from tests.samples.postgres import Server

ME = Actor("me", "cli")
NOW_NS = 1_795_000_000 * 10**9
AGENT = Subject(Level.KEY, "agent")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> AccessDatabase:
    if request.param == "sqlite":
        return SqliteAccess(tmp_path / "access.sqlite3")
    server: Server = request.getfixturevalue("postgres")
    return postgres_access(server.database())


@pytest.fixture
def store(database: AccessDatabase) -> Iterator[AccessStore]:
    made = AccessStore(database, clock=lambda: NOW_NS)
    yield made
    made.close()


def limit(kind: LimitKind, amount: int, period: Period, subject: Subject = AGENT) -> StoredLimit:
    return StoredLimit(subject, kind, period, amount, Outage.DENY)


def test_a_snapshot_is_what_was_said(store: AccessStore) -> None:
    assert not store.snapshot().is_used
    store.put_tenant("acme", ["m", "n"], disabled=False, actor=ME)
    store.put_team("acme", "red", ["n", "o"], disabled=False, actor=ME)
    key, secret = store.create_key(NewKey("agent", "acme", "red", (Role.VIEWER, Role.USER), note="é\u2028"), ME)
    assert (key.note, key.created_ns, key.expires_ns) == ("é\u2028", NOW_NS, None)
    store.set_limit(limit(LimitKind.REQUESTS, 60, Period.MINUTE), ME)
    store.set_limit(limit(LimitKind.REQUESTS, 70, Period.MINUTE), ME)  # in its place
    store.set_limit(limit(LimitKind.MONEY, 10**12, Period.MONTH, Subject(Level.TENANT, "acme")), ME)
    store.set_alias(Subject.team("acme", "red"), "fast", "n", ME)
    (made,) = stored_keys(store.snapshot(), {}, "EUR")
    caller = made.caller
    assert (made.digest, caller.models) == (digest_of(secret), frozenset({"n"}))
    assert caller.rights == {Right.INFER, Right.SEE_RUNS}
    assert [(rule.resource, rule.amount, rule.on_outage) for rule in caller.limits] == [
        (Resource.REQUESTS, 70, Outage.DENY)
    ]
    assert [(b.limit, b.currency, b.only) for b in caller.budgets] == [(10**12, "EUR", (("tenant", "acme"),))]
    assert caller.aliases == {"fast": "n"}
    store.put_tenant("acme", None, disabled=True, actor=ME)
    assert stored_keys(store.snapshot(), {}, "EUR") == []


def test_every_change_makes_the_version_larger_and_is_noted_once(store: AccessStore) -> None:
    versions = [store.version()]
    for change in (
        lambda: store.put_tenant("acme", None, disabled=False, actor=ME),
        lambda: store.create_key(NewKey("agent", "acme"), ME),
        lambda: store.rotate_key("agent", 60, ME),
        lambda: store.set_limit(limit(LimitKind.TOKENS, 1, Period.MINUTE), ME),
        lambda: store.remove_limit(AGENT, LimitKind.TOKENS, Period.MINUTE, ME),
        lambda: store.set_repairs("agent", ["sort-tools"], ME),
        lambda: store.revoke_key("agent", ME),
    ):
        change()
        versions.append(store.version())
    assert versions == sorted(set(versions))
    assert len(store.audit()) == len(versions) - 1
    newest = store.audit(2)
    assert [entry.action for entry in newest] == ["key.revoke", "key.repair"]
    assert [entry.action for entry in store.audit(1, before=newest[-1].seq)] == ["limit.remove"]


def test_what_is_refused_changes_nothing(store: AccessStore) -> None:
    store.create_key(NewKey("agent"), ME)
    version, entries = store.version(), len(store.audit())
    for refused in (
        lambda: store.create_key(NewKey("agent"), ME),
        lambda: store.create_key(NewKey("../x"), ME),
        lambda: store.create_key(NewKey("x", "nobody"), ME),
        lambda: store.create_key(NewKey("x", roles=()), ME),
        lambda: store.put_team("nobody", "red", None, disabled=False, actor=ME),
        lambda: store.rotate_key("nobody", 1, ME),
        lambda: store.set_limit(limit(LimitKind.MONEY, 1, Period.MINUTE), ME),
        lambda: store.set_limit(limit(LimitKind.TOKENS, -1, Period.MINUTE), ME),
        lambda: store.remove_limit(AGENT, LimitKind.TOKENS, Period.MINUTE, ME),
        lambda: store.set_alias(AGENT, "fast", None, ME),
        lambda: store.create_key(NewKey("x", repairs=("tidy-up",)), ME),
        lambda: store.set_repairs("agent", ["tidy-up"], ME),
        lambda: store.set_repairs("nobody", ["sort-tools"], ME),
    ):
        with pytest.raises(AccessRefused):
            refused()
    assert (store.version(), len(store.audit())) == (version, entries)


def test_prefix_repair_is_a_keys_own_and_applied_in_one_order(store: AccessStore) -> None:
    store.create_key(NewKey("plain"), ME)
    key, _ = store.create_key(NewKey("agent", repairs=("canonical-keys", "sort-tools", "sort-tools")), ME)
    assert key.repairs == ("sort-tools", "canonical-keys")

    def callers() -> dict[str, tuple[str, ...]]:
        return {made.caller.identity.key_id: made.caller.repairs for made in stored_keys(store.snapshot(), {}, "EUR")}

    assert callers() == {"plain": (), "agent": ("sort-tools", "canonical-keys")}
    store.set_alias(AGENT, "fast", "n", ME)  # a caller with something of its own is made anew
    assert callers()["agent"] == ("sort-tools", "canonical-keys")
    assert store.set_repairs("agent", [], ME).repairs == ()
    assert callers() == {"plain": (), "agent": ()}


def test_secrets_end_with_the_overlap_and_with_their_key(store: AccessStore) -> None:
    _, first = store.create_key(NewKey("agent", expires_ns=NOW_NS + 100 * 10**9), ME)
    _, second = store.rotate_key("agent", 10, ME)
    ends = {digest: expires_ns for digest, expires_ns, _ in store.snapshot().keys}
    assert ends == {digest_of(first): NOW_NS + 10 * 10**9, digest_of(second): NOW_NS + 100 * 10**9}
    store.rotate_key("agent", 3600, ME)  # longer than the first has left: its end stays
    again = {digest: expires_ns for digest, expires_ns, _ in store.snapshot().keys}
    assert again[digest_of(first)] == NOW_NS + 10 * 10**9
    store.revoke_key("agent", ME)
    assert (store.snapshot().keys, store.snapshot().is_used) == ((), True)


def test_processes_that_change_at_once_all_have_their_say(database: AccessDatabase) -> None:
    stores = [AccessStore(database) for _ in range(4)]
    stores[0].version()

    def make(number: int) -> None:
        for n in range(5):
            stores[number].create_key(NewKey(f"k{number}-{n}"), ME)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[0].keys()) == 20
    assert stores[0].version() == 20
    for store in stores:
        store.close()


def test_nobody_edits_the_log(database: AccessDatabase, store: AccessStore) -> None:
    store.put_tenant("acme", None, disabled=False, actor=ME)
    session = database.open()
    for statement in ("UPDATE access_audit SET actor = 'nobody'", "DELETE FROM access_audit"):
        with pytest.raises(AccessError, match="append-only"), session.writing():
            session.execute(statement)
    session.close()
    assert [entry.actor for entry in store.audit()] == ["me"]


def test_a_server_that_went_away_is_used_again_when_it_is_back(postgres: Server) -> None:
    store = AccessStore(postgres_access(postgres.database()))
    store.create_key(NewKey("agent"), ME)
    postgres.kill()
    try:
        with pytest.raises(AccessUnavailable):
            store.version()
    finally:
        postgres.start()
    assert store.version() == 1
    store.close()


def test_tables_are_not_made_where_that_is_not_the_policy(postgres: Server) -> None:
    url = postgres.database()
    with pytest.raises(AccessError, match="keepwarm ledger migrate"):
        AccessStore(postgres_access(url, makes_tables=False)).version()
    postgres_access(url).migrate()
    assert AccessStore(postgres_access(url, makes_tables=False)).version() == 0

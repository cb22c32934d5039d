"""A ring that follows its store, and what it does while that is away."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gateway.access.database import SqliteAccess, SqliteSession
from gateway.access.errors import AccessUnavailable
from gateway.access.keeper import KeeperOptions, KeyKeeper
from gateway.access.records import Actor, NewKey
from gateway.access.store import AccessStore
from gateway.errors import KeysAway, Unauthorized
from gateway.identity import KeyRing

ME = Actor("me", "cli")


class Flaky(SqliteAccess):
    """A store that can be away."""

    is_away = False

    def open(self) -> SqliteSession:
        if Flaky.is_away:
            raise AccessUnavailable("away")
        return super().open()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AccessStore:
    monkeypatch.setattr(Flaky, "is_away", False)
    return AccessStore(Flaky(tmp_path / "access.sqlite3"))


def away(store: AccessStore, is_away: bool) -> None:
    store.close()
    Flaky.is_away = is_away


def keeper_of(store: AccessStore, ring: KeyRing, **more: object) -> KeyKeeper:
    return KeyKeeper(store, ring, fixed=(), rules={}, currency="USD", **more)  # type: ignore[arg-type]


async def test_nobody_is_let_in_while_nobody_knows_whether_there_are_keys(store: AccessStore) -> None:
    ring = KeyRing()
    keeper = keeper_of(store, ring)
    away(store, True)
    await keeper.refresh()
    with pytest.raises(Unauthorized):
        ring.authenticate({"host": "localhost"})
    away(store, False)
    await keeper.refresh()
    assert ring.authenticate({"host": "localhost"}).is_admin  # there are none
    _, secret = store.create_key(NewKey("agent"), ME)
    await keeper.refresh()
    with pytest.raises(Unauthorized):
        ring.authenticate({"host": "localhost"})
    assert ring.authenticate({"x-api-key": secret}).identity.key_id == "agent"
    store.revoke_key("agent", ME)
    await keeper.refresh()
    for headers in ({"host": "localhost"}, {"x-api-key": secret}):  # a last key that goes opens no door
        with pytest.raises(Unauthorized):
            ring.authenticate(headers)
    store.close()


async def test_what_is_known_holds_while_the_store_is_away_up_to_the_limit(
    store: AccessStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gateway.access.keeper")
    now, ring = 0.0, KeyRing()
    keeper = keeper_of(store, ring, options=KeeperOptions(stale_limit_s=30.0), clock=lambda: now)
    _, secret = store.create_key(NewKey("agent"), ME)
    await keeper.refresh()
    away(store, True)
    for moment in (1.0, 29.0):
        now = moment
        await keeper.refresh()
        assert ring.authenticate({"x-api-key": secret})
    now = 31.0
    await keeper.refresh()
    with pytest.raises(KeysAway):
        ring.authenticate({"x-api-key": secret})
    with pytest.raises(Unauthorized):
        ring.authenticate({"x-api-key": "sk-other"})
    away(store, False)
    await keeper.refresh()
    assert ring.authenticate({"x-api-key": secret})
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    store.close()

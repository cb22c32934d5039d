"""Stored keys at the door: let in, rotated, revoked, expired, by role, tenant and team, in every process that looks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from gateway.access.database import SqliteAccess
from gateway.access.records import Actor, NewKey, Subject
from gateway.access.roles import Role
from gateway.access.store import AccessStore
from gateway.app import running
from gateway.errors import SettingsError
from gateway.limits.rules import Level
from gateway.settings import load_settings
from tests.gateways import Client, gateway_for
from tests.scripted_engine import ScriptedEngine

ME = Actor("test", "cli")
FAST = {"access": {"refresh_s": 0.02}}


def store_in(home: Path) -> AccessStore:
    return AccessStore(SqliteAccess(home / "access.sqlite3"))


async def status(client: Client, secret: str, **body: object) -> int:
    async with client.chat({"authorization": f"Bearer {secret}"}, **body) as response:
        await response.read()
        return int(response.status)


async def until_status(client: Client, secret: str, wanted: int) -> None:
    async with asyncio.timeout(10):
        while await status(client, secret) != wanted:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example"])
async def test_nobody_listens_beyond_this_machine_without_a_key(host: str, tmp_path: Path) -> None:
    instances = [{"id": "a", "url": "http://127.0.0.1:9"}]
    flags = {"home": str(tmp_path), "server": {"host": host}, "instances": instances}
    with pytest.raises(SettingsError, match="beyond this machine"):
        async with running(load_settings(flags=flags, environment={})):
            pass


async def test_a_key_is_made_rotated_and_revoked_while_the_gateway_serves(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    _, first = store.create_key(NewKey("agent"), ME)
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, **FAST) as client:
        assert await status(client, first) == 200
        assert await status(client, first + "x") == 401
        _, second = store.rotate_key("agent", 3600, ME)
        await until_status(client, second, 200)
        assert await status(client, first) == 200  # for the overlap
        _, third = store.rotate_key("agent", 0, ME)
        await until_status(client, third, 200)
        assert (await status(client, first), await status(client, second)) == (401, 401)
        store.revoke_key("agent", ME)
        await until_status(client, third, 401)
        assert [row.identity.key_id for row in client.stored()] == ["agent"] * len(client.stored())
    store.close()


async def test_an_expired_key_stops_by_itself(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    _, over = store.create_key(NewKey("over", expires_ns=time.time_ns() - 1), ME)
    _, soon = store.create_key(NewKey("soon", expires_ns=time.time_ns() + 3600 * 10**9), ME)
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path) as client:
        assert await status(client, soon) == 200
        async with client.chat({"x-api-key": over}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "expired_api_key"
    store.close()


async def test_models_are_allowed_by_tenant_team_and_key_together_and_called_by_alias(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put_tenant("acme", ["m", "n"], disabled=False, actor=ME)
    store.put_team("acme", "red", ["m"], disabled=False, actor=ME)
    store.set_alias(Subject.team("acme", "red"), "smart", "m", ME)
    store.set_alias(Subject(Level.TENANT, "acme"), "smart", "n", ME)
    _, red = store.create_key(NewKey("red", tenant="acme", team="red"), ME)
    _, other = store.create_key(NewKey("other", tenant="acme", models=("m",)), ME)
    models = [{"name": "m"}, {"name": "n"}]
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, models=models, **FAST) as client:
        assert await status(client, red) == 200
        assert await status(client, red, model="n") == 403
        assert await status(client, red, model="smart") == 200  # the team's word before the tenant's
        assert engine.asked[-1].json["model"] == "m"
        assert await status(client, other, model="smart") == 403  # its tenant means n
        async with client.session.get(f"{client.url}/v1/models", headers={"x-api-key": red}) as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["m", "smart"]
        store.put_team("acme", "red", ["m"], disabled=True, actor=ME)
        await until_status(client, red, 401)
        assert await status(client, other) == 200
    store.close()


@pytest.mark.parametrize(
    ("role", "chat", "runs", "cost", "instances"),
    [
        (Role.USER, 200, 200, 403, 403),
        (Role.VIEWER, 403, 200, 403, 403),
        (Role.FINANCE, 403, 403, 200, 403),
        (Role.ADMIN, 200, 200, 200, 200),
    ],
)
async def test_what_each_role_may(role: Role, chat: int, runs: int, cost: int, instances: int, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    _, secret = store.create_key(NewKey("k", roles=(role,)), ME)
    store.close()
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path) as client:
        assert await status(client, secret) == chat
        for path, wanted in (("/console/runs", runs), ("/console/cost", cost), ("/keepwarm/v1/instances", instances)):
            async with client.session.get(client.url + path, headers={"x-api-key": secret}) as response:
                assert response.status == wanted, path

"""The admin API: only for admins, strict, counts at once, and everything is in a log that nobody can edit."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import Client, gateway_for
from tests.scripted_engine import ScriptedEngine

ROOT_KEY = {"id": "root", "secret": "sk-root", "admin": True}
PLAIN_KEY = {"id": "plain", "secret": "sk-plain"}
AS_ROOT = {"x-api-key": "sk-root"}
NEVER = {"access": {"refresh_s": 60}}  # what counts at once must not wait for a look


async def call(client: Client, method: str, path: str, body: Any = None, **query: str) -> tuple[int, Any]:
    url = f"{client.url}/admin/v1{path}"
    async with client.session.request(method, url, json=body, headers=AS_ROOT, params=query) as response:
        return response.status, await response.json()


async def chat(client: Client, secret: str, **body: Any) -> int:
    async with client.chat({"authorization": f"Bearer {secret}"}, **body) as response:
        return int(response.status)


async def test_a_tenant_with_a_team_and_a_key_from_its_making_to_its_end(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=[ROOT_KEY], **NEVER) as client:
        assert (await call(client, "PUT", "/tenants/acme", {"models": ["m"]}))[0] == 200
        assert (await call(client, "PUT", "/tenants/acme/teams/red", {}))[0] == 200
        assert (await call(client, "GET", "/tenants/acme/teams"))[1]["teams"][0]["name"] == "red"
        new = {"id": "agent", "tenant": "acme", "team": "red", "note": "nightly", "expires_at": "90d"}
        status, made = await call(client, "POST", "/keys", new)
        assert status == 201
        first = made["secret"]
        assert (made["key"]["secrets"][0]["prefix"], made["key"]["roles"]) == (first[:10], ["user"])
        assert await chat(client, first) == 200

        _, rotated = await call(client, "POST", "/keys/agent/rotate", {"overlap": "0"})
        assert (await chat(client, first), await chat(client, rotated["secret"])) == (401, 200)

        alias = {"level": "team", "subject": "acme/red", "name": "fast", "model": "m"}
        assert (await call(client, "PUT", "/aliases", alias))[0] == 200
        assert await chat(client, rotated["secret"], model="fast") == 200
        place = {name: alias[name] for name in ("level", "subject", "name")}
        assert (await call(client, "DELETE", "/aliases", **place))[0] == 200
        assert await chat(client, rotated["secret"], model="fast") == 403

        limit = {"level": "key", "subject": "agent", "kind": "requests", "amount": 0}
        assert (await call(client, "PUT", "/limits", limit))[1]["limit"]["period"] == "minute"
        assert await chat(client, rotated["secret"]) == 429
        assert (await call(client, "DELETE", "/limits", level="key", subject="agent", kind="requests"))[0] == 200
        money = {"level": "tenant", "subject": "acme", "kind": "money", "amount": "12.50", "period": "day"}
        assert (await call(client, "PUT", "/limits", money))[1]["limit"] == {
            "level": "tenant", "subject": "acme", "kind": "money", "period": "day", "amount": "12.5",
            "on_outage": "deny",
        }  # fmt: skip
        await call(client, "DELETE", "/limits", level="tenant", subject="acme", kind="money", period="day")
        assert await chat(client, rotated["secret"]) == 200

        assert (await call(client, "POST", "/keys/agent/revoke"))[1]["key"]["revoked_at"] is not None
        assert await chat(client, rotated["secret"]) == 401
        assert (await call(client, "POST", "/keys/agent/rotate"))[0] == 409

        _, told = await call(client, "GET", "/audit", limit="100")
        assert [entry["action"] for entry in reversed(told["entries"])] == [
            "tenant.put", "team.put", "key.create", "key.rotate", "alias.set", "alias.remove", "limit.set",
            "limit.remove", "limit.set", "limit.remove", "key.revoke",
        ]  # fmt: skip
        assert {(entry["actor"], entry["source"]) for entry in told["entries"]} == {("root", "127.0.0.1")}
        assert first not in str(told)
        assert rotated["secret"] not in str(told)
        _, newest = await call(client, "GET", "/audit", limit="1", subject="agent")
        assert [entry["action"] for entry in newest["entries"]] == ["key.revoke"]


async def test_only_admins_are_answered(tmp_path: Path) -> None:
    keys = [ROOT_KEY, PLAIN_KEY]
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=keys) as client:
        for method, path in (
            ("GET", "/keys"), ("POST", "/keys"), ("GET", "/keys/x"), ("POST", "/keys/x/rotate"),
            ("POST", "/keys/x/revoke"), ("GET", "/tenants"), ("PUT", "/tenants/x"), ("GET", "/tenants/x/teams"),
            ("PUT", "/tenants/x/teams/y"), ("GET", "/limits"), ("PUT", "/limits"), ("DELETE", "/limits"),
            ("GET", "/aliases"), ("PUT", "/aliases"), ("DELETE", "/aliases"), ("GET", "/audit"),
        ):  # fmt: skip
            for headers, status in (({}, 401), ({"x-api-key": "sk-plain"}, 403)):
                async with client.session.request(method, f"{client.url}/admin/v1{path}", headers=headers) as response:
                    assert response.status == status, (method, path)
        _, told = await call(client, "GET", "/keys")
        assert told == {"keys": [], "settings": ["root", "plain"]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/keys", {"id": "x", "colour": "red"}, 400),
        ("POST", "/keys", {"id": "no spaces"}, 409),
        ("POST", "/keys", {"id": "root"}, 409),
        ("POST", "/keys", {"id": "x", "tenant": "unheard-of"}, 404),
        ("POST", "/keys", {"id": "x", "roles": ["emperor"]}, 400),
        ("POST", "/keys", {"id": "x", "roles": []}, 409),
        ("POST", "/keys", {"id": "x", "expires_at": "someday"}, 400),
        ("POST", "/keys", [], 400),
        ("GET", "/keys/unheard-of", None, 404),
        ("POST", "/keys/unheard-of/revoke", None, 404),
        ("PUT", "/limits", {"level": "key", "subject": "x", "kind": "requests", "amount": -1}, 409),
        ("PUT", "/limits", {"level": "key", "subject": "x", "kind": "requests", "amount": "many"}, 400),
        ("PUT", "/limits", {"level": "key", "subject": "x", "kind": "requests", "amount": 1, "period": "day"}, 409),
        ("PUT", "/limits", {"level": "key", "subject": "x", "kind": "money", "amount": "1e-12"}, 400),
        ("DELETE", "/limits", None, 400),
        ("DELETE", "/aliases", None, 400),
        ("GET", "/audit?limit=all", None, 400),
    ],
)
async def test_what_is_wrong_is_told_and_changes_nothing(
    method: str, path: str, body: Any, status: int, tmp_path: Path
) -> None:
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=[ROOT_KEY]) as client:
        got, told = await call(client, method, path, body)
        assert (got, "message" in told["error"]) == (status, True)
        assert (await call(client, "GET", "/audit"))[1]["entries"] == []


async def test_nobody_edits_the_log(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=[ROOT_KEY]) as client:
        await call(client, "PUT", "/tenants/acme", {})
    with sqlite3.connect(tmp_path / "access.sqlite3") as connection:
        for statement in ("UPDATE access_audit SET actor = 'nobody'", "DELETE FROM access_audit"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)
        stored = "\n".join(connection.iterdump())
    assert "acme" in stored

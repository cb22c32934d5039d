"""Limits, the cache guard and what answers tell, over HTTP, in both APIs' words."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from gateway.access.database import SqliteAccess
from gateway.access.records import Actor, LimitKind, NewKey, Period, StoredLimit, Subject
from gateway.access.store import AccessStore
from gateway.limits.rules import Level, Outage
from tests.gateways import Client, gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer, stream

KEY = {"id": "k", "secret": "sk-k", "team": "red", "tenant": "acme"}
AS_K = {"x-api-key": "sk-k"}
ME = Actor("test", "cli")
PRICES = 'name = "t"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1, hit = 0.1, output = 2 }'


async def messages(client: Client, demand: str | None = None, **body: Any) -> tuple[int, dict[str, str], Any]:
    headers = AS_K if demand is None else {**AS_K, "x-keepwarm-min-hit": demand}
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **body}
    async with client.session.post(f"{client.url}/v1/messages", json=body, headers=headers) as response:
        return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.json()


async def test_a_refusal_is_in_the_callers_protocol_with_what_is_left(tmp_path: Path) -> None:
    limits = [
        {"key": "k", "requests_per_minute": 1000},
        {"tenant": "acme", "team": "red", "requests_per_minute": 3, "tokens_per_minute": 100_000},
    ]
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=[KEY], limits=limits) as client:
        statuses = []
        for _ in range(3):
            async with client.chat(AS_K, max_tokens=50) as response:
                statuses.append(response.status)
                told = {k.lower(): v for k, v in response.headers.items()}
        assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-remaining-requests"]) == ("3", "0")
        assert int(told["x-ratelimit-remaining-tokens"]) < 100_000
        if statuses != [200] * 3:
            pytest.fail(f"the minute changed under way: {statuses}")
        async with client.chat(AS_K) as response:
            body = await response.json()
            assert (response.status, body["error"]["type"], body["error"]["code"]) == (
                429, "rate_limit_error", "rate_limit_exceeded",
            )  # fmt: skip
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        status, headers, body = await messages(client)
        assert (status, body["type"], body["error"]["type"]) == (429, "error", "rate_limit_error")
        assert headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        assert "retry-after" in headers
        assert len(engine.asked) == 3
        async with client.session.get(f"{client.url}/metrics") as response:
            told = await response.text()
        assert 'keepwarm_limited_requests_total{result="admitted"} 3.0' in told
        assert 'keepwarm_limited_requests_total{result="denied"} 2.0' in told


@pytest.mark.requirement("R22")
async def test_no_more_at_once_than_allowed_and_room_again_whatever_became_of_them(tmp_path: Path) -> None:
    limits = [{"key": "k", "concurrency": 2}]
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, keys=[KEY], limits=limits) as client:
        go_on = asyncio.Event()
        engine.script = Script(body=answer("x"), wait_for=go_on)

        async def ask() -> int:
            async with client.chat(AS_K) as response:
                await response.read()
                return int(response.status)

        asking = [asyncio.create_task(ask()) for _ in range(10)]
        async with asyncio.timeout(10):
            refused = [await first for first in itertools.islice(asyncio.as_completed(asking), 8)]
        assert refused == [429] * 8
        await client.until(lambda: len(engine.asked) == 2)
        go_on.set()
        assert sorted(await asyncio.gather(*asking)) == [200] * 2 + [429] * 8
        engine.script = Script(status=500, body={"error": "broken"})
        assert await ask() == 500
        left = asyncio.create_task(ask())
        go_on.clear()
        engine.script = Script(body=answer("x"), wait_for=go_on)
        left.cancel()
        await asyncio.wait({left})
        go_on.set()
        await client.until(lambda: not client.gateway.flights.count)
        assert await asyncio.gather(ask(), ask()) == [200, 200]


async def test_stored_limits_hold_soon_and_money_is_a_budget(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    store = AccessStore(SqliteAccess(tmp_path / "access.sqlite3"))
    _, secret = store.create_key(NewKey("agent"), ME)
    money = StoredLimit(Subject(Level.KEY, "agent"), LimitKind.MONEY, Period.MONTH, 300_000, Outage.DENY)
    store.set_limit(money, ME)
    billing = {"prices": str(prices)}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, billing=billing, access={"refresh_s": 0.02}) as client,
    ):

        async def ask(**body: Any) -> int:
            async with client.chat({"x-api-key": secret}, **body) as response:
                return int(response.status)

        assert await ask(max_tokens=100) == 200
        assert await ask(max_tokens=1000) == 429
        store.remove_limit(Subject(Level.KEY, "agent"), LimitKind.MONEY, Period.MONTH, ME)
        async with asyncio.timeout(10):
            while await ask(max_tokens=1000) != 200:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        none = StoredLimit(Subject(Level.KEY, "agent"), LimitKind.REQUESTS, Period.MINUTE, 0, Outage.DENY)
        store.set_limit(none, ME)
        async with asyncio.timeout(10):
            while await ask() != 429:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
    store.close()


async def test_answers_tell_what_they_hit_and_cost_by_policy(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    shown = ["run", "step", "instance", "hit", "cost"]
    keys = [KEY, {"id": "quiet", "secret": "sk-q", "answer_headers": []}]
    async with (
        ScriptedEngine() as engine,
        gateway_for(
            [engine], tmp_path, keys=keys, billing={"prices": str(prices)},
            server={"answer_headers": shown, "stream_summary": True},
        ) as client,
    ):  # fmt: skip
        engine.script = Script(body=answer("x", prompt=10, output=1, cached=4))
        async with client.chat(AS_K) as response:
            told = {k.lower(): v for k, v in response.headers.items() if k.lower().startswith("x-keepwarm")}
        assert set(told) == {"x-keepwarm-request-id", *(f"x-keepwarm-{name}" for name in shown)}
        assert (told["x-keepwarm-hit"], told["x-keepwarm-cost"]) == ("4", "0.000008400;USD")
        (record,) = await client.records(1)
        assert (record.usage.hit_tokens, record.charge.amount_nano) == (4, 8400)
        async with client.chat({"x-api-key": "sk-q"}) as response:
            assert [name for name in response.headers if name.lower().startswith("x-keepwarm")] == [
                "x-keepwarm-request-id"
            ]
        engine.script = Script(events=stream(["a", "b"], cached=3))
        async with client.chat(AS_K, stream=True) as response:
            body = (await response.read()).decode()
            assert "x-keepwarm-hit" not in response.headers
        last = body.rstrip("\n").splitlines()[-1]
        assert last == ": keepwarm hit=3 cost=0.000011300;USD"


DEMANDS = [
    ("0", 200, None), ("0%", 200, None), ("1", 412, "prefix_cold"), ("80%", 412, "prefix_cold"),
    ("0.8", 412, "prefix_cold"), ("-1", 400, "invalid_request"), ("much", 400, "invalid_request"),
    ("101%", 400, "invalid_request"), ("", 400, "invalid_request"),
]  # fmt: skip


async def test_a_cold_prefix_is_refused_before_an_engine_is_asked_and_a_warm_one_is_found(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 60}]
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        engines = [first, second]
        instances = [
            {"id": f"e{n}", "url": engine.url, "adapter": "openai", "models": ["m"], "capacity_tokens": 100_000}
            for n, engine in enumerate(engines)
        ]
        async with gateway_for(
            engines, tmp_path, instances=instances, models=[{"name": "m", "tokenizer": "default"}],
            routing={"policy": "round-robin"}, ready_limit_s=60,
        ) as client:  # fmt: skip
            for demand, status, code in DEMANDS:
                asked = len(first.asked) + len(second.asked)
                async with client.chat({"x-keepwarm-min-hit": demand}) as response:
                    body = await response.json()
                assert (response.status, body.get("error", {}).get("code")) == (status, code), demand
                assert len(first.asked) + len(second.asked) - asked == (1 if status == 200 else 0)
            async with client.chat(messages=long) as response:
                warm = response.headers["x-keepwarm-instance"]
            for _ in range(3):  # whatever turn it is, and nowhere else
                async with client.chat({"x-keepwarm-min-hit": "80%"}, messages=long) as response:
                    assert (response.status, response.headers["x-keepwarm-instance"]) == (200, warm)
                    assert int(response.headers["x-keepwarm-predicted-hit"]) > 400
            status, _, body = await messages(client, messages=[{"role": "user", "content": "else"}], demand="0.9")
            assert (status, body["type"]) == (412, "error")
            assert client.at_rest()

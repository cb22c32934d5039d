"""Budgets at the gateway's door: requests over them are refused before an engine sees them; alerts go out once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.gateways import gateway_for
from tests.scripted_engine import Script, ScriptedEngine, answer
from tracing.record import Outcome

PRICES = 'name = "t"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1, hit = 0.1, output = 2 }'
CALLS = {"name": "calls", "unit": "calls", "limit": "5", "window": "month"}


async def test_forty_at_once_against_five_calls(tmp_path: Path) -> None:
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, billing={"budgets": [CALLS]}) as client,
    ):

        async def ask() -> tuple[int, Any]:
            async with client.chat() as response:
                return response.status, await response.json()

        answers = await asyncio.gather(*(ask() for _ in range(40)))
        assert sorted(status for status, _ in answers) == [200] * 5 + [429] * 35
        refused = next(body for status, body in answers if status == 429)
        assert (refused["error"]["code"], refused["error"]["type"]) == ("budget_exceeded", "insufficient_quota")
        assert len(engine.asked) == 5
        records = await client.records(40)
        assert [record.outcome for record in records].count(Outcome.REJECTED) == 35


async def test_what_was_reserved_and_not_spent_is_given_back(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    # one answer costs 10.2 millionths; what is reserved for it, 100 output tokens and the prompt, over 200
    money = {"name": "money", "unit": "money", "limit": "0.0003", "window": "month"}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, billing={"budgets": [money], "prices": str(prices)}) as client,
    ):
        engine.script = Script(body=answer("x", prompt=10, output=1, cached=2))
        statuses = []
        for _ in range(4):
            async with client.chat(max_tokens=100) as response:
                statuses.append(response.status)
                await response.read()
            await client.until(lambda: not client.gateway.flights.count)
        assert statuses == [200] * 4
        async with client.chat(max_tokens=1000) as response:
            assert response.status == 429


async def test_tokens_that_nobody_counted_are_not_given_back(tmp_path: Path) -> None:
    tokens = {"name": "tokens", "unit": "tokens", "limit": "150", "window": "month"}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, billing={"budgets": [tokens]}) as client,
    ):
        engine.script = Script(body=answer("x") | {"usage": None})
        for status in (200, 429):
            async with client.chat(max_tokens=100) as response:
                assert response.status == status
            await client.until(lambda: not client.gateway.flights.count)


async def test_a_dearer_cache_write_is_reserved_for(tmp_path: Path) -> None:
    """The prompt at 1 a million fits into the budget; written for an hour, at 2000, it does not."""
    money = {"name": "money", "unit": "money", "limit": "0.001", "window": "month"}
    for name, rates, status in (("plain", "", 200), ("writes", "write_1h = 2000, ", 429)):
        prices = tmp_path / f"{name}.toml"
        prices.write_text(PRICES.replace("{ fresh", f"{{ {rates}fresh"))
        billing = {"budgets": [money], "prices": str(prices)}
        async with (
            ScriptedEngine() as engine,
            gateway_for([engine], tmp_path / name, billing=billing) as client,
            client.chat(max_tokens=10) as response,
        ):
            assert response.status == status


async def test_a_model_without_a_price_is_refused_by_a_money_budget(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES.replace('"m"', '"other"'))
    money = {"name": "money", "unit": "money", "limit": "10", "window": "day"}
    for policy, status in (("deny", 429), ("admit", 200)):
        settings = {"budgets": [money | {"on_unpriced": policy}], "prices": str(prices)}
        async with (
            ScriptedEngine() as engine,
            gateway_for([engine], tmp_path / policy, billing=settings) as client,
            client.chat() as response,
        ):
            assert response.status == status


async def test_a_restarted_gateway_goes_on_counting_and_a_lost_store_begins_with_the_ledger(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        for loses_store in (False, True):
            for status in (200, 200, 200, 200, 200) if not loses_store else (429,):
                async with (
                    gateway_for([engine], tmp_path, billing={"budgets": [CALLS]}) as client,
                    client.chat() as response,
                ):
                    assert response.status == status
            (tmp_path / "budgets.sqlite3").rename(tmp_path / f"lost-{loses_store}")


async def test_an_alert_goes_out_once(tmp_path: Path) -> None:
    alerts: list[dict[str, Any]] = []

    async def hook(request: web.Request) -> web.Response:
        alerts.append(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/hook", hook)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/hook"  # type: ignore[union-attr]
    settings = {"budgets": [CALLS | {"alerts": [40, 100], "hard": False}], "alert_webhook": url}
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, billing=settings) as client:
        for _ in range(7):
            async with client.chat() as response:
                assert response.status == 200
        await client.until(lambda: len(alerts) == 2)
    await runner.cleanup()
    assert [(alert["percent"], alert["limit"]) for alert in alerts] == [(40, 5), (100, 5)]


@pytest.mark.parametrize("unit", ["tokens", "money"])
async def test_a_budget_that_only_watches_refuses_no_number(tmp_path: Path, unit: str) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    watch = {"name": "watch", "unit": unit, "limit": 1000, "window": "day", "hard": False}
    billing = {"budgets": [watch], "prices": str(tmp_path / "prices.toml")}
    async with ScriptedEngine() as engine, gateway_for([engine], tmp_path, billing=billing) as client:

        async def ask(limit: int) -> int:
            async with client.chat(max_tokens=limit) as response:
                return int(response.status)

        asks = [ask(limit) for limit in (10**400, *[2**63 - 1] * 4, *[2**62] * 4)]
        assert await asyncio.gather(*asks) == [200] * 9


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 50}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000.0}),
        ("completions", {"prompt": "x", "n": 2, "best_of": 50}),
        ("completions", {"prompt": ["x"] * 50}),
        ("completions", {"prompt": [[1, 2]] * 25, "n": 2}),
    ],
)
async def test_every_answer_that_a_request_may_get_is_reserved(
    tmp_path: Path, path: str, asked: dict[str, Any]
) -> None:
    tokens = {"name": "t", "unit": "tokens", "limit": 4000, "window": "day"}
    body: dict[str, Any] = {"model": "m", "max_tokens": 100}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, billing={"budgets": [tokens]}) as client,
    ):
        async with client.session.post(f"{client.url}/v1/{path}", json=body | asked) as no:
            assert no.status == 429
        assert engine.asked == []
        async with client.session.post(f"{client.url}/v1/completions", json={"model": "m", "prompt": [1, 2]}) as yes:
            assert yes.status == 200


async def test_the_larger_of_two_output_limits_is_reserved(tmp_path: Path) -> None:
    tokens = {"name": "t", "unit": "tokens", "limit": 1000, "window": "day"}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, billing={"budgets": [tokens]}) as client,
        client.chat(max_tokens=1, max_completion_tokens=10**6) as response,
    ):
        assert response.status == 429


async def test_a_second_book_has_budgets_in_its_own_currency(tmp_path: Path) -> None:
    main, second = tmp_path / "main.toml", tmp_path / "second.toml"
    main.write_text(PRICES.replace('"m"', '"other"'))
    second.write_text(PRICES.replace("USD", "CNY"))
    prices = {"prices": str(main), "books": [{"prices": str(second), "models": ["m"]}]}
    dollars = {"name": "dollars", "unit": "money", "limit": "10", "window": "month"}
    yuan = dollars | {"name": "yuan", "currency": "CNY"}
    for number, (budgets, status) in enumerate(
        (([dollars], 429), ([dollars, yuan], 200), ([dollars, yuan | {"limit": "0.000001"}], 429))
    ):
        async with (
            ScriptedEngine() as engine,
            gateway_for([engine], tmp_path / str(number), billing={"budgets": budgets, **prices}) as client,
            client.chat(max_tokens=10) as response,
        ):
            assert response.status == status

"""The demonstration's agent through the gateway and two real engines, counted a second time in between.

A recording proxy stands before each engine and keeps the engine's own answers. From those, and from the price book read
as plain TOML, the money is computed again by arithmetic that shares nothing with the meter.
"""

from __future__ import annotations

import asyncio
import tomllib
from contextlib import AsyncExitStack
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.demo.agent import Agent
from gateway.demo.desk import PLAN, Desk
from tests.embedded_engines import engines
from tests.gateways import Client, gateway_for
from tests.integration.recording_proxy import Recorded, RecordingProxy
from tracing.record import Outcome

pytestmark = pytest.mark.model

PAGE = 16
NANO = 10**9


def rates() -> dict[str, Decimal]:
    """Return the default book's prices for a million tokens, read as plain TOML."""
    book: dict[str, Any] = tomllib.loads((files("billing") / "books" / "default.toml").read_text(), parse_float=Decimal)
    (entry,) = (entry for entry in book["price"] if "*SmolLM2*" in entry["models"])
    return {name: Decimal(value) for name, value in entry["rates"].items()}


def money_nano(answer: Recorded, per_million: dict[str, Decimal]) -> int:
    """Return what the engine's own counts cost."""
    tiers = answer.cached_by_tier
    tokens = {
        "fresh": answer.prompt_tokens - answer.cached_tokens,
        "output": answer.output_tokens,
        **{f"hit_{tier}": count for tier, count in tiers.items()},
    }
    return sum(
        int((Decimal(n) * per_million[c] * NANO / 1_000_000).to_integral_value()) for c, n in tokens.items() if n
    )


def drive(url: str, folder: Path) -> None:
    """Run the demonstration's agent with the official client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        agent = Agent(client, client.models.list().data[0].id, Desk(folder), "counted", lambda text: None)
        for tool in PLAN:
            agent.force(tool)
        agent.ask("Which item is short?")
        agent.answer(max_tokens=16)


async def test_ledger_trace_and_the_engines_own_answers_agree_on_every_step(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(engines(tmp_path, 2))
        proxies = [await stack.enter_async_context(RecordingProxy(url)) for url in urls]
        instances = [{"id": f"e{n}", "url": proxy.url, "adapter": "embedded"} for n, proxy in enumerate(proxies)]
        client: Client = await stack.enter_async_context(
            gateway_for([], tmp_path / "home", instances=instances, ready_count=2, ready_limit_s=30)
        )
        await asyncio.to_thread(drive, client.url, tmp_path / "desk")
        records = await client.records(len(PLAN) + 1)

        answers = {answer.request_id: answer for proxy in proxies for answer in proxy.answers if answer.usage}
        assert len(answers) == len(records)
        assert len({record.instance for record in records}) == 1, "a run stays where its prefix is"
        before, per_million, total = 0, rates(), 0
        for record in records:
            answer, usage = answers[record.request_id], record.usage
            assert record.outcome is Outcome.OK
            assert record.gateway_prompt_tokens == usage.prompt_tokens == answer.prompt_tokens
            assert (usage.hit_tokens, usage.output_tokens) == (answer.cached_tokens, answer.output_tokens)
            assert answer.cached_by_tier == {
                "device": usage.hit_device_tokens,
                "host": usage.hit_host_tokens,
                "disk": usage.hit_disk_tokens,
                "pool": usage.hit_pool_tokens,
            }
            assert usage.hit_tokens >= before // PAGE * PAGE
            assert record.charge.amount_nano == money_nano(answer, per_million)
            before, total = usage.prompt_tokens, total + money_nano(answer, per_million)
        assert sum(t.amount_nano for t in client.gateway.ledger.totals()) == total
        assert [record.link.step for record in records if record.link] == list(range(1, len(PLAN) + 2))
        assert all(record.tool_calls for record in records[:-1])

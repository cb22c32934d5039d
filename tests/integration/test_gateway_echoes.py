"""A tool-calling agent on a real engine whose client spells each call anew: what sending generated ids wins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from radix_index.base import Knowledge
from tests.gateways import Client, gateway_for
from tests.samples.echo_agent import MODEL, run_agent
from tracing.record import Outcome, RequestRecord

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

PAGE = 16
STEPS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    embedded = {
        "enabled": True,
        "device_tokens": 8192,
        "host_bytes": 0,
        "disk_bytes": 0,
        "pool_bytes": 0,
        "page_tokens": PAGE,
    }
    home: Path = tmp_path_factory.mktemp("home")
    async with gateway_for([], home, instances=[], embedded=embedded, ready_limit_s=240, ready_count=1) as client:
        await client.until(lambda: all(feed.knowledge is Knowledge.COMPLETE for feed in client.gateway.fleet.feeds()))
        yield client
        assert client.at_rest()


def computed(record: RequestRecord) -> int:
    """Return for how many tokens the engine has certainly computed pages.

    The end of a call is forced by its grammar, so nothing was computed for its last tokens: about ten.
    """
    return record.usage.prompt_tokens + record.usage.output_tokens - PAGE


@pytest.mark.parametrize("stream", [False, True])
async def test_each_step_hits_what_the_one_before_generated(client: Client, stream: bool) -> None:
    records = await run_agent(client, f"kept-{stream}", steps=STEPS, stream=stream)
    for record in records:
        assert record.outcome is Outcome.OK
        assert record.gateway_prompt_tokens == record.usage.prompt_tokens
        assert record.decision is not None
        assert record.decision.exact
        assert record.decision.predicted_hit_tokens == record.usage.hit_tokens
    first = records[0]
    assert first.prompt is not None
    assert (first.prompt.echo, first.prompt.echo_won_tokens) == ("none", 0)
    for before, record in pairwise(records):
        assert record.prompt is not None
        assert record.prompt.echo == "kept"
        assert record.usage.hit_tokens >= computed(before) // PAGE * PAGE
        assert 0 < record.prompt.echo_won_tokens <= before.usage.output_tokens


async def test_rendered_anew_the_generated_pages_miss(client: Client, tmp_path: Path) -> None:
    """A second gateway in front of the same engine, with the policy off: the difference is what the policy wins."""
    kept = await run_agent(client, "won", steps=STEPS)
    url = client.gateway.fleet.instances["embedded-0"].spec.url
    engine = {"id": "embedded-0", "url": url, "adapter": "embedded"}
    off = {"models": [{"name": MODEL, "quoted_answers": "rendered"}], "instances": [engine]}
    async with gateway_for([], tmp_path / "home", ready_count=1, ready_limit_s=30, **off) as plain:
        rendered = await run_agent(plain, "rendered", steps=STEPS)
    for before, record in pairwise(rendered):
        assert record.prompt is not None
        assert (record.prompt.echo, record.prompt.echo_won_tokens) == ("none", 0)
        assert record.usage.hit_tokens < computed(before) // PAGE * PAGE
    won = sum(record.prompt.echo_won_tokens for record in kept if record.prompt is not None)
    missed = [computed(before) // PAGE * PAGE - record.usage.hit_tokens for before, record in pairwise(rendered)]
    assert won > 0
    assert sum(missed) > 0

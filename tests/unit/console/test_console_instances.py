from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from engine_adapter.base import InstanceFacts
from engine_adapter.openai_compatible import OpenAICompatible
from gateway.instance import Instance, InstanceSpec
from gateway.residency import predicted_residency
from gateway.routing import Rates
from radix_index.index import RadixIndex
from tests.samples.console import console_app, visitor
from tracing.store import TraceStore

RATES = Rates(prefill=1000.0, host=1e6, disk=1e5, pool=1e4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    store = TraceStore(tmp_path / "t.sqlite3")
    yield store
    store.close()


def engine() -> Instance:
    spec = InstanceSpec(id="e<0>", url="http://e", adapter=OpenAICompatible())
    instance = Instance(spec, RATES)
    instance.facts = InstanceFacts(models=("m<1>",), capacity_tokens=4096)
    instance.is_healthy, instance.trouble = True, None
    instance.predicted = predicted_residency(RadixIndex(), spec.id, instance.facts, instance.scores)
    for cached in (0, 32, 16):
        expectation = instance.predicted.expect([1, 2], 40)
        instance.predicted.answered(expectation, cached)
    return instance


async def page(store: TraceStore, instances: list[Instance], tenant: str | None = None) -> tuple[int, str]:
    app = console_app(store, visitor(tenant), instances=lambda: instances)
    async with TestClient(TestServer(app)) as client, client.get("/console/instances") as response:
        return response.status, await response.text()


async def test_the_error_of_what_was_predicted_is_shown(store: TraceStore) -> None:
    status, text = await page(store, [engine()])
    assert status == 200
    assert "e&lt;0&gt;" in text
    assert "m&lt;1&gt;" in text
    assert "prediction, from what was routed there" in text
    assert "<b>66%</b> exact of 3" in text
    assert "+5.3 tokens in the mean, 5.3 in size" in text


async def test_an_engine_that_nobody_reached_yet(store: TraceStore) -> None:
    spec = InstanceSpec(id="e", url="http://e", adapter=OpenAICompatible())
    status, text = await page(store, [Instance(spec, RATES)])
    assert status == 200
    assert "not probed yet" in text
    assert "no answer yet" in text


@pytest.mark.parametrize(("tenant", "status"), [(None, 200), ("acme", 403)])
async def test_tenants_do_not_see_engines(store: TraceStore, tenant: str | None, status: int) -> None:
    found, text = await page(store, [engine()], tenant)
    assert found == status
    assert ("http://e" in text) is (tenant is None)

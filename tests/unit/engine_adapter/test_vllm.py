"""vLLM's adapter: what it makes of configurations that no recording has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_adapter.base import Ask, Merge
from engine_adapter.errors import UpstreamError
from engine_adapter.vllm import Vllm, event_sources, ranked_sources
from engine_adapter.vllm_store import storage_facts
from engine_adapter.wire_client import WireClient
from kvstore.page import Tier
from tests.scripted_engine import ScriptedEngine

_EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://0.0.0.0:6557",
    "topic": "kv",
}


def _config(**more: object) -> dict[str, Any]:
    return {"kv_events_config": _EVENTS, "parallel_config": {"data_parallel_size": 2}, **more}


def test_a_request_gets_what_the_gateway_wants_of_it() -> None:
    prepared = Vllm().prepare(Ask("r", stream=True, salt="s", input_ids=[1, 2], priority=3, model="theirs"))
    assert prepared.members == {
        "model": "theirs",
        "stream_options": Merge({"include_usage": True}),
        "cache_salt": "s",
        "kv_transfer_params": Merge({"prompt_token_ids": [1, 2]}),
        "priority": -3,
    }
    assert prepared.headers["x-request-id"] == "r"
    plain = Vllm().prepare(Ask("r", stream=False, salt="", priority=0))  # an empty salt would be refused
    assert plain.members == {}
    assert Vllm().prepare(Ask("r", stream=False, endpoint="embeddings", salt="s")).members == {}
    assert Vllm().rank_headers(3) == {"x-data-parallel-rank": "3"}


def test_every_rank_publishes_a_port_further() -> None:
    first, second = event_sources(_config(), "10.0.0.7")
    assert (first.endpoint, first.replay_endpoint, first.topic) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557", "kv")
    assert (second.endpoint, second.replay_endpoint, second.rank) == ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:6558", 1)
    (alone,) = ranked_sources("ipc:///run/kv", None, "", 1)
    assert (alone.endpoint, alone.replay_endpoint) == ("ipc:///run/kv", None)
    assert ranked_sources("ipc:///run/kv", None, "", 2)[1].endpoint == "ipc:///run/kv_dp1"


@pytest.mark.parametrize(
    "events", [{}, None, {**_EVENTS, "enable_kv_cache_events": False}, {**_EVENTS, "publisher": "null"}]
)
def test_no_events_no_sources(events: object) -> None:
    assert event_sources({"kv_events_config": events}, "h") == ()


def test_our_connector_is_known_by_its_module() -> None:
    extra = {"disk": "/pages", "pool": "redis://user:secret@10.0.0.9:6379"}
    ours = {"kv_connector_module_path": "kvstore.plugins.vllm.connector", "kv_connector_extra_config": extra}
    found = storage_facts({"kv_transfer_config": ours, "cache_config": {"block_size": 16}})
    assert found.tiers == ("device", "host", "disk")
    assert found.pool is not None
    assert "secret" not in found.pool
    other = storage_facts({"kv_transfer_config": ours, "cache_config": {"block_size": 32}})
    assert other.pool != found.pool  # they cannot read one another's pages
    theirs = {"kv_connector_module_path": "lmcache.connector", "kv_connector_extra_config": extra}
    assert storage_facts({"kv_transfer_config": theirs}).tiers == ("device",)
    assert storage_facts({"kv_transfer_config": None}).pool is None


def test_clearing_the_engines_own_cache_leaves_our_connectors_tiers() -> None:
    for module, cleared in (("kvstore.plugins.vllm.connector", (Tier.DEVICE,)), ("lmcache.connector", None)):
        config = _config(kv_transfer_config={"kv_connector_module_path": module})
        for source in event_sources(config, "h", storage_facts(config).tiers):
            assert source.cleared == cleared if cleared else Tier.HOST in source.cleared


@pytest.mark.parametrize(("version", "reads"), [("0.32.0", True), ("1.0", True), ("0.31.2", False), ("dev", False)])
async def test_ids_are_sent_to_versions_that_read_them(version: str, reads: bool) -> None:
    class Client(WireClient):
        """The real client, but for one answer."""

        async def request(self, method: str, url: str, headers: Any, body: bytes | None = None) -> Any:
            if url.endswith("/version"):
                return _Told(json.dumps({"version": version}).encode())
            return await super().request(method, url, headers, body)

    async with ScriptedEngine(models=("m",)) as engine, Client() as client:
        facts = await Vllm().describe(client, engine.url, {})
        assert facts.capabilities is not None
        assert (facts.version, facts.capabilities.input_ids, facts.capabilities.priority) == (version, reads, False)
        assert (facts.models, facts.event_sources, facts.block_size) == (("m",), (), None)


async def test_a_server_that_is_not_there_describes_nothing() -> None:
    async with ScriptedEngine() as engine, WireClient() as client:
        url = engine.url
    async with WireClient() as client:
        with pytest.raises(UpstreamError):
            await Vllm().describe(client, url, {})


class _Told:
    status = 200

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read_all(self, limit_bytes: int) -> bytes:
        return self._body

    def close(self) -> None:
        pass

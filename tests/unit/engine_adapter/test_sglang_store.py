from __future__ import annotations

import json
from typing import Any

import pytest

from engine_adapter.base import EventSource
from engine_adapter.http import UpstreamClient
from engine_adapter.sglang import Sglang
from engine_adapter.sglang_store import relayed, storage_facts
from engine_adapter.wire_client import WireClient
from tests.scripted_engine import ScriptedEngine

OURS = {
    "backend_name": "keepwarm",
    "module_path": "kvstore.plugins.sglang.hicache",
    "class_name": "Keepwarm",
    "interface_v1": 1,
    "disk": "/var/pages",
    "disk_gb": 10,
    "pool": "redis://user:secret@pool:6379/1",
    "events": "tcp://*:5570",
}


def info(config: dict[str, Any] | str | None = None, **more: object) -> dict[str, object]:
    told = config if isinstance(config, str) else json.dumps(OURS if config is None else config)
    return {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": told, "page_size": 16, **more}


def test_where_our_plugin_keeps_pages_and_tells_of_them() -> None:
    facts = storage_facts(info())
    assert facts is not None
    assert (facts.tiers, facts.port) == (("device", "host", "disk"), 5570)
    assert facts.pool is not None
    assert "secret" not in facts.pool


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"hicache_storage_backend": "file"},
        info("@/etc/storage.json"),
        info("7"),
        info({**OURS, "module_path": "somebody.elses"}),
        {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": None},
    ],
)
def test_storages_of_others_say_nothing(told: dict[str, object]) -> None:
    assert storage_facts(told) is None


def test_without_pool_disk_and_events() -> None:
    facts = storage_facts(info({"module_path": "kvstore.plugins.sglang.hicache", "host_gb": 1}))
    assert facts is not None
    assert (facts.tiers, facts.port, facts.pool) == (("device", "host"), None, None)


def test_servers_share_a_pool_when_their_pages_are_alike() -> None:
    def pool(config: dict[str, Any] | None = None, **more: object) -> str | None:
        facts = storage_facts(info(config, **more))
        assert facts is not None
        return facts.pool

    assert pool() == pool({**OURS, "pool": "redis://other:credentials@pool:6379/1", "disk": "/elsewhere"})
    others = [
        pool(kv_cache_dtype="fp8_e5m2"), pool(page_size=32), pool(model_path="/models/b"), pool(version="0.5.24"),
        pool(served_model_name="b"), pool({**OURS, "namespace": "blue"}), pool({**OURS, "pool": "redis://pool:6379/2"}),
    ]  # fmt: skip
    assert len({pool(), *others}) == 8
    named = {**OURS, "pool_name": "ours"}
    assert pool(named) == pool({**named, "pool": "redis://10.0.0.5:6379/1"}) != pool()


def test_each_rank_has_its_own_relay() -> None:
    own = tuple(EventSource(f"tcp://h:{5557 + rank}", None, "kv", rank) for rank in range(2))
    first, second = relayed(own, 5570, "h")
    assert (first.endpoint, first.replay_endpoint, first.rank) == ("tcp://h:5570", "tcp://h:5571", 0)
    assert (second.endpoint, second.replay_endpoint, second.rank) == ("tcp://h:5572", "tcp://h:5573", 1)
    assert relayed((), 5570, "h") == ()


async def test_an_instance_with_our_storage_is_followed_through_its_relay() -> None:
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 16}
    async with ScriptedEngine(info=info(kv_events=events)) as engine, WireClient() as client:
        facts = await describe(client, engine.url)
        (source,) = facts.event_sources
        assert source.endpoint.endswith(":5570")
        assert facts.tiers == ("device", "host", "disk")
        assert facts.pool is not None


async def describe(client: UpstreamClient, url: str) -> Any:
    return await Sglang().describe(client, url, {})

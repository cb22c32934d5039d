"""vLLM's OpenAI server.

What it answers anybody: its models and their folder (``/v1/models``), its version (``/version``), and block size and
capacity (``vllm:cache_config_info`` in ``/metrics``). Where it publishes its KV events, and whether it heeds
priorities, stands in ``/server_info`` alone, which it has only with ``VLLM_SERVER_DEV_MODE=1``; for all others the
settings name the sockets (``[instances.kv_events]``). Rank ``n`` publishes ``n`` ports above rank 0.

A conversation's token ids go in ``kv_transfer_params.prompt_token_ids``: seen in 0.32, and then the messages are not
read. Closing the connection of a request stops it; the route that does so by id needs a flag, so it is not used.

Sources: vLLM 0.32.0, run, and its source (``entrypoints``, ``distributed/kv_events.py``); ``tests/captures``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from engine_adapter.base import (
    OPENAI_ENDPOINTS,
    Ask,
    Capabilities,
    Continuation,
    EventSource,
    Handover,
    InstanceFacts,
    LoadSignal,
    Merge,
    Prepared,
    UsageParts,
    mapping,
    whole_number,
)
from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient, get_bytes, get_json
from engine_adapter.load import EngineLoad, gauges_by_rank, labels_of
from engine_adapter.openai_compatible import OpenAICompatible, adapter_names, list_models, names_and_length
from engine_adapter.vllm_store import storage_facts
from kvstore.page import Tier

_READS_IDS = (0, 32)
_INFO_S = 60.0  # the first time it looks at the whole machine before it answers
_VERSION = re.compile(r"(\d+)\.(\d+)")
_CACHE_CONFIG = "vllm:cache_config_info"
_RUNNING, _WAITING, _USED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_GAUGES = frozenset({_RUNNING, _WAITING, _USED})
_PORT = re.compile(r"^(?P<head>tcp://.*:)(?P<port>\d+)$")


class Vllm(OpenAICompatible):
    """Events over ZMQ, a cache salt for each request, token ids as a prompt; hits as a total."""

    name = "vllm"
    capabilities = Capabilities(
        events=True,
        salt=True,
        media=True,
        load=LoadSignal.SCRAPE,
        continuation=Continuation.MESSAGE,
        handover=Handover.PARAMS,
        endpoints=OPENAI_ENDPOINTS | {"embeddings", "tokenize"},
    )
    health_path = "/health"
    load_paths = ("/metrics",)

    def prepare(self, ask: Ask) -> Prepared:
        """Add salt, ids and priority; less is sooner in vLLM."""
        plain = super().prepare(ask)
        if ask.endpoint not in OPENAI_ENDPOINTS:
            return plain
        edits = dict(plain.members)
        if ask.salt:
            edits["cache_salt"] = ask.salt
        if ask.input_ids is not None:
            edits["kv_transfer_params"] = Merge({"prompt_token_ids": ask.input_ids})
        if ask.priority:
            edits["priority"] = -ask.priority
        return Prepared(edits, plain.headers)

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return the ``usage`` object, which stands at one place here."""
        usage = mapping(answer.get("usage"))
        return None if usage is None else UsageParts(usage, None)

    def rank_headers(self, rank: int) -> Mapping[str, str]:
        """Return the header that its own data-parallel router obeys."""
        return {"x-data-parallel-rank": str(rank)}

    def read_load(self, body: bytes) -> Sequence[EngineLoad]:
        """Return each engine's gauges."""
        return [
            EngineLoad(int(found[_RUNNING]), int(found[_WAITING]), found.get(_USED), rank=rank)
            for rank, found in sorted(gauges_by_rank(body, _GAUGES, "engine").items())
            if _RUNNING in found and _WAITING in found
        ]

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Read ``/v1/models``, ``/version``, ``/metrics`` and, where it is there, ``/server_info``."""
        entries = await list_models(client, url, headers)
        models, max_len = names_and_length(entries)
        version = _text((await _or_nothing(client, f"{url}/version", headers)).get("version"))
        cache = labels_of(await _page(client, f"{url}/metrics", headers), _CACHE_CONFIG)
        config = await _or_nothing(client, f"{url}/server_info?config_format=json", headers, timeout_s=_INFO_S)
        config = mapping(config.get("vllm_config")) or {}
        store = storage_facts(config)
        return InstanceFacts(
            models=models,
            adapters=adapter_names(entries),
            max_model_len=max_len,
            block_size=_number(cache.get("block_size")) or _of(config, "cache_config", "block_size"),
            event_sources=event_sources(config, urlsplit(url).hostname or "127.0.0.1", store.tiers),
            capacity_tokens=_number(cache.get("kv_cache_size_tokens")) or _capacity(cache),
            model_path=next((root for entry in entries if (root := _text(entry.get("root")))), None),
            pool=store.pool,
            tiers=store.tiers,
            version=version,
            capabilities=replace(
                self.capabilities,
                input_ids=_reads_ids(version),
                priority=(mapping(config.get("scheduler_config")) or {}).get("policy") == "priority",
            ),
        )


def event_sources(
    config: Mapping[str, object], host: str, tiers: Sequence[str] = ("device",)
) -> tuple[EventSource, ...]:
    """Return one source for each data-parallel rank of a server's own ``VllmConfig``; none when events are off.

    A wildcard address stands for the host that the instance is reached by. ``reset_prefix_cache`` says that all blocks
    are cleared, and leaves the tiers of our connector as they are, which tell of themselves.
    """
    events = mapping(config.get("kv_events_config")) or {}
    endpoint = _text(events.get("endpoint"))
    if not events.get("enable_kv_cache_events") or events.get("publisher") != "zmq" or endpoint is None:
        return ()
    replay, topic = _text(events.get("replay_endpoint")), _text(events.get("topic")) or ""
    ranks = _of(config, "parallel_config", "data_parallel_size") or 1
    sources = ranked_sources(_at(endpoint, host), None if replay is None else _at(replay, host), topic, ranks)
    if len(tiers) == 1:
        return sources
    return tuple(replace(source, cleared=(Tier.DEVICE,)) for source in sources)


def ranked_sources(endpoint: str, replay: str | None, topic: str, ranks: int) -> tuple[EventSource, ...]:
    """Return the sources of a server whose rank 0 publishes here. Pure."""
    return tuple(
        EventSource(_moved(endpoint, rank), None if replay is None else _moved(replay, rank), topic, rank)
        for rank in range(ranks)
    )


def _moved(endpoint: str, rank: int) -> str:
    """Return where a rank binds when rank 0 binds here: its port is higher, other addresses get a suffix."""
    found = _PORT.match(endpoint)
    if found is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{found['head']}{int(found['port']) + rank}"


def _at(endpoint: str, host: str) -> str:
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):", f"tcp://{host}:", endpoint)


def _reads_ids(version: str | None) -> bool:
    found = _VERSION.match(version or "")
    return found is not None and tuple(map(int, found.groups())) >= _READS_IDS


def _capacity(cache: Mapping[str, str]) -> int | None:
    blocks, size = _number(cache.get("num_gpu_blocks")), _number(cache.get("block_size"))
    return None if blocks is None or size is None else blocks * size


def _of(config: Mapping[str, object], part: str, name: str) -> int | None:
    return whole_number((mapping(config.get(part)) or {}).get(name))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


async def _or_nothing(
    client: UpstreamClient, url: str, headers: Mapping[str, str], *, timeout_s: float = 5.0
) -> Mapping[str, object]:
    """Return what a route says that not every server has."""
    try:
        return await get_json(client, url, headers, timeout_s=timeout_s)
    except UpstreamError:
        return {}


async def _page(client: UpstreamClient, url: str, headers: Mapping[str, str]) -> bytes:
    try:
        return await get_bytes(client, url, headers)
    except UpstreamError:
        return b""

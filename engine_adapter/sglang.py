"""SGLang, and every engine that answers on its surface, such as our embedded one.

Sources: SGLang 0.5.23 (``/server_info``, ``return_cached_tokens_details``, ``cache_salt``, KV events over ZMQ,
``input_ids`` in a chat); ``sglext.output_ids`` and the header that asks for it came with 0.5.20, older ones tell no
ids; how tools are printed was read in 0.5.15 to 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec

from engine_adapter.base import (
    OPENAI_ENDPOINTS,
    Ask,
    Capabilities,
    Continuation,
    EventSource,
    Handover,
    InstanceFacts,
    LoadSignal,
    Prepared,
    UsageParts,
    mapping,
    whole_number,
)
from engine_adapter.http import UpstreamClient, get_json
from engine_adapter.load import EngineLoad, LoadSource, gauges_by_rank
from engine_adapter.openai_compatible import OpenAICompatible, adapter_names, list_models, names_and_length
from engine_adapter.sglang_store import relayed, storage_facts

_WRITTEN = ("description", "name", "parameters")  # what SGLang writes of a function, in its order, null or not
_OPTIONAL = ("strict", "defer_loading")  # … and what it leaves out where it is null
_KEEPS_ORDER = (0, 5, 23)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_RUNNING, _WAITING, _USED = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
_GAUGES = frozenset({_RUNNING, _WAITING, _USED})


class Sglang(OpenAICompatible):
    """Hits for each tier in ``sglext``, a cache salt for each request, events whose ports ``/server_info`` tells."""

    name = "sglang"
    capabilities = Capabilities(
        events=True,
        cached_detail=True,
        salt=True,
        media=True,
        load=LoadSignal.SCRAPE,
        input_ids=True,
        output_ids=True,
        abort=True,
        continuation=Continuation.MESSAGE,
        handover=Handover.BOOTSTRAP,
        endpoints=OPENAI_ENDPOINTS | {"embeddings", "tokenize"},
    )
    health_path = "/health"
    load_paths = ("/v1/loads?include=core", "/metrics")
    private_members = frozenset({"sglext"})
    id_members = MappingProxyType({"sglext": "output_ids"})

    def prepare(self, ask: Ask) -> Prepared:
        """Add the salt and the wish for hits by tier; the request's name for ``/abort_request`` goes in a header."""
        plain = super().prepare(ask)
        if ask.endpoint not in OPENAI_ENDPOINTS:
            return plain
        edits = dict(plain.members) | {"return_cached_tokens_details": True}
        if ask.salt is not None:
            edits["cache_salt"] = ask.salt
        if ask.input_ids is not None:
            edits["input_ids"] = ask.input_ids
        headers = {**plain.headers, "x-override-rid": ask.request_id}
        if ask.wants_output_ids:
            headers["x-sglext-return-output-ids"] = "1"
        if ask.priority is not None:  # without one a request comes after all others
            headers["x-override-priority"] = str(ask.priority)
        if ask.session is not None:
            edits["session_id"] = ask.session
        return Prepared(edits, headers)

    def prompt_tools(
        self, tools: Sequence[Mapping[str, object]] | None, tool_choice: object, version: str | None
    ) -> Sequence[Mapping[str, object]] | None:
        """Return none for ``"none"``, only the function that is named where one is; each as SGLang prints it."""
        if not tools or tool_choice == "none":
            return None
        if isinstance(tool_choice, Mapping):
            named = (mapping(tool_choice.get("function")) or {}).get("name")
            tools = [tool for tool in tools if (mapping(tool.get("function")) or {}).get("name") == named]
        keeps_order = _number(version) >= _KEEPS_ORDER
        return [_printed_tool(tool, keeps_order=keeps_order) for tool in tools]

    def rank_headers(self, rank: int) -> Mapping[str, str]:
        """Return the header of 0.5.23 and the one before it."""
        return {"x-override-routed-dp-rank": str(rank), "x-data-parallel-rank": str(rank)}

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return ``usage`` and ``sglext``; either may stand alone in a chunk of a stream."""
        usage, extension = mapping(answer.get("usage")), mapping(answer.get("sglext"))
        if usage is None and extension is None:
            return None
        return UsageParts(usage, extension, _first_ids((extension or {}).get("output_ids")))

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Read ``/v1/models`` and ``/server_info``."""
        entries = await list_models(client, url, headers)
        models, max_len = names_and_length(entries)
        info = await get_json(client, f"{url}/server_info", headers)
        own = mapping(info.get("keepwarm")) or {}
        tiers = own.get("tiers")
        host = urlsplit(url).hostname or "127.0.0.1"
        sources, pool = event_sources(info, host), _text(own.get("pool_id"))
        storage = storage_facts(info)
        if storage is not None:
            tiers, pool = list(storage.tiers), storage.pool
            if storage.port is not None:
                sources = relayed(sources, storage.port, host)
        loads = load_sources(info, host)
        return InstanceFacts(
            models=models,
            adapters=adapter_names(entries),
            max_model_len=max_len,
            block_size=_block_size(info),
            event_sources=sources,
            capacity_tokens=whole_number(info.get("max_total_num_tokens")),
            model_path=_text(info.get("model_path")),
            weights_id=_weights(info),
            pool=pool,
            version=_text(info.get("version")),
            tiers=tuple(t for t in tiers if isinstance(t, str)) if isinstance(tiers, list) else ("device",),
            capabilities=replace(
                self.capabilities,
                priority=_heeds_priority(info),
                session=info.get("enable_session_radix_cache") is True,
                load=LoadSignal.PUSH if loads else LoadSignal.SCRAPE,
            ),
            load_sources=loads,
        )

    def read_load(self, body: bytes) -> Sequence[EngineLoad]:
        """Read ``/v1/loads``, or the gauges of ``/metrics``."""
        return _loads(body) if body.lstrip().startswith(b"{") else _gauged(body)

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """Return the request that stops a request by the name that ``prepare`` gave it."""
        return "/abort_request", msgspec.json.encode({"rid": request_id})

    def close_session(self, session: str) -> tuple[str, bytes] | None:
        """Return the request that lets go of a session's pages."""
        return "/close_session", msgspec.json.encode({"session_id": session})


def event_sources(info: Mapping[str, object], host: str) -> tuple[EventSource, ...]:
    """Return one source for each data-parallel rank that ``/server_info`` advertises; none when events are off.

    A wildcard address stands for the host that the instance is reached by.
    """
    events = mapping(info.get("kv_events"))
    if events is None or events.get("publisher") != "zmq":
        return ()
    base, replay = whole_number(events.get("endpoint_port_base")), whole_number(events.get("replay_endpoint_port_base"))
    if base is None:
        return ()
    named = _text(events.get("endpoint_host"))
    address = host if named in (None, "*", "0.0.0.0", "::", "[::]") else named
    return tuple(
        EventSource(
            endpoint=f"tcp://{address}:{base + rank}",
            replay_endpoint=None if replay is None else f"tcp://{address}:{replay + rank}",
            topic=_text(events.get("topic")) or "",
            rank=rank,
        )
        for rank in range(whole_number(events.get("dp_size")) or 1)
    )


def load_sources(info: Mapping[str, object], host: str) -> tuple[LoadSource, ...]:
    """Return where each rank publishes its load (``--load-publish-endpoint``); none where that is off."""
    events = mapping(info.get("kv_events")) or {}
    base = whole_number(events.get("load_endpoint_port_base"))
    if base is None:
        return ()
    topic, ranks = _text(events.get("load_topic")) or "load", whole_number(events.get("dp_size")) or 1
    return tuple(LoadSource(f"tcp://{host}:{base + rank}", topic, rank) for rank in range(ranks))


def _loads(body: bytes) -> list[EngineLoad]:
    try:
        told = msgspec.json.decode(body, type=dict[str, object]).get("loads")
    except (msgspec.DecodeError, RecursionError):
        return []
    found = []
    for each in told if isinstance(told, list) else ():
        load = mapping(each) or {}
        running, waiting = whole_number(load.get("num_running_reqs")), whole_number(load.get("num_waiting_reqs"))
        if running is not None and waiting is not None:
            usage = load.get("token_usage")
            found.append(
                EngineLoad(
                    running,
                    waiting,
                    float(usage) if isinstance(usage, int | float) else None,
                    whole_number(load.get("num_waiting_uncached_tokens")),
                    whole_number(load.get("dp_rank")) or 0,
                )
            )
    return found


def _gauged(body: bytes) -> list[EngineLoad]:
    return [
        EngineLoad(int(found[_RUNNING]), int(found[_WAITING]), found.get(_USED), rank=rank)
        for rank, found in sorted(gauges_by_rank(body, _GAUGES, "dp_rank").items())
        if _RUNNING in found and _WAITING in found
    ]


def _printed_tool(tool: Mapping[str, object], *, keeps_order: bool) -> Mapping[str, object]:
    """Return a tool as SGLang's data model writes it: members it doesn't know are lost, others are added.

    From 0.5.23 on a function's members stay in the client's order; before that they had one of their own.
    """
    function = mapping(tool.get("function")) or {}
    order = [*(function if keeps_order else ()), *_WRITTEN, *_OPTIONAL]
    printed: dict[str, object] = {}
    for name in dict.fromkeys(order):
        value = function.get(name)
        if name == "defer_loading" and value is None:
            value = tool.get("defer_loading")
        if name == "strict" and not keeps_order:
            value = bool(value)
        if name in _WRITTEN or (name in _OPTIONAL and value is not None):
            printed[name] = value
    return {"type": tool.get("type", "function"), "function": printed, "defer_loading": tool.get("defer_loading")}


def _number(version: str | None) -> tuple[int, ...]:
    """Return a version's leading numbers; one that isn't known counts as new."""
    found = _VERSION.match(version or "")
    return tuple(map(int, found.groups())) if found is not None else _KEEPS_ORDER


def _first_ids(value: object) -> Sequence[int] | None:
    ids = value[0] if isinstance(value, list) and value else None
    return ids if isinstance(ids, list) and all(type(token_id) is int for token_id in ids) else None


def _weights(info: Mapping[str, object]) -> str | None:
    """Return which weights it serves: the embedded engine's name of them, or the version that an update set."""
    own, version = _text(info.get("weights_id")), _text(info.get("weight_version"))
    if own is not None or version in (None, "default"):
        return own
    return f"{_text(info.get('model_path')) or ''}@{version}"


def _block_size(info: Mapping[str, object]) -> int | None:
    events = mapping(info.get("kv_events")) or {}
    return whole_number(events.get("block_size")) or whole_number(info.get("page_size"))


def _heeds_priority(info: Mapping[str, object]) -> bool:
    """Tell whether more is sooner, and 0 what who says nothing gets or stands above; a scheme of the operator's own is
    left alone."""
    return (
        info.get("enable_priority_scheduling") is True
        and info.get("schedule_low_priority_values_first") is not True
        and not info.get("default_priority_value")
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

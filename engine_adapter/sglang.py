"""SGLang, and every engine that answers on its surface, such as our embedded one.

Sources: SGLang 0.5.23 (``/server_info``, ``return_cached_tokens_details``, ``cache_salt``, KV events over ZMQ,
``input_ids`` in a chat); ``sglext.output_ids`` and the header that asks for it came with 0.5.20, older ones tell no
ids; how tools are printed was read in 0.5.15 to 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from urllib.parse import urlsplit

from engine_adapter.base import (
    OPENAI_ENDPOINTS,
    Ask,
    Capabilities,
    Continuation,
    EventSource,
    InstanceFacts,
    Prepared,
    UsageParts,
    mapping,
    whole_number,
)
from engine_adapter.http import UpstreamClient, get_json
from engine_adapter.openai_compatible import OpenAICompatible, read_models

_WRITTEN = ("description", "name", "parameters")  # what SGLang writes of a function, in its order, null or not
_OPTIONAL = ("strict", "defer_loading")  # … and what it leaves out where it is null
_KEEPS_ORDER = (0, 5, 23)
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Sglang(OpenAICompatible):
    """Hits for each tier in ``sglext``, a cache salt for each request, events whose ports ``/server_info`` tells."""

    name = "sglang"
    capabilities = Capabilities(
        events=True,
        cached_detail=True,
        salt=True,
        priority=True,
        input_ids=True,
        output_ids=True,
        abort=True,
        continuation=Continuation.MESSAGE,
        endpoints=OPENAI_ENDPOINTS | {"embeddings", "tokenize"},
    )
    health_path = "/health"
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
        models, max_len = await read_models(client, url, headers)
        info = await get_json(client, f"{url}/server_info", headers)
        own = mapping(info.get("keepwarm")) or {}
        tiers = own.get("tiers")
        return InstanceFacts(
            models=models,
            max_model_len=max_len,
            block_size=_block_size(info),
            event_sources=event_sources(info, urlsplit(url).hostname or "127.0.0.1"),
            capacity_tokens=whole_number(info.get("max_total_num_tokens")),
            model_path=_text(info.get("model_path")),
            weights_id=_text(info.get("weights_id")),
            pool=_text(own.get("pool_id")),
            version=_text(info.get("version")),
            tiers=tuple(t for t in tiers if isinstance(t, str)) if isinstance(tiers, list) else ("device",),
        )


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


def _block_size(info: Mapping[str, object]) -> int | None:
    events = mapping(info.get("kv_events")) or {}
    return whole_number(events.get("block_size")) or whole_number(info.get("page_size"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

"""SGLang, and every engine that answers on its surface, such as our embedded one.

Source: SGLang 0.5.23 (``/server_info``, ``return_cached_tokens_details``, ``cache_salt``, KV events over ZMQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from engine_adapter.base import (
    Ask,
    Capabilities,
    EventSource,
    InstanceFacts,
    Prepared,
    UsageParts,
    mapping,
    whole_number,
)
from engine_adapter.http import UpstreamClient, get_json
from engine_adapter.openai_compatible import OpenAICompatible, read_models


class Sglang(OpenAICompatible):
    """Hits for each tier in ``sglext``, a cache salt for each request, events whose ports ``/server_info`` tells."""

    name = "sglang"
    capabilities = Capabilities(events=True, cached_detail=True, salt=True, priority=True, input_ids=True, abort=True)
    health_path = "/health"
    private_members = frozenset({"sglext"})

    def prepare(self, ask: Ask) -> Prepared:
        """Add the salt and the wish for hits by tier; the request's name for ``/abort_request`` goes in a header."""
        plain = super().prepare(ask)
        edits = dict(plain.members) | {"return_cached_tokens_details": True}
        if ask.salt is not None:
            edits["cache_salt"] = ask.salt
        return Prepared(edits, {**plain.headers, "x-override-rid": ask.request_id})

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return ``usage`` and ``sglext``; either may stand alone in a chunk of a stream."""
        usage, extension = mapping(answer.get("usage")), mapping(answer.get("sglext"))
        return None if usage is None and extension is None else UsageParts(usage, extension)

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


def _block_size(info: Mapping[str, object]) -> int | None:
    events = mapping(info.get("kv_events")) or {}
    return whole_number(events.get("block_size")) or whole_number(info.get("page_size"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

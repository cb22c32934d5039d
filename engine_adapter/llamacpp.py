"""llama.cpp's own server (``llama-server``).

It publishes no events: what it holds is predicted from what was routed there, and its answers correct that. Slots are
matched token by token, so its hits are no multiples of a block. It answers ``timings`` beside ``usage``; both count the
cached tokens, and ``timings.prompt_n`` leaves them out.

Sources: llama.cpp of October 2026 (xllamacpp 2026.10.11549), run: ``tests/captures``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_adapter.base import (
    OPENAI_ENDPOINTS,
    Capabilities,
    Continuation,
    InstanceFacts,
    LoadSignal,
    UsageParts,
    mapping,
    whole_number,
)
from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient, get_json
from engine_adapter.load import EngineLoad, gauges_by_rank
from engine_adapter.openai_compatible import OpenAICompatible, read_models

_RUNNING, _WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"


class LlamaCpp(OpenAICompatible):
    """Hits as a total, no salt: tenants who must not share a cache need servers of their own."""

    name = "llamacpp"
    capabilities = Capabilities(
        media=True,
        load=LoadSignal.SCRAPE,
        continuation=Continuation.PREFILL,
        endpoints=OPENAI_ENDPOINTS | {"embeddings"},
    )
    health_path = "/health"
    load_paths = ("/metrics",)

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return ``usage``; of an answer that has only ``timings``, the same from them."""
        if (usage := mapping(answer.get("usage"))) is not None:
            return UsageParts(usage, None)
        timings = mapping(answer.get("timings"))
        return None if timings is None else _from_timings(timings)

    def read_load(self, body: bytes) -> Sequence[EngineLoad]:
        """Return the requests in slots, and those that wait for one."""
        return [
            EngineLoad(int(found[_RUNNING]), int(found[_WAITING]))
            for found in gauges_by_rank(body, frozenset({_RUNNING, _WAITING}), "").values()
            if _RUNNING in found and _WAITING in found
        ]

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Read ``/v1/models`` and ``/props``, which says how much its slots hold."""
        models, _ = await read_models(client, url, headers)
        props = await _props(client, url, headers)
        slots = whole_number(props.get("total_slots"))
        context = whole_number((mapping(props.get("default_generation_settings")) or {}).get("n_ctx"))
        build = props.get("build_info")
        return InstanceFacts(
            models=models,
            max_model_len=context or None,
            capacity_tokens=None if slots is None or context is None else slots * context or None,
            version=build if isinstance(build, str) and build else None,
        )


def _from_timings(timings: Mapping[str, object]) -> UsageParts | None:
    cached, computed = whole_number(timings.get("cache_n")), whole_number(timings.get("prompt_n"))
    output = whole_number(timings.get("predicted_n"))
    if cached is None or computed is None or output is None:
        return None
    usage = {
        "prompt_tokens": cached + computed,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return UsageParts(usage, None)


async def _props(client: UpstreamClient, url: str, headers: Mapping[str, str]) -> Mapping[str, object]:
    try:
        return await get_json(client, f"{url}/props", headers)
    except UpstreamError:
        return {}

"""Anything that speaks OpenAI's API and promises no more: a vendor's API, TGI, LMDeploy, llama-server, Ollama …

llama-server is known again by the owner that it gives its models, and says in ``/props`` how much its slots hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from engine_adapter.base import (
    OPENAI_ENDPOINTS,
    Ask,
    Capabilities,
    Continuation,
    InstanceFacts,
    Merge,
    Prepared,
    UsageParts,
    mapping,
    whole_number,
)
from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient, get_json


class OpenAICompatible:
    """Chat completions, completions and a list of models; usage in OpenAI's shape."""

    name = "openai"
    capabilities = Capabilities()
    health_path = "/v1/models"
    private_members: frozenset[str] = frozenset()
    id_members: Mapping[str, str] = MappingProxyType({})

    def prepare(self, ask: Ask) -> Prepared:
        """Ask for usage in streams, which the gateway needs, and name the model as the instance knows it."""
        edits: dict[str, object | Merge] = {}
        if ask.model is not None:
            edits["model"] = ask.model
        if ask.stream and ask.endpoint in OPENAI_ENDPOINTS:
            edits["stream_options"] = Merge({"include_usage": True})
        if ask.begun is not None and self.capabilities.continuation is Continuation.MESSAGE and ask.endpoint == "chat":
            edits |= {"continue_final_message": True, "add_generation_prompt": False}
        return Prepared(edits, {"x-request-id": ask.request_id})

    def prompt_tools(
        self, tools: Sequence[Mapping[str, object]] | None, tool_choice: object, version: str | None
    ) -> Sequence[Mapping[str, object]] | None:
        """Return all tools, whatever the choice: vLLM's default, so that a choice costs no cached prefix."""
        return tools

    def rank_headers(self, rank: int) -> Mapping[str, str]:
        """Return nothing: ranks are nobody's business but the engine's."""
        return {}

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return the ``usage`` object where there is one."""
        usage = mapping(answer.get("usage"))
        return None if usage is None else UsageParts(usage, None)

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Read the list of models."""
        entries = await _list_models(client, url, headers)
        models, max_len = _names_and_length(entries)
        is_llama_cpp = any(entry.get("owned_by") == "llamacpp" for entry in entries)
        capacity = await _slots_tokens(client, url, headers) if is_llama_cpp else None
        return InstanceFacts(models=models, max_model_len=max_len, capacity_tokens=capacity)


async def read_models(
    client: UpstreamClient, url: str, headers: Mapping[str, str]
) -> tuple[tuple[str, ...], int | None]:
    """Return the names in ``/v1/models`` and the shortest context, where they tell. Raises ``UpstreamError``."""
    return _names_and_length(await _list_models(client, url, headers))


async def _list_models(client: UpstreamClient, url: str, headers: Mapping[str, str]) -> list[Mapping[str, object]]:
    listed = (await get_json(client, f"{url}/v1/models", headers)).get("data")
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _names_and_length(entries: Sequence[Mapping[str, object]]) -> tuple[tuple[str, ...], int | None]:
    names = tuple(name for entry in entries if isinstance(name := entry.get("id"), str))
    lengths = [length for entry in entries if (length := whole_number(entry.get("max_model_len"))) is not None]
    return names, min(lengths, default=None)


async def _slots_tokens(client: UpstreamClient, url: str, headers: Mapping[str, str]) -> int | None:
    """Return how many tokens llama-server's slots hold together, ``None`` where it does not tell."""
    try:
        props = await get_json(client, f"{url}/props", headers)
    except UpstreamError:
        return None
    slots, settings = whole_number(props.get("total_slots")), mapping(props.get("default_generation_settings")) or {}
    context = whole_number(settings.get("n_ctx"))
    return None if slots is None or context is None else slots * context or None

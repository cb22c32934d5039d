"""Anything that speaks OpenAI's API and promises no more: a vendor's API, an engine without an adapter of its own."""

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
from engine_adapter.http import UpstreamClient, get_json
from engine_adapter.load import EngineLoad


class OpenAICompatible:
    """Chat completions, completions and a list of models; usage in OpenAI's shape."""

    name: str = "openai"
    capabilities: Capabilities = Capabilities(media=True, threads=True)
    health_path: str = "/v1/models"
    load_paths: Sequence[str] = ()
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
        """Return the ``usage`` object where there is one, also where some vendors put a stream's."""
        usage = mapping(answer.get("usage")) or _usage_within(answer)
        return None if usage is None else UsageParts(usage, None)

    def read_load(self, body: bytes) -> Sequence[EngineLoad]:
        """Return nothing."""
        return []

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """Return nothing: closing the connection is what there is."""
        return None

    def close_session(self, session: str) -> tuple[str, bytes] | None:
        """Return nothing."""
        return None

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Read the list of models."""
        models, max_len = await read_models(client, url, headers)
        return InstanceFacts(models=models, max_model_len=max_len)


def _usage_within(answer: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the usage of a stream's last chunk that stands in its choice (Moonshot) or in ``x_groq`` (Groq)."""
    choices = answer.get("choices")
    holder = choices[0] if isinstance(choices, list) and choices else None
    found = mapping(holder.get("usage")) if isinstance(holder, dict) else None
    if found is None and (groq := mapping(answer.get("x_groq"))) is not None:
        found = mapping(groq.get("usage"))
    return found


async def read_models(
    client: UpstreamClient, url: str, headers: Mapping[str, str]
) -> tuple[tuple[str, ...], int | None]:
    """Return the names in ``/v1/models`` and the shortest context, where they tell. Raises ``UpstreamError``."""
    return names_and_length(await list_models(client, url, headers))


async def list_models(client: UpstreamClient, url: str, headers: Mapping[str, str]) -> list[Mapping[str, object]]:
    """Return the entries of ``/v1/models``. Raises ``UpstreamError``."""
    listed = (await get_json(client, f"{url}/v1/models", headers)).get("data")
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def adapter_names(entries: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """Return which names among entries of ``/v1/models`` are adapters: of those a parent is told. Pure."""
    return frozenset(name for entry in entries if entry.get("parent") and isinstance(name := entry.get("id"), str))


def names_and_length(entries: Sequence[Mapping[str, object]]) -> tuple[tuple[str, ...], int | None]:
    """Return the names among entries of ``/v1/models`` and the shortest context, where they tell. Pure."""
    names = tuple(name for entry in entries if isinstance(name := entry.get("id"), str))
    lengths = [length for entry in entries if (length := whole_number(entry.get("max_model_len"))) is not None]
    return names, min(lengths, default=None)

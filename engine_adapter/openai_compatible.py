"""Anything that speaks OpenAI's API and promises no more: a vendor's API, TGI, LMDeploy, llama-server, Ollama …"""

from __future__ import annotations

from collections.abc import Mapping

from engine_adapter.base import Ask, Capabilities, InstanceFacts, Merge, Prepared, UsageParts, mapping, whole_number
from engine_adapter.http import UpstreamClient, get_json


class OpenAICompatible:
    """Chat completions, completions and a list of models; usage in OpenAI's shape."""

    name = "openai"
    capabilities = Capabilities()
    health_path = "/v1/models"
    private_members: frozenset[str] = frozenset()

    def prepare(self, ask: Ask) -> Prepared:
        """Ask for usage in streams, which the gateway needs, and name the model as the instance knows it."""
        edits: dict[str, object | Merge] = {}
        if ask.model is not None:
            edits["model"] = ask.model
        if ask.stream:
            edits["stream_options"] = Merge({"include_usage": True})
        return Prepared(edits, {"x-request-id": ask.request_id})

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return the ``usage`` object where there is one."""
        usage = mapping(answer.get("usage"))
        return None if usage is None else UsageParts(usage, None)

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Read the list of models."""
        models, max_len = await read_models(client, url, headers)
        return InstanceFacts(models=models, max_model_len=max_len)


async def read_models(
    client: UpstreamClient, url: str, headers: Mapping[str, str]
) -> tuple[tuple[str, ...], int | None]:
    """Return the names in ``/v1/models`` and the shortest context, where they tell. Raises ``UpstreamError``."""
    answer = await get_json(client, f"{url}/v1/models", headers)
    listed = answer.get("data")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    names = tuple(name for entry in entries if isinstance(name := entry.get("id"), str))
    lengths = [length for entry in entries if (length := whole_number(entry.get("max_model_len"))) is not None]
    return names, min(lengths, default=None)

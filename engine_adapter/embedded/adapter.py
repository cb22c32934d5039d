"""The embedded engine as the gateway sees it: SGLang's surface, with what it does otherwise. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine_adapter.base import OPENAI_ENDPOINTS, Ask, Continuation, Handover, Prepared
from engine_adapter.sglang import Sglang


class Embedded(Sglang):
    """It renders with keepwarm's own encoder: special tokens in messages stay text, and tools stay in the prompt.

    In streams it tells the ids of its tokens as it goes, and it can go on with an answer that another began, grammars
    and seeds included.
    """

    name = "embedded"
    capabilities = replace(
        Sglang.capabilities, literal_text=True, continuation=Continuation.IDS, handover=Handover.NONE
    )

    def prepare(self, ask: Ask) -> Prepared:
        """Do as SGLang; ask for ids in a stream, and give what there is of an answer that goes on."""
        prepared = super().prepare(ask)
        if ask.endpoint not in OPENAI_ENDPOINTS:
            return prepared
        members, headers = dict(prepared.members), dict(prepared.headers)
        if ask.stream:
            headers["x-keepwarm-streamed-ids"] = "1"
        if ask.begun is not None and ask.begun.ids:
            members |= {"given_output_ids": ask.begun.ids, "given_parts": ask.begun.parts}
        return Prepared(members, headers)

    def prompt_tools(
        self, tools: Sequence[Mapping[str, object]] | None, tool_choice: object, version: str | None
    ) -> Sequence[Mapping[str, object]] | None:
        """Return all tools: with ``"none"`` too, since a prompt that loses its tools loses its prefix with them."""
        return tools

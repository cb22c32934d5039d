"""The embedded engine as the gateway sees it: SGLang's surface, with what it does otherwise. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine_adapter.sglang import Sglang


class Embedded(Sglang):
    """It renders with keepwarm's own encoder: special tokens in messages stay text, and tools stay in the prompt."""

    name = "embedded"
    capabilities = replace(Sglang.capabilities, literal_text=True)

    def prompt_tools(
        self, tools: Sequence[Mapping[str, object]] | None, tool_choice: object, version: str | None
    ) -> Sequence[Mapping[str, object]] | None:
        """Return all tools: with ``"none"`` too, since a prompt that loses its tools loses its prefix with them."""
        return tools

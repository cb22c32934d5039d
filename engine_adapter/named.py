"""Every kind of engine, by the name that the settings have for it. Imports no engine's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine_adapter.base import EngineAdapter
from engine_adapter.embedded.adapter import Embedded
from engine_adapter.flavours import FLAVOURS, FlavouredOpenAI
from engine_adapter.llamacpp import LlamaCpp
from engine_adapter.openai_compatible import OpenAICompatible
from engine_adapter.sglang import Sglang
from engine_adapter.vllm import Vllm

ADAPTERS: Mapping[str, EngineAdapter] = MappingProxyType(
    {
        **{adapter.name: adapter for adapter in (Sglang(), Vllm(), LlamaCpp(), Embedded(), OpenAICompatible())},
        **{name: FlavouredOpenAI(flavour) for name, flavour in FLAVOURS.items()},
    }
)

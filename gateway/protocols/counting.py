"""What an engine counted of its answer, as disjoint classes of tokens."""

from __future__ import annotations

from collections.abc import Mapping

from billing.counts import UsageReading
from billing.usage import openai_usage
from engine_adapter.base import EngineAdapter
from tracing.record import Usage, UsageSource

Json = Mapping[str, object]


def reading_of(adapter: EngineAdapter, usage: Json | None, extension: Json | None) -> UsageReading | None:
    """Read a usage object and what an engine of this kind says beside it; ``None`` where there is none."""
    if usage is None:
        return None
    return openai_usage(usage, extension, silence_is_zero=adapter.capabilities.cached_detail)


def is_counted(reading: UsageReading | None) -> bool:
    """Tell whether there is a reading that can be billed."""
    return reading is not None and reading.usage.source is not UsageSource.MISSING


def engine_usage(adapter: EngineAdapter, usage: Json | None, extension: Json | None) -> Usage | None:
    """Return the counts alone; ``None`` also where they cannot be the engine's."""
    reading = reading_of(adapter, usage, extension)
    return reading.usage if reading is not None and reading.usage.source is UsageSource.ENGINE else None

"""What was expected of an instance when a request was routed there, held against what its answer reports.

Every instance's predictions are scored, by what they are based on: ``events`` that the engine publishes, the token
``ids`` of what was routed there, or its ``text`` where ids cannot be known. For instances without events the answers
also correct the prediction (``radix_index.predict``), which then stands in the index like everybody's knowledge.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine_adapter.base import InstanceFacts
from radix_index.base import PrefixIndex
from radix_index.predict import Expectation, PredictedResidency, PredictionStats
from tracing.record import HitSource, Usage, UsageSource

BASES = ("events", "ids", "text")
"""What predictions are based on, the best first."""

DEFAULT_CAPACITY_TOKENS = 262_144
"""Where neither the settings nor the engine tell; answers correct it, and it is remembered up to twice as much."""

LEAST_BLOCK_TOKENS = 16
"""A prediction in finer blocks would cost more than it can be worth: it is approximate anyway."""


def new_scores() -> dict[str, PredictionStats]:
    """Return a score of nothing, by basis."""
    return {basis: PredictionStats() for basis in BASES}


def predicted_residency(
    index: PrefixIndex,
    instance: str,
    facts: InstanceFacts,
    scores: dict[str, PredictionStats],
    *,
    capacity_tokens: int | None = None,
    pool: str | None = None,
) -> PredictedResidency:
    """Begin to predict what an instance without events holds. ``capacity_tokens``: as declared; else as it says."""
    block = facts.block_size or LEAST_BLOCK_TOKENS
    return PredictedResidency(
        index,
        instance,
        block_size=block * -(-LEAST_BLOCK_TOKENS // block),
        capacity_tokens=capacity_tokens or facts.capacity_tokens or DEFAULT_CAPACITY_TOKENS,
        pool=pool,
        stats=scores["ids"],
        approximate_stats=scores["text"],
    )


class Watch(msgspec.Struct, frozen=True):
    """One routed prompt, until its answer tells what was cached."""

    computed: Callable[[], None]
    """Its first token came."""
    answered: Callable[[Usage], None]
    """Its usage is known. Nothing is learned of an answer that the engine itself did not count."""


def watch_prediction(predicted: PredictedResidency, expectation: Expectation) -> Watch:
    """Follow a prompt that was sent to an instance without events."""

    def answered(usage: Usage) -> None:
        if usage.source is UsageSource.ENGINE:
            predicted.answered(
                expectation,
                cached_tokens(usage),
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
            )

    return Watch(lambda: predicted.computed(expectation), answered)


def watch_events(stats: PredictionStats, hit_tokens: int, block_size: int) -> Watch:
    """Follow a prompt whose hits were read from an instance's whole and undisturbed events."""

    def answered(usage: Usage) -> None:
        reported = cached_tokens(usage)
        if reported is not None:
            stats.count(hit_tokens // block_size, reported, block_size, usage.prompt_tokens // block_size)

    return Watch(lambda: None, answered)


def cached_tokens(usage: Usage) -> int | None:
    """Return the engine's own count of cached prompt tokens, ``None`` where it gave none."""
    if usage.source is not UsageSource.ENGINE or usage.hit_source is HitSource.UNKNOWN:
        return None  # where tiers were inferred, their sum is still the engine's
    return usage.hit_tokens

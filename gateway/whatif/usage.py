"""An answer's tokens with other hits: what was computed becomes a hit, or what was hit is computed."""

from __future__ import annotations

from msgspec.structs import replace

from tracing.record import HitSource, Usage

_COMPUTED = ("fresh_tokens", "write_tokens", "write_5m_tokens", "write_1h_tokens")
_HITS = ("hit_pool_tokens", "hit_disk_tokens", "hit_host_tokens", "hit_unknown_tokens", "hit_device_tokens")


def with_hits(usage: Usage, hit_tokens: int) -> Usage:
    """Return the same answer with so many hit tokens; at least the last prompt token is computed.

    More hits are read from the device, in place of fresh tokens first and of written ones then; fewer are lost by the
    slowest tier first, and computed without being billed as written.
    """
    wanted = min(max(hit_tokens, 0), max(usage.prompt_tokens - 1, 0))
    counts = {name: getattr(usage, name) for name in (*_COMPUTED, *_HITS)}
    more = wanted - usage.hit_tokens
    for name in _COMPUTED if more > 0 else _HITS:
        moved = min(abs(more), counts[name])
        counts[name] -= moved
        if more > 0:
            counts["hit_device_tokens"] += moved
            more -= moved
        else:
            counts["fresh_tokens"] += moved
            more += moved
    return replace(usage, **counts)


def with_tiers(usage: Usage, tier_tokens: tuple[int, int, int, int]) -> Usage:
    """Return the same answer with these hits by tier and the rest computed, nothing billed as written."""
    device, host, disk, pool = tier_tokens
    return Usage(
        fresh_tokens=max(usage.prompt_tokens - sum(tier_tokens), 0),
        hit_device_tokens=device,
        hit_host_tokens=host,
        hit_disk_tokens=disk,
        hit_pool_tokens=pool,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        source=usage.source,
        hit_source=HitSource.REPORTED,
    )

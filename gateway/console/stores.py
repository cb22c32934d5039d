"""The page stores of the engines, read from their own metrics: bytes, hits, misses and alarms by reason, latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from gateway.console.formats import count, duration, share
from gateway.console.scale import percent

_PREFIX: Final = "keepwarm_engine_tier_"
_ORDER: Final = ("device", "host", "disk", "pool")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(slots=True)
class TierFacts:
    """One tier of one engine. ``events`` by name: hits, puts, evictions, dropped, ``miss:reason``, ``alarm:reason``."""

    used_bytes: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    events: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by operation: sum
    calls: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier as the page shows it."""

    kind: str
    used: str
    width: str
    hits: str
    hit_share: str
    misses: tuple[tuple[str, str, str], ...]  # reason, count, width
    alarms: tuple[tuple[str, str], ...]
    evictions: str
    moved: str
    latency: str


@dataclass(frozen=True, slots=True)
class StoreView:
    """One engine's store; ``tiers`` are ``None`` where it tells nothing of them."""

    instance: str
    tiers: tuple[TierRow, ...] | None


def tier_facts(metrics: str) -> dict[str, TierFacts]:
    """Return what an engine's metrics say of its tiers. Raises ``ValueError`` for text that is none."""
    found: dict[str, TierFacts] = {}
    for family in text_string_to_metric_families(metrics):
        if not family.name.startswith(_PREFIX):
            continue
        for sample in family.samples:
            tier = sample.labels.get("tier")
            if tier is not None:
                _take(found.setdefault(tier, TierFacts()), sample.name.removeprefix(_PREFIX), sample)
    return found


def _take(facts: TierFacts, name: str, sample: object) -> None:
    labels: Mapping[str, str] = sample.labels  # type: ignore[attr-defined]  # its samples are untyped
    value: float = sample.value  # type: ignore[attr-defined]
    if name == "used_bytes":
        facts.used_bytes += value
    elif name == "bytes_total":
        if labels.get("direction") == "read":
            facts.read_bytes += value
        else:
            facts.written_bytes += value
    elif name == "pages_total":
        event = labels.get("event", "")
        facts.events[event] = facts.events.get(event, 0.0) + value
    elif name in ("seconds_sum", "seconds_count"):
        sums = facts.seconds if name == "seconds_sum" else facts.calls
        operation = labels.get("operation", "")
        sums[operation] = sums.get(operation, 0.0) + value


def store_view(instance: str, metrics: str | None) -> StoreView:
    """Return what the page shows of an engine's store."""
    try:
        found = {} if metrics is None else tier_facts(metrics)
    except ValueError:
        found = {}
    largest = max((facts.used_bytes for facts in found.values()), default=0.0)
    rows = [_row(tier, found[tier], largest) for tier in _ORDER if tier in found]
    return StoreView(instance, tuple(rows) or None)


def store_data(stores: Mapping[str, str | None]) -> list[dict[str, object]]:
    """Return the same for machines: a row for each event of each tier."""
    rows: list[dict[str, object]] = []
    for instance, metrics in stores.items():
        for tier, facts in ({} if metrics is None else tier_facts(metrics)).items():
            moved = {"read_bytes": facts.read_bytes, "written_bytes": facts.written_bytes}
            values = {"used_bytes": facts.used_bytes} | moved | facts.events
            where = {"instance": instance, "tier": tier}
            rows += [{**where, "name": name, "value": value} for name, value in values.items()]
    return rows


def _row(tier: str, facts: TierFacts, largest: float) -> TierRow:
    misses = {name.removeprefix("miss:"): value for name, value in facts.events.items() if name.startswith("miss:")}
    alarms = {name.removeprefix("alarm:"): value for name, value in facts.events.items() if name.startswith("alarm:")}
    hits, asked = facts.events.get("hits", 0.0), facts.events.get("hits", 0.0) + sum(misses.values())
    most = max(misses.values(), default=0.0)
    return TierRow(
        kind=tier,
        used=bytes_text(facts.used_bytes),
        width=percent(round(facts.used_bytes), round(largest) or 1),
        hits=count(round(hits)),
        hit_share=share(round(hits), round(asked)),
        misses=tuple(
            (reason.replace("_", " "), count(round(value)), percent(round(value), round(most) or 1))
            for reason, value in sorted(misses.items(), key=lambda each: -each[1])
            if value
        ),
        alarms=tuple((reason.replace("_", " "), count(round(value))) for reason, value in alarms.items() if value),
        evictions=count(round(facts.events.get("evictions", 0.0))),
        moved=f"{bytes_text(facts.read_bytes)} read, {bytes_text(facts.written_bytes)} written",
        latency=_latencies(facts),
    )


def _latencies(facts: TierFacts) -> str:
    names: Sequence[str] = sorted(facts.calls)
    return ", ".join(
        f"{name} {duration(round(facts.seconds.get(name, 0.0) / facts.calls[name] * 1e9))}"
        for name in names
        if facts.calls[name]
    )


def bytes_text(size: float) -> str:
    """A size in the binary unit that fits."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 999.5 else f"{size:.0f} {_UNITS[unit]}"

"""The prefix index as plain values: what it knows, what it takes, and how far each source can be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.console.formats import NOTHING, count, share
from gateway.console.instances import KNOWN_BY
from gateway.console.scale import Segment, percent
from gateway.console.stores import bytes_text
from gateway.instance import Instance
from kvstore.page import Tier
from radix_index.base import IndexStats, Knowledge


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source: an instance's events, or what is predicted of it."""

    instance: str
    state: str
    is_exact: bool
    is_degraded: bool
    next_batch: str
    resets: str
    blocks: tuple[str, ...]  # by tier
    bar: tuple[Segment, ...]
    total: str


@dataclass(frozen=True, slots=True)
class IndexView:
    """Everything on the page."""

    blocks: str
    names: str
    holder_sets: str
    evicted: str
    used: str
    budget: str
    fill: str
    fill_share: str
    sources: tuple[SourceRow, ...]


def index_view(
    stats: IndexStats, instances: Sequence[Instance], held: Mapping[str, tuple[int, int, int, int]]
) -> IndexView:
    """Return what the page shows."""
    most = max((sum(counts) for counts in held.values()), default=0) or 1
    known = {instance.id for instance in instances}
    rows = [_source(instance, held.get(instance.id, (0, 0, 0, 0)), most) for instance in instances]
    rows += [
        SourceRow(name, "pool, told by its instances", False, False, NOTHING, NOTHING, *_blocks(counts, most))
        for name, counts in sorted(held.items())
        if name not in known
    ]
    return IndexView(
        blocks=count(stats.blocks),
        names=count(stats.names),
        holder_sets=count(stats.holder_sets),
        evicted=count(stats.evicted_blocks),
        used=bytes_text(stats.used_bytes),
        budget=bytes_text(stats.byte_budget),
        fill=percent(min(stats.used_bytes, stats.byte_budget), stats.byte_budget),
        fill_share=share(stats.used_bytes, stats.byte_budget),
        sources=tuple(rows),
    )


def index_data(instances: Sequence[Instance], held: Mapping[str, tuple[int, int, int, int]]) -> list[dict[str, object]]:
    """Return the holders for machines."""
    knowledge = {instance.id: instance.knowledge for instance in instances}
    return [
        {
            "holder": name,
            "knowledge": None if (known := knowledge.get(name)) is None else known.value,
            **{f"{tier.label}_blocks": counts[tier] for tier in Tier},
        }
        for name, counts in sorted(held.items())
    ]


def _source(instance: Instance, counts: tuple[int, int, int, int], most: int) -> SourceRow:
    knowledge, feed = instance.knowledge, instance.feed
    if knowledge is None:
        state = "prediction, from what was routed there" if instance.predicted is not None else "not known yet"
    else:
        state = KNOWN_BY[knowledge] + (", catching up" if feed is not None and feed.is_settling else "")
    return SourceRow(
        instance.id,
        state,
        knowledge is Knowledge.COMPLETE,
        knowledge in (Knowledge.STALE, Knowledge.PARTIAL),
        NOTHING if feed is None or feed.next_sequence is None else count(feed.next_sequence),
        NOTHING if feed is None else count(feed.resets),
        *_blocks(counts, most),
    )


def _blocks(counts: tuple[int, int, int, int], most: int) -> tuple[tuple[str, ...], tuple[Segment, ...], str]:
    bar, at = [], 0
    for tier in Tier:
        if counts[tier]:
            words = f"{count(counts[tier])} blocks in {tier.label}"
            bar.append(Segment(tier.label, percent(at, most), percent(counts[tier], most), words))
            at += counts[tier]
    return tuple(count(each) if each else NOTHING for each in counts), tuple(bar), count(sum(counts))

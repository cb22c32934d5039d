"""The fleet as a picture: each instance with its load, and each tier with what it holds, to one scale a tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.console.formats import count, share
from gateway.console.instances import state_of
from gateway.console.scale import percent
from gateway.instance import Instance
from kvstore.page import Tier

_TIERS = tuple(tier for tier in Tier if tier is not Tier.POOL)


@dataclass(frozen=True, slots=True)
class TierCell:
    """What one holder has in one tier. ``width``: of its capacity, or of the fullest holder where that is not known."""

    kind: str
    tokens: str
    width: str
    title: str


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One instance, or a pool (which has no load)."""

    name: str
    state: str
    is_bad: bool
    running: str
    queued: str
    load_width: str
    load_title: str
    cells: tuple[TierCell | None, ...]  # device, host, disk, pool
    is_pool: bool = False


def fleet_rows(
    instances: Sequence[Instance], held: Mapping[str, tuple[int, int, int, int]], block_sizes: Mapping[str, int]
) -> list[FleetRow]:
    """Return a row for each instance, then for each pool. ``held``: blocks by tier, as the index knows them."""
    tokens = {
        name: tuple(blocks * block_sizes.get(name, max(block_sizes.values(), default=1)) for blocks in counts)
        for name, counts in held.items()
    }
    fullest = [max((counts[tier] for counts in tokens.values()), default=0) for tier in Tier]
    busiest = max((instance.load.queued_tokens for instance in instances), default=0)
    rows = []
    for instance in instances:
        mine = tokens.get(instance.id, (0, 0, 0, 0))
        capacity = instance.facts.capacity_tokens if instance.facts is not None else None
        tiers = instance.facts.tiers if instance.facts is not None else ()
        state, is_bad = state_of(instance)
        cells: list[TierCell | None] = [_cell(Tier.DEVICE, mine[0], capacity or fullest[0], capacity)]
        for tier in _TIERS[1:]:
            has = mine[tier] or tier.label in tiers
            cells.append(_cell(tier, mine[tier], fullest[tier], None) if has else None)
        rows.append(
            FleetRow(
                name=instance.id,
                state=state,
                is_bad=is_bad,
                running=count(instance.load.running),
                queued=count(instance.load.queued_tokens),
                load_width=percent(instance.load.queued_tokens, busiest or 1),
                load_title=f"{count(instance.load.queued_tokens)} prompt tokens wait for their first token",
                cells=(*cells, None),
            )
        )
    pools = sorted(tokens.keys() - {instance.id for instance in instances})
    for name in pools:
        cell = _cell(Tier.POOL, tokens[name][Tier.POOL], fullest[Tier.POOL], None)
        rows.append(FleetRow(name, "shared", False, "", "", "0%", "", (None, None, None, cell), is_pool=True))
    return rows


def _cell(tier: Tier, tokens: int, scale: int, capacity: int | None) -> TierCell:
    of = f" of {count(capacity)} ({share(tokens, capacity)})" if capacity else ""
    words = f"{count(tokens)} tokens{of} known in {tier.label}"
    return TierCell(tier.label, count(tokens), percent(min(tokens, scale), scale or 1), words)

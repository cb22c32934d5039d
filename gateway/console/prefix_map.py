"""Which prefixes are shared: by how many requests and runs, who holds them now and in which tier.

Prompts are known by their marks, every so many tokens; marks that always occur together are one prefix, so that the
prefixes are the branches of a tree. A branch's worth is its own tokens times those who hold it. Holders are read from
the index at the moment of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.console.formats import ago, count
from gateway.console.scale import percent
from kvstore.page import Tier
from tracing.record import RequestRecord

RECORDS: Final = 2_000
MAX_PREFIXES: Final = 40
_AGENTS_NAMED: Final = 3

HoldersOf = Callable[[Sequence[int]], Sequence[Mapping[str, tuple[Tier, ...]]]]
"""Who holds each of these blocks, and in which tiers."""


@dataclass(slots=True)
class Branch:
    """A prefix: the tokens from ``start_tokens`` to ``end_tokens`` behind those of its parent."""

    mark: int  # of its end
    start_tokens: int
    end_tokens: int
    requests: int = 0
    last_ns: int = 0
    runs: set[tuple[str, str]] = field(default_factory=set)
    agents: dict[str, int] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    holders: Mapping[str, tuple[Tier, ...]] = field(default_factory=dict)

    @property
    def own_tokens(self) -> int:
        """The tokens that it has for itself."""
        return self.end_tokens - self.start_tokens

    @property
    def weight(self) -> int:
        """Tokens times holders; what nobody holds counts by what it is shared."""
        return self.own_tokens * len(self.holders)


@dataclass(frozen=True, slots=True)
class HolderCell:
    """One instance: in which tier it has the prefix, ``None`` where it has not."""

    kind: str | None
    title: str


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One prefix of the map."""

    name: str
    shared_by: str
    model: str
    tokens: str
    end: str
    x: str
    width: str
    title: str
    requests: str
    runs: str
    when: str
    cells: tuple[HolderCell, ...]
    holders: int


@dataclass(frozen=True, slots=True)
class PrefixMap:
    """The map: its columns are the holders."""

    holders: tuple[str, ...]
    rows: tuple[PrefixRow, ...]
    records: int
    longest: str


def branches(records: Sequence[RequestRecord]) -> list[Branch]:
    """Return the prefixes that more than one request had, cut where prompts part. O(marks)."""
    counts: dict[int, int] = {}
    for record in records:
        if record.prefix is not None:
            for mark in record.prefix.marks():
                counts[mark] = counts.get(mark, 0) + 1
    found: dict[int, Branch] = {}
    for record in records:
        if record.prefix is not None:
            _walk(record, counts, found)
    return list(found.values())


def _walk(record: RequestRecord, counts: Mapping[int, int], found: dict[int, Branch]) -> None:
    """Cut one prompt's marks into branches: each ends where fewer requests go on."""
    assert record.prefix is not None
    marks, stride = record.prefix.marks(), record.prefix.stride_tokens
    start = 0
    for place, mark in enumerate(marks):
        following = counts[marks[place + 1]] if place + 1 < len(marks) else 0
        if counts[mark] < 2:
            break
        if following != counts[mark]:
            branch = found.setdefault(mark, Branch(mark, start * stride, (place + 1) * stride))
            _count(branch, record)
            start = place + 1


def _count(branch: Branch, record: RequestRecord) -> None:
    branch.requests += 1
    branch.last_ns = max(branch.last_ns, record.stamps.arrived_ns)
    branch.models.add(record.model)
    if record.link is not None:
        branch.runs.add((record.identity.tenant, record.link.run_id))
    agent = record.labels.get("agent")
    if agent:
        branch.agents[agent] = branch.agents.get(agent, 0) + 1


def prefix_map(records: Sequence[RequestRecord], holders_of: HoldersOf | None, now_ns: int) -> PrefixMap:
    """The map of the prefixes that weigh most, tokens times holders, then tokens times requests."""
    found = branches(records)
    if holders_of is not None and found:
        for branch, holders in zip(found, holders_of([branch.mark for branch in found]), strict=True):
            branch.holders = holders
    found.sort(key=lambda branch: (branch.weight, branch.own_tokens * branch.requests), reverse=True)
    shown = found[:MAX_PREFIXES]
    names = tuple(sorted({name for branch in shown for name in branch.holders}))
    longest = max((branch.end_tokens for branch in shown), default=0)
    return PrefixMap(
        names, tuple(_row(branch, names, longest, now_ns) for branch in shown), len(records), count(longest)
    )


def prefix_data(records: Sequence[RequestRecord], holders_of: HoldersOf | None) -> list[dict[str, object]]:
    """All shared prefixes for machines."""
    found = branches(records)
    held = holders_of([branch.mark for branch in found]) if holders_of is not None and found else [{}] * len(found)
    return [
        {
            "mark": f"{branch.mark:016x}",
            "start_tokens": branch.start_tokens,
            "end_tokens": branch.end_tokens,
            "requests": branch.requests,
            "runs": len(branch.runs),
            "agents": sorted(branch.agents),
            "models": sorted(branch.models),
            "holders": sorted(f"{name}:{tier.label}" for name, tiers in holders.items() for tier in tiers),
        }
        for branch, holders in zip(found, held, strict=True)
    ]


def _row(branch: Branch, names: Sequence[str], longest: int, now_ns: int) -> PrefixRow:
    agents = sorted(branch.agents, key=lambda name: -branch.agents[name])
    more = len(agents) - _AGENTS_NAMED
    who = ", ".join(agents[:_AGENTS_NAMED]) + (f" +{more}" if more > 0 else "")
    cells = []
    for name in names:
        tiers = branch.holders.get(name, ())
        kind = min(tiers).label if tiers else None
        words = ", ".join(tier.label for tier in tiers) or "does not hold it"
        cells.append(HolderCell(kind, f"{name}: {words}"))
    return PrefixRow(
        name=f"{branch.mark:016x}"[:8],
        shared_by=who or "no agent named",
        model=", ".join(sorted(branch.models)),
        tokens=count(branch.own_tokens),
        end=count(branch.end_tokens),
        x=percent(branch.start_tokens, longest),
        width=percent(branch.own_tokens, longest),
        title=f"tokens {count(branch.start_tokens)} to {count(branch.end_tokens)} of these prompts",
        requests=count(branch.requests),
        runs=count(len(branch.runs)),
        when=ago(branch.last_ns, now_ns),
        cells=tuple(cells),
        holders=len(branch.holders),
    )

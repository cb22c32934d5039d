"""What the connector's halves tell each other: plans go down with every step, reports come up with its output.

The scheduler's half decides, the workers' halves move bytes; they are separate processes. Everything here is a value
and pickles. Blocks are named by vLLM's own hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.page import PageLayout, PageMeta, Tier


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch these pages into these blocks of the engine's cache, for a request that waits for them.

    ``patience_s``: how long computing them would take, where that is known.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Store this block as a page once the step has computed it."""

    hash: bytes
    meta: PageMeta
    block_id: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Read these pages of a tier for nobody: how long that takes is not known any more."""

    tier: Tier
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the workers do in one step. ``number`` grows by one; ``is_idle``: the step computes nothing."""

    number: int
    is_idle: bool
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    samples: tuple[Sample, ...] = ()
    clears: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """These pages became readable in ``tier``."""

    tier: Tier
    pages: tuple[tuple[bytes, PageMeta], ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These pages are no longer readable in ``tier``."""

    tier: Tier
    hashes: tuple[bytes, ...]


Change = Stored | Removed


@dataclass(frozen=True, slots=True)
class Read:
    """A read of a tier below the host: what it brought and how long it took."""

    tier: Tier
    moved_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A load of which only the first ``good`` pages came, in time and right."""

    request_id: str
    good: int


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself when the engine starts, and what its tiers hold already."""

    rank: int
    layout: PageLayout
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """``settled``: all that was to be saved up to this step is in every tier that takes it, or was dropped."""

    step: int
    settled: int
    changes: tuple[Change, ...] = ()
    reads: tuple[Read, ...] = ()
    failures: tuple[Failed, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the ranks tell of one step. vLLM merges the ranks' reports with ``aggregate``."""

    ranks: dict[int, RankReport] = field(default_factory=dict)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Return both."""
        return WorkerReport({**self.ranks, **other.ranks})

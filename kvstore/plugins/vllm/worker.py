"""A worker's half: moves pages between this rank's blocks and its tiers, and reports what came of it.

Loads run in the store's threads while the engine computes; a page that does not come in time, or does not verify, is a
block that failed to load, which vLLM then computes. Saves are copied out of the cache before the step's output goes up,
so no block has to be kept for them, and are written behind from the host tier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvstore.codec import checksum
from kvstore.deadline import Allowance
from kvstore.fetching import report as report_failure
from kvstore.memory import page_rows
from kvstore.page import PageLayout, Tier, key_content_hash, page_key
from kvstore.page_store import PageStore, PageStoreOptions
from kvstore.plugins.vllm.messages import (
    Change,
    Failed,
    Hello,
    Load,
    RankReport,
    Read,
    Removed,
    Sample,
    Save,
    StepPlan,
    Stored,
    WorkerReport,
)
from kvstore.plugins.vllm.paged_cache import BlockTarget, PagedCache
from kvstore.tiers.base import Page, PagesStored, PageTier, TierChange

log = logging.getLogger(__name__)

_WINDOW_BYTES = 8 << 20
_IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for what is under way, instead of being one of very many."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """``announce_pages``: of each tier, told after a start. ``close_s``: for what is unwritten when the engine ends."""

    load_s: Allowance
    announce_pages: int = 100_000
    close_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Loading:
    load: Load
    future: Future[list[Tier | None]]


class WorkerHalf:
    """One rank's pages. Called from the worker's own thread; its tiers tell of changes from theirs."""

    def __init__(
        self, rank: int, cache: PagedCache, layout: PageLayout, tiers: Sequence[PageTier], limits: WorkerLimits
    ) -> None:
        """The tiers are closed by this object."""
        self._rank, self._cache, self._layout, self._limits = rank, cache, layout, limits
        self._fingerprint = layout.fingerprint
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self._reads: list[Read] = []
        for tier in tiers:
            tier.on_change = self._changed
        self._tiers = {tier.tier: tier for tier in tiers}
        options = PageStoreOptions(get_s=limits.load_s, window_bytes=_WINDOW_BYTES)
        self._store = PageStore(tiers, options, on_read=self._read)
        self._window = max(1, _WINDOW_BYTES // layout.page_bytes)
        self._rows = page_rows(self._window, layout.page_bytes)
        self._sampler = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-sample")
        self._loading: list[_Loading] = []
        self._failed: set[int] = set()
        self._failures: list[Failed] = []
        self._plan = StepPlan(0, is_idle=True)
        self._settled = 0
        self.failed_pages = self.lost_saves = 0

    def hello(self) -> Hello:
        """Say what this rank is, and what its tiers hold from before."""
        for tier in self._tiers.values():
            if tier.tier is not Tier.POOL:
                tier.announce(self._limits.announce_pages)
        return Hello(self._rank, self._layout, self._take_changes())

    def begin(self, plan: StepPlan) -> None:
        """Start the step's loads; they are done when ``finished`` names their requests."""
        self._plan = plan
        if plan.clears:
            self._store.clear()
        for load in plan.loads:
            keys = [page_key(self._fingerprint, name) for name in load.hashes]
            target = BlockTarget(self._cache, load.block_ids)
            timeout_s = self._limits.load_s.seconds(len(keys) * self._layout.page_bytes)
            if load.patience_s is not None:
                timeout_s = min(timeout_s, load.patience_s)
            future = self._store.start_get(keys, target, timeout_s=timeout_s, to_first_gap=True)
            self._loading.append(_Loading(load, future))
        for sample in plan.samples:
            self._sampler.submit(self._sample, sample).add_done_callback(report_failure)

    def save(self) -> None:
        """Copy out what the step has computed, and write it behind."""
        saves = self._plan.saves
        for start in range(0, len(saves), self._window):
            self._save(saves[start : start + self._window])
        if self._settled < self._plan.number and self._store.flush(_IDLE_WAIT_S if self._plan.is_idle else 0.0):
            self._settled = self._plan.number

    def finished(self) -> set[str]:
        """Return the requests whose loads are over, well or badly."""
        if self._plan.is_idle and self._loading:
            wait([each.future for each in self._loading], timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        over = [each for each in self._loading if each.future.done()]
        self._loading = [each for each in self._loading if not each.future.done()]
        for each in over:
            found = each.future.result()
            good = found.index(None) if None in found else len(found)
            if good < len(found):
                self._failed.update(each.load.block_ids[good:])
                self._failures.append(Failed(each.load.request_id, good))
                self.failed_pages += len(found) - good
        return {each.load.request_id for each in over}

    def failed(self) -> set[int]:
        """Return the blocks that were not loaded, once."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> WorkerReport:
        """Return what there is to tell, once."""
        with self._lock:
            reads, self._reads = tuple(self._reads), []
        failures, self._failures = tuple(self._failures), []
        told = RankReport(self._plan.number, self._settled, self._take_changes(), reads, failures)
        return WorkerReport({self._rank: told})

    def close(self) -> None:
        """Write what was accepted, within bounds, and close the tiers. Idempotent."""
        self._sampler.shutdown(wait=True, cancel_futures=True)
        if not self._store.flush(self._limits.close_s):
            log.warning("keepwarm: some pages were not written within %g s", self._limits.close_s)
        self._store.close()

    def _save(self, saves: Sequence[Save]) -> None:
        self._cache.copy_out([save.block_id for save in saves], self._rows)
        pages = []
        for save, row in zip(saves, self._rows, strict=False):
            data = memoryview(row)
            pages.append(Page(page_key(self._fingerprint, save.hash), save.meta, data, checksum(data)))
        self.lost_saves += self._store.put(pages).count(False)

    def _sample(self, sample: Sample) -> None:
        """Read a few pages of a tier for nobody. A miss is as good: it says that the tier answers."""
        tier = self._tiers.get(sample.tier)
        if tier is None:
            return
        rows = page_rows(len(sample.hashes), self._layout.page_bytes)
        keys = [page_key(self._fingerprint, name) for name in sample.hashes]
        began_s = time.monotonic()
        found = tier.get(keys, [memoryview(row) for row in rows])
        moved = sum(each is not None for each in found) * self._layout.page_bytes
        self._read(sample.tier, moved, time.monotonic() - began_s)

    def _read(self, tier: Tier, moved_bytes: int, took_s: float) -> None:
        with self._lock:
            self._reads.append(Read(tier, moved_bytes, took_s))

    def _changed(self, change: TierChange) -> None:
        if isinstance(change, PagesStored):
            pages = tuple((key_content_hash(key), meta) for key, meta in change.pages)
            self._changes.append(Stored(change.tier, pages))
        else:
            self._changes.append(Removed(change.tier, tuple(map(key_content_hash, change.keys))))

    def _take_changes(self) -> tuple[Change, ...]:
        return tuple(self._changes.popleft() for _ in range(len(self._changes)))

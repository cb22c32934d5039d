"""The scheduler's half: which pages a request is offered, which blocks are stored, and what the engine tells of both.

It moves no bytes and never waits. What the workers' tiers hold it knows from their reports; those that others write to,
too, are asked beside its thread. All its methods are called from vLLM's scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.page import PageLayout, Tier
from kvstore.plugins.vllm.holdings import Holdings
from kvstore.plugins.vllm.messages import Change, Failed, Hello, Load, Sample, Save, StepPlan, WorkerReport
from kvstore.plugins.vllm.requests import Tracked
from kvstore.plugins.vllm.shared_lookup import Places, SharedLookup
from kvstore.worth import FetchWorth

_SAMPLE_PAGES = 4  # at least, and as many as _SAMPLE_BYTES are
_SAMPLE_BYTES = 1 << 20
_PATIENCE_S = 10.0
_SHUN_S = 1.0
"""How long nothing is offered of a tier that failed to deliver: what is asked in vain costs a request a step or two."""
BlockIdsOf = Callable[[str], Sequence[int]]
"""Returns the blocks of a request, first to last."""


class SchedulerHalf:
    """Offers pages, plans steps, keeps the picture of what the workers hold."""

    def __init__(
        self,
        block_tokens: int,
        worth: FetchWorth,
        open_lookup: Callable[[Sequence[PageLayout]], SharedLookup | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = block_tokens
        self._worth = worth
        self._open_lookup = open_lookup
        self._clock = clock
        self._holdings: Holdings | None = None
        self._lookup: SharedLookup | None = None
        self._page_bytes = 0
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._asked: dict[bytes, int] = {}  # blocks that are being stored, and the step that asked for it
        self._refused: dict[Tier, tuple[bytes, ...]] = {}
        self._shunned: dict[Tier, float] = {}  # until when
        self._changes: list[Change] = []
        self._computing: dict[int, tuple[float, int]] = {}  # by step: when it began, prompt tokens in it
        self._step = self._settled = self._last_save = 0
        self._saved_s = 0.0
        self._clears = False

    # --- the engine starts ---

    def greet(self, hellos: Sequence[Hello]) -> None:
        """Take in what every rank says of itself; from here on pages are offered and stored."""
        self._holdings = Holdings(len(hellos))
        layouts = [hello.layout for hello in sorted(hellos, key=lambda hello: hello.rank)]
        self._page_bytes = sum(layout.page_bytes for layout in layouts)
        for hello in hellos:
            self._changes += self._holdings.apply(hello.rank, hello.changes)
        self._lookup = self._open_lookup(layouts)

    @property
    def has_work(self) -> bool:
        """Whether the engine should go on stepping without requests: something is unwritten, or untold.

        A medium that takes long over it is not waited for: what it holds is told with some later step.
        """
        is_writing = self._last_save > self._settled and self._clock() - self._saved_s < _PATIENCE_S
        return bool(self._changes or self._clears or is_writing)

    # --- a request ---

    def track(self, request: Any) -> None:
        """A request has come: begin to look for its pages."""
        tracked = self._requests[request.request_id] = Tracked(request)
        self._ask_others(tracked)

    def offer(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many pages beyond these tokens are worth loading; ``None`` while a shared tier is being asked."""
        if self._holdings is None:
            return 0
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            self.track(request)
            tracked = self._requests[request.request_id]
        if tracked.has_failed:
            return 0
        self._ask_others(tracked)
        shared: Places | None = {} if self._lookup is None else self._lookup.answer(tracked.id)
        if shared is None:
            return None
        if self._lookup is not None:
            for tier, took_s in self._lookup.take_times():
                self._worth.asked(tier, took_s)
        start = computed_tokens // self._tokens
        names = tracked.hashes[start : tracked.loadable(self._tokens)]
        tiers = self._leading(names, shared)
        count = self._worth.leading(tiers, page_bytes=self._page_bytes, page_tokens=self._tokens)
        for tier in set(tiers[count:]) - {Tier.HOST}:
            self._refused[tier] = tuple(
                name for name, where in zip(names[count:], tiers[count:], strict=False) if where is tier
            )[: self._sample_pages]
        tracked.claimed_from, tracked.claimed = start, tiers[:count]
        return count

    def _leading(self, names: Sequence[bytes], shared: Places) -> list[Tier]:
        """Return where each of the leading blocks lies that some tier would deliver."""
        assert self._holdings is not None
        now_s, tiers = self._clock(), list[Tier]()
        shunned = {tier for tier, until_s in self._shunned.items() if now_s < until_s}
        for name in names:
            tier = self._holdings.tier_of(name) or shared.get(name)
            if tier is None or tier in shunned:
                break
            tiers.append(tier)
        return tiers

    def allocated(self, request: Any, block_ids: Sequence[int], loaded_tokens: int) -> None:
        """Blocks were given to a request; with ``loaded_tokens`` it waits until those pages of the offer are there."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if self._lookup is not None:
            self._lookup.forget(tracked.id)
        tracked.loading = ()
        if not loaded_tokens:
            return
        start, count = tracked.claimed_from, loaded_tokens // self._tokens
        tracked.loading = tracked.claimed[:count]
        names, blocks = tracked.hashes[start : start + count], block_ids[start : start + count]
        patience_s = self._worth.patience_s(count, self._tokens)
        self._loads.append(Load(tracked.id, tuple(names), tuple(blocks), patience_s))

    def sources(self, request: Any) -> dict[Tier, int]:
        """Return how many tokens of what a request is loading come from which tier."""
        tracked = self._requests.get(request.request_id)
        counted: dict[Tier, int] = {}
        for tier in () if tracked is None else tracked.loading:
            counted[tier] = counted.get(tier, 0) + self._tokens
        return counted

    def finished(self, request_id: str) -> None:
        """A request has ended."""
        self._requests.pop(request_id, None)
        if self._lookup is not None:
            self._lookup.forget(request_id)

    # --- a step ---

    def plan(self, scheduled: Mapping[str, int], guessed: Mapping[str, int], block_ids_of: BlockIdsOf) -> StepPlan:
        """Return what the workers do in this step. ``guessed``: of the tokens scheduled, those that may not stand."""
        self._step += 1
        saves = [save for request_id in scheduled for save in self._saves(request_id, scheduled, guessed, block_ids_of)]
        if saves:
            self._last_save, self._saved_s = self._step, self._clock()
        prompt = sum(count for count in scheduled.values() if count > self._tokens)
        if prompt:
            self._computing[self._step] = (self._clock(), prompt)
        loads, self._loads = tuple(self._loads), []
        clears, self._clears = self._clears, False
        if clears:
            self._last_save, self._saved_s = self._step, self._clock()
        return StepPlan(
            self._step, not scheduled, loads, tuple(saves), self._samples() if self._refused else (), clears
        )

    def _saves(
        self,
        request_id: str,
        scheduled: Mapping[str, int],
        guessed: Mapping[str, int],
        block_ids_of: BlockIdsOf,
    ) -> list[Save]:
        tracked = self._requests.get(request_id)
        if tracked is None or self._holdings is None:
            return []
        done = tracked.request.num_computed_tokens + scheduled[request_id] - guessed.get(request_id, 0)
        if done // self._tokens <= tracked.saved:  # as in most steps of most requests
            return []
        full = min(done // self._tokens, tracked.pages(self._tokens))
        saves, block_ids, hashes = [], block_ids_of(request_id), tracked.hashes
        for block in range(tracked.saved, min(full, len(block_ids))):
            name = bytes(hashes[block])
            if name in self._asked or self._holdings.has(name):
                continue
            self._asked[name] = self._step
            saves.append(Save(name, tracked.meta(block, self._tokens), block_ids[block]))
        tracked.saved = full
        return saves

    def _samples(self) -> tuple[Sample, ...]:
        due = [tier for tier in self._worth.due(self._clock()) if self._refused.get(tier)]
        return tuple(Sample(tier, self._refused.pop(tier)) for tier in due)

    def reported(self, report: WorkerReport) -> None:
        """Take in what the workers tell of a step that is over."""
        if self._holdings is None:
            return
        now_s = self._clock()
        for rank, told in sorted(report.ranks.items()):
            self._changes += self._holdings.apply(rank, told.changes)
            for read in told.reads:
                self._worth.fetched(read.tier, read.moved_bytes * len(report.ranks), read.took_s, now_s)
            for failure in told.failures:
                self._failed(failure, now_s)
        settled = min((told.settled for told in report.ranks.values()), default=self._settled)
        if settled > self._settled:
            self._settled = settled
            self._asked = {name: step for name, step in self._asked.items() if step > settled}
        for step in {told.step for told in report.ranks.values()}:
            began = self._computing.pop(step, None)
            if began is not None:
                self._worth.prefill.observe(began[1], now_s - began[0])

    def _failed(self, failure: Failed, now_s: float) -> None:
        tracked = self._requests.get(failure.request_id)
        if tracked is None:
            return
        tracked.has_failed = True
        if failure.good < len(tracked.loading):
            self._shunned[tracked.loading[failure.good]] = now_s + _SHUN_S

    @property
    def _sample_pages(self) -> int:
        return max(_SAMPLE_PAGES, _SAMPLE_BYTES // max(1, self._page_bytes))

    def take_changes(self) -> list[Change]:
        """Return what the engine's tiers hold now and did not before, in order, once."""
        changes, self._changes = self._changes, []
        return changes

    def clear(self) -> None:
        """Forget every page that the workers hold, with the next step."""
        self._clears = True

    def close(self) -> None:
        """End the look-ups."""
        if self._lookup is not None:
            self._lookup.close()

    def _ask_others(self, tracked: Tracked) -> None:
        """Ask shared tiers for what the engine has not itself; not those of which it would load nothing anyway."""
        if self._lookup is None or self._holdings is None or not self._lookup.is_due(tracked.id):
            return
        names = [name for name in tracked.hashes[: tracked.loadable(self._tokens)] if not self._holdings.tier_of(name)]
        kinds = set[Tier]()
        for tier in self._lookup.kinds if names else ():
            if self._worth.pays_to_ask(tier, len(names), page_bytes=self._page_bytes, page_tokens=self._tokens):
                kinds.add(tier)
            elif tier is not Tier.HOST:
                self._refused[tier] = tuple(names[: self._sample_pages])
        self._lookup.ask(tracked.id, names, kinds)

"""A stand-in for vLLM around the connector's two halves: torch CPU tensors for its cache, its order of calls, no model.

What a block holds follows from its name, so that any byte of any block can be told right from wrong. Messages between
the halves are pickled, as between vLLM's processes. The real one is tried by ``tests.e2e.real_vllm``.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.deadline import Allowance
from kvstore.page import PageLayout, Tier
from kvstore.plugins.vllm.messages import Change, StepPlan, WorkerReport
from kvstore.plugins.vllm.paged_cache import PagedCache
from kvstore.plugins.vllm.scheduler import SchedulerHalf
from kvstore.plugins.vllm.shared_lookup import SharedLookup
from kvstore.plugins.vllm.worker import WorkerHalf, WorkerLimits
from kvstore.tiers.base import PageTier
from kvstore.worth import FetchWorth, WorthOptions

BLOCK = 4
LAYERS, HEADS, CONTENT = 3, 2, 32
PAGE_BYTES = LAYERS * HEADS * BLOCK * CONTENT * 4
PATIENT = Allowance(60.0)
ALWAYS = WorthOptions(prefill_tokens_per_s=0.001)
"""Whatever is held is worth loading."""


def layout(rank: int = 0, ranks: int = 1, weights: str = "sample") -> PageLayout:
    return PageLayout(weights, "uint8", BLOCK, 1, 1, PAGE_BYTES // BLOCK, rank=rank, ranks=ranks, is_mla=True)


def block_names(tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    """Name the full blocks by a chain of their own, as vLLM does by its."""
    names, parent = list[bytes](), repr(salt).encode()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashlib.sha256(parent + repr(list(tokens[start : start + BLOCK])).encode()).digest()
        names.append(parent)
    return names


@dataclass
class Medium:
    """An image in a prompt, as far as the connector looks at it."""

    mm_position: Any


@dataclass
class Position:
    offset: int


@dataclass
class Request:
    """A request with the members of vLLM's that the connector reads."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    lora_request: object = None
    prompt_embeds: object = None
    mm_features: list[Medium] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return block_names(self.all_token_ids, self.cache_salt)


@dataclass
class Served:
    """What came of a request: blocks that were loaded, blocks that were computed, and where they lie."""

    loaded: int
    computed: int
    failed: int
    block_ids: list[int]


class PagedEngine:
    """One engine of one or several ranks."""

    def __init__(
        self,
        tiers_of: Callable[[PageLayout], list[PageTier]],
        *,
        blocks: int = 64,
        ranks: int = 1,
        lookup: Callable[[Sequence[PageLayout]], SharedLookup | None] = lambda layouts: None,
        worth: WorthOptions = ALWAYS,
        load_s: Allowance = PATIENT,
        weights: str = "sample",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.caches, self.workers = list[dict[str, torch.Tensor]](), list[WorkerHalf]()
        for rank in range(ranks):
            cache = {f"layer.{n}": torch.zeros((blocks, HEADS, BLOCK, CONTENT)) for n in range(LAYERS)}
            mine = layout(rank, ranks, weights)
            limits = WorkerLimits(load_s, close_s=60.0)
            self.caches.append(cache)
            self.workers.append(WorkerHalf(rank, PagedCache(cache, blocks), mine, tiers_of(mine), limits))
        self.worth = FetchWorth(worth)
        self.scheduler = SchedulerHalf(BLOCK, self.worth, lookup, clock=clock)
        self.scheduler.greet([pickle.loads(pickle.dumps(worker.hello())) for worker in self.workers])
        self.told: list[Change] = self.scheduler.take_changes()
        self._free = list(range(blocks))

    def serve(self, request: Request, chunk: int = 1 << 20) -> Served:
        """Take a request from its arrival to the end of its prompt, ``chunk`` tokens a step; then forget its blocks."""
        self.scheduler.track(request)
        offered = self.scheduler.offer(request, 0)
        while offered is None:  # the pool has not answered
            time.sleep(0)  # vLLM's scheduler is another process than what is waited for
            offered = self.scheduler.offer(request, 0)
        ids = [self._free.pop() for _ in range(-(-request.num_tokens // BLOCK))]
        self.scheduler.allocated(request, ids, offered * BLOCK)
        failed = self._load(request, ids) if offered else 0
        if failed:  # vLLM asks again for a request of which nothing came
            assert self.scheduler.offer(request, 0) == 0
        loaded = computed_from = offered - failed
        for index in range(loaded):
            assert self.holds(ids[index], request.block_hashes[index]), f"wrong bytes in block {index}"
        request.num_computed_tokens = computed_from * BLOCK
        while request.num_computed_tokens < request.num_tokens:
            count = min(chunk, request.num_tokens - request.num_computed_tokens)
            self.step({request.request_id: count}, ids, request)
        self.scheduler.finished(request.request_id)
        self._free += ids
        return Served(loaded, request.num_tokens // BLOCK - loaded, failed, ids)

    def _load(self, request: Request, ids: list[int]) -> int:
        invalid, finished = set[int](), set[str]()
        while request.request_id not in finished:
            done, bad = self.step({}, ids, request)
            finished |= done
            invalid |= bad
        failed = [index for index, block_id in enumerate(ids) if block_id in invalid]
        offered = len(self.scheduler.sources(request)) and sum(self.scheduler.sources(request).values()) // BLOCK
        return offered - failed[0] if failed else 0

    def step(
        self, scheduled: dict[str, int], ids: list[int], request: Request, guessed: dict[str, int] | None = None
    ) -> tuple[set[str], set[int]]:
        """Run one step; return the requests whose loads ended, and the blocks that failed to load."""
        plan: StepPlan = pickle.loads(pickle.dumps(self.scheduler.plan(scheduled, guessed or {}, lambda _: ids)))
        finished, failed, report = list[set[str]](), set[int](), WorkerReport()
        count = scheduled.get(request.request_id, 0)
        for worker in self.workers:
            worker.begin(plan)
        self._compute(request, ids, count)
        request.num_computed_tokens += count
        for worker in self.workers:
            worker.save()
            finished.append(worker.finished())
            failed |= worker.failed()
            report = report.aggregate(pickle.loads(pickle.dumps(worker.report())))
        self.scheduler.reported(report)
        self.told += self.scheduler.take_changes()
        return set.intersection(*finished), failed

    def idle(self) -> None:
        """Step without requests for as long as the connector asks for it, as vLLM does."""
        nobody = Request("nobody", [])
        while self.scheduler.has_work:
            self.step({}, [], nobody)

    def holds(self, block_id: int, name: bytes) -> bool:
        """Tell whether a block of every rank holds what belongs to its name."""
        return all(
            torch.equal(tensor[block_id], block_content(name, rank, layer))
            for rank, cache in enumerate(self.caches)
            for layer, tensor in enumerate(cache.values())
        )

    def tiers_of(self, name: bytes) -> set[Tier]:
        """Return where the engine has said that it holds a block."""
        held = set[Tier]()
        for change in self.told:
            names = [page[0] for page in change.pages] if hasattr(change, "pages") else list(change.hashes)
            if name in names:
                held = held | {change.tier} if hasattr(change, "pages") else held - {change.tier}
        return held

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def _compute(self, request: Request, ids: list[int], count: int) -> None:
        end = (request.num_computed_tokens + count) // BLOCK
        for index in range(request.num_computed_tokens // BLOCK, end):
            for rank, cache in enumerate(self.caches):
                for layer, tensor in enumerate(cache.values()):
                    tensor[ids[index]] = block_content(request.block_hashes[index], rank, layer)


def block_content(name: bytes, rank: int, layer: int) -> torch.Tensor:
    """Return the one right content of a block in a layer."""
    seed = hashlib.shake_128(name + bytes([rank, layer])).digest(HEADS * BLOCK * CONTENT)
    return torch.tensor(list(seed), dtype=torch.float32).reshape(HEADS, BLOCK, CONTENT)

"""Where requests wait for their turn: the asynchronous side of ``gateway.admission``, one queue a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.admission import Admission, AdmissionOptions, Entry, QueueFull
from gateway.draft import Draft
from gateway.errors import TooBusy
from gateway.fleet import Fleet
from gateway.priority import Priority
from gateway.replies import Waiting
from gateway.settings import AdmissionSettings
from tracing.record import Decision

_LOOK_S = 1.0
_TICK_S = 0.001


@dataclass(slots=True)
class _Queue:
    admission: Admission
    turns: dict[Entry, asyncio.Future[None]]
    last_queue_s: float = 0.0  # how long the one that began last had waited


class AdmissionGate:
    """Lets requests begin in their turn. ``options_of`` is asked for a model's limits each time its queue is made or
    looked at, so that they follow the fleet."""

    def __init__(
        self,
        options_of: Callable[[str], AdmissionOptions],
        objectives_s: Mapping[str, float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``objectives_s``: within which keys, by their ids, want a first token."""
        self._options_of, self._objectives_s, self._now = options_of, objectives_s, now
        self._queues: dict[str, _Queue] = {}

    @asynccontextmanager
    async def turn(self, model: str, entry: Entry, client: Waiting | None = None) -> AsyncIterator[None]:
        """Wait for the request's turn, and hold it inside. ``client`` is shown meanwhile that it waits.

        Raises ``TooBusy`` (429 with Retry-After), ``ClientGone``.
        """
        queue = self._queue(model)
        admission = queue.admission
        try:
            admission.offer(entry, self._now())
        except QueueFull as full:
            raise TooBusy(str(full), retry_after_s=round(full.retry_after_s)) from None
        turn = queue.turns[entry] = asyncio.get_running_loop().create_future()
        try:
            self._pass(queue)
            await self._wait(queue, entry, turn, client)
            queue.last_queue_s = self._now() - entry.came_s
            yield
        finally:
            queue.turns.pop(entry, None)
            admission.leave(entry, self._now())
            self._pass(queue)

    def entry(self, draft: Draft, foreseen: Decision | None, tokens: int) -> Entry:
        """See ``entry_of``."""
        objective_s = self._objectives_s.get(draft.identity.key_id)
        return entry_of(draft, foreseen, self._now(), tokens, objective_s)

    def run_ended(self, run: str, instances: frozenset[str]) -> None:
        """Give what the run held to those that wait."""
        for queue in self._queues.values():
            queue.admission.run_ended(run)
            self._pass(queue)

    async def _wait(self, queue: _Queue, entry: Entry, turn: asyncio.Future[None], client: Waiting | None) -> None:
        while not turn.done():
            left_s = entry.came_s + queue.admission.options.deadline_s - self._now()
            due_s = _LOOK_S if client is None else min(client.due_s(), _LOOK_S)
            await asyncio.wait({turn}, timeout=min(max(left_s, 0.0) + _TICK_S, due_s))
            if not turn.done():
                self._pass(queue)  # it may be late; and runs that fell idle give their places back meanwhile
            if not turn.done() and client is not None and not client.due_s():
                await client.heartbeat()
        turn.result()

    def _queue(self, model: str) -> _Queue:
        found = self._queues.get(model)
        if found is None:
            found = self._queues[model] = _Queue(Admission(self._options_of(model)), {})
        else:
            found.admission.options = self._options_of(model)
        return found

    def _pass(self, queue: _Queue) -> None:
        """Let those begin who may, and send away those who have waited for too long."""
        now_s, admission = self._now(), queue.admission
        for entry in admission.admit(now_s):
            if (turn := queue.turns.get(entry)) is not None and not turn.done():
                turn.set_result(None)
        for entry in admission.expired(now_s):
            if (turn := queue.turns.get(entry)) is not None and not turn.done():
                after_s = round(admission.retry_after_s())
                turn.set_exception(TooBusy("no turn came in the time that requests wait here", retry_after_s=after_s))

    def depths(self) -> Iterator[tuple[str, int, float, float]]:
        """Yield for each model how many wait, how long the oldest has, and how long the last to begin had."""
        now_s = self._now()
        for model, queue in self._queues.items():
            yield model, queue.admission.waiting, queue.admission.oldest_wait_s(now_s), queue.last_queue_s


def entry_of(
    draft: Draft,
    foreseen: Decision | None,
    now_s: float,
    tokens: int,
    objective_s: float | None = None,
) -> Entry:
    """Return what waits for a request of ``tokens``. ``foreseen``: where it would go now.

    "interactive" is what keys with an objective for the first token get by themselves, among their own tenant's.
    """
    identity, warm = draft.identity, min(foreseen.predicted_hit_tokens, tokens) if foreseen is not None else 0
    return Entry(
        tenant=identity.tenant,
        new_tokens=tokens - warm,
        context_tokens=tokens,
        came_s=now_s,
        run=draft.run,
        priority=max(draft.priority, Priority.NORMAL),
        warm_share=warm / tokens if tokens else 0.0,
        objective_s=0.0 if draft.priority is Priority.INTERACTIVE else objective_s,
    )


def options_of(settings: AdmissionSettings, fleet: Fleet) -> Callable[[str], AdmissionOptions]:
    """Return what gives a model's limits from the instances that serve it now."""

    def options(model: str) -> AdmissionOptions:
        able = [instance for instance in fleet.serving(model) if instance.takes_requests]
        sizes = [each.spec.capacity_tokens or (each.facts.capacity_tokens if each.facts else None) for each in able]
        memory = None
        if settings.memory_share is not None and sizes and all(sizes):
            memory = int(settings.memory_share * sum(size or 0 for size in sizes))
        return AdmissionOptions(
            running_limit=(settings.requests_per_instance or 1) * max(len(able), 1),
            queue_limit=settings.queue,
            deadline_s=settings.deadline_s,
            quantum_tokens=settings.quantum_tokens,
            huge_tokens=settings.huge_tokens,
            huge_at_once=settings.huge_at_once,
            memory_tokens=memory,
            run_idle_s=settings.run_idle_s,
        )

    return options

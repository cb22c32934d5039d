"""When agent runs end, and who hears of it: what a run holds is then given to others.

A run has ended when

* its client says so: ``x-keepwarm-run-end`` on its last request, ``POST /keepwarm/v1/runs/{id}/end``, or a span of its
  own with the attribute ``keepwarm.run.end``;
* its trace has, by its root span, where that is configured: some agents make a trace of every turn;
* the call that began it was answered, where it is a sub-agent's;
* nothing came of it for long.

It may go on all the same: whatever hears of an end takes back a hint and nothing else, so that a run that is taken up
again is served like one that was idle. Nobody is told of an end while a request of the run is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter

from gateway.errors import BadRequest

RUN_END_HEADER = "x-keepwarm-run-end"
_MOST_RUNS = 65_536
_LOOKS = 8  # within the time that a run may be idle


class Why(StrEnum):
    """What a run's end was seen by."""

    TOLD = "told"
    SPAN = "span"
    CALL_ANSWERED = "call_answered"
    IDLE = "idle"
    ROOM = "room"  # too many runs are followed: the one that is idle longest is not any more


class HearsOfEnds(Protocol):
    """Something that runs hold a part of."""

    def run_ended(self, run: str, instances: frozenset[str]) -> object:
        """Give it back. ``instances``: where requests of the run were sent. Must not raise, nor wait."""


@dataclass(slots=True)
class _Followed:
    under_way: int = 0
    instances: set[str] = field(default_factory=set)
    idle_since_s: float = 0.0
    ends: Why | None = None  # once its last request is over


class RunEnds:
    """Follows runs, by names that are unique over all keys (``run_name``). For one event loop."""

    def __init__(
        self,
        hearers: Sequence[HearsOfEnds],
        idle_s: float,
        registry: CollectorRegistry | None = None,
        now: Callable[[], float] = time.monotonic,
        tell_others: Callable[[str, str], object] = lambda run, why: None,
    ) -> None:
        """``idle_s``: how long nothing may come of a run until it has ended. ``tell_others``: what other workers call
        ``end_here`` with."""
        self._hearers, self._idle_s, self._now, self._tell_others = hearers, idle_s, now, tell_others
        self._runs: OrderedDict[str, _Followed] = OrderedDict()  # idle longest first
        self._ended = Counter("keepwarm_runs_ended", "Agent runs that ended", ("why",), registry=registry)

    def __len__(self) -> int:
        """Return how many runs are followed."""
        return len(self._runs)

    def begun(self, run: str) -> None:
        """A request of the run is under way. Goes with one ``over``."""
        followed = self._runs.get(run)
        if followed is None:
            followed = self._runs[run] = _Followed()
            if len(self._runs) > _MOST_RUNS:
                self._tell(next(iter(self._runs)), Why.ROOM)
        followed.under_way += 1
        followed.ends = None
        self._runs.move_to_end(run)

    def over(self, run: str, instances: Iterable[str]) -> None:
        """The request is over; it was sent to these instances."""
        followed = self._runs.get(run)
        if followed is None:
            return  # there was no room for it
        followed.under_way -= 1
        followed.instances.update(instances)
        followed.idle_since_s = self._now()
        self._runs.move_to_end(run)
        if followed.ends is not None and not followed.under_way:
            self._tell(run, followed.ends)

    def linked(self, key_id: str, run_id: str) -> None:
        """A request of the run has come, here or to another worker."""
        run = run_name(key_id, run_id)
        if (followed := self._runs.get(run)) is not None:
            followed.idle_since_s, followed.ends = self._now(), None
            self._runs.move_to_end(run)

    def call_answered(self, key_id: str, run_id: str) -> None:
        """The call that began the run was answered."""
        self.end_here(run_name(key_id, run_id), Why.CALL_ANSWERED)

    def end(self, run: str, why: Why) -> None:
        """The run has ended, or will have with its last request."""
        self.end_here(run, why)
        self._tell_others(run, why.value)

    def end_here(self, run: str, why: Why) -> None:
        """Do as ``end``, without telling others. Nothing happens to a run that is not followed."""
        followed = self._runs.get(run)
        if followed is None:
            return
        followed.ends = why
        if not followed.under_way:
            self._tell(run, why)

    def end_idle(self) -> None:
        """End the runs of which nothing came for long. O(runs that end), and those that have requests under way."""
        until_s = self._now() - self._idle_s
        for run, followed in list(self._runs.items()):
            if followed.under_way:
                continue
            if followed.idle_since_s > until_s:
                break
            self._tell(run, Why.IDLE)

    async def run(self) -> None:
        """Look for idle runs until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / _LOOKS)
            self.end_idle()

    def _tell(self, run: str, why: Why) -> None:
        followed = self._runs.pop(run)
        self._ended.labels(why.value).inc()
        for hearer in self._hearers:
            hearer.run_ended(run, frozenset(followed.instances))


def ends_run(headers: Mapping[str, str]) -> bool:
    """Tell whether a client says that its run ends with this request. Raises ``BadRequest``."""
    word = (headers.get(RUN_END_HEADER) or "false").lower()
    if word not in ("true", "false", "1", "0"):
        raise BadRequest(f"{RUN_END_HEADER} must be true or false")
    return word in ("true", "1")


def run_name(key_id: str, run_id: str) -> str:
    """Return what a run is called among the runs of all keys, in engines too: clients may name theirs alike."""
    return f"{key_id}/{run_id}"

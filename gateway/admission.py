"""Who may begin next, of those who wait for one model: bounded, by deadline, fair between tenants, by whole runs.

Values in, values out: no clock, no waiting. A request is *offered*; ``admit`` hands out those that may begin, as far as
there is room; each is *left* exactly once, whether it began or not.

* **Bounded.** More than ``queue_limit`` waiting: refused at once, with the time after which another try makes sense.
  Who has waited for ``deadline_s`` is refused too.
* **Fair.** Between tenants by virtual time over tokens (start-time fair queueing): who has had less comes first, and an
  idle tenant saves nothing up. Tenants within ``quantum_tokens`` of the least are alike, and of those the one whose
  request is warmest goes first, which keeps prefixes together without costing anybody more than a quantum.
* **Priorities** are strict between classes; lower numbers first.
* **Huge cold prompts** have a lane: at most ``huge_at_once`` of them are under way, and those that wait for it hold
  nobody up.
* **By run.** What active runs hold may not exceed ``memory_tokens``: a run's first step waits until there is room for
  it, its later steps never do. A run that was idle for ``run_idle_s`` has given its place back. So a fleet that is
  asked for more than its memory serves some runs well instead of all of them cold.

Sources: Goyal et al., Start-Time Fair Queueing (SIGCOMM '96); Cao et al., Locality-aware Fair Scheduling (DLPM,
arXiv 2501.14312).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Limits for one model. ``running_limit``: requests under way; ``memory_tokens``: of active runs; ``None``: any."""

    running_limit: int
    queue_limit: int = 1000
    deadline_s: float = 30.0
    quantum_tokens: int = 20_000
    huge_tokens: int = 50_000
    huge_at_once: int = 2
    memory_tokens: int | None = None
    run_idle_s: float = 120.0


@dataclass(slots=True, eq=False)
class Entry:
    """One request. ``new_tokens``: what it makes the fleet compute; ``context_tokens``: what its run then holds.

    ``objective_s``: within which its key wants a first token; of one tenant's requests the most urgent goes first.
    """

    tenant: str
    new_tokens: int
    context_tokens: int
    came_s: float
    run: Hashable | None = None
    priority: int = 0
    warm_share: float = 0.0
    objective_s: float | None = None
    is_huge: bool = field(default=False, init=False)
    has_begun: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)

    @property
    def urgency(self) -> float:
        """When its first token is due."""
        return self.came_s + (self.objective_s if self.objective_s is not None else 3600.0)


class QueueFull(Exception):
    """Too many wait. ``retry_after_s``: when there will probably be room."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"too many requests wait; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class Admission:
    """The queue of one model. O(tenants waiting + their first few requests) a call of ``admit``."""

    def __init__(self, options: AdmissionOptions) -> None:
        self.options = options
        self.running = self.huge_running = 0
        self.held_tokens = 0
        self._waiting: dict[Entry, None] = {}
        self._virtual: dict[str, float] = {}  # tenant → tokens that it has had, on the common scale
        self._scale = 0.0
        self._runs: OrderedDict[Hashable, tuple[int, int, float]] = OrderedDict()  # run → tokens, steps, idle since
        self._served_s = 1.0  # smoothed seconds between two that end
        self._ended_s: float | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def oldest_wait_s(self, now_s: float) -> float:
        """Return how long the one that has waited longest has."""
        return max((now_s - entry.came_s for entry in self._waiting), default=0.0)

    def offer(self, entry: Entry, now_s: float) -> None:
        """Let a request wait. Raises ``QueueFull``."""
        if len(self._waiting) >= self.options.queue_limit:
            raise QueueFull(self.retry_after_s())
        entry.is_huge = entry.new_tokens >= self.options.huge_tokens
        if not any(other.tenant == entry.tenant for other in self._waiting):
            self._virtual[entry.tenant] = max(self._virtual.get(entry.tenant, 0.0), self._scale)
        self._waiting[entry] = None

    def retry_after_s(self) -> float:
        """Return when one more of those that wait now will have had its turn."""
        return min(max(len(self._waiting) * self._served_s, 1.0), 60.0)

    def admit(self, now_s: float) -> list[Entry]:
        """Return those that begin now, in their order."""
        self._forget_idle_runs(now_s)
        begun = []
        while self.running < self.options.running_limit and (entry := self._next()) is not None:
            self._begin(entry)
            begun.append(entry)
        return begun

    def expired(self, now_s: float) -> list[Entry]:
        """Return, and take out, those that have waited for too long."""
        late = [entry for entry in self._waiting if now_s - entry.came_s >= self.options.deadline_s]
        for entry in late:
            self.leave(entry, now_s)
        return late

    def leave(self, entry: Entry, now_s: float) -> None:
        """The request is over, began or not. Idempotent."""
        if entry.is_over:
            return
        entry.is_over = True
        if not entry.has_begun:
            self._waiting.pop(entry, None)
            return
        self.running -= 1
        self.huge_running -= entry.is_huge
        if entry.run is not None:
            tokens, steps, _ = self._runs[entry.run]
            self._runs[entry.run] = tokens, steps - 1, now_s
            self._runs.move_to_end(entry.run)
        if self._ended_s is not None:
            self._served_s += 0.1 * (min(now_s - self._ended_s, 60.0) - self._served_s)
        self._ended_s = now_s

    def run_ended(self, run: Hashable) -> None:
        """No step of this run will follow: its place is free, where none is under way."""
        held = self._runs.get(run)
        if held is not None and not held[1]:
            self._drop_run(run)

    def check(self) -> None:
        """Verify the sums; raises ``AssertionError``."""
        assert 0 <= self.running <= self.options.running_limit
        assert 0 <= self.huge_running <= min(self.running, self.options.huge_at_once)
        assert self.held_tokens == sum(tokens for tokens, _, _ in self._runs.values())
        assert sum(steps for _, steps, _ in self._runs.values()) <= self.running
        assert len(self._waiting) <= self.options.queue_limit

    def _next(self) -> Entry | None:
        able = [entry for entry in self._waiting if self._fits(entry)]
        if not able:
            return None
        first_class = min(entry.priority for entry in able)
        able = [entry for entry in able if entry.priority == first_class]
        least = min(self._virtual[entry.tenant] for entry in able)
        near = [entry for entry in able if self._virtual[entry.tenant] <= least + self.options.quantum_tokens]
        return min(near, key=lambda entry: (-round(entry.warm_share, 1), entry.urgency, entry.came_s))

    def _fits(self, entry: Entry) -> bool:
        if entry.is_huge and self.huge_running >= self.options.huge_at_once:
            return False
        limit = self.options.memory_tokens
        if limit is None or entry.run is None or entry.run in self._runs or not self._runs:
            return True  # the only run is always served, however large
        return self.held_tokens + entry.context_tokens <= limit

    def _begin(self, entry: Entry) -> None:
        del self._waiting[entry]
        entry.has_begun = True
        self.running += 1
        self.huge_running += entry.is_huge
        start = self._virtual[entry.tenant]
        self._scale = max(self._scale, min((self._virtual[e.tenant] for e in self._waiting), default=start))
        self._virtual[entry.tenant] = start + max(entry.new_tokens, 1)
        if len(self._virtual) > 2 * len(self._waiting) + 1024:
            waiting = {other.tenant for other in self._waiting}
            self._virtual = {
                tenant: at for tenant, at in self._virtual.items() if tenant in waiting or at > self._scale
            }
        if entry.run is not None:
            tokens, steps, idle_s = self._runs.get(entry.run, (0, 0, 0.0))
            grown = max(tokens, entry.context_tokens)
            self.held_tokens += grown - tokens
            self._runs[entry.run] = grown, steps + 1, idle_s

    def _forget_idle_runs(self, now_s: float) -> None:
        idle_s = self.options.run_idle_s
        for run in [r for r, (_, steps, since) in self._runs.items() if not steps and now_s - since >= idle_s]:
            self._drop_run(run)

    def _drop_run(self, run: Hashable) -> None:
        self.held_tokens -= self._runs.pop(run)[0]

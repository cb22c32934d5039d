"""What was routed to one instance and is not over: reserved at the decision, released exactly once, learned from.

An engine computes prompts one after the other in the order they came. So the one at the head of the queue began when it
came or when the one before it gave its first token, and its cost is learned from that time on: its wait is no cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gateway.policy.costs import EngineCosts, Fetch

_LEAST_LEARNED_TOKENS = 64
"""Below this many computed tokens an answer's delay is overhead and says nothing about the rate."""

_LEAST_LEARNED_OUTPUT = 9
_OVERDUE = 0.1
"""A prompt that takes longer than expected is expected to take this share of its time so far in addition."""

_WAITED = 2.0
"""A prompt that took so many times as long as expected waited for something else: for memory."""

_LOST_AFTER_S = 2.0
_LATELY_S = 60.0
_BALANCE_S = 3600.0
"""Some prompts take what an instance computes in ten minutes: over so little, evenness is who had the last."""

_PACE_WEIGHT, _KIND_WEIGHT, _SAME_PACE, _PACES = 0.05, 0.01, 0.2, (0.1, 10.0)
"""An instance counts as fast as others of its kind until it is off by so much: noise makes no favourites."""

_WAITS, _DECODES, _OVER = "waits", "decodes", "over"


class Load:
    """The load of one instance. Times are seconds of any one clock that never runs back."""

    __slots__ = ("_context_s", "_free_s", "_prompt_s", "_seen_s", "_waiting", "busy_share", "context_tokens", "costs",
                 "decoding", "fetching", "held_output", "held_tokens", "lately_s", "link_free_s", "on_idle", "pace",
                 "queued_s", "queued_tokens", "running", "slowness", "waited_s")  # fmt: skip

    def __init__(self, costs: EngineCosts, on_idle: Callable[[], None] | None = None) -> None:
        self.costs, self.on_idle = costs, on_idle
        self.pace = 1.0  # what prompts took here against what was expected of its kind, smoothed
        self.slowness = 1.0  # by what prompts' times are multiplied: 1 while it is about as fast as others of its kind
        self.running = 0  # requests that are not over
        self.decoding = 0  # of them those that gave a first token
        self.queued_tokens = 0  # new tokens of the others
        self.queued_s = 0.0  # what these will take
        self.context_tokens = 0.0  # of those decoding
        self.fetching = 0  # of those that wait: how many have, or had, pages to fetch
        self.held_tokens = 0.0  # prompt and output of all, as far as it is foreseen
        self.held_output = 0.0  # the output of it
        self.link_free_s = -math.inf  # when the fetches that were begun will be over
        self.lately_s = 0.0  # what the prompts routed here took, the longer ago the less
        self.busy_share = 0.0  # of the time lately, in which prompts were computed
        self.waited_s = -math.inf  # when last a prompt was done that had waited for more than prompts
        self._waiting: dict[Reservation, None] = {}
        self._free_s = -math.inf  # when the last prompt was done
        self._context_s = self._prompt_s = 0.0  # integrals over time: context decoding, and prompts under way
        self._seen_s = -math.inf

    def prompt_s(self, new_tokens: int, context_tokens: int) -> float:
        """Return how long a prompt takes here now."""
        return self.costs.prompt_s(new_tokens, context_tokens, self.context_tokens) * self.slowness

    def took(self, new_tokens: int, context_tokens: int, beside_tokens: float, seconds: float) -> None:
        """Learn from a prompt that was computed here in ``seconds``, its wait not counted."""
        if seconds > 0:
            ratio = seconds / self.costs.prompt_s(new_tokens, context_tokens, beside_tokens)
            ratio = min(max(ratio, _PACES[0]), _PACES[1])
            self.pace += _PACE_WEIGHT * (ratio - self.pace)
            self.costs.pace += _KIND_WEIGHT * (ratio - self.costs.pace)
            relative = self.pace / self.costs.pace  # all of a kind slow is no instance's pace but what the kind costs
            self.slowness = relative if abs(relative - 1) > _SAME_PACE else 1.0
            self.costs.learn_prompt(new_tokens, context_tokens, beside_tokens, seconds / self.slowness)

    def backlog_s(self, now_s: float) -> float:
        """Return the time until all prompts that came before now will be computed. O(1), or O(waiting) with fetches."""
        if not self._waiting:
            return 0.0
        head = self._head()
        elapsed = now_s - (head.ready_s if head.ready_s > self._free_s else self._free_s)
        if elapsed < 0:
            return 0.0  # all are fetching yet: nobody computes
        left = head.prompt_s - elapsed
        if left < _OVERDUE * elapsed:
            # An answer that is not streamed shows no first token: after a while its prompt no longer counts.
            left = _OVERDUE * elapsed if elapsed < 4 * head.prompt_s + _LOST_AFTER_S else 0.0
        if not self.fetching:
            return max(self.queued_s - head.prompt_s, 0.0) + left
        for other in self._waiting:
            if other is not head and other.ready_s <= now_s + left:
                left += other.prompt_s
        return left

    def is_short_of_memory(self, now_s: float, lasting_s: float) -> bool:
        """Tell whether somebody waits for longer than prompts explain, or did ``lasting_s`` ago at most. O(waiting)."""
        if now_s - self.waited_s < lasting_s:
            return True
        if not self._waiting:
            return False
        head = self._head()
        return head._fetch is None and now_s - max(head.ready_s, self._free_s) > head.prompt_s

    def turn(self, now_s: float, backlog_s: float, ready_s: float, prompt_s: float) -> tuple[float, float]:
        """Return when a prompt begins that comes now and has its pages in ``ready_s``, seconds from now, and how long
        it holds up those that came before it and fetch until after the backlog. O(waiting)."""
        free_s, begins_s, held_up_s = backlog_s, max(backlog_s, ready_s), 0.0
        fetching = [(each.ready_s - now_s, each.prompt_s) for each in self._waiting if each.ready_s > now_s + backlog_s]
        for others_ready_s, others_s in sorted(fetching):
            if others_ready_s <= begins_s:
                free_s = max(free_s, others_ready_s) + others_s
                begins_s = max(begins_s, free_s)
            else:
                held_up_s += max(begins_s + prompt_s - others_ready_s, 0.0)
        return begins_s, held_up_s

    def _head(self) -> Reservation:
        """Return whose prompt is being computed: the first of those that had their pages when the last was done, else
        the first to have them. Who fetches holds up nobody."""
        if not self.fetching:
            return next(iter(self._waiting))
        return min(self._waiting, key=lambda each: each.ready_s if each.ready_s > self._free_s else self._free_s)

    def busy_at(self, now_s: float) -> float:
        """Return the share of the time lately in which prompts were computed, until now."""
        self._pass(now_s)
        return self.busy_share

    def reserve(
        self,
        prompt_tokens: int,
        new_tokens: int,
        now_s: float,
        output_tokens: float = 0.0,
        fetch: tuple[int, int, int, int] | None = None,
    ) -> Reservation:
        """Count a request from now on: so many of its tokens are computed, and so many fetched. Plain values only."""
        self._pass(now_s)
        reservation = Reservation(self, prompt_tokens, new_tokens, now_s, output_tokens, fetch)
        self._waiting[reservation] = None
        self.fetching += fetch is not None
        self.running += 1
        self.queued_tokens += new_tokens
        self.queued_s += reservation.prompt_s
        self.held_tokens += prompt_tokens + output_tokens
        self.held_output += output_tokens
        return reservation

    def check(self) -> None:
        """Verify the sums; raises ``AssertionError``. O(waiting)."""
        assert self.running >= len(self._waiting) + self.decoding - 1e-9
        assert self.queued_tokens == sum(each.new_tokens for each in self._waiting)
        assert abs(self.queued_s - sum(each.prompt_s for each in self._waiting)) <= 1e-6 * max(self.queued_s, 1.0)
        if not self.running:
            assert not self._waiting
            assert (self.decoding, self.held_tokens, self.context_tokens) == (0, 0.0, 0.0)

    def _pass(self, now_s: float) -> None:
        passed = now_s - self._seen_s
        if passed > 0:
            if self._seen_s > -math.inf:
                self._context_s += passed * self.context_tokens
                kept = math.exp(-passed / _LATELY_S)
                self.busy_share *= kept
                self.lately_s *= math.exp(-passed / _BALANCE_S)
                if self._waiting:
                    self._prompt_s += passed
                    self.busy_share += 1 - kept
            self._seen_s = now_s

    def _leave(self, reservation: Reservation) -> bool:
        """Take a prompt from the queue; tell whether it was at its head."""
        was_head = self._head() is reservation
        del self._waiting[reservation]
        self.fetching -= reservation._fetch is not None
        self.queued_tokens -= reservation.new_tokens
        self.queued_s = self.queued_s - reservation.prompt_s if self._waiting else 0.0
        return was_head


class Reservation:
    """One request's share of a load."""

    __slots__ = ("_begun", "_beside", "_fetch", "_had_link", "_load", "_span", "_state", "came_s", "new_tokens",
                 "output_tokens", "prompt_s", "prompt_tokens", "ready_s")  # fmt: skip

    def __init__(
        self,
        load: Load,
        prompt_tokens: int,
        new_tokens: int,
        now_s: float,
        output_tokens: float,
        fetch: tuple[int, int, int, int] | None,
    ) -> None:
        self._load, self.prompt_tokens, self.new_tokens = load, prompt_tokens, new_tokens
        self.came_s, self.output_tokens = now_s, output_tokens
        self._beside, self._fetch = load.context_tokens, None if fetch is None else Fetch(*fetch)
        self.prompt_s = load.prompt_s(new_tokens, prompt_tokens - new_tokens)
        self.ready_s, self._had_link = now_s, load.link_free_s <= now_s
        if self._fetch is not None:
            self.ready_s = load.link_free_s = max(now_s, load.link_free_s) + load.costs.fetch_s(self._fetch)
        self._state = _WAITS
        self._begun = (now_s, 0.0, 0.0)
        self._span: tuple[float, float, float] | None = None

    @property
    def _context(self) -> float:
        return self.prompt_tokens + 0.5 * self.output_tokens

    def answered(self, now_s: float) -> None:
        """The first token came: the prompt no longer queues, and what it took is learned. Idempotent."""
        if self._state is not _WAITS:
            return
        load = self._load
        load._pass(now_s)
        self._state, self._begun = _DECODES, (now_s, load._context_s, load._prompt_s)
        free_s, began_s = load._free_s, max(self.ready_s, load._free_s)
        was_head = load._leave(self)
        load._free_s = now_s
        load.lately_s += self.prompt_s
        load.decoding += 1
        load.context_tokens += self._context
        if not was_head:
            return
        if self._fetch is None:
            if now_s - began_s > _WAITED * self.prompt_s:
                load.waited_s = now_s
            if self.new_tokens >= _LEAST_LEARNED_TOKENS:
                context = self.prompt_tokens - self.new_tokens
                load.took(self.new_tokens, context, self._beside, now_s - began_s)
        elif self._had_link and free_s <= self.ready_s:
            load.costs.learn_fetch(self._fetch, now_s - self.came_s - self.prompt_s)  # it waited for nothing else

    def release(self, now_s: float) -> None:
        """The request is over. Idempotent."""
        if self._state is _OVER:
            return
        load = self._load
        load._pass(now_s)
        if self._state is _WAITS:
            load._leave(self)
        else:
            load.decoding -= 1
            load.context_tokens -= self._context
            since_s, context_s, prompt_s = self._begun
            if (took_s := now_s - since_s) > 0:
                self._span = took_s, load._context_s - context_s, load._prompt_s - prompt_s
        self._state = _OVER
        load.held_tokens -= self.prompt_tokens + self.output_tokens
        load.held_output -= self.output_tokens
        load.running -= 1
        if not load.running:
            load.held_tokens = load.held_output = load.context_tokens = 0.0  # no rounding stays behind
            if load.on_idle is not None:
                load.on_idle()

    def counted(self, output_tokens: int) -> None:
        """The answer, which is over, came to so many tokens. Once, and only for whole answers."""
        if self._span is not None and output_tokens >= _LEAST_LEARNED_OUTPUT:
            took_s, context_s, prompt_s = self._span
            self._load.costs.learn_step(context_s / took_s, prompt_s / took_s, took_s / output_tokens)
        self._span = None


def total(loads: Iterable[Load]) -> tuple[int, int]:
    """Return requests running and prompt tokens queued over all loads."""
    listed = list(loads)
    return sum(load.running for load in listed), sum(load.queued_tokens for load in listed)

"""A circuit breaker for an instance: requests that fail there stop new ones, and one at a time finds out what is now.

It judges what probes cannot see: an engine whose front answers while its model is stuck. Whether anybody is there at
all is told by probes and refused connections, not here. A state machine and nothing else: time is given, nothing waits.

::

                    failures in a row
        closed ─────────────────────────▶ open ──── after a period, jittered ────▶ half-open
          ▲ ▲                              ▲                                        │    │
          │ └── it was down and is back ───┤ the trial fails ◀──────────────────────┘    │
          └──────────────────────────────── the trial is answered ◀──────────────────────┘

What a client did wrong (4xx) and what the engine had no room for (429, 503) is no failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Whether requests go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """``failures`` in a row, each within ``window_s`` of the one before, open it; at most ``period_s`` later a request
    is let through. A breaker that closes, or an instance that comes up, takes its full share after ``slow_start_s``."""

    failures: int = 3
    window_s: float = 30.0
    period_s: float = 2.0
    slow_start_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request's leave to go there. What came before the breaker last moved says nothing about now."""

    epoch: int
    is_trial: bool


class Breaker:
    """The state of one instance. Times are seconds of one clock that never runs back."""

    def __init__(
        self, options: BreakerOptions, chance: random.Random, on_move: Callable[[], None] = lambda: None
    ) -> None:
        """``on_move`` is called when it closes, and when it is closed no longer."""
        self._options, self._chance, self._on_move = options, chance, on_move
        self.state = State.CLOSED
        self._epoch = 0
        self._failures, self._last_failure_s = 0, 0.0
        self._retry_s = 0.0
        self._is_trying = False
        self._warm_from_s: float | None = None

    def admits(self, now_s: float) -> bool:
        """Tell whether one more request may go there."""
        if self.state is State.CLOSED:
            return True
        return not self._is_trying and now_s >= self._retry_s

    def begin(self, now_s: float) -> Ticket:
        """A request goes there. Give each ticket back, once, by one of the three methods below."""
        if self.state is State.CLOSED:
            return Ticket(self._epoch, is_trial=False)
        is_trial = self.admits(now_s)
        if is_trial:
            self.state, self._is_trying = State.HALF_OPEN, True
        return Ticket(self._epoch, is_trial)

    def succeeded(self, ticket: Ticket, now_s: float) -> bool:
        """The engine answered; returns whether that closed the breaker."""
        if ticket.epoch != self._epoch:
            return False
        if self.state is State.CLOSED:
            self._failures = 0
        elif ticket.is_trial:
            self._close(now_s)
            return True
        return False

    def failed(self, ticket: Ticket, now_s: float) -> bool:
        """The engine broke off, was silent, or failed (5xx); returns whether that opened the breaker."""
        if ticket.epoch != self._epoch:
            return False
        if self.state is State.CLOSED:
            is_near = now_s - self._last_failure_s <= self._options.window_s
            self._failures = self._failures + 1 if is_near else 1
            self._last_failure_s = now_s
            if self._failures < self._options.failures:
                return False
        elif not ticket.is_trial:
            return False
        self._open(now_s)
        return True

    def dropped(self, ticket: Ticket) -> None:
        """The request ended without a verdict: its client left, the engine had no room, or the mistake was the
        client's."""
        if ticket.epoch == self._epoch and ticket.is_trial:
            self._is_trying = False

    def came_up(self, now_s: float) -> None:
        """The instance was away and is back, as a new one for all that is known."""
        self._close(now_s)

    def rest_s(self, now_s: float) -> float:
        """Return for how long it lets nobody through; 0 when it does. A trial that runs may end at any time."""
        return 0.0 if self.state is State.CLOSED else max(self._retry_s - now_s, 0.0)

    def share(self, now_s: float) -> float:
        """Return which part of its share of requests the instance should get, above 0 and at most 1."""
        if self._warm_from_s is None or self._options.slow_start_s <= 0:
            return 1.0
        return min(max((now_s - self._warm_from_s) / self._options.slow_start_s, 0.1), 1.0)

    def _open(self, now_s: float) -> None:
        self.state, self._is_trying, self._failures = State.OPEN, False, 0
        self._epoch += 1
        self._retry_s = now_s + self._options.period_s * self._chance.uniform(0.5, 1.0)
        self._on_move()

    def _close(self, now_s: float) -> None:
        self.state, self._is_trying, self._failures = State.CLOSED, False, 0
        self._epoch += 1
        self._warm_from_s = now_s
        self._on_move()

"""A breaker under any order of events: never more than one trial, never a state that nothing leads out of."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gateway.breaker import Breaker, BreakerOptions, State, Ticket

OPTIONS = BreakerOptions(failures=3, window_s=10.0, period_s=2.0, slow_start_s=5.0)


class Traffic(RuleBasedStateMachine):
    """Requests come, end well or badly or without a verdict, in any order; time passes; the instance goes and comes."""

    tickets = Bundle("tickets")

    @initialize(seed=st.integers(0, 9))
    def start(self, seed: int) -> None:
        self.breaker, self.now = Breaker(OPTIONS, random.Random(seed)), 0.0
        self.trials: set[int] = set()  # trials in flight that count
        self.opened_at: float | None = None
        self.row = 0  # failures in a row since it closed, as an onlooker counts them

    @rule(seconds=st.floats(0.0, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=tickets)
    def request(self) -> tuple[int, Ticket]:
        was_open, admits = self.breaker.state is not State.CLOSED, self.breaker.admits(self.now)
        ticket = self.breaker.begin(self.now)
        assert ticket.is_trial == (was_open and admits)
        if ticket.is_trial:
            assert not self.trials
            self.trials = {id(ticket)}
        return id(ticket), ticket

    @rule(held=consumes(tickets))
    def answered(self, held: tuple[int, Ticket]) -> None:
        before = self.breaker.state
        self.breaker.succeeded(held[1], self.now)
        if held[0] in self.trials:
            assert self.breaker.state is State.CLOSED
            self.trials.clear()
        else:
            assert self.breaker.state is before

    @rule(held=consumes(tickets))
    def failed(self, held: tuple[int, Ticket]) -> None:
        before = self.breaker.state
        opened = self.breaker.failed(held[1], self.now)
        if held[0] in self.trials or opened:
            assert self.breaker.state is State.OPEN
            self.trials.clear()
            self.opened_at = self.now
        else:
            assert self.breaker.state is before

    @rule(held=consumes(tickets))
    def client_error_or_gone(self, held: tuple[int, Ticket]) -> None:
        before = self.breaker.state
        self.breaker.dropped(held[1])
        assert self.breaker.state is before
        self.trials.discard(held[0])

    @rule()
    def came_up(self) -> None:
        self.breaker.came_up(self.now)
        self.trials.clear()
        assert self.breaker.admits(self.now)
        assert self.breaker.share(self.now) == 0.1

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert 0 < self.breaker.share(self.now) <= 1
        assert self.breaker.share(self.now + 1.01 * OPTIONS.slow_start_s) == 1
        if self.breaker.state is State.CLOSED:
            assert self.breaker.admits(self.now)
        elif not self.trials and self.opened_at is not None:
            assert self.breaker.admits(self.opened_at + OPTIONS.period_s), "no request goes there for ever"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def breaker() -> Breaker:
    return Breaker(OPTIONS, random.Random(1))


def test_failures_in_a_row_open_it_and_one_answer_between_them_does_not() -> None:
    one = breaker()
    for at in (0.0, 1.0):
        assert not one.failed(one.begin(at), at)
    one.succeeded(one.begin(2.0), 2.0)
    assert [one.failed(one.begin(at), at) for at in (3.0, 4.0, 5.0)] == [False, False, True]
    assert not one.admits(5.9)
    assert one.admits(7.0)


def test_failures_far_apart_do_not_open_it() -> None:
    one = breaker()
    assert not any(one.failed(one.begin(at), at) for at in (0.0, 11.0, 22.0, 33.0, 44.0))


def test_requests_that_were_sent_before_it_closed_again_say_nothing_about_now() -> None:
    one = breaker()
    old = [one.begin(0.0) for _ in range(9)]
    assert [one.failed(ticket, 1.0) for ticket in old[:3]] == [False, False, True]
    one.succeeded(one.begin(3.0), 3.0)
    assert one.state is State.CLOSED
    assert not any(one.failed(ticket, 4.0) for ticket in old[3:])
    assert one.admits(4.0)


def test_it_takes_its_share_step_by_step() -> None:
    one = breaker()
    assert one.share(0.0) == 1  # nobody knows of any trouble
    one.came_up(10.0)
    assert [one.share(at) for at in (10.0, 12.5, 15.0)] == [0.1, 0.5, 1.0]

"""The circuit breaker's states, without any medium."""

from __future__ import annotations

import logging
import threading

import pytest

from kvstore.breaker import Breaker, BreakerOptions

AT_ONCE = BreakerOptions(first_probe_s=0.0, longest_probe_s=0.0)
NEVER = BreakerOptions(first_probe_s=3600.0)


def test_it_closes_again_when_a_probe_succeeds_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([False, False, True])
    threads: list[str] = []

    def probe() -> bool:
        threads.append(threading.current_thread().name)
        return next(answers)

    breaker = Breaker("a disk", probe, AT_ONCE)
    with caplog.at_level(logging.WARNING):
        breaker.trip("it is gone")
        assert breaker.wait_closed(10)
        breaker.stop()
    assert threads == ["a disk probe"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "a disk: out of use: it is gone", "a disk: in use again"
    ]  # fmt: skip


def test_while_it_is_open_further_failures_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    breaker = Breaker("a disk", lambda: True, NEVER)
    for _ in range(100):
        breaker.trip("again")
    assert not breaker.closed
    assert len(caplog.records) == 1
    breaker.stop()


def test_it_trips_again_after_it_has_closed() -> None:
    breaker = Breaker("a disk", lambda: True, AT_ONCE)
    for _ in range(3):
        breaker.trip("it is gone")
        assert breaker.wait_closed(10)
    breaker.stop()


def test_once_stopped_it_starts_no_probe() -> None:
    breaker = Breaker("a disk", lambda: True, AT_ONCE)
    breaker.stop()
    breaker.trip("too late")
    assert breaker.closed

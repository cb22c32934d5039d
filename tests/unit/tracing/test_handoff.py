"""Handing items from a loop to a thread: none lost, none twice, in order, within the bound."""

from __future__ import annotations

import threading

from tracing.handoff import Handoff


def test_everything_comes_in_order_whatever_the_moment() -> None:
    handoff: Handoff[int | None] = Handoff(10_000, 0.0)
    got: list[int] = []

    def take() -> None:
        while True:
            for item in handoff.take(7):
                if item is None:
                    return
                got.append(item)

    taker = threading.Thread(target=take)
    taker.start()
    for number in range(5_000):
        assert handoff.put_within(number, 10)
    assert handoff.put_within(None, 10)
    taker.join(30)
    assert not taker.is_alive()
    assert got == list(range(5_000))


def test_a_full_queue_takes_nothing_until_there_is_room() -> None:
    handoff: Handoff[str] = Handoff(2, 60.0)
    assert handoff.put("a")
    assert handoff.put("b")
    assert not handoff.put("c")
    assert not handoff.put_within("c", 0.0)
    handoff.hurry()
    assert handoff.take(10) == ["a", "b"]
    assert handoff.put("c")


def test_who_hurries_does_not_wait_for_others_to_gather() -> None:
    handoff: Handoff[str] = Handoff(10, 3600.0)
    handoff.put("a")
    handoff.hurry()
    assert handoff.take(10) == ["a"]

"""Delivery in order, outside locks, from any thread."""

from __future__ import annotations

import threading

from kvstore.outbox import Outbox


def test_a_subscriber_may_cause_further_changes() -> None:
    outbox: Outbox[int] = Outbox()
    seen: list[int] = []

    def deliver(change: int) -> None:
        if change < 3:
            outbox.append(change + 1)
            outbox.drain(deliver)
        seen.append(change)

    outbox.append(0)
    outbox.drain(deliver)
    assert seen == [0, 1, 2, 3]


def test_many_threads_deliver_in_the_order_of_appending() -> None:
    outbox: Outbox[int] = Outbox()
    order, counter = threading.Lock(), iter(range(10**9))
    seen: list[int] = []

    def work() -> None:
        for _ in range(500):
            with order:
                outbox.append(next(counter))
            outbox.drain(seen.append)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == list(range(2000))

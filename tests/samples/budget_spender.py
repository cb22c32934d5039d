"""A process that asks a budget for many requests at once and tells each that was admitted.

``python -m tests.samples.budget_spender STORE POLICY AT_NS,AT_NS,… COUNT`` where the store is a Redis URL or a file.
Where the store is away a request asks again a few times, so that a store that returns is used.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from billing.budget_redis import RedisBudgetStore
from billing.budget_sqlite import SqliteBudgetStore
from billing.budgets import Budget, Budgets, BudgetStore, Estimate, Policy, Spender, Unit, Window
from billing.errors import BudgetExceeded

LIMIT = 100
WHO = Spender("acme", "research", "key-1", "m")
ONE_CALL = Estimate(tokens=0, nano=0, currency="USD")


def budget(policy: Policy) -> Budget:
    """Return the budget: 100 calls an hour."""
    return Budget("calls", Unit.CALLS, LIMIT, Window.HOUR, per=("team",), on_outage=policy)


async def spend(store: BudgetStore, policy: Policy, instants: list[int], count: int) -> None:
    """Ask ``count`` times, many at once, going round the instants; tell each that was admitted."""
    budgets = Budgets([budget(policy)], store)
    await budgets.open(instants[0])
    os.write(1, b"ready\n")
    await asyncio.to_thread(sys.stdin.readline)

    async def ask(number: int) -> None:
        at_ns = instants[number % len(instants)]
        for _ in range(2):
            try:
                ticket = await budgets.admit(WHO, ONE_CALL, at_ns)
            except BudgetExceeded as error:
                if error.why == "exhausted":
                    return
                await asyncio.sleep(0.1)  # the store is away: real time has to pass for it to come back
                continue
            os.write(1, b"%d %s\n" % (at_ns, b"counted" if ticket.holds else b"uncounted"))
            return

    for first in range(0, count, 250):
        await asyncio.gather(*(ask(number) for number in range(first, min(first + 250, count))))
    await store.close()


def main(where: str, policy: str, instants: str, count: str) -> None:
    """Run it."""
    is_redis = where.startswith(("redis", "unix"))
    store: BudgetStore = RedisBudgetStore(where, timeout_s=2.0) if is_redis else SqliteBudgetStore(Path(where))
    asyncio.run(spend(store, Policy(policy), [int(word) for word in instants.split(",")], int(count)))


if __name__ == "__main__":
    main(*sys.argv[1:])

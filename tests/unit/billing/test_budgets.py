"""Budgets: windows, whom they hold for, all or nothing, settling, alerts, and policies when the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from billing.budget_seeds import budget_seeds
from billing.budget_sqlite import SqliteBudgetStore
from billing.budgets import (
    Alert,
    Budget,
    Budgets,
    Estimate,
    Hold,
    Policy,
    Seed,
    Settled,
    Spender,
    Ticket,
    Unit,
    Window,
)
from billing.errors import BudgetExceeded, BudgetStoreError
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from tests.samples.billed import START_NS, many

NOW_NS = 1_795_000_000 * 10**9
WHO = Spender("acme", "research", "key-1", "m")
CALLS = Budget("calls", Unit.CALLS, 2, Window.DAY)
MONEY = Budget("money", Unit.MONEY, 1000, Window.DAY, alerts=(50, 100))


def estimate(nano: int | None = 100, tokens: int = 10, calls: int = 1) -> Estimate:
    return Estimate(tokens, nano, "USD", calls)


@pytest.fixture
def store(tmp_path: Path) -> SqliteBudgetStore:
    return SqliteBudgetStore(tmp_path / "budgets.sqlite3")


class Away:
    """A store that cannot be asked for some counters, or for any."""

    def __init__(self, *concerns: str) -> None:
        self.error = BudgetStoreError("away", frozenset(concerns) if concerns else None)
        self.asked: list[str] = []

    async def open(self, at_ns: int) -> None:
        raise self.error

    async def reserve(self, holds: Sequence[Hold], at_ns: int) -> Hold | None:
        if self.error.concerns is None or any(hold.counter in self.error.concerns for hold in holds):
            raise self.error
        self.asked += [hold.counter for hold in holds]
        return None

    async def settle(self, holds: Sequence[Hold], amounts: Sequence[int]) -> list[Settled]:
        raise self.error

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("window", "start", "end"),
    [
        (Window.MINUTE, "2026-12-31T23:59:00", "2027-01-01T00:00:00"),
        (Window.HOUR, "2026-12-31T23:00:00", "2027-01-01T00:00:00"),
        (Window.DAY, "2026-12-31T00:00:00", "2027-01-01T00:00:00"),
        (Window.WEEK, "2026-12-28T00:00:00", "2027-01-04T00:00:00"),
        (Window.MONTH, "2026-12-01T00:00:00", "2027-01-01T00:00:00"),
    ],
)
def test_windows_follow_the_calendar(window: Window, start: str, end: str) -> None:
    at_ns = int(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * 10**9 + 999_999_999
    found = [datetime.fromtimestamp(ns / 10**9, UTC).isoformat() for ns in window.around(at_ns)]
    assert found == [f"{start}+00:00", f"{end}+00:00"]
    assert window.around(window.around(at_ns)[1])[0] == window.around(at_ns)[1]


def test_whom_a_budget_holds_for_and_who_counts_apart() -> None:
    budget = Budget("b", Unit.CALLS, 1, Window.DAY, only=(("team", "research"),), per=("key", "model"))
    assert budget.holds_for(WHO)
    assert not budget.holds_for(Spender("acme", "sales", "key-1", "m"))
    assert budget.counter(WHO) == "b|key-1|m"
    assert budget.counter(Spender("a", "research", "k|m", "x")) != budget.counter(Spender("a", "research", "k", "m|x"))


async def test_a_request_reserves_in_all_budgets_or_in_none(store: SqliteBudgetStore) -> None:
    budgets = Budgets([MONEY, CALLS], store)
    for _ in range(2):
        await budgets.admit(WHO, estimate(), NOW_NS)
    with pytest.raises(BudgetExceeded, match="calls: exhausted"):
        await budgets.admit(WHO, estimate(), NOW_NS)
    ticket = await Budgets([MONEY], store).admit(WHO, estimate(800), NOW_NS)  # 200 were kept, not 300
    assert ticket.holds[0].amount == 800
    await store.close()


class Slow:
    """A store that takes its time: what was asked is done, whoever has left meanwhile."""

    def __init__(self, store: SqliteBudgetStore) -> None:
        self._store, self.asked, self.may_go_on = store, asyncio.Event(), asyncio.Event()

    async def open(self, at_ns: int) -> None: ...

    async def reserve(self, holds: Sequence[Hold], at_ns: int) -> Hold | None:
        self.asked.set()
        await self.may_go_on.wait()
        return await self._store.reserve(holds, at_ns)

    async def settle(self, holds: Sequence[Hold], amounts: Sequence[int]) -> list[Settled]:
        return await self._store.settle(holds, amounts)

    async def close(self) -> None: ...


async def test_who_leaves_while_the_store_reserves_takes_nothing(store: SqliteBudgetStore) -> None:
    slow = Slow(store)
    budgets = Budgets([CALLS, MONEY], slow)
    leaving = asyncio.create_task(budgets.admit(WHO, estimate(), NOW_NS))
    await slow.asked.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert leaving.cancelled()
    slow.may_go_on.set()
    running = asyncio.create_task(budgets.run())
    await budgets.drain()
    for _ in range(2):
        await budgets.admit(WHO, estimate(nano=500), NOW_NS)  # all of both is there
    with pytest.raises(BudgetExceeded):
        await budgets.admit(WHO, estimate(nano=0), NOW_NS)
    running.cancel()


async def test_what_is_settled_lower_makes_room_and_unknown_is_never_nothing(store: SqliteBudgetStore) -> None:
    budgets = Budgets([MONEY], store)
    ticket = await budgets.admit(WHO, estimate(900), NOW_NS)
    with pytest.raises(BudgetExceeded):
        await budgets.admit(WHO, estimate(200), NOW_NS)
    await budgets.settle(ticket, estimate(100))
    second = await budgets.admit(WHO, estimate(900), NOW_NS)
    await budgets.settle(second, estimate(None))
    with pytest.raises(BudgetExceeded):
        await budgets.admit(WHO, estimate(1), NOW_NS)
    await store.close()


async def test_each_alert_is_given_once_a_window(store: SqliteBudgetStore) -> None:
    alerts: list[Alert] = []

    async def on_alert(alert: Alert) -> None:
        alerts.append(alert)

    budgets = Budgets([MONEY], store, on_alert)
    for came_to in (499, 1, 100, 400, 0):
        await budgets.settle(await budgets.admit(WHO, estimate(0), NOW_NS), estimate(came_to))
    assert [(alert.percent, alert.used) for alert in alerts] == [(50, 500), (100, 1000)]
    day = 86_400 * 10**9
    await budgets.settle(await budgets.admit(WHO, estimate(0), NOW_NS + day), estimate(500))
    assert len(alerts) == 3
    await store.close()


async def test_a_soft_budget_refuses_nothing(store: SqliteBudgetStore) -> None:
    budgets = Budgets([Budget("b", Unit.TOKENS, 5, Window.DAY, hard=False)], store)
    for _ in range(3):
        assert (await budgets.admit(WHO, estimate(tokens=10), NOW_NS)).holds
    await store.close()


async def test_an_unknown_price_acts_by_policy(store: SqliteBudgetStore) -> None:
    with pytest.raises(BudgetExceeded, match="unpriced"):
        await Budgets([MONEY], store).admit(WHO, estimate(None), NOW_NS)
    lenient = Budget("b", Unit.MONEY, 1, Window.DAY, on_unpriced=Policy.ADMIT)
    assert await Budgets([lenient], store).admit(WHO, estimate(None), NOW_NS) == Ticket()
    foreign = Budget("b", Unit.MONEY, 1, Window.DAY, currency="EUR")
    with pytest.raises(BudgetExceeded, match="unpriced"):
        await Budgets([foreign], store).admit(WHO, estimate(1), NOW_NS)
    await store.close()


async def test_each_currency_has_budgets_of_its_own(store: SqliteBudgetStore) -> None:
    euro = Budget("euro", Unit.MONEY, 150, Window.DAY, currency="EUR")
    budgets = Budgets([MONEY, euro, CALLS], store)
    in_euro = Estimate(10, 100, "EUR")
    ticket = await budgets.admit(WHO, in_euro, NOW_NS)
    assert [hold.budget.name for hold in ticket.holds] == ["euro", "calls"]
    assert [hold.budget.name for hold in (await budgets.admit(WHO, estimate(1), NOW_NS)).holds] == ["money", "calls"]
    with pytest.raises(BudgetExceeded, match="euro: exhausted"):
        await budgets.admit(WHO, in_euro, NOW_NS)
    with pytest.raises(BudgetExceeded, match="unpriced"):  # in no budget's currency: judged as unknown
        await budgets.admit(WHO, Estimate(10, 1, "CNY"), NOW_NS)
    with pytest.raises(BudgetExceeded, match="unpriced"):
        await budgets.admit(WHO, Estimate(10, None, "EUR"), NOW_NS)
    await store.close()


async def test_a_store_that_is_away_acts_by_each_budgets_policy() -> None:
    lenient = Budget("lenient", Unit.CALLS, 1, Window.DAY, on_outage=Policy.ADMIT)
    budgets = Budgets([CALLS, lenient], Away())
    await budgets.open(NOW_NS)
    with pytest.raises(BudgetExceeded, match="calls: unavailable"):
        await budgets.admit(WHO, estimate(), NOW_NS)
    assert await Budgets([lenient], Away()).admit(WHO, estimate(), NOW_NS) == Ticket()
    store = Away("lenient")
    budgets = Budgets([CALLS, lenient], store)
    ticket = await budgets.admit(WHO, estimate(), NOW_NS)
    assert ([hold.counter for hold in ticket.holds], store.asked) == (["calls"], ["calls"])
    await budgets.settle(ticket, estimate())
    assert budgets.status.unsettled == 1


async def test_the_ledger_seeds_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    records = many(9)
    with Ledger(path) as ledger:
        ledger.register(PriceBook.default())
        for record in records:
            ledger.append(record)
    budgets = [
        Budget("calls", Unit.CALLS, 3, Window.MONTH, per=("team",)),
        Budget("money", Unit.MONEY, 10**12, Window.MONTH, only=(("team", "team-1"),)),
        Budget("tokens", Unit.TOKENS, 10**12, Window.MONTH),
    ]
    with LedgerReader(path) as reader:
        seeds = budget_seeds(budgets, reader, START_NS + 10**10)
    used = {seed.counter: seed.used for seed in seeds}
    assert {name: used[name] for name in used if name.startswith("calls")} == {
        f"calls|team-{number}": 3 for number in range(3)
    }
    mine = [record for record in records if record.identity.team == "team-1"]
    assert used["money"] == sum(record.charge.amount_nano or 0 for record in mine)
    assert used["tokens"] == sum(record.usage.total_tokens for record in records)
    store = SqliteBudgetStore(tmp_path / "budgets.sqlite3", seeds)
    with pytest.raises(BudgetExceeded):
        await Budgets(budgets, store).admit(Spender("acme", "team-1", "k", "m"), estimate(), START_NS)
    again = SqliteBudgetStore(tmp_path / "budgets.sqlite3", [Seed("calls|team-1", seeds[0].start_ns, 0, 0)])
    with pytest.raises(BudgetExceeded):
        await Budgets(budgets, again).admit(Spender("acme", "team-1", "k", "m"), estimate(), START_NS)
    await store.close()
    await again.close()

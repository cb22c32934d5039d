"""Budgets: how much may be spent in a window, by whom; what is reserved before a request and settled after it.

A request reserves in every budget that it falls under, in all or in none, before an engine sees it: one call, or the
most that it may cost. Afterwards each reservation is settled at what it came to. So however many requests arrive
together, in however many processes, no more than the limit is admitted in a window; the window is that of the arrival.
What is reserved by a process that dies stays reserved until its window ends.

Where the store cannot be asked, or forgot what it had counted, each budget acts by its stated policy: ``deny``
(default) until the store is there again and the window in which it forgot is over, or ``admit``, uncounted. A money
budget acts by ``on_unpriced`` where a request has no price, or one in a currency that none of its budgets is in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Protocol

from billing.errors import BudgetExceeded, BudgetStoreError

log = logging.getLogger("keepwarm.billing.budgets")

_SECOND_NS = 10**9
SUBJECTS = ("tenant", "team", "key", "model")


class Unit(StrEnum):
    """What a budget counts."""

    CALLS = "calls"
    TOKENS = "tokens"
    MONEY = "money"  # nano-units of the budget's currency


class Window(StrEnum):
    """How long a budget's windows are. They follow the UTC calendar; weeks begin on Monday."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"

    def around(self, at_ns: int) -> tuple[int, int]:
        """Return the window of an instant: first ns, and the first ns after it."""
        moment = datetime.fromtimestamp(at_ns // _SECOND_NS, UTC)
        day = moment.replace(hour=0, minute=0, second=0)
        match self:
            case Window.MINUTE:
                start, end = moment.replace(second=0), moment.replace(second=0) + timedelta(minutes=1)
            case Window.HOUR:
                start = moment.replace(minute=0, second=0)
                end = start + timedelta(hours=1)
            case Window.DAY:
                start, end = day, day + timedelta(days=1)
            case Window.WEEK:
                start = day - timedelta(days=day.weekday())
                end = start + timedelta(days=7)
            case Window.MONTH:
                start = day.replace(day=1)
                end = (start + timedelta(days=32)).replace(day=1)
        return int(start.timestamp()) * _SECOND_NS, int(end.timestamp()) * _SECOND_NS


class Policy(StrEnum):
    """What happens to a request that a budget cannot judge."""

    DENY = "deny"
    ADMIT = "admit"


@dataclass(frozen=True, slots=True)
class Spender:
    """Whom a request is booked to."""

    tenant: str
    team: str
    key: str
    model: str

    def value(self, subject: str) -> str:
        """Return one of ``SUBJECTS``."""
        return str(getattr(self, subject))


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget. ``only``: whose requests it holds for; ``per``: each of these has a count of its own.

    ``alerts``: percents of the limit at which an alert is given, once a window. Without ``hard`` nothing is refused.
    """

    name: str
    unit: Unit
    limit: int
    window: Window
    only: tuple[tuple[str, str], ...] = ()  # (subject, value)
    per: tuple[str, ...] = ()  # subjects
    currency: str = "USD"
    hard: bool = True
    alerts: tuple[int, ...] = (80, 100)
    on_outage: Policy = Policy.DENY
    on_unpriced: Policy = Policy.DENY

    def holds_for(self, who: Spender) -> bool:
        """Tell whether a request falls under the budget."""
        return all(who.value(subject) == value for subject, value in self.only)

    def counter(self, who: Spender) -> str:
        """Return the name of the count that a request goes into."""
        return "|".join((self.name, *(who.value(subject).replace("|", "||") for subject in self.per)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most that a request may come to, or what it came to. ``tokens`` is ``None`` where nobody counted them,
    ``nano`` where there is no price."""

    tokens: int | None
    nano: int | None
    currency: str
    calls: int = 1

    def amount(self, budget: Budget) -> int | None:
        """Return the amount in a budget's unit; ``None`` when it cannot be told."""
        match budget.unit:
            case Unit.CALLS:
                return self.calls
            case Unit.TOKENS:
                return self.tokens
            case Unit.MONEY:
                return self.nano if self.currency == budget.currency else None


@dataclass(frozen=True, slots=True)
class Hold:
    """An amount that is reserved in one window of one count."""

    budget: Budget
    counter: str
    start_ns: int
    end_ns: int
    amount: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's reservations, until they are settled."""

    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True)
class Alert:
    """A count reached a share of its limit."""

    budget: str
    counter: str
    percent: int
    used: int
    limit: int
    unit: Unit
    window_start_ns: int
    window_end_ns: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A count after a settlement, and the highest alert that it newly reached."""

    used: int
    alert_percent: int | None


class BudgetStore(Protocol):
    """Where counts are kept. Every call is atomic over all holds, whichever process makes it."""

    async def open(self, at_ns: int) -> None:
        """Get to know the store. Raises ``BudgetStoreError``."""

    async def reserve(self, holds: Sequence[Hold], at_ns: int) -> Hold | None:
        """Add all amounts, or none and return the first hold that a hard limit has no room for.

        Raises ``BudgetStoreError`` when it cannot be told, with the holds that this concerns.
        """

    async def settle(self, holds: Sequence[Hold], amounts: Sequence[int]) -> list[Settled]:
        """Replace reserved amounts by what they came to. Raises ``BudgetStoreError``."""

    async def close(self) -> None:
        """Let go of the store."""


@dataclass(slots=True)
class BudgetStatus:
    """Counters since the start."""

    admitted: int = 0
    denied: int = 0
    denied_by_outage: int = 0
    admitted_in_outage: int = 0  # uncounted
    unsettled: int = 0  # settlements that were lost to an outage: the reservation stands


OnAlert = Callable[[Alert], Awaitable[None]]
#: Settlements that may wait; beyond it reservations stand as they are.
MAX_UNSETTLED = 100_000


class Budgets:
    """Admits and settles. Used by one event loop; ``run`` settles in the background."""

    def __init__(self, budgets: Sequence[Budget], store: BudgetStore, on_alert: OnAlert | None = None) -> None:
        self._budgets, self._store, self._on_alert = tuple(budgets), store, on_alert
        self._due: asyncio.Queue[tuple[Ticket, Estimate | None]] = asyncio.Queue(MAX_UNSETTLED)
        self._left: set[asyncio.Task[Hold | None]] = set()  # reservations whose requests are gone already
        self._in_outage = False
        self.status = BudgetStatus()

    async def open(self, at_ns: int) -> None:
        """Get to know the store, before the first request. Where it is away, requests meet that by their policies."""
        try:
            await self._store.open(at_ns)
        except BudgetStoreError as error:
            self._note_outage(error)

    @property
    def are_there(self) -> bool:
        """Whether there are budgets besides those that come with a request."""
        return bool(self._budgets)

    async def admit(self, who: Spender, most: Estimate, at_ns: int, own: Sequence[Budget] = ()) -> Ticket:
        """Reserve ``most`` in every budget that holds. Raises ``BudgetExceeded``, and then nothing is reserved.

        ``own``: budgets that hold for this spender, besides those that are there for all.
        """
        holds = []
        for budget in _falling_under((*self._budgets, *own), who, most):
            start_ns, end_ns = budget.window.around(at_ns)
            amount = most.amount(budget)
            if amount is None and budget.on_unpriced is Policy.DENY and budget.hard:
                self.status.denied += 1
                raise BudgetExceeded(budget.name, "unpriced", end_ns)
            if amount is not None:
                holds.append(Hold(budget, budget.counter(who), start_ns, end_ns, amount))
        if not holds:
            return Ticket()
        return await self._reserve(holds, at_ns)

    async def _reserve(self, holds: list[Hold], at_ns: int) -> Ticket:
        asking = asyncio.ensure_future(self._store.reserve(holds, at_ns))
        try:
            full = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._left.add(asking)
            asking.add_done_callback(partial(self._give_back, Ticket(tuple(holds))))
            raise
        except BudgetStoreError as error:
            return await self._without_store(holds, at_ns, error)
        if self._in_outage:
            self._in_outage = False
            log.warning("budgets are judged again")
        if full is not None:
            self.status.denied += 1
            raise BudgetExceeded(full.budget.name, "exhausted", full.end_ns)
        self.status.admitted += 1
        return Ticket(tuple(holds))

    def _give_back(self, ticket: Ticket, asking: asyncio.Task[Hold | None]) -> None:
        """The client left while the store was reserving for it: nobody else will settle that."""
        self._left.discard(asking)
        if not asking.cancelled() and asking.exception() is None and asking.result() is None:
            self.settle_soon(ticket, None)

    async def _without_store(self, holds: list[Hold], at_ns: int, error: BudgetStoreError) -> Ticket:
        """Act by the policies of the budgets that cannot be asked; the others are asked alone."""
        unknown = [hold for hold in holds if error.concerns is None or hold.counter in error.concerns]
        for hold in unknown:
            if hold.budget.on_outage is Policy.DENY and hold.budget.hard:
                self.status.denied_by_outage += 1
                self._note_outage(error)
                raise BudgetExceeded(hold.budget.name, "unavailable", hold.end_ns) from error
        known = [hold for hold in holds if hold not in unknown]
        if known and len(known) < len(holds):
            return await self._reserve(known, at_ns)
        self._note_outage(error)
        self.status.admitted_in_outage += 1
        return Ticket()

    def _note_outage(self, error: BudgetStoreError) -> None:
        """Say it once an outage, not once a request."""
        if not self._in_outage:
            self._in_outage = True
            log.error("budgets cannot be judged and act by their policies: %s", error)

    def settle_soon(self, ticket: Ticket, came_to: Estimate | None) -> None:
        """Have ``run`` settle a request; ``None``: it never was one. Where an amount is unknown the reservation stands:
        unknown is never 0."""
        if not ticket.holds:
            return
        try:
            self._due.put_nowait((ticket, came_to))
        except asyncio.QueueFull:
            self.status.unsettled += 1

    async def settle(self, ticket: Ticket, came_to: Estimate | None) -> None:
        """Settle a request and give the alerts that follow. Never raises for the store."""
        amounts = []
        for hold in ticket.holds:
            amount = 0 if came_to is None else came_to.amount(hold.budget)
            amounts.append(hold.amount if amount is None else amount)
        try:
            settled = await self._store.settle(ticket.holds, amounts)
        except BudgetStoreError as error:
            self.status.unsettled += 1
            log.warning("a request's budgets could not be settled: %s", error)
            return
        for hold, now in zip(ticket.holds, settled, strict=True):
            if now.alert_percent is not None:
                await self._alert(hold, now)

    async def _alert(self, hold: Hold, now: Settled) -> None:
        budget = hold.budget
        log.warning("budget %s has reached %d%%: %d of %d %s in %s", budget.name, now.alert_percent, now.used,
                    budget.limit, budget.unit.value, hold.counter)  # fmt: skip
        if self._on_alert is not None and now.alert_percent is not None:
            await self._on_alert(
                Alert(
                    budget=budget.name,
                    counter=hold.counter,
                    percent=now.alert_percent,
                    used=now.used,
                    limit=budget.limit,
                    unit=budget.unit,
                    window_start_ns=hold.start_ns,
                    window_end_ns=hold.end_ns,
                )
            )

    async def run(self) -> None:
        """Settle what ``settle_soon`` was given, until cancelled."""
        while True:
            ticket, came_to = await self._due.get()
            try:
                await self.settle(ticket, came_to)
            finally:
                self._due.task_done()

    async def drain(self) -> None:
        """Wait until ``run`` has settled everything."""
        if self._left:
            await asyncio.wait(self._left)
            await asyncio.sleep(0)  # what each of them has reserved is given back now
        await self._due.join()


def _falling_under(budgets: Sequence[Budget], who: Spender, most: Estimate) -> list[Budget]:
    """Return the budgets that a request falls under.

    Of those of money it is those in the currency of its price; where there are others only, it falls under these, and
    they act as for a price that is not known.
    """
    holding = [budget for budget in budgets if budget.holds_for(who)]
    money = [budget for budget in holding if budget.unit is Unit.MONEY]
    if most.nano is None or not any(budget.currency == most.currency for budget in money):
        return holding
    return [budget for budget in holding if budget.unit is not Unit.MONEY or budget.currency == most.currency]


@dataclass(frozen=True, slots=True)
class Seed:
    """What the ledger says was used in a window, for a store that knows nothing yet."""

    counter: str
    start_ns: int
    end_ns: int
    used: int

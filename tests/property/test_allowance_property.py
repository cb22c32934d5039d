"""Allowances against a token-by-token oracle: exact, whatever the order of arrival, and settled in whatever pieces."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.allowances import grants
from billing.credits import ALLOWANCE
from billing.meter import charge
from billing.prices import PriceBook
from billing.row import LedgerRow, row_of
from billing.settlement import missing_credits
from tests.samples.billed import billed
from tracing.record import Identity, Stamps, Usage, UsageSource

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
RATES = {"fresh": 1000, "hit_device": 100, "output": 3000}
MONTH_START_NS = 1_793_491_200 * 10**9  # 2026-11-01
DAY_NS = 86_400 * 10**9
MONTHS = ("2026-11", "2026-12")

#: (hour of the two months, team, fresh, hit, output)
asked = st.lists(
    st.tuples(
        st.integers(0, 61 * 24 - 1), st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 30), st.integers(0, 9)
    ),
    min_size=1,
    max_size=25,
)


def book(limit: int, period: str, shared: bool) -> PriceBook:
    per = "" if shared else 'per = ["team"]'
    return PriceBook.from_toml(
        f"""
        name = "free"
        currency = "USD"
        [[allowance]]
        name = "start"
        tokens = {limit}
        period = "{period}"
        {per}
        [[price]]
        models = ["m"]
        rates = {{ fresh = 1, hit_device = 0.1, output = 3 }}
        """
    )


def rows_of(drawn: list[tuple[int, str, int, int, int]], prices: PriceBook) -> list[LedgerRow]:
    rows = []
    for number, (hour, team, fresh, hit, output) in enumerate(drawn):
        arrived = MONTH_START_NS + hour * DAY_NS // 24
        usage = Usage(fresh_tokens=fresh, hit_device_tokens=hit, output_tokens=output, source=UsageSource.ENGINE)
        record = replace(
            billed(number, prices, model="m"),
            request_id=f"req-{number:03}",
            identity=Identity("acme", team, f"key-{team}"),
            usage=usage,
            charge=charge(usage, prices, "m", arrived, team=team),
            stamps=Stamps(arrived, closed_ns=arrived + 1),
        )
        rows.append(row_of(record))
    return rows


def token_by_token(rows: list[LedgerRow], limit: int, period: str, shared: bool) -> Counter[tuple[str, str]]:
    """Lay every token of the accounts in line, and give the first ones of each period back at their own price."""
    left: dict[tuple[str, str], int] = {}
    given_back: Counter[tuple[str, str]] = Counter()
    for row in sorted(rows, key=lambda row: (row.posted_ns, row.request_id)):
        day = (row.posted_ns - MONTH_START_NS) // DAY_NS
        name = f"day {day}" if period == "day" else MONTHS[day >= 30]
        account = (name, "" if shared else row.team)
        for token_class, price in RATES.items():
            for _ in range(getattr(row, f"{token_class}_tokens")):
                if left.setdefault(account, limit) > 0:
                    left[account] -= 1
                    given_back[row.team, MONTHS[day >= 30]] += price
    return given_back


@CALM
@given(asked, st.integers(1, 400), st.sampled_from(("day", "month")), st.booleans(), st.integers(0, 5))
def test_what_is_free_is_the_first_tokens_of_the_accounts(
    drawn: list[tuple[int, str, int, int, int]], limit: int, period: str, shared: bool, seed: int
) -> None:
    prices = book(limit, period, shared)
    rows = rows_of(drawn, prices)
    shuffled = rows.copy()
    random.Random(seed).shuffle(shuffled)
    found: Counter[tuple[str, str]] = Counter()
    for key, grant in grants(shuffled, {prices.version: prices}).items():
        found[key.place.team, key.period[:7]] += grant.amount_nano
    assert +found == token_by_token(rows, limit, period, shared)


@CALM
@given(asked, st.integers(1, 400), st.sampled_from(("day", "month")), st.integers(0, 25), st.integers(0, 5))
def test_settling_in_pieces_comes_to_the_same(
    drawn: list[tuple[int, str, int, int, int]], limit: int, period: str, first: int, seed: int
) -> None:
    """Rows may come late and change who used an allowance first: what was posted is then moved, never left standing."""
    prices = book(limit, period, shared=True)
    rows = [row for row in rows_of(drawn, prices) if row.posted_ns < MONTH_START_NS + 30 * DAY_NS]
    random.Random(seed).shuffle(rows)
    posted: list[LedgerRow] = []
    for known in (rows[:first], rows):
        granted = grants(known, {prices.version: prices})
        posted += missing_credits(granted, posted, ALLOWANCE, MONTHS[0], MONTH_START_NS + 40 * DAY_NS)
    by_team: Counter[str] = Counter()
    for row in posted:
        by_team[row.team] -= row.amount_nano or 0
    expected = token_by_token(rows, limit, period, shared=True)
    assert +by_team == Counter({team: amount for (team, _), amount in expected.items()})
    assert len({(row.request_id, row.revision) for row in posted}) == len(posted)

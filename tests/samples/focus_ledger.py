"""A ledger with everything in it that a FOCUS export has to tell apart; as a module: ``python -m … PATH`` makes it."""

from __future__ import annotations

import sys
from pathlib import Path

from billing.allowances import period_of
from billing.corrections import correct
from billing.credits import LOST_HITS, Grant, GrantKey, credit_rows
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.meter import charge
from billing.periods import post
from billing.posting import place_of
from billing.prices import PriceBook
from billing.row import LedgerRow
from billing.settlement import settle
from billing.storage import Lease, storage_rows
from tests.samples.billed import START_NS, altered, billed, died_in_flight, unpriced
from tracing.record import RequestRecord, Usage, UsageSource

BOOK_TOML = """
name = "contracts"
currency = "USD"
rounding = { mode = "half_up", level = "line" }

[[allowance]]
name = "start"
tokens = 20_000
per = ["team"]

[[price]]
models = ["big-*"]
teams = ["team-1"]
request_fee = 0.0001
storage_per_hour = 1
tool_fees = { web_search = 0.008 }
rates = { fresh = 1.1, hit = 0.1, write_5m = 1.2, output = 4.4 }

[[price]]
models = ["big-*"]
request_fee = 0.0002
request_minimum = 0.004
storage_per_hour = 4.5
tool_fees = { web_search = 0.01, web_fetch = 0 }
rates = { fresh = 2.2, hit = 0.22, write_5m = 2.4, output = 8.8, reasoning = 9.9 }
service_tiers = { batch = { multiplier = 0.5 } }

[[price.context]]
above_prompt_tokens = 3000
multiplier = 2

[[price.windows]]
name = "peak"
timezone = "Asia/Shanghai"
hours = [["09:00", "23:00"]]
multiplier = 1.5
"""
DEARER_TOML = BOOK_TOML.replace("4.4", "4.6").replace("8.8", "9.0").replace('"contracts"', '"next"')


def contracts() -> PriceBook:
    """Return the book."""
    return PriceBook.from_toml(BOOK_TOML)


def contracted(number: int, book: PriceBook) -> RequestRecord:
    """Return a request under the contracts: every third at batch price, some with writes, reasoning and searches."""
    record = billed(number, book, model=f"big-{number % 2}")
    usage = record.usage
    if number % 4 == 0:
        usage = Usage(fresh_tokens=number, write_5m_tokens=64, hit_device_tokens=3000, output_tokens=40,
                      reasoning_tokens=9, source=UsageSource.ENGINE, tool_uses=(("web_search", 2),))  # fmt: skip
    arrived = START_NS + number * 7 * 60 * 10**9
    paid = charge(
        usage,
        book,
        record.served_model,
        arrived,
        team=record.identity.team,
        service_tier="batch" if number % 3 == 0 else None,
    )
    stamps = altered(record, usage=usage, charge=paid)
    return altered(stamps, stamps=type(record.stamps)(arrived, closed_ns=arrived + 10**9))


def fill(path: Path, count: int = 60) -> None:
    """Write the requests, correct some of them by a later book, settle what is free, keep some prompts cached."""
    book, default, later = contracts(), PriceBook.default(), PriceBook.from_toml(DEARER_TOML)
    with Ledger(path) as ledger:
        for known in (book, default, later):
            ledger.register(known)
        for number in range(count):
            ledger.append(contracted(number, book))
        for number in range(count, count + 30):
            ledger.append(billed(number, default))
        ledger.append(unpriced(count + 30, default))
        ledger.append(died_in_flight(count + 31, default))
    with LedgerReader(path) as reader:
        chosen = [reader.history(f"req-{number}") for number in range(0, count, 10)]
    rows = [correct(history, later, reason="contract", at_ns=START_NS + 40 * 86_400 * 10**9) for history in chosen]
    post(path, [row for row in rows if row is not None])
    for month in ("2026-09", "2026-10"):
        settle(path, month, START_NS + 60 * 86_400 * 10**9)
    give_back(path, chosen[1][0])
    kept = [Lease(f"cache-{n}", "big-0", 12_345, START_NS, START_NS + n * 5_000 * 10**9, "t", f"team-{n}", "k")
            for n in range(3)]  # fmt: skip
    post(path, storage_rows(kept, lambda model: book, (), START_NS + 60 * 86_400 * 10**9))


def give_back(path: Path, row: LedgerRow) -> None:
    """Post a credit for hits that were lost."""
    month, end_ns = period_of(row.posted_ns, "month")
    key = GrantKey(LOST_HITS, f"{LOST_HITS} eviction", month, end_ns, place_of(row))
    post(path, credit_rows({key: Grant(512, 46_080)}, {}, START_NS + 60 * 86_400 * 10**9))


if __name__ == "__main__":
    fill(Path(sys.argv[1]))

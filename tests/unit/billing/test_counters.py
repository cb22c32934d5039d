"""The ledger's counters: begun with everything, brought up by what others write, always equal to the report."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from billing.corrections import correct
from billing.counters import DIMENSIONS, LedgerCounters
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.periods import post
from billing.prices import PriceBook
from gateway.ledger_metrics import LedgerCollector
from tests.samples.billed import START_NS, died_in_flight, many, unpriced

DEARER = PriceBook.from_toml(
    'name = "d"\ncurrency = "USD"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
)


def check(path: Path, counters: LedgerCounters) -> None:
    with LedgerReader(path) as reader:
        report = reader.report(DIMENSIONS)
    assert counters.refresh() == {(group.key, group.currency): group.sums for group in report.groups}


def test_they_equal_the_report_whoever_writes_and_whenever_they_began(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    records = [*many(30), *many(40, unpriced)[30:], *many(45, died_in_flight)[40:]]
    with Ledger(path) as ledger, Ledger(path) as other:
        ledger.register(PriceBook.default())
        first = LedgerCounters(path)
        assert first.refresh() == {}
        for record in records[:20]:
            ledger.append(record)
        assert ledger.flush()
        check(path, first)
        second = LedgerCounters(path)
        for record in records[10:]:
            other.append(record)
        assert other.flush()
        check(path, first)
        check(path, second)
    with LedgerReader(path) as reader:
        row = correct(reader.history("req-3"), DEARER, reason="r", at_ns=START_NS)
    assert row is not None
    post(path, [row])
    check(path, first)
    for counters in (first, second):
        counters.close()


def test_prometheus_says_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with Ledger(path) as ledger:
        ledger.register(PriceBook.default())
        for record in [*many(20), *many(25, unpriced)[20:]]:
            ledger.append(record)
    registry, counters = CollectorRegistry(), LedgerCounters(path)
    registry.register(LedgerCollector(counters))
    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + int(sample.value)
    with LedgerReader(path) as reader:
        (total,) = reader.report().totals
    counters.close()
    assert sums == {
        "keepwarm_ledger_unreadable": 0,
        "keepwarm_ledger_requests_total": total.sums.requests,
        "keepwarm_ledger_unpriced_requests": total.sums.unpriced,
        "keepwarm_ledger_cost_nano": total.sums.amount_nano,
        "keepwarm_ledger_saved_nano": total.sums.saved_nano,
        "keepwarm_ledger_tokens": total.sums.prompt_tokens + total.sums.output_tokens,
    }

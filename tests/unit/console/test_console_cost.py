"""The page of costs: the same numbers as ``keepwarm report`` on the command line, and each tenant its own only."""

from __future__ import annotations

import asyncio
import json
import re
from html import unescape
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.prices import PriceBook
from billing.reports import Report, build_report
from billing.row import row_of
from billing.trend_chart import MAX_BUCKETS, caption, trend_svg
from gateway.cli import main
from gateway.console.costs import DIMENSIONS, WINDOWS
from gateway.console.formats import count, money
from tests.samples.billed import START_NS, altered, billed, many, unpriced
from tests.samples.console import console_app, visitor
from tracing.record import Identity
from tracing.store import TraceStore

BOOK = PriceBook.default()
NOW_NS = START_NS + 3 * 86_400 * 10**9
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "ledger.sqlite3"
    euro = PriceBook.from_toml(
        'name = "e"\ncurrency = "EUR"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.5, output = 2 }'
    )
    with Ledger(path) as opened:
        opened.register(BOOK)
        opened.register(euro)
        for record in [*many(60), unpriced(60, BOOK), *(billed(number, euro) for number in range(61, 70))]:
            opened.append(record)
        opened.append(
            altered(billed(70, BOOK), identity=Identity("rival", "secret-team", "k"), labels={"agent": HOSTILE})
        )
    return path


def pages(ledger: Path, tmp_path: Path, *addresses: str, tenant: str | None = None) -> list[str]:
    """Ask for pages over HTTP."""

    def report_of(by: list[str], where: RowFilter) -> Report:
        with LedgerReader(ledger) as reader:
            return reader.report(by, where)

    async def ask() -> list[str]:
        store = TraceStore(tmp_path / "traces.sqlite3")
        app = console_app(store, visitor(tenant), clock=lambda: NOW_NS, report_of=report_of)
        async with TestClient(TestServer(app)) as client:
            texts = []
            for address in addresses:
                async with client.get(address) as answer:
                    assert answer.status == 200
                    texts.append(await answer.text())
        store.close()
        return texts

    return asyncio.run(ask())


def words_of(page: str) -> str:
    """What a reader sees, with nothing between the parts of an amount."""
    body = page[page.index("<main") :]
    return unescape(re.sub(r"<(/?span)[^>]*>", "", body))


@pytest.mark.parametrize("by", DIMENSIONS)
def test_the_page_says_what_the_command_says(
    by: str, ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"/console/cost?by={by}&window=all"
    page, as_json, as_csv = pages(ledger, tmp_path, address, f"{address}&form=json", f"{address}&form=csv")
    assert main(["report", "--ledger", str(ledger), "--by", by, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(as_json) == json.loads(printed)
    assert main(["report", "--ledger", str(ledger), "--by", by, "--csv"]) == 0
    assert as_csv == capsys.readouterr().out
    seen, content = words_of(page), json.loads(printed)
    for group in content["groups"]:
        rows = [text for text in re.findall(r"<tr>.*?</tr>", seen, re.DOTALL) if f">{group[by]}" in text]
        amounts = (
            str(money(group["amount_nano"], group["currency"])),
            str(money(group["saved_nano"], group["currency"])),
        )
        assert any(all(amount in text for amount in amounts) for text in rows), group
        assert any(count(group["prompt_tokens"]) in text for text in rows)
    for total in content["totals"]:
        assert str(money(total["amount_nano"], total["currency"])) in seen
        assert str(money(total["saved_nano"], total["currency"])) in seen


def test_a_window_is_that_of_the_command(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LedgerReader(ledger) as reader:
        expected = reader.report(("team",), RowFilter(since_ns=NOW_NS - WINDOWS["7d"][0]))  # type: ignore[operator]
    (found,) = pages(ledger, tmp_path, "/console/cost?window=7d&form=json")
    assert [entry["amount_nano"] for entry in json.loads(found)["totals"]] == [
        g.sums.amount_nano for g in expected.totals
    ]
    (empty,) = pages(ledger, tmp_path, "/console/cost?window=24h")
    assert "Nothing was billed in this time." in empty


def test_a_tenant_sees_its_own_rows_only(ledger: Path, tmp_path: Path) -> None:
    for by in DIMENSIONS:
        mine, theirs = (
            pages(
                ledger,
                tmp_path,
                f"/console/cost?by={by}&window=all",
                f"/console/cost?by={by}&window=all&form=csv",
                tenant=name,
            )
            for name in ("acme", "rival")
        )
        assert "secret-team" not in "".join(mine)
        assert "team-1" not in "".join(theirs)
    (page,) = pages(ledger, tmp_path, "/console/cost?window=all", tenant="rival")
    assert str(money(billed(70, BOOK).charge.amount_nano or 0, "USD")) in words_of(page)


def test_what_clients_named_runs_nothing_and_odd_questions_get_the_default(ledger: Path, tmp_path: Path) -> None:
    page, odd = pages(ledger, tmp_path, "/console/cost?by=agent&window=all", "/console/cost?by=%3Cb%3E&window=9")
    assert HOSTILE not in page
    assert '<option value="team" selected>' in odd


def test_a_trend_says_its_numbers_and_says_when_it_is_cut() -> None:
    report = build_report([row_of(billed(number * 4000, BOOK)) for number in range(MAX_BUCKETS + 5)], ("hour",))
    groups = report.groups
    chart = trend_svg(groups, "USD")
    assert chart.count("<g>") == MAX_BUCKETS
    assert groups[-1].key[0] in chart
    assert f"of {len(groups)}" in caption(groups)
    assert trend_svg([], "USD") == ""

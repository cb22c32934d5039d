"""Tools that an API runs itself and charges for by use: read, priced, stored, corrected, exported, computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.allowances import grants
from billing.corrections import correct
from billing.counts import MAX_PROBLEMS, ProblemCode, UsageReading
from billing.errors import PriceBookError
from billing.focus import export
from billing.focus_check import focus_faults
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.meter import charge, recharge
from billing.periods import post
from billing.price_import import import_genai_prices
from billing.prices import PriceBook
from billing.rates import TOOLS
from billing.row import row_of
from billing.usage import anthropic_stream_usage, anthropic_usage, openai_usage, responses_usage
from billing.verify import verify_ledger
from tests.samples.billed import START_NS, altered, billed
from tracing.record import RequestRecord, Usage, UsageSource

HEAD = 'name = "vendor"\ncurrency = "USD"\nallowance = [{ name = "start", tokens = 1_000_000 }]\n'
PRICE = '[[price]]\nmodels = ["m"]\nrates = { fresh = 3, hit = 0.3, write_5m = 3.75, output = 15 }\n'
NO_FEES = PriceBook.from_toml(HEAD + PRICE)
BOOK = PriceBook.from_toml(HEAD + PRICE + "tool_fees = { web_search = 0.01, web_fetch = 0 }\n")
SEARCHED = {"input_tokens": 1000, "output_tokens": 100, "server_tool_use": {"web_search_requests": 3}}


def asked(book: PriceBook, usage: Usage, number: int = 0) -> RequestRecord:
    record = billed(number, book, model="m", usage=usage)
    return altered(record, charge=charge(usage, book, "m", record.stamps.arrived_ns, team=record.identity.team))


def test_anthropics_web_search_costs_ten_a_thousand() -> None:
    paid = charge(anthropic_usage(SEARCHED).usage, BOOK, "m", START_NS)
    assert paid.amount_nano == 3_000_000 + 1_500_000 + 3 * 10_000_000
    assert ("web_search", 3, 30_000_000) in [(line.token_class, line.quantity, line.amount_nano) for line in paid.lines]
    assert paid.saved_nano == 0


@pytest.mark.parametrize(
    ("reading", "uses"),
    [
        (anthropic_usage(SEARCHED), (("web_search", 3),)),
        (anthropic_stream_usage({**SEARCHED, "server_tool_use": {"web_search_requests": 0}}, SEARCHED),
         (("web_search", 3),)),
        (
            openai_usage({"prompt_tokens": 9, "completion_tokens": 1, "server_tool_use": {"web_fetch_requests": 2,
                                                                                        "web_search_requests": 1}}),
            (("web_fetch", 2), ("web_search", 1)),
        ),
        (anthropic_usage(SEARCHED | {"server_tool_use": None}), ()),
        (anthropic_usage(SEARCHED | {"server_tool_use": {"web_search_requests": -1}}), ()),
        (anthropic_usage(SEARCHED | {"server_tool_use": {"web_search_requests": 3, "web_search": 3}}),
         (("web_search", 3),)),
    ],
)  # fmt: skip
def test_uses_are_read(reading: UsageReading, uses: tuple[tuple[str, int], ...]) -> None:
    assert reading.usage.tool_uses == uses


def test_responses_tells_its_searches_by_items() -> None:
    items = [
        {"type": "web_search_call", "action": {"type": "search"}},
        {"type": "web_search_call", "action": {"type": "open_page"}},
        {"type": "web_search_call"},
        {"type": "file_search_call"},
        {"type": "function_call"},
        {"type": "message"},
        "nonsense",
    ]
    reading = responses_usage({"input_tokens": 9, "output_tokens": 1}, items)
    assert reading.usage.tool_uses == (("file_search", 1), ("web_search", 2))
    assert not reading.problems


@pytest.mark.parametrize("told", [
    [{"web_search_requests": 3}], "3", 3, {"web_search_requests": 3, "web_search": 2}, {"web_search_requests": 10**9},
])  # fmt: skip
def test_uses_that_are_told_oddly_are_an_alarm(told: object) -> None:
    assert len(anthropic_usage(SEARCHED | {"server_tool_use": told}).problems) == 1


def test_thousands_of_unknown_tools_are_few_alarms() -> None:
    items = [{"type": "code_interpreter_call"}, {"type": "image_generation_call"}] * 3000
    reading = responses_usage({"input_tokens": 9, "output_tokens": 1}, items)
    assert [problem.detail for problem in reading.problems] == [
        "3000 of 'code_interpreter_call'", "3000 of 'image_generation_call'",
    ]  # fmt: skip
    reading = anthropic_usage(SEARCHED | {"server_tool_use": {f"tool_{number}": 1 for number in range(3000)}})
    assert len(reading.problems) == MAX_PROBLEMS


def test_a_tool_without_a_name_in_books_is_an_alarm() -> None:
    told = anthropic_usage(SEARCHED | {"server_tool_use": {"divination_requests": 1, "web_search_requests": 1}})
    ran = responses_usage({"input_tokens": 9, "output_tokens": 1}, [{"type": "code_interpreter_call"}])
    assert told.usage.tool_uses == (("web_search", 1),)
    assert [problem.code for problem in (*told.problems, *ran.problems)] == [ProblemCode.UNKNOWN_TOOL] * 2


def test_a_tool_without_a_price_is_unpriced_and_its_uses_are_kept() -> None:
    usage = anthropic_usage(SEARCHED).usage
    row = row_of(asked(NO_FEES, usage))
    assert (row.amount_nano, row.unpriced_reason) == (None, "no_rate:web_search")
    assert row.usage() == usage
    basis = row.charge().basis
    assert basis is not None
    assert recharge(row.usage(), BOOK, basis).amount_nano == 34_500_000


def test_a_ledger_corrects_exports_and_verifies_them(tmp_path: Path) -> None:
    path, dear = tmp_path / "ledger.sqlite3", PriceBook.from_toml(HEAD + PRICE + "tool_fees = { web_search = 0.02 }\n")
    usage = anthropic_usage(SEARCHED).usage
    with Ledger(path) as ledger:
        for book in (NO_FEES, BOOK, dear):
            ledger.register(book)
        ledger.append(asked(NO_FEES, usage, 1))
        ledger.append(asked(BOOK, usage, 2))
        ledger.append(asked(BOOK, replace(usage, tool_uses=()), 3))
    for book, change in ((BOOK, 34_500_000), (dear, 60_000_000)):
        with LedgerReader(path) as reader:
            histories = [reader.history(f"req-{number}") for number in (1, 2, 3)]
        rows = [correct(history, book, reason="price", at_ns=START_NS + 86_400 * 10**9) for history in histories]
        posted = [row for row in rows if row is not None]
        post(path, posted)
        assert sum(row.amount_nano or 0 for row in posted) == change
    assert verify_ledger(path).passed
    with LedgerReader(path) as reader:
        rows_, books = list(reader.rows()), reader.price_books()
    dataset = export(rows_, books, "USD")
    lines = list(dataset.lines())
    assert focus_faults(lines, dataset.billed_nano, "USD") == []
    searches = [line for line in lines if line["x_TokenClass"] == "web_search"]
    assert {line["SkuMeter"] for line in searches} == {"Web searches"}
    (first,) = (line for line in searches if line["ChargeClass"] == "")
    assert (first["PricingQuantity"], first["PricingUnit"]) == ("3.0", "Requests")
    assert (first["ListUnitPrice"], first["BilledCost"]) == ("0.010000000", "0.030000000")


def test_a_changed_count_is_found(tmp_path: Path) -> None:
    path, usage = tmp_path / "ledger.sqlite3", anthropic_usage(SEARCHED).usage
    wrong = asked(BOOK, usage, 1)
    lines = tuple(replace(line, quantity=2) if line.token_class in TOOLS else line for line in wrong.charge.lines)
    with Ledger(path) as ledger:
        ledger.register(BOOK)
        ledger.append(altered(wrong, charge=replace(wrong.charge, lines=lines)))
    assert verify_ledger(path).fault_count == 1


def test_uses_are_no_tokens_of_an_allowance() -> None:
    row = row_of(asked(BOOK, anthropic_usage(SEARCHED).usage))
    (grant,) = grants([row], {BOOK.version: BOOK}).values()
    assert (grant.quantity, grant.amount_nano) == (1100, 4_500_000)


def test_a_fee_that_no_integer_holds_is_told() -> None:
    with pytest.raises(PriceBookError, match=r"price\[0\].tool_fees.web_search: .* has more than 9 decimals"):
        PriceBook.from_toml(HEAD + PRICE + "tool_fees = { web_search = 0.0000000001 }\n")
    with pytest.raises(PriceBookError, match="tool_fees"):
        PriceBook.from_toml(HEAD + PRICE + "tool_fees = { divination = 1 }\n")


def test_nothing_of_it_without_uses() -> None:
    plain = Usage(fresh_tokens=10, output_tokens=1, source=UsageSource.ENGINE)
    assert charge(plain, BOOK, "m", START_NS).lines == charge(plain, NO_FEES, "m", START_NS).lines


def test_an_imported_book_has_them() -> None:
    book = PriceBook.from_toml(import_genai_prices("anthropic").toml)
    fees = [entry.tool_fees for entry in book.file.price if entry.tool_fees]
    assert fees
    assert {str(fee["web_search"]) for fee in fees} == {"0.01"}

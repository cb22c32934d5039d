"""Importing and comparing price books."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from genai_prices import Usage as TheirUsage
from genai_prices import calc_price

from billing.errors import PriceBookError
from billing.meter import charge
from billing.price_diff import diff
from billing.price_import import import_genai_prices
from billing.prices import PriceBook
from tracing.record import Usage, UsageSource

BOOK = """
name = "b"
currency = "USD"
[[price]]
models = ["m"]
rates = { fresh = 1, output = 2 }
[[price]]
models = ["n"]
teams = ["t"]
rates = { fresh = 1, output = 2 }
"""


@pytest.mark.parametrize("at", [datetime(2026, 11, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)], ids=str)
@pytest.mark.parametrize("provider", ["anthropic", "openai", "google", "moonshotai"])
def test_an_imported_book_prices_as_the_data_set_itself_does(provider: str, at: datetime) -> None:
    book = PriceBook.from_toml(import_genai_prices(provider).toml)
    priced = 0
    at_ns = int(at.timestamp()) * 10**9
    for entry in book.file.price:
        (model,) = entry.models
        if entry.effective_to is not None or "output" not in entry.rates.by_class():
            continue
        cases = [(1000, 0, 10), (900_001, 0, 1), (500, 100, 3)]  # a class without a price is unpriced here, not fresh
        for prompt, hits, output in cases if "hit_unknown" in entry.rates.by_class() else cases[:2]:
            usage = Usage(fresh_tokens=prompt - hits, hit_unknown_tokens=hits, output_tokens=output,
                          source=UsageSource.ENGINE)  # fmt: skip
            ours = charge(usage, book, model, at_ns)
            try:
                counts = TheirUsage(input_tokens=prompt, cache_read_tokens=hits, output_tokens=output)
                theirs = calc_price(counts, model, provider_id=provider, genai_request_timestamp=at)
            except LookupError:
                break  # an id that its own matching does not find
            if theirs.model.id != model:
                break  # … or takes for another model
            assert ours.amount_nano == round(theirs.total_price * 10**9), (model, prompt)
            priced += 1
    assert priced > 10


def test_what_a_book_cannot_say_is_told() -> None:
    imported = import_genai_prices("deepseek")
    assert any("time of day" in line for line in imported.left_out)
    with pytest.raises(PriceBookError, match="no provider 'nobody'"):
        import_genai_prices("nobody")


def test_books_that_say_the_same_do_not_differ() -> None:
    assert diff(PriceBook.from_toml(BOOK), PriceBook.from_toml(BOOK.replace("fresh = 1,", "fresh = 1.00,"))) == []


def test_every_difference_is_a_line() -> None:
    after = BOOK.replace('"USD"', '"EUR"').replace("output = 2 }\n[[", "output = 2.5 }\nrequest_fee = 1\n[[")
    after = after.replace('"n"', '"o"')
    assert diff(PriceBook.from_toml(BOOK), PriceBook.from_toml(after)) == [
        "~ book: currency: USD -> EUR",
        "~ m: rates.output: 2 -> 2.5",
        "~ m: request_fee: nothing -> 1",
        "- n teams t",
        "+ o teams t",
    ]
    head, first, second = BOOK.partition('[[price]]\nmodels = ["m"]')[0], *BOOK.split("[[price]]")[1:]
    swapped = f"{head}[[price]]{second}[[price]]{first}"
    assert diff(PriceBook.from_toml(BOOK), PriceBook.from_toml(swapped)) == ["~ the order of the entries"]

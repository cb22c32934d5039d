"""A book made of GPU hours, and several books at once."""

from __future__ import annotations

from decimal import Decimal

import pytest

from billing.errors import PriceBookError
from billing.prices import PriceBook
from billing.self_hosted import HostingCost, Throughput, self_hosted_book, token_price
from billing.shelf import PriceShelf, ShelvedBook
from gateway.cli import main


def test_a_price_is_what_the_second_costs_over_what_it_makes() -> None:
    # 2 GPUs at 3.60 an hour: 0.002 a second; 10,000 tokens in it: 0.20 a million, 0.25 at 80 %, 0.30 with 20 % on top
    assert token_price(HostingCost(Decimal("3.60"), 2), 10_000) == Decimal("0.2")
    assert token_price(HostingCost(Decimal("3.60"), 2, Decimal("0.8")), 10_000) == Decimal("0.25")
    assert token_price(HostingCost(Decimal("3.60"), 2, Decimal("0.8"), Decimal("0.2")), 10_000) == Decimal("0.3")


def test_a_price_never_falls_short_of_the_cost() -> None:
    cost = HostingCost(Decimal("2.49"))
    price = token_price(cost, 7_001)
    assert price * 7_001 * 3600 / 10**6 >= Decimal("2.49")
    assert (price - Decimal("0.000001")) * 7_001 * 3600 / 10**6 < Decimal("2.49")


def test_the_book_is_one_and_prices_its_tiers_by_their_speed() -> None:
    speed = Throughput(20_000, 4_000, {"device": 2_000_000, "host": 300_000})
    book = PriceBook.from_toml(self_hosted_book("llama-*", HostingCost(Decimal("2.50"), 2), speed))
    card = book.card("llama-3", 0, 100)
    assert {name: Decimal(rate).scaleb(-12) for name, rate in card.rates.items()} == {  # type: ignore[union-attr]
        "fresh": Decimal("0.069445"),
        "hit_device": Decimal("0.000695"),
        "hit_host": Decimal("0.00463"),
        "output": Decimal("0.347223"),
    }
    assert book.file.costs is not None
    assert (book.file.costs.gpu_hour, book.file.costs.gpus_per_instance) == (Decimal("2.50"), 2)


@pytest.mark.parametrize(
    ("cost", "speed", "told"),
    [
        (HostingCost(Decimal(0)), Throughput(1, 1), "the GPU hour must be above 0"),
        (HostingCost(Decimal(1)), Throughput(0, 1), "prefill tokens"),
        (HostingCost(Decimal(1)), Throughput(1, 1, {"tape": 5}), "no tier 'tape'"),
        (HostingCost(Decimal(1), utilization=Decimal(2)), Throughput(1, 1), "utilization is a share"),
        (HostingCost(Decimal(1), margin=Decimal(-1)), Throughput(1, 1), "margin"),
    ],
)
def test_what_no_book_can_be_made_of(cost: HostingCost, speed: Throughput, told: str) -> None:
    with pytest.raises(PriceBookError, match=told):
        self_hosted_book("m", cost, speed)


def test_the_command_prints_a_book(capsys: pytest.CaptureFixture[str]) -> None:
    words = "prices from-gpu-hours --model m --gpu-hour 3.60 --prefill-tokens-per-s 1000 --decode-tokens-per-s 100"
    assert main([*words.split(), "--hit-tokens-per-s", "host=5000"]) == 0
    book = PriceBook.from_toml(capsys.readouterr().out)
    assert book.file.price[0].rates.by_class() == {
        "fresh": Decimal(1), "hit_host": Decimal("0.2"), "output": Decimal(10)
    }  # fmt: skip
    assert main([*words.split(), "--hit-tokens-per-s", "host"]) == 1
    assert "write TIER=N" in capsys.readouterr().err


def test_the_first_book_that_fits_prices_a_request_whether_it_has_a_price_or_not() -> None:
    def book(name: str, currency: str) -> PriceBook:
        return PriceBook.from_toml(
            f'name = "{name}"\ncurrency = "{currency}"\n[[price]]\nmodels = ["{name}-*"]\nrates = {{ fresh = 1 }}'
        )

    own, deepseek, azure = book("own", "EUR"), book("deepseek", "CNY"), book("azure", "USD")
    others = [ShelvedBook(azure, ("gpt-*",), ("azure-*",)), ShelvedBook(deepseek, ("deepseek-*",))]
    shelf = PriceShelf(own, others)
    assert shelf.book_for("gpt-5", "azure-west") is azure
    assert shelf.book_for("gpt-5", "local-0") is own
    assert shelf.book_for("gpt-5") is own
    assert shelf.book_for("deepseek-flash", "anything") is deepseek
    assert shelf.books == (own, azure, deepseek)

"""The price file: strict, exact, versioned; and which price counts when."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

import billing
from billing.errors import PriceBookError
from billing.prices import PriceBook
from billing.rates import NoPrice, RateCard

BASE = """
name = "test"
currency = "USD"
[[price]]
models = ["m"]
rates = { fresh = 1, hit = 0.1, output = 2 }
"""


def test_the_readmes_example_is_a_book_that_says_what_it_says() -> None:
    text = (Path(billing.__file__).parent / "README.md").read_text("utf-8")
    (example,) = (found for found in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[[price]]" in found)
    book = PriceBook.from_toml(example, "README.md")
    assert fresh(book, "llama-3", "2026-11-02T01:30", team="research") == 300_000_000_000  # 09:30 in Shanghai: peak
    assert fresh(book, "llama-3", "2026-10-01T01:30", team="research") == 150_000_000_000  # a holiday
    assert book.file.allowance[0].per == ("team",)


def test_what_a_book_does_not_say_is_no_part_of_its_version() -> None:
    """Keys that came later leave the versions of older books alone: they are in the ledger for ever."""
    assert set(json.loads(PriceBook.from_toml(BASE).body)) == {"name", "currency", "price"}
    assert set(json.loads(PriceBook.from_toml(BASE).body)["price"][0]) == {"models", "rates"}


def ns(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 10**9


def fresh(book: PriceBook, model: str = "m", at: str = "2026-11-02T00:00", prompt: int = 1, **who: str) -> int | str:
    """The price of fresh tokens in pico-units, or why there is none."""
    card = book.card(model, ns(at), prompt, **who)
    return card.reason if isinstance(card, NoPrice) else card.rates["fresh"]


def problems(text: str) -> str:
    with pytest.raises(PriceBookError) as caught:
        PriceBook.from_toml(text, "book.toml")
    assert str(caught.value).startswith("price book book.toml cannot be used:")
    return "\n".join(caught.value.problems)


class TestStrictness:
    @pytest.mark.parametrize(
        ("change", "path"),
        [
            (("fresh = 1,", "fresh = 1, cached_tokens = 1,"), "price[0].rates.cached_tokens: "),
            (("fresh = 1,", "fresh = -1,"), "price[0].rates.fresh: "),
            (("fresh = 1,", "fresh = true,"), "price[0].rates.fresh: "),
            (("fresh = 1,", "fresh = 0.0000000000001,"), "price[0].rates.fresh: has more than 12 decimals"),
            (("fresh = 1,", ""), "price[0].rates: fresh: "),
            (('models = ["m"]', "models = []"), "price[0].models: "),
            (('currency = "USD"', 'currency = "usd"'), "currency: "),
            (('currency = "USD"', ""), "currency: "),
            (('models = ["m"]', 'models = ["m"]\neffective_from = 2026-01-01T00:00:00'), "price[0].effective_from: "),
            (('models = ["m"]', 'models = ["m"]\nrequest_fee = 0.0000000001'), "price[0].request_fee: "),
            (
                (
                    'models = ["m"]',
                    'models = ["m"]\neffective_from = 2026-01-02T00:00:00Z\neffective_to = 2026-01-02T00:00:00Z',
                ),
                "price[0]: effective_to: ",
            ),
        ],
    )
    def test_an_error_names_its_path(self, change: tuple[str, str], path: str) -> None:
        assert change[0] in BASE
        assert path in problems(BASE.replace(*change))

    @pytest.mark.parametrize(
        ("tables", "path"),
        [
            (
                '[[price.windows]]\nname = "w"\ntimezone = "Mars/Base"\nmultiplier = 2',
                "price[0].windows[0]: timezone: ",
            ),
            ('[[price.windows]]\nname = "w"\nhours = [["22:00", "06:00"]]\nmultiplier = 2', "crosses midnight"),
            ('[[price.windows]]\nname = "w"\nhours = [["22:00", "25:00"]]\nmultiplier = 2', "is no time of day"),
            ('[[price.windows]]\nname = "w"', "needs exactly one of multiplier and multipliers"),
            ("[[price.context]]\nabove_prompt_tokens = 9\nrates = { fresh = 2 }", "says nothing of hit_device"),
            ("[[price.context]]\nabove_prompt_tokens = 0\nmultiplier = 2", "price[0].context[0].above_prompt_tokens: "),
            ("[price.service_tiers]\nbatch = { multiplier = 0.5, multipliers = { fresh = 1 } }", "exactly one"),
            ("[price.service_tiers]\nodd = { multiplier = 0.0000000000001 }", "service_tiers.odd"),
            ("[price.service_tiers]\na = { multiplier = 0.000000000001 }", "tier a: hit_device: "),
            ('[[price]]\nmodels = ["m"]\nrates = { fresh = 3 }', "price[1]: never counts, price[0]"),
        ],
    )
    def test_a_structure_that_cannot_be_held_is_refused(self, tables: str, path: str) -> None:
        assert path in problems(BASE + tables)

    def test_every_problem_is_told_at_once(self) -> None:
        text = problems(BASE.replace("fresh = 1", "fresh = -1").replace("output = 2", "outputs = 2"))
        assert len(text.splitlines()) == 2

    def test_what_is_no_toml_and_what_is_not_there(self, tmp_path: Path) -> None:
        assert "Invalid value" in problems("name = ")
        with pytest.raises(PriceBookError, match="absent"):
            PriceBook.load(tmp_path / "absent.toml")

    def test_numbers_are_decimals_and_never_floats(self) -> None:
        book = PriceBook.from_toml(BASE.replace("fresh = 1,", "fresh = 0.1,"))
        quoted = PriceBook.from_toml(BASE.replace("fresh = 1,", 'fresh = "0.10",'))
        assert fresh(book) == fresh(quoted) == 100_000_000_000
        assert book.version == quoted.version


class TestVersion:
    def test_it_is_a_digest_of_the_content(self) -> None:
        book = PriceBook.from_toml(BASE)
        assert PriceBook.from_toml("# a comment\n" + BASE).version == book.version
        assert PriceBook.from_toml(BASE.replace("output = 2", "output = 3")).version != book.version

    def test_the_stored_body_makes_the_same_book_again(self) -> None:
        for book in (PriceBook.from_toml(BASE), PriceBook.default()):
            again = PriceBook.from_body(book.body)
            assert (again.version, again.body) == (book.version, book.body)

    def test_a_stored_body_that_is_broken_is_an_error(self) -> None:
        with pytest.raises(PriceBookError):
            PriceBook.from_body("{}")


class TestPackagedBook:
    def test_it_prices_the_default_model_and_each_tier_by_its_distance(self) -> None:
        card = PriceBook.default().card("SmolLM2-135M-Instruct", ns("2026-11-02T00:00"), 100)
        assert isinstance(card, RateCard)
        tiers = [card.rates[name] for name in ("hit_device", "hit_host", "hit_disk", "hit_pool", "fresh")]
        assert tiers == sorted(set(tiers))

    def test_it_has_no_price_for_others(self) -> None:
        assert fresh(PriceBook.default(), "gpt-x") == "no_price"


class TestLookup:
    def test_the_first_entry_that_fits_counts(self) -> None:
        book = PriceBook.from_toml(
            """
            name = "contracts"
            currency = "EUR"
            [[price]]
            models = ["big-*"]
            teams = ["research"]
            rates = { fresh = 1 }
            [[price]]
            models = ["big-*"]
            regions = ["eu", "uk"]
            rates = { fresh = 2 }
            [[price]]
            models = ["big-*", "exact.name"]
            rates = { fresh = 3 }
            """
        )
        unit = 10**12
        assert fresh(book, "big-one", team="research", region="eu") == 1 * unit
        assert fresh(book, "big-one", team="sales", region="uk") == 2 * unit
        assert fresh(book, "big-one", team="sales") == 3 * unit
        assert fresh(book, "exact.name") == 3 * unit
        assert fresh(book, "exactXname") == fresh(book, "a big-one") == "no_price"

    def test_dates_are_half_open(self) -> None:
        book = PriceBook.from_toml(
            """
            name = "a cut"
            currency = "USD"
            [[price]]
            models = ["luna"]
            effective_from = 2026-01-01T00:00:00Z
            effective_to = 2026-07-30T00:00:00Z
            rates = { fresh = 1.00 }
            [[price]]
            models = ["luna"]
            effective_from = 2026-07-30T02:00:00+02:00
            rates = { fresh = 0.20 }
            """
        )
        assert fresh(book, "luna", "2025-12-31T23:59") == "not_in_force"
        assert fresh(book, "luna", "2026-07-29T23:59") == 10**12
        assert fresh(book, "luna", "2026-07-30T00:00") == 2 * 10**11

    def test_a_context_tier_is_chosen_by_the_whole_prompt(self) -> None:
        tiers = "[[price.context]]\nabove_prompt_tokens = 200\nmultiplier = 2\n"
        tiers += "[[price.context]]\nabove_prompt_tokens = 500\nrates = { fresh = 7, hit = 1, output = 9 }"
        book = PriceBook.from_toml(BASE + tiers)
        assert [fresh(book, prompt=n) for n in (200, 201, 500, 501)] == [n * 10**12 for n in (1, 2, 2, 7)]

    def test_windows_follow_weekday_hour_holiday_and_zone(self) -> None:
        window = """
            [[price.windows]]
            name = "peak"
            timezone = "Asia/Shanghai"
            weekdays = ["mon", "tue", "wed", "thu", "fri"]
            hours = [["09:00", "12:00"], ["14:00", "18:00"]]
            except_on = [2026-10-01]
            multiplier = 2
            """
        book = PriceBook.from_toml(BASE + window)
        prices = {
            "2026-09-30T00:59:59": 1,  # Wednesday, a second before nine in Shanghai
            "2026-09-30T01:00:00": 2,
            "2026-09-30T03:59:59": 2,
            "2026-09-30T04:00:00": 1,  # noon
            "2026-09-30T06:00:00": 2,
            "2026-09-30T10:00:00": 1,
            "2026-10-01T02:00:00": 1,  # a holiday
            "2026-10-03T02:00:00": 1,  # Saturday
            "2026-10-05T02:00:00": 2,  # Monday
        }
        assert {at: fresh(book, at=at) for at in prices} == {at: n * 10**12 for at, n in prices.items()}

    def test_a_window_keeps_its_hours_when_the_clocks_change(self) -> None:
        window = (
            '[[price.windows]]\nname = "n"\ntimezone = "Europe/Berlin"\nhours = [["08:00", "09:00"]]\nmultiplier = 2'
        )
        book = PriceBook.from_toml(BASE + window)
        assert fresh(book, at="2026-10-24T06:30") == 2 * 10**12  # summer time
        assert fresh(book, at="2026-10-26T06:30") == 10**12
        assert fresh(book, at="2026-10-26T07:30") == 2 * 10**12

    def test_adjustments_multiply(self) -> None:
        more = """
            [[price.context]]
            above_prompt_tokens = 100
            multipliers = { fresh = 2, hit = 2, output = 1.5 }
            [[price.windows]]
            name = "always"
            multiplier = 3
            [price.service_tiers]
            batch = { multiplier = 0.5 }
            """
        card = PriceBook.from_toml(BASE + more).card("m", 0, 101, service_tier="batch")
        assert isinstance(card, RateCard)
        assert card.rates["fresh"] == 3 * 10**12
        assert card.rates["hit_pool"] == 3 * 10**11
        assert card.rates["output"] == 45 * 10**11
        assert card.rule == "price[0] m above 100 window always tier batch"

    def test_service_tiers_that_mean_none_and_one_without_a_price(self) -> None:
        book = PriceBook.from_toml(BASE)
        assert fresh(book, service_tier="default") == fresh(book)
        assert fresh(book, service_tier="priority") == "no_service_tier"

    def test_storage(self) -> None:
        assert PriceBook.from_toml(BASE).storage_rate("m", 0) == NoPrice("no_rate:storage")
        book = PriceBook.from_toml(BASE.replace('models = ["m"]', 'models = ["m"]\nstorage_per_hour = 4.5'))
        assert book.storage_rate("m", 0) == 4_500_000_000_000
        assert book.storage_rate("other", 0) == NoPrice("no_price")

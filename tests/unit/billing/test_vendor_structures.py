"""Vendors' price structures, as a book would hold them, each with a worked example. Prices are examples, not a list."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from billing.errors import PriceBookError
from billing.meter import charge, storage_charge
from billing.prices import PriceBook
from billing.rates import NoPrice
from billing.usage import anthropic_usage, gemini_usage, openai_usage
from tracing.record import Usage

DEEPSEEK = """
name = "DeepSeek"
currency = "USD"
[holidays]
china = [2026-10-01, 2026-10-02, 2026-10-05, 2026-10-06, 2026-10-07]
[[price]]
models = ["deepseek-flash"]
effective_from = 2026-08-16T00:00:00Z
rates = { fresh = 0.15, hit = 0.003, output = 0.60 }
[[price.windows]]
name = "peak"
weekdays = ["mon", "tue", "wed", "thu", "fri"]
hours = [["01:00", "04:00"], ["06:00", "10:00"]]
except_holidays = ["china"]
multiplier = 2
"""
OPENAI = """
name = "OpenAI"
currency = "USD"
[[price]]
models = ["gpt-5.6-luna"]
effective_to = 2026-07-30T00:00:00Z
rates = { fresh = 1.00, hit = 0.10, write = 1.25, output = 6 }
[[price]]
models = ["gpt-5.6-luna"]
effective_from = 2026-07-30T00:00:00Z
rates = { fresh = 0.20, hit = 0.02, write = 0.25, output = 1.20 }
[[price.context]]
above_prompt_tokens = 272000
multipliers = { fresh = 2, hit = 2, write = 2, output = 1.5 }
[price.service_tiers]
batch = { multiplier = 0.5 }
flex = { multiplier = 0.5 }
priority = { multiplier = 2 }
"""
ANTHROPIC = """
name = "Anthropic"
currency = "USD"
[[price]]
models = ["claude-opus-5.5*"]
rates = { fresh = 5, hit = 0.25, write_5m = 6.25, write_1h = 10, output = 25 }
[price.service_tiers]
batch = { multiplier = 0.5 }
"""
ANTHROPIC_LONG = ANTHROPIC.replace(
    "[price.service_tiers]",
    """cache_minimum_tokens = 1024
cache_lifetime_s = 300
[[price.context]]
above_prompt_tokens = 200000
multipliers = { fresh = 2, hit = 2, write_5m = 2, write_1h = 2, output = 1.5 }
[price.service_tiers]""",
)
GEMINI = """
name = "Gemini"
currency = "USD"
[[price]]
models = ["gemini-3.1-pro"]
storage_per_hour = 4.50
rates = { fresh = 2, hit = 0.20, output = 12 }
[[price.context]]
above_prompt_tokens = 200000
rates = { fresh = 4, hit = 0.40, output = 18 }
[price.service_tiers]
batch = { multiplier = 0.5 }
flex = { multiplier = 0.5 }
priority = { multiplier = 1.75 }
"""
QWEN = """
name = "Qwen"
currency = "CNY"
[[price]]
models = ["qwen-implicit"]
rates = { fresh = 2.4, hit = 0.48, output = 9.6 }
[[price]]
models = ["qwen-explicit"]
rates = { fresh = 2.4, hit = 0.24, write = 3.0, output = 9.6 }
[[price]]
models = ["qwen-tiered"]
cache_minimum_tokens = 1024
cache_lifetime_s = 300
rates = { fresh = 0.8, hit = 0.16, output = 2 }
service_tiers = { batch = { multiplier = 0.5 } }
[[price.context]]
above_prompt_tokens = 128000
rates = { fresh = 1.2, hit = 0.24, output = 3 }
[[price.context]]
above_prompt_tokens = 256000
rates = { fresh = 2.4, hit = 0.48, output = 12 }
"""
MOONSHOT = """
name = "Moonshot"
currency = "USD"
[[price]]
models = ["kimi-k2"]
rates = { fresh = 0.60, hit = 0.15, output = 2.50 }
[[price]]
models = ["kimi-k3"]
rates = { fresh = 1, hit = 0.10, write_5m = 1, write_1h = 2, output = 4 }
"""


def cost(book: str, usage: Usage, model: str, at: str = "2026-11-02T12:00", tier: str | None = None) -> int | None:
    at_ns = int(datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()) * 10**9
    return charge(usage, PriceBook.from_toml(book), model, at_ns, service_tier=tier).amount_nano


def openai(prompt: int, cached: int, output: int, written: int = 0) -> Usage:
    details = {"cached_tokens": cached, "cache_write_tokens": written}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return openai_usage(usage).usage


@pytest.mark.parametrize(
    ("at", "factor"),
    [
        ("2026-11-02T00:59", 1),  # Monday
        ("2026-11-02T01:00", 2),
        ("2026-11-02T04:00", 1),
        ("2026-11-02T09:59", 2),
        ("2026-10-31T02:00", 1),  # Saturday
        ("2026-10-01T02:00", 1),  # National Day
        ("2026-10-08T02:00", 2),
    ],
)
def test_deepseek_doubles_at_peak_but_not_on_weekends_and_holidays(at: str, factor: int) -> None:
    usage = {"prompt_cache_hit_tokens": 900_000, "prompt_cache_miss_tokens": 100_000, "completion_tokens": 1_000}
    base = 900_000 * 3 + 100_000 * 150 + 1_000 * 600
    assert cost(DEEPSEEK, openai_usage(usage).usage, "deepseek-flash", at) == factor * base


def test_deepseek_had_no_such_price_before() -> None:
    assert cost(DEEPSEEK, openai(10, 0, 1), "deepseek-flash", "2026-08-15T23:59") is None


def test_openai_cut_its_price_on_a_date() -> None:
    usage = openai(18_014, 0, 0, written=18_011)
    assert cost(OPENAI, usage, "gpt-5.6-luna", "2026-07-29T23:59") == 22_516_750
    assert cost(OPENAI, usage, "gpt-5.6-luna", "2026-07-30T00:00") == 4_503_350


def test_openai_prices_the_whole_of_a_long_request_higher() -> None:
    at_limit, over = openai(272_000, 200_000, 1_000), openai(272_001, 200_000, 1_000)
    assert cost(OPENAI, at_limit, "gpt-5.6-luna") == 72_000 * 200 + 200_000 * 20 + 1_000 * 1_200
    assert cost(OPENAI, over, "gpt-5.6-luna") == 72_001 * 400 + 200_000 * 40 + 1_000 * 1_800


def test_openai_service_tiers() -> None:
    usage = openai(1_000, 0, 100)
    base = 1_000 * 200 + 100 * 1_200
    assert cost(OPENAI, usage, "gpt-5.6-luna", tier="default") == base
    assert cost(OPENAI, usage, "gpt-5.6-luna", tier="batch") == base // 2
    assert cost(OPENAI, usage, "gpt-5.6-luna", tier="priority") == 2 * base
    assert cost(OPENAI, usage, "gpt-5.6-luna", tier="scale") is None


def test_anthropic_writes_by_lifetime_and_reads_at_the_models_own_discount() -> None:
    usage = {
        "input_tokens": 100,
        "cache_read_input_tokens": 10_000,
        "cache_creation_input_tokens": 3_000,
        "cache_creation": {"ephemeral_5m_input_tokens": 1_000, "ephemeral_1h_input_tokens": 2_000},
        "output_tokens": 50,
    }
    right = 100 * 5_000 + 10_000 * 250 + 1_000 * 6_250 + 2_000 * 10_000 + 50 * 25_000
    assert cost(ANTHROPIC, anthropic_usage(usage).usage, "claude-opus-5.5-20261001") == right
    assert cost(ANTHROPIC, anthropic_usage(usage).usage, "claude-opus-5.5-20261001", tier="batch") == right // 2


def test_gemini_switches_the_rate_of_the_whole_request() -> None:
    short = gemini_usage({"promptTokenCount": 200_000, "candidatesTokenCount": 10, "thoughtsTokenCount": 90}).usage
    long = gemini_usage({"promptTokenCount": 250_000, "cachedContentTokenCount": 50_000}).usage
    assert cost(GEMINI, short, "gemini-3.1-pro") == 200_000 * 2_000 + 100 * 12_000
    assert cost(GEMINI, long, "gemini-3.1-pro") == 200_000 * 4_000 + 50_000 * 400


def test_qwen_implicit_and_explicit_caches() -> None:
    implicit = openai(10_000, 8_000, 100)
    assert cost(QWEN, implicit, "qwen-implicit") == 2_000 * 2_400 + 8_000 * 480 + 100 * 9_600
    details = {"cached_tokens": 0, "cache_creation_input_tokens": 8_000}
    usage = {"prompt_tokens": 10_000, "completion_tokens": 100, "prompt_tokens_details": details}
    assert cost(QWEN, openai_usage(usage).usage, "qwen-explicit") == 2_000 * 2_400 + 8_000 * 3_000 + 100 * 9_600


def test_moonshot_multipliers_are_per_model() -> None:
    assert cost(MOONSHOT, openai(1_000, 800, 10), "kimi-k2") == 200 * 600 + 800 * 150 + 10 * 2_500
    usage = {
        "input_tokens": 10,
        "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
        "output_tokens": 1,
    }
    assert cost(MOONSHOT, anthropic_usage(usage).usage, "kimi-k3") == 10 * 1_000 + 100 * 1_000 + 200 * 2_000 + 4_000


def test_anthropic_batch_multiplies_a_long_requests_writes_as_well() -> None:
    usage = {
        "input_tokens": 100_000,
        "cache_read_input_tokens": 100_000,
        "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
        "output_tokens": 50,
    }
    reading = anthropic_usage(usage).usage
    long = 2 * (100_000 * 5_000 + 100_000 * 250 + 10 * 6_250 + 20 * 10_000) + 50 * 37_500
    assert cost(ANTHROPIC_LONG, reading, "claude-opus-5.5") == long
    assert cost(ANTHROPIC_LONG, reading, "claude-opus-5.5", tier="batch") == long // 2


def test_what_a_price_says_of_the_cache() -> None:
    terms = PriceBook.from_toml(ANTHROPIC_LONG).cache_terms("claude-opus-5.5", 0)
    assert (terms.minimum_tokens, terms.lifetime_s) == (1024, 300)
    assert PriceBook.from_toml(GEMINI).cache_terms("gemini-3.1-pro", 0).lifetime_s is None
    assert PriceBook.from_toml(GEMINI).cache_terms("nobody", 0).minimum_tokens == 0


def test_gemini_prorates_the_storage_of_an_explicit_cache() -> None:
    book = PriceBook.from_toml(GEMINI)
    rate = book.storage_rate("gemini-3.1-pro", 0)
    assert rate == 4_500_000_000_000
    # 100,000 tokens for 90 minutes: 0.1 million x 4.50 x 1.5 hours = 0.675
    assert storage_charge(100_000, 90 * 60 * 10**9, rate, book.rounding) == 675_000_000
    assert storage_charge(1, 10**9, rate, book.rounding) == 1  # 1.25 nano-units, rounded once
    assert book.storage_rate("gemini-2", 0) == NoPrice("no_price")


def test_gemini_service_tiers_apply_to_the_long_price_too() -> None:
    usage = gemini_usage({"promptTokenCount": 250_000, "cachedContentTokenCount": 50_000}).usage
    base = 200_000 * 4_000 + 50_000 * 400
    assert cost(GEMINI, usage, "gemini-3.1-pro", tier="priority") == base * 7 // 4
    assert cost(GEMINI, usage, "gemini-3.1-pro", tier="flex") == base // 2


@pytest.mark.parametrize(
    ("prompt", "fresh", "hit", "output"),
    [(128_000, 800, 160, 2_000), (128_001, 1_200, 240, 3_000), (256_001, 2_400, 480, 12_000)],
)
def test_qwen_is_tiered_by_the_length_of_the_input(prompt: int, fresh: int, hit: int, output: int) -> None:
    usage = openai(prompt, 100_000, 100)
    right = (prompt - 100_000) * fresh + 100_000 * hit + 100 * output
    assert cost(QWEN, usage, "qwen-tiered") == right
    assert cost(QWEN, usage, "qwen-tiered", tier="batch") == right // 2


@pytest.mark.parametrize(
    ("at", "factor"),
    [
        ("2026-10-09T16:00", 1),  # Saturday in Shanghai already, before the hours begin
        ("2026-10-10T01:00", 2),  # 09:00 of a Saturday that is worked
        ("2026-10-11T01:00", 1),  # Sunday
        ("2026-10-01T01:00", 1),  # National Day
        ("2026-10-02T15:59", 1),
        ("2026-10-12T04:00", 1),  # Monday 12:00: the hours' end
    ],
)
def test_a_calendar_with_holidays_and_days_that_make_up_for_them(at: str, factor: int) -> None:
    book = """
    name = "calendar"
    currency = "CNY"
    [holidays]
    china = [2026-10-01, 2026-10-02, 2026-10-05]
    [[price]]
    models = ["m"]
    rates = { fresh = 1, hit = 0.02, output = 4 }
    [[price.windows]]
    name = "peak"
    timezone = "Asia/Shanghai"
    weekdays = ["mon", "tue", "wed", "thu", "fri"]
    hours = [["09:00", "12:00"]]
    except_holidays = ["china"]
    also_on = [2026-10-10]
    multiplier = 2
    """
    assert cost(book, openai(1_000, 900, 0), "m", at) == factor * (100 * 1_000 + 900 * 20)


def test_holidays_that_nobody_named_are_an_error() -> None:
    with pytest.raises(PriceBookError, match="no holidays named germany"):
        PriceBook.from_toml(DEEPSEEK.replace('["china"]', '["germany"]'))

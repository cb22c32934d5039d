"""Vendors' price structures, as a book would hold them, each with a worked example. Prices are examples, not a list."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from billing.meter import charge
from billing.prices import PriceBook
from billing.usage import anthropic_usage, gemini_usage, openai_usage
from tracing.record import Usage

DEEPSEEK = """
name = "DeepSeek"
currency = "USD"
[[price]]
models = ["deepseek-flash"]
effective_from = 2026-08-16T00:00:00Z
rates = { fresh = 0.15, hit = 0.003, output = 0.60 }
[[price.windows]]
name = "peak"
weekdays = ["mon", "tue", "wed", "thu", "fri"]
hours = [["01:00", "04:00"], ["06:00", "10:00"]]
except_on = [2026-10-01, 2026-10-02, 2026-10-05, 2026-10-06, 2026-10-07]
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

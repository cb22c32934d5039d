"""Publicly reported miscounts of token bills: our cost must be the right one to the last digit, and not the wrong one.

Each line: where it was reported, the shape, its counts, prices per million, the right and the wrong cost.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from billing.cases import Case, load_cases, render_results, run_case
from billing.errors import CaseFileError

Counts = dict[str, int]


def openai(prompt: int, cached: int, output: int, written: int = 0) -> Counts:
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cache_write_tokens": written,
        "completion_tokens": output,
    }


def anthropic(fresh: int, five: int, hour: int, output: int, read: int = 0) -> Counts:
    return {
        "input_tokens": fresh,
        "cache_creation_5m": five,
        "cache_creation_1h": hour,
        "cache_read_input_tokens": read,
        "output_tokens": output,
    }


def prices(text: str) -> dict[str, str]:
    return dict(zip(("input", "read", "output", "write_5m", "write_1h"), text.split(), strict=False))


MISCOUNTS = [
    ("litellm#14849", "openai", openai(262_960, 257_955, 1_744), "1.25 0.625 10", "0.184918125", "0.7642"),
    ("litellm#9812", "anthropic", anthropic(3, 12_304, 0, 550), "3 0.3 15 3.75", "0.054399", "0.091311"),
    ("litellm#26016", "openai", openai(44_341, 41_518, 0), "1.4 0.26 0", "0.01474688", "0.0620774"),
    ("litellm#35127", "openai", openai(172_000, 155_000, 0, 3_000), "5 0.5 0 6.25", "0.16625", "0.86"),
    ("litellm#33071", "openai", openai(3_541, 0, 5, 3_541), "1 0.1 6 1.25", "0.00445625", "0.003571"),
    ("bifrost#3451", "anthropic", anthropic(6, 159_217, 0, 2_745), "5 0.5 25 6.25", "1.06376125", "1.85984625"),
    ("langwatch#7018", "openai", openai(4_814, 4_736, 10), "1.25 0.125 10", "0.0007895", "0.0067095"),
    ("pi#2148", "openai", openai(20_212, 16_298, 931), "0.5 0.05 3", "0.0055649", "0.0137139"),
    ("oh-my-pi#6876", "anthropic", anthropic(0, 0, 344_139, 0), "5 0.5 25 6.25 10", "3.44139", "2.15086875"),
    ("pi#5738", "anthropic", anthropic(0, 600_000, 400_000, 0), "5 0.5 25 6.25 10", "7.75", "6.25"),
    ("inspect_ai#4705", "anthropic", anthropic(0, 0, 1_000_000, 0), "3 0.3 15 3.75 6", "6", "3.75"),
    ("hermes-agent#93678", "openai", openai(250_000, 0, 0), "4 0.4 18", "1", "0.5"),
    ("laravel/ai#846", "openai", openai(18_014, 0, 0, 18_011), "1 0.1 6 1.25", "0.02251675", "0.018014"),
    (
        "litellm#14849, as Gemini tells it",
        "gemini",
        {"prompt_tokens": 262_960, "cached_tokens": 257_955, "candidates_tokens": 1_700, "thoughts_tokens": 44},
        "1.25 0.625 10",
        "0.184918125",
        "0.7642",
    ),
    (
        "litellm#35127, as the Responses API tells it",
        "responses",
        {"input_tokens": 172_000, "cached_tokens": 155_000, "cache_write_tokens": 3_000, "output_tokens": 0},
        "5 0.5 0 6.25",
        "0.16625",
        "0.86",
    ),
]


def case(ref: str, shape: str, usage: Counts, rates: str, right: str, wrong: str) -> Case:
    return Case(ref, shape, usage, prices(rates), Decimal(right), Decimal(wrong))


@pytest.mark.parametrize("line", MISCOUNTS, ids=[line[0] for line in MISCOUNTS])
def test_the_cost_is_right(line: tuple[str, str, Counts, str, str, str]) -> None:
    result = run_case(case(*line))
    assert result.amount == result.case.right != result.case.wrong
    assert result.reading.problems == ()
    assert result.agrees


def test_an_alarm_is_no_agreement() -> None:
    result = run_case(Case("clamped", "openai", openai(10, 20, 0), prices("1 0 1"), Decimal(0)))
    assert result.amount == 0
    assert not result.agrees
    assert "hits_exceed_prompt" in render_results([result])


@pytest.mark.parametrize(
    ("shape", "usage", "rates", "said"),
    [
        ("cohere", {}, {"input": "1"}, "no shape 'cohere'"),
        ("openai", openai(1, 0, 0) | {"cached": 1}, {"input": "1"}, "openai usage has no cached"),
        ("openai", openai(1, 0, 0), {"inputs": "1"}, "no rate 'inputs'"),
        ("openai", openai(1, 0, 0), {"input": "-1"}, "price\\[0\\].rates.fresh"),
    ],
)
def test_what_a_case_cannot_mean_is_an_error(shape: str, usage: Counts, rates: dict[str, str], said: str) -> None:
    with pytest.raises(CaseFileError, match=said):
        run_case(Case("odd", shape, usage, rates, Decimal(0)))


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"ref": "a"}]', '[{"ref": "a", "shape": "openai", "usage": 3}]'])
def test_a_file_that_holds_no_cases_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(CaseFileError):
        load_cases(path)

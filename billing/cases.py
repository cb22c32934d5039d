"""Worked examples: usage, rates and the right cost, run through the same path as a real request.

A file is a JSON list of ``{"ref", "shape": "openai" | "responses" | "anthropic" | "gemini", "usage": {…},
"rates_per_mtok": {…}, "right": "0.1849"}``; ``wrong`` (what a known bug made of it) and ``why`` are shown where given.
The usage has short keys (``cached_tokens``, ``cache_creation_1h``); each is put where that API puts it, read by
``billing.usage``, priced by a book made of the rates, and the amount must equal ``right`` to the last digit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from billing.counts import UsageReading
from billing.errors import CaseFileError, PriceBookError
from billing.meter import NANO_PER_UNIT, charge
from billing.prices import PriceBook
from billing.usage import anthropic_usage, gemini_usage, openai_usage, responses_usage
from tracing.record import Charge

_MODEL = "case"
#: The rate names of case files -> the classes that they price.
_RATES = {
    "input": ("fresh",),
    "read": ("hit",),
    "write_5m": ("write", "write_5m"),
    "write_1h": ("write_1h",),
    "output": ("output",),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One example. Amounts are decimals in the currency's unit."""

    ref: str
    shape: str
    usage: Mapping[str, int]
    rates: Mapping[str, str]
    right: Decimal
    wrong: Decimal | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What came out: the case agrees when the amount is right and the usage raised no alarm."""

    case: Case
    reading: UsageReading
    charge: Charge

    @property
    def amount(self) -> Decimal | None:
        """The computed cost, exactly."""
        nano = self.charge.amount_nano
        return None if nano is None else Decimal(nano).scaleb(-9)

    @property
    def agrees(self) -> bool:
        """Whether the cost is the right one to the last digit."""
        return self.amount == self.case.right and not self.reading.problems


def load_cases(path: Path) -> list[Case]:
    """Read a case file. Raises ``CaseFileError``."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CaseFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CaseFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, list):
        raise CaseFileError(f"{path} holds no list of cases")
    cases = []
    for index, entry in enumerate(content):
        try:
            wrong = entry.get("wrong")
            cases.append(
                Case(
                    ref=str(entry["ref"]),
                    shape=entry["shape"],
                    usage=dict(entry["usage"]),
                    rates={name: rate for name, rate in entry["rates_per_mtok"].items() if name != "note"},
                    right=Decimal(entry["right"]),
                    wrong=None if wrong is None else Decimal(wrong),
                    why=str(entry.get("why", "")),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation) as error:
            raise CaseFileError(f"{path}: case {index}: {type(error).__name__}: {error}") from error
    return cases


def run_case(case: Case) -> CaseResult:
    """Run one case. Raises ``CaseFileError`` for a shape, count or rate that there is none of."""
    shape = _SHAPES.get(case.shape)
    if shape is None:
        raise CaseFileError(f"{case.ref}: there is no shape {case.shape!r}, only {', '.join(_SHAPES)}")
    left = dict(case.usage)
    reading = shape(left)
    if left:
        raise CaseFileError(f"{case.ref}: {case.shape} usage has no {', '.join(left)}")
    return CaseResult(case, reading, charge(reading.usage, _book(case), _MODEL, 0))


def _book(case: Case) -> PriceBook:
    rates = []
    for name, rate in case.rates.items():
        if name not in _RATES:
            raise CaseFileError(f"{case.ref}: there is no rate {name!r}, only {', '.join(_RATES)}")
        rates += [f'{token_class} = "{rate}"' for token_class in _RATES[name]]
    text = f'name = "case"\ncurrency = "USD"\n[[price]]\nmodels = ["{_MODEL}"]\n[price.rates]\n' + "\n".join(rates)
    try:
        return PriceBook.from_toml(text, case.ref)
    except PriceBookError as error:
        raise CaseFileError(str(error)) from error


# Each puts the short keys where its API has them, taking what it knows out of ``left``.


def _openai(left: dict[str, int]) -> UsageReading:
    details = {
        "cached_tokens": left.pop("cached_tokens", None),
        "cache_write_tokens": left.pop("cache_write_tokens", None),
    }
    usage: dict[str, object] = {"prompt_tokens_details": details}
    usage["completion_tokens_details"] = {"reasoning_tokens": left.pop("reasoning_tokens", None)}
    usage |= {name: left.pop(name, None) for name in ("prompt_tokens", "completion_tokens")}
    return openai_usage(usage)


def _responses(left: dict[str, int]) -> UsageReading:
    details = {
        "cached_tokens": left.pop("cached_tokens", None),
        "cache_write_tokens": left.pop("cache_write_tokens", None),
    }
    usage: dict[str, object] = {"input_tokens_details": details}
    usage["output_tokens_details"] = {"reasoning_tokens": left.pop("reasoning_tokens", None)}
    usage |= {name: left.pop(name, None) for name in ("input_tokens", "output_tokens")}
    return responses_usage(usage)


def _anthropic(left: dict[str, int]) -> UsageReading:
    five, hour = left.pop("cache_creation_5m", 0), left.pop("cache_creation_1h", 0)
    usage: dict[str, object] = {
        "cache_creation_input_tokens": five + hour,
        "cache_creation": {"ephemeral_5m_input_tokens": five, "ephemeral_1h_input_tokens": hour},
    }
    usage |= {name: left.pop(name, None) for name in ("input_tokens", "cache_read_input_tokens", "output_tokens")}
    return anthropic_usage(usage)


def _gemini(left: dict[str, int]) -> UsageReading:
    names = {
        "prompt_tokens": "promptTokenCount",
        "cached_tokens": "cachedContentTokenCount",
        "candidates_tokens": "candidatesTokenCount",
        "thoughts_tokens": "thoughtsTokenCount",
        "tool_use_prompt_tokens": "toolUsePromptTokenCount",
    }
    return gemini_usage({field: left.pop(name, None) for name, field in names.items()})


_SHAPES: dict[str, Callable[[dict[str, int]], UsageReading]] = {
    "openai": _openai,
    "responses": _responses,
    "anthropic": _anthropic,
    "gemini": _gemini,
}


def render_results(results: list[CaseResult]) -> str:
    """Return one line for each case and one that counts them."""
    lines = []
    for result in results:
        case = result.case
        amount = "unpriced" if result.amount is None else f"{result.amount.normalize():f}"
        verdict = "right" if result.agrees else f"WRONG, should be {case.right.normalize():f}"
        known = "" if case.wrong is None else f"  (known bug: {case.wrong.normalize():f}, {case.why})"
        alarms = "".join(f"  [{problem}]" for problem in result.reading.problems)
        lines.append(f"{case.ref:<40} {amount:>14}  {verdict}{alarms}{known}")
    agreeing = sum(result.agrees for result in results)
    lines.append(f"{agreeing} of {len(results)} cases agree to the last of {len(str(NANO_PER_UNIT)) - 1} decimals")
    return "\n".join(lines)

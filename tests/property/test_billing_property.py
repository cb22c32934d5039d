"""Whatever usage comes and whatever a book says: classes are disjoint and complete, money is exact and additive."""

from __future__ import annotations

import re
from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.counts import UsageReading
from billing.meter import charge, recharge
from billing.prices import PriceBook
from billing.rates import TOKEN_CLASSES, NoPrice
from billing.reports import build_report
from billing.row import LedgerRow, row_of, row_values
from billing.usage import (
    anthropic_stream_usage,
    anthropic_usage,
    gemini_usage,
    llamacpp_usage,
    ollama_usage,
    openai_usage,
    recovered_usage,
    responses_usage,
    with_hits_of,
    with_inferred_tiers,
)
from billing.verify import verify_rows
from tests.samples.billed import MODEL, altered, billed
from tracing.record import Charge, RequestRecord, Usage, UsageSource

#: No example is failed for being slow: the machine may be busy.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

tokens = st.integers(0, 300_000)
junk = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.integers(), st.lists(st.integers(), max_size=1)
)


@st.composite
def split(draw: st.DrawFn, parts: int) -> list[int]:
    """Numbers of tokens for disjoint parts."""
    return [draw(tokens) for _ in range(parts)]


def check(reading: UsageReading, *, prompt: int, hits: int, output: int) -> None:
    usage, problems = reading
    assert problems == ()
    assert (usage.prompt_tokens, usage.hit_tokens, usage.output_tokens) == (prompt, hits, output)
    check_disjoint(usage)


def check_disjoint(usage: Usage) -> None:
    classes = [getattr(usage, f"{name}_tokens") for name in TOKEN_CLASSES if name not in ("output", "reasoning")]
    assert all(isinstance(count, int) and count >= 0 for count in classes)
    assert sum(classes) == usage.prompt_tokens
    assert 0 <= usage.reasoning_tokens <= usage.output_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.output_tokens


@CALM
@given(split(4), split(5), st.booleans())
def test_openai_shapes(parts: list[int], tiers: list[int], with_tiers: bool) -> None:
    fresh, hits, written, output = parts
    sglext = None
    if with_tiers:
        device, host, disk, pool, rest = tiers
        hits = sum(tiers)
        details = {"device": device, "host": host, "storage": disk + pool + rest, "disk": disk, "pool": pool}
        sglext = {"cached_tokens_details": details}
    prompt = fresh + hits + written
    details = {"cached_tokens": hits, "cache_write_tokens": written}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    reading = openai_usage(usage | {"prompt_tokens_details": details}, sglext)
    check(reading, prompt=prompt, hits=hits, output=output)
    assert (reading.usage.fresh_tokens, reading.usage.write_tokens) == (fresh, written)
    if with_tiers:
        assert reading.usage.hit_unknown_tokens == tiers[4]
    else:
        hit_miss = {"prompt_cache_hit_tokens": hits, "prompt_cache_miss_tokens": fresh + written}
        assert openai_usage(usage | hit_miss).usage.hit_tokens == hits
        responses = {"input_tokens": prompt, "output_tokens": output, "input_tokens_details": details}
        assert responses_usage(responses) == reading


@CALM
@given(split(5))
def test_anthropic_shapes_whole_and_streamed(parts: list[int]) -> None:
    fresh, read, five, hour, output = parts
    inputs = {
        "input_tokens": fresh,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": five + hour,
        "cache_creation": {"ephemeral_5m_input_tokens": five, "ephemeral_1h_input_tokens": hour},
    }
    reading = anthropic_usage(inputs | {"output_tokens": output})
    check(reading, prompt=fresh + read + five + hour, hits=read, output=output)
    assert (reading.usage.write_5m_tokens, reading.usage.write_1h_tokens) == (five, hour)
    ways = [
        (inputs | {"output_tokens": 1}, {"output_tokens": output}),
        (inputs | {"output_tokens": 1}, inputs | {"output_tokens": output}),
        (inputs | {"output_tokens": 1}, {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": output}),
        ({"input_tokens": fresh + read, "output_tokens": 0}, inputs | {"output_tokens": output}),
    ]
    for start, delta in ways[: 4 if fresh + read + five + hour else 3]:
        assert anthropic_stream_usage(start, delta) == reading


@CALM
@given(split(5))
def test_gemini_shape(parts: list[int]) -> None:
    fresh, cached, tool, candidates, thoughts = parts
    counts = {
        "promptTokenCount": fresh + cached,
        "cachedContentTokenCount": cached,
        "toolUsePromptTokenCount": tool,
        "candidatesTokenCount": candidates,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": sum(parts),
    }
    told = {name: count for name, count in counts.items() if count or name == "promptTokenCount"}
    for usage in (counts, told):  # zeros are left out of its JSON
        reading = gemini_usage(usage)
        check(reading, prompt=fresh + cached + tool, hits=cached, output=candidates + thoughts)
        assert reading.usage.reasoning_tokens == thoughts


@CALM
@given(split(3))
def test_llamacpp_and_ollama_shapes(parts: list[int]) -> None:
    fresh, cached, output = parts
    timings = {"cache_n": cached, "prompt_n": fresh, "predicted_n": output}
    usage = {"prompt_tokens": fresh + cached, "completion_tokens": output}
    whole = usage | {"prompt_tokens_details": {"cached_tokens": cached}}
    answer = {
        "prompt_eval_count": fresh + cached,
        "prompt_eval_cached_count": cached,
        "eval_count": output,
    }
    for reading in (llamacpp_usage(None, timings), llamacpp_usage(usage, timings), llamacpp_usage(whole, timings)):
        check(reading, prompt=fresh + cached, hits=cached, output=output)
    check(ollama_usage(answer), prompt=fresh + cached, hits=cached, output=output)


FIELDS = re.findall(
    r"\w+",
    """
    prompt_tokens completion_tokens total_tokens prompt_tokens_details completion_tokens_details cached_tokens device
    host disk pool storage storage_backend reasoning_tokens input_tokens output_tokens input_tokens_details
    cache_creation cache_creation_input_tokens cache_read_input_tokens ephemeral_5m_input_tokens cache_write_tokens
    ephemeral_1h_input_tokens promptTokenCount candidatesTokenCount thoughtsTokenCount cachedContentTokenCount
    prompt_cache_hit_tokens prompt_cache_miss_tokens cache_n prompt_n predicted_n prompt_eval_count eval_count
    prompt_eval_cached_count cached_tokens_details
    """,
)
leaf = st.one_of(junk, st.integers(0, 50))
anything = st.dictionaries(
    st.sampled_from(FIELDS), st.one_of(leaf, st.dictionaries(st.sampled_from(FIELDS), leaf, max_size=4)), max_size=10
)


@settings(CALM, max_examples=300)
@given(anything, anything)
def test_no_usage_object_raises_or_breaks_the_classes(one: dict[str, object], other: dict[str, object]) -> None:
    readings = [
        openai_usage(one, other),
        openai_usage(one, {"cached_tokens_details": other}, silence_is_zero=True),
        responses_usage(one),
        anthropic_usage(one),
        anthropic_stream_usage(one, other),
        gemini_usage(one),
        llamacpp_usage(one, other),
        ollama_usage(one),
    ]
    readings.append(with_hits_of(readings[0], readings[2]))
    for usage, problems in readings:
        check_disjoint(usage)
        assert usage.source in (UsageSource.ENGINE, UsageSource.MISSING)
        assert problems or usage.source is UsageSource.ENGINE
        check_disjoint(with_inferred_tiers(usage, (7, 5, 3, 1)))


@CALM
@given(st.one_of(st.none(), tokens), tokens, st.one_of(st.none(), st.tuples(tokens, tokens, tokens, tokens)))
def test_recovered_usage(prompt: int | None, output: int, predicted: tuple[int, int, int, int] | None) -> None:
    usage = recovered_usage(prompt, output, predicted).usage
    check_disjoint(usage)
    if prompt is not None:
        assert (usage.prompt_tokens, usage.output_tokens) == (prompt, output)


# Money.

price = st.decimals(0, 100, places=6).map(str)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    output = draw(tokens)
    counts = {f"{name}_tokens": draw(tokens) for name in TOKEN_CLASSES[:-2]}
    return Usage(
        **counts, output_tokens=output, reasoning_tokens=draw(st.integers(0, output)), source=UsageSource.ENGINE
    )


@st.composite
def books(draw: st.DrawFn) -> PriceBook:
    rates = "\n".join(
        f'{name} = "{draw(price)}"' for name in TOKEN_CLASSES if name != "reasoning" or draw(st.booleans())
    )
    mode = draw(st.sampled_from(("half_even", "half_up", "up", "down")))
    level = draw(st.sampled_from(("line", "request")))
    fee, least = draw(st.decimals(0, 1, places=9)), draw(st.decimals(0, 1, places=9))
    above = draw(st.integers(1, 2_000_000))
    return PriceBook.from_toml(
        f"""
        name = "drawn"
        currency = "USD"
        rounding = {{ mode = "{mode}", level = "{level}" }}
        [[price]]
        models = ["{MODEL}"]
        request_fee = "{fee}"
        request_minimum = "{least}"
        [price.rates]
        {rates}
        [[price.context]]
        above_prompt_tokens = {above}
        multiplier = "{draw(st.sampled_from(("0.5", "1.5", "2")))}"
        [[price.windows]]
        name = "w"
        hours = [["06:00", "18:00"]]
        multiplier = "{draw(st.sampled_from(("0.25", "2")))}"
        """
    )


def exact_nano(usage: Usage, book: PriceBook, at_ns: int) -> tuple[Fraction, dict[str, Fraction]]:
    """The same money in fractions, from the entry as it is written."""
    entry = book.file.price[0]
    rates = {name: Fraction(rate) for name, rate in entry.rates.by_class().items()}
    factor = Fraction(1)
    if usage.prompt_tokens > entry.context[0].above_prompt_tokens:
        factor *= Fraction(entry.context[0].multiplier or 0)
    if 6 <= at_ns // (3600 * 10**9) % 24 < 18:
        factor *= Fraction(entry.windows[0].multiplier or 0)
    quantities = {name: getattr(usage, f"{name}_tokens") for name in TOKEN_CLASSES if name != "reasoning"}
    if "reasoning" in rates:
        quantities |= {
            "output": usage.output_tokens - usage.reasoning_tokens,
            "reasoning": usage.reasoning_tokens,
        }
    parts = {name: quantity * rates[name] * factor * 1000 for name, quantity in quantities.items() if quantity}
    return rates["fresh"] * factor * 1000, parts


@settings(CALM, max_examples=150)
@given(usages(), books(), st.integers(0, 10**18))
def test_the_amount_is_exact_and_the_sum_of_its_lines(usage: Usage, book: PriceBook, at_ns: int) -> None:
    result = charge(usage, book, MODEL, at_ns)
    _, parts = exact_nano(usage, book, at_ns)
    lines = {line.token_class: line for line in result.lines}
    assert result.amount_nano == sum(line.amount_nano for line in result.lines)
    entry = book.file.price[0]
    fee, least = Fraction(entry.request_fee) * 10**9, Fraction(entry.request_minimum) * 10**9
    assert result.amount_nano is not None
    assert result.amount_nano >= least
    slack = len(parts) if entry and book.rounding.level == "line" else 1
    assert abs(result.amount_nano - max(least, sum(parts.values()) + fee)) <= slack
    for name, part in parts.items():
        assert abs(lines[name].amount_nano - part) <= 1
    assert set(lines) - {"request", "minimum"} == set(parts)
    assert result.basis is not None
    assert recharge(usage, book, result.basis) == result


@CALM
@given(usages(), books(), st.integers(0, 10**18))
def test_saved_is_what_no_cache_would_have_cost_more(usage: Usage, book: PriceBook, at_ns: int) -> None:
    fresh, parts = exact_nano(usage, book, at_ns)
    entry = book.file.price[0]
    least = Fraction(entry.request_minimum) * 10**9
    cost = sum(parts.values()) + Fraction(entry.request_fee) * 10**9
    cached = {name: part for name, part in parts.items() if name.startswith(("hit_", "write"))}
    quantity = sum(getattr(usage, f"{name}_tokens") for name in cached)
    without = cost - sum(cached.values()) + quantity * fresh
    saved = charge(usage, book, MODEL, at_ns).saved_nano
    assert saved is not None
    assert abs(saved - (max(without, least) - max(cost, least))) <= 1


@CALM
@given(usages(), st.lists(st.integers(0, 1000), min_size=5, max_size=5), st.sampled_from(("line", "request")))
def test_a_saving_is_never_negative_where_a_hit_costs_no_more_than_a_miss(
    usage: Usage, percents: list[int], level: str
) -> None:
    hits = TOKEN_CLASSES[1:6]
    rates = ", ".join(f'{name} = "0.000{n:04d}"' for name, n in zip(hits, percents, strict=True))
    book = PriceBook.from_toml(
        f"""
        name = "hits"
        currency = "USD"
        rounding = {{ mode = "up", level = "{level}" }}
        [[price]]
        models = ["*"]
        rates = {{ fresh = 0.0001, {rates}, output = 1 }}
        """
    )
    read_only = replace(usage, write_tokens=0, write_5m_tokens=0, write_1h_tokens=0)
    saved = charge(read_only, book, "m", 0).saved_nano
    assert saved is not None
    assert saved >= 0


@CALM
@given(usages(), st.sampled_from(TOKEN_CLASSES[:-1]))
def test_a_class_without_a_rate_is_unpriced_exactly_when_it_is_used(usage: Usage, missing: str) -> None:
    names = [name for name in TOKEN_CLASSES[:-1] if name not in (missing, "fresh")]
    rates = ", ".join(f"{name} = 1" for name in names)
    book = PriceBook.from_toml(
        f'name = "b"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = {{ fresh = 1, {rates} }}'
    )
    result = charge(usage, book, "m", 0)
    used = missing != "fresh" and getattr(usage, f"{missing}_tokens") > 0
    assert (result.amount_nano is None) == used
    assert result.unpriced_reason == (f"no_rate:{missing}" if used else None)


@given(st.lists(st.tuples(usages(), books()), min_size=1, max_size=8))
@settings(CALM, max_examples=40)
def test_rows_survive_storage_verify_and_add_up(drawn: list[tuple[Usage, PriceBook]]) -> None:
    records: list[RequestRecord] = [billed(number, book, usage=usage) for number, (usage, book) in enumerate(drawn)]
    rows = [LedgerRow(*row_values(record)) for record in records]  # type: ignore[arg-type]
    assert rows == [row_of(record) for record in records]
    assert verify_rows(rows, {book.version: book for _, book in drawn}).faults == []
    (total,) = build_report(rows).totals
    assert total.sums.amount_nano == sum(record.charge.amount_nano or 0 for record in records)
    wrong = altered(records[0], charge=_one_more(records[0].charge))
    assert not verify_rows([row_of(wrong)], {book.version: book for _, book in drawn}).passed


def _one_more(paid: Charge) -> Charge:
    assert paid.amount_nano is not None
    return replace(paid, amount_nano=paid.amount_nano + 1)


@CALM
@given(books(), st.integers(0, 10**18), tokens)
def test_a_book_made_again_from_its_stored_body_prices_alike(book: PriceBook, at_ns: int, prompt: int) -> None:
    again = PriceBook.from_body(book.body)
    assert again.version == book.version
    card = book.card(MODEL, at_ns, prompt)
    assert not isinstance(card, NoPrice)
    assert again.card(MODEL, at_ns, prompt) == card

"""Every usage shape, whole and streamed, cut anywhere, under every price structure: the right cost to the last digit.

The oracle (``tests.samples.price_structures``) is written from the vendors' pages, in decimals and wall-clock time, and
shares nothing with the meter but the numbers that go into both.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from billing.meter import charge
from billing.prices import PriceBook
from billing.rates import TOOLS
from billing.usage import recovered_usage, with_inferred_tiers
from tests.samples.price_structures import MODES, STRUCTURES, Structure, with_rounding
from tests.samples.usage_shapes import SHAPES, Shape
from tracing.record import HitSource, Usage, UsageSource

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = ("fresh", "hit", "device", "host", "disk", "pool", "write", "write_5m", "write_1h", "output", "reasoning")
MODEL = "m"
BOOKS = {structure.name: PriceBook.from_toml(structure.toml(MODEL)) for structure in STRUCTURES}
MOMENTS = [
    int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 10**9
    for text in (
        "2026-11-02T00:59:59",  # Monday, before DeepSeek's peak
        "2026-11-02T01:00:00",
        "2026-11-02T09:59:59",
        "2026-11-02T10:00:00",
        "2026-10-31T02:00:00",  # Saturday
        "2026-10-01T02:00:00",  # National Day
        "2026-10-10T02:00:00",  # a Saturday that is worked in Shanghai
        "2026-10-10T16:30:00",  # Sunday there already
    )
]
CUTS = ("before the first byte", "in the middle", "after the usage")


def drawn(chance: random.Random) -> dict[str, int]:
    scale = chance.choice((10, 5_000, 300_000))
    counts = {name: chance.choice((0, chance.randrange(scale))) for name in NAMES}
    counts["fresh"] += 1
    counts["output"] += 1
    counts["reasoning"] = chance.randrange(counts["output"] + 1)
    return counts


def reading(shape: Shape, counts: dict[str, int], streamed: bool, cut: str) -> tuple[Usage, dict[str, int] | None]:
    """Return the usage that stands at the end, and the classes that must be billed (``None``: nobody counted)."""
    prompt = sum(count for name, count in shape.classes(counts).items() if name != "output")
    if cut == "after the usage" or not streamed:
        if cut == "after the usage":
            found = (shape.streamed if streamed else shape.whole)(counts)
            assert found.problems == (), found.problems
            return found.usage, shape.classes(counts)
        return Usage(source=UsageSource.MISSING), None  # an answer in one piece, and it did not come: nobody counted
    if cut == "before the first byte":
        return Usage(source=UsageSource.MISSING), None
    seen = counts["output"] // 2
    predicted = (min(counts["device"], prompt), 0, 0, 0)
    usage = recovered_usage(prompt, seen, predicted).usage
    return usage, {"fresh": prompt - predicted[0], "hit_device": predicted[0], "output": seen}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.name)
def test_every_combination(shape: Shape, structure: Structure) -> None:
    chance = random.Random(f"{shape.name} {structure.name}")
    book = BOOKS[structure.name]
    for streamed, cut, at_ns, tier in product((False, True), CUTS, MOMENTS, (None, *structure.tiers)):
        counts = drawn(chance)
        usage, classes = reading(shape, counts, streamed, cut)
        found = charge(usage, book, MODEL, at_ns, service_tier=tier)
        if classes is None:
            assert (found.amount_nano, found.unpriced_reason) == (None, "usage_missing")
            continue
        assert usage.prompt_tokens + usage.output_tokens == sum(classes.values())
        if "reasoning" in structure.rates:
            classes["reasoning"] = usage.reasoning_tokens
            classes["output"] = usage.output_tokens - usage.reasoning_tokens
        right = structure.cost_nano(classes, at_ns, tier)
        assert found.amount_nano == right, (streamed, cut, at_ns, tier, counts)
        if right is None:
            assert (found.unpriced_reason or "").startswith("no_rate:")
        assert sum(line.amount_nano for line in found.lines) == (right or 0)


@settings(CALM, max_examples=400)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(STRUCTURES),
    st.sampled_from(sorted(MODES)),
    st.sampled_from(("line", "request")),
    st.integers(0, 1_900_000_000),
    st.lists(st.integers(0, 400_000), min_size=len(NAMES) - 1, max_size=len(NAMES) - 1),
    st.booleans(),
)
def test_any_counts_at_any_time_under_any_rounding(
    shape: Shape, structure: Structure, mode: str, level: str, at_s: int, numbers: list[int], streamed: bool
) -> None:
    counts = dict(zip(NAMES, [*numbers, 0], strict=True))
    rounded = with_rounding(structure, mode, level)
    found = (shape.streamed if streamed else shape.whole)(counts)
    if found.problems:  # an Anthropic stream whose start tells nothing but zeros leaves the delta's word
        assert sum(numbers[:-1]) == 0
        return
    amount = charge(found.usage, PriceBook.from_toml(rounded.toml(MODEL)), MODEL, at_s * 10**9).amount_nano
    assert amount == rounded.cost_nano(shape.classes(counts), at_s * 10**9)


@settings(CALM, max_examples=200)
@given(
    st.sampled_from([shape for shape in SHAPES if shape.name in ("openai", "anthropic", "responses")]),
    st.sampled_from(STRUCTURES),
    st.sampled_from(sorted(MODES)),
    st.sampled_from(("line", "request")),
    st.dictionaries(st.sampled_from(TOOLS), st.integers(0, 40)),
    st.dictionaries(st.sampled_from(TOOLS), st.decimals(0, 3, places=9).map(lambda fee: f"{fee:f}")),
    st.sampled_from(MOMENTS),
    st.integers(0),
)
def test_uses_of_tools_under_every_structure(
    shape: Shape,
    structure: Structure,
    mode: str,
    level: str,
    uses: dict[str, int],
    fees: dict[str, str],
    at_ns: int,
    seed: int,
) -> None:
    counts = drawn(random.Random(seed)) | {"reasoning": 0}
    priced = replace(with_rounding(structure, mode, level), tools=fees)
    told = tuple(sorted((tool, count) for tool, count in uses.items() if count))
    usage = structs.replace(shape.whole(counts).usage, tool_uses=told)
    found = charge(usage, PriceBook.from_toml(priced.toml(MODEL)), MODEL, at_ns)
    assert found.amount_nano == priced.cost_nano(shape.classes(counts), at_ns, uses=uses)
    assert {line.token_class: line.quantity for line in found.lines if line.token_class in TOOLS} == dict(told)


def test_tiers_that_an_engine_does_not_tell_are_inferred_and_say_so() -> None:
    structure = next(each for each in STRUCTURES if each.name == "self-hosted")
    counts = dict.fromkeys(NAMES, 0) | {"fresh": 100, "hit": 900, "output": 10}
    vllm = next(shape for shape in SHAPES if shape.name == "vllm")
    usage = with_inferred_tiers(vllm.whole(counts).usage, (512, 256, 0, 0))
    assert usage.hit_source is HitSource.INFERRED
    classes = {"fresh": 100, "hit_device": 512, "hit_host": 256, "hit_unknown": 132, "output": 10}
    amount = charge(usage, BOOKS["self-hosted"], MODEL, MOMENTS[0]).amount_nano
    assert amount == structure.cost_nano(classes, MOMENTS[0])
    told = next(shape for shape in SHAPES if shape.name == "sglang").whole(counts | {"device": 900, "hit": 0})
    assert with_inferred_tiers(told.usage, (1, 2, 3, 4)) == told.usage  # the engine's own word stands


def test_a_separated_engines_decode_node_is_not_believed() -> None:
    """The two public reports: all but one token called cached where 3,072 of 4,609 were, or none."""
    shape = next(shape for shape in SHAPES if shape.name == "prefill-decode")
    for hit in (3_072, 0):
        counts = dict.fromkeys(NAMES, 0) | {"fresh": 4_609 - hit, "hit": hit, "output": 7}
        usage = shape.whole(counts).usage
        assert (usage.hit_tokens, usage.prompt_tokens, usage.output_tokens) == (hit, 4_609, 7)

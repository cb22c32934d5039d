"""The round-robin baseline over recorded requests: what it hits follows from where it sends them, at equal prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from billing.attribution import UNITS
from billing.prices import PriceBook
from gateway.replay.errors import ParameterError
from gateway.replay.performance import PRESETS
from gateway.replay.recorded import Baseline, BaselineFleet, round_robin
from tests.samples.prefixed import STRIDE, prefixed
from tracing.record import RequestRecord, Usage, UsageSource

BOOK = PriceBook.from_toml(
    """
    name = "b"
    currency = "USD"
    [costs]
    gpu_hour = 2
    prefill_tokens_per_s = 1000
    host_gib = 100
    host_gib_hour = 0.01
    [[price]]
    models = ["m"]
    rates = { fresh = 1, hit = 0.1, output = 3 }
    """
)
ENGINE = PRESETS["llama8b-h100"]


def run(records: list[RequestRecord], instances: int | None = 2, device_tokens: int = 100_000) -> Baseline:
    fleet = BaselineFleet(replace(ENGINE, device_tokens=device_tokens), instances)
    return round_robin(records, {BOOK.version: BOOK}, fleet, UNITS["team"])


def steps(count: int, hits: int) -> list[RequestRecord]:
    """One growing conversation; each step hits all that it had before, as a prefix-aware router makes it."""
    parts = "abcdefghijklmnop"
    return [
        prefixed(n, parts[: n + 1], BOOK, hits=min(n * STRIDE, hits), at_s=10 * n, instance=f"engine-{n % 2}")
        for n in range(count)
    ]


def test_round_robin_on_one_engine_hits_all_and_on_two_half_a_step_less() -> None:
    records = steps(8, hits=10**6)
    actual = sum(record.usage.hit_tokens for record in records)
    (alone,) = run(records, instances=1).totals().values()
    assert alone.baseline_hit_tokens == alone.hit_tokens == actual
    assert alone.baseline_nano == alone.cost_nano
    (two,) = run(records, instances=2).totals().values()
    # the n-th step finds what the step before the last had: 0, 0, 1, 2, 3, 4, 5, 6 parts
    assert two.baseline_hit_tokens == 21 * STRIDE
    assert two.saved_beyond_baseline_nano == (actual - 21 * STRIDE) * 900
    assert two.saved_nano == actual * 900 == sum(record.charge.saved_nano or 0 for record in records)
    assert two.baseline_saved_gpu_ns == (actual - 21 * STRIDE) * 10**6


def test_a_device_that_forgets_loses_more() -> None:
    strangers = [prefixed(100 + n, "ZYXWVU"[n:] + "zyxwvu"[:n], BOOK, at_s=10 * n + 5) for n in range(6)]
    records = [*steps(8, hits=10**6), *strangers]
    (small,) = run(records, instances=1, device_tokens=1_100).totals().values()
    (large,) = run(records, instances=1).totals().values()
    assert small.baseline_hit_tokens < large.baseline_hit_tokens


def test_the_instances_are_those_of_the_records() -> None:
    assert run(steps(4, 0), instances=None).instances == 2
    seen = {"engine-0": 0, "engine-1": 0, "engine-2": 0}
    assert run([prefixed(0, "ab", BOOK, seen=seen)], instances=None).instances == 3


def test_what_the_tiers_cost_in_that_time() -> None:
    found = run(steps(8, hits=0))
    span_s = (found.last_ns - found.first_ns) / 1e9
    assert found.tier_cost_nano == {"USD": round(10**9 * span_s / 3600)}


def test_what_cannot_be_replayed_is_left_out_and_counted() -> None:
    good = steps(3, hits=0)
    records = [
        *good,
        structs.replace(good[0], prefix=None),
        structs.replace(good[0], usage=Usage(source=UsageSource.MISSING)),
        structs.replace(good[0], charge=structs.replace(good[0].charge, price_version="gone")),
        structs.replace(good[0], charge=structs.replace(good[0].charge, amount_nano=None, unpriced_reason="no_price")),
    ]
    found = run(records)
    assert sum(found.left_out.values()) == 4
    assert found.totals()["USD"].requests == 3
    with pytest.raises(ParameterError, match="no recorded request"):
        run(records[3:])
    assert run(good, instances=1, device_tokens=200).left_out["larger than the baseline's device"] == 2

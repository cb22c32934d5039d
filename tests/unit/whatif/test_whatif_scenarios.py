"""What-if on small cases whose answers follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from billing.prices import PriceBook
from gateway.replay.errors import ParameterError
from gateway.replay.performance import PRESETS
from gateway.whatif.compare import Comparison, Played, compare, ns_per_token
from gateway.whatif.fleets import FleetAsItIs, FleetChange, SimulatedFleet, fleet_of
from gateway.whatif.scenarios import OtherPrices, PerfectPrefix, Repair, Retention, Scenario
from gateway.whatif.usage import with_hits
from tests.samples.prefixed import STRIDE, prefixed
from tracing.detail import BreakKind, PromptChange, StepDetail
from tracing.detail import Comparison as Compared
from tracing.record import Charge, RequestRecord, Usage, UsageSource

BOOK = PriceBook.from_toml(
    """
    name = "b"
    currency = "USD"
    [[price]]
    models = ["m"]
    rates = { fresh = 1, hit = 0.1, output = 3 }
    """
)
DEARER = PriceBook.from_toml(
    """
    name = "c"
    currency = "USD"
    [[price]]
    models = ["m"]
    rates = { fresh = 2, hit = 0.2, output = 6 }
    """
)
BOOKS = {BOOK.version: BOOK}
SECOND = 10**9
HIT_SPARES = 900  # nano-units a token


def played(records: list[RequestRecord], *scenarios: Scenario) -> Comparison:
    return compare(records, BOOKS, lambda _records, _stride: scenarios)


def hits_in_parts(result: Played, records: list[RequestRecord]) -> list[float]:
    return [result.hits[record.request_id] / STRIDE for record in records]


def test_what_happened_is_the_sum_of_the_records_own_charges() -> None:
    records = [prefixed(n, "abc", BOOK, hits=n * 100) for n in range(4)]
    (sums,) = played(records).recorded.sums.values()
    assert sums.cost_nano == sum(record.charge.amount_nano or 0 for record in records)
    assert (sums.requests, sums.hit_tokens) == (4, 600)


def test_a_perfect_prefix_is_what_anybody_had_computed_before() -> None:
    records = [
        prefixed(0, "ab", BOOK, instance="engine-0"),
        prefixed(1, "abc", BOOK, instance="engine-1"),
        prefixed(2, "xbc", BOOK),  # equal letters behind another beginning are another prefix
        prefixed(3, "abcd", BOOK, hits=2 * STRIDE),
    ]
    result = played(records, PerfectPrefix(BOOKS, STRIDE)).scenarios[0]
    assert hits_in_parts(result, records) == [0, 2, 0, 3]
    spared = 3 * STRIDE  # two parts of the second, one more of the last
    before = sum(record.charge.amount_nano or 0 for record in records)
    assert result.sums["USD"].cost_nano == before - spared * HIT_SPARES


def test_nothing_is_at_hand_before_its_first_token() -> None:
    twins = [prefixed(0, "ab", BOOK, at_s=0), prefixed(1, "ab", BOOK, at_s=0), prefixed(2, "ab", BOOK, at_s=1)]
    result = played(twins, PerfectPrefix(BOOKS, STRIDE)).scenarios[0]
    assert hits_in_parts(result, twins) == [0, 0, 2]


def test_a_perfect_prefix_never_loses_what_was_hit() -> None:
    records = [prefixed(0, "ab", BOOK, hits=200)]
    assert played(records, PerfectPrefix(BOOKS, STRIDE)).scenarios[0].hits == {"req-0": 200}


@pytest.mark.parametrize(("shared", "expected"), [(False, [0, 0, 2, 0]), (True, [0, 2, 2, 0])])
def test_retention_counts_from_the_last_use_on_its_instance_or_on_any(shared: bool, expected: list[int]) -> None:
    records = [
        prefixed(0, "ab", BOOK, at_s=0, instance="engine-0"),
        prefixed(1, "ab", BOOK, at_s=50, instance="engine-1"),
        prefixed(2, "abc", BOOK, at_s=55, instance="engine-0"),  # 55 s after its first use there
        prefixed(3, "abc", BOOK, at_s=116, instance="engine-0"),  # 61 s after the last one
    ]
    scenario = Retention(BOOKS, STRIDE, 60 * SECOND, "60s", shared=shared)
    assert hits_in_parts(played(records, scenario).scenarios[0], records) == expected


def test_a_use_keeps_a_prefix_and_not_what_followed_it() -> None:
    records = [
        prefixed(0, "abc", BOOK, at_s=0),
        prefixed(1, "ab", BOOK, at_s=50),
        prefixed(2, "abc", BOOK, at_s=70),
    ]
    scenario = Retention(BOOKS, STRIDE, 60 * SECOND, "60s", shared=True)
    assert hits_in_parts(played(records, scenario).scenarios[0], records) == [0, 2, 2]


def test_an_hour_later_the_same_request_is_at_hand_exactly_as_long_as_it_is_kept() -> None:
    for kept_s, hit in ((3599, 0), (3600, 2)):
        records = [prefixed(0, "ab", BOOK, at_s=0), prefixed(1, "ab", BOOK, at_s=3600)]
        first = structs.replace(
            records[0], stamps=structs.replace(records[0].stamps, first_token_ns=records[0].stamps.arrived_ns)
        )
        scenario = Retention(BOOKS, STRIDE, kept_s * SECOND, "x", shared=True)
        assert played([first, records[1]], scenario).scenarios[0].hits["req-1"] == hit * STRIDE


def test_a_repair_gives_what_the_step_repeats_behind_its_first_difference() -> None:
    record = prefixed(1, "abcdefg", BOOK, hits=100)
    change = PromptChange(
        BreakKind.TIMESTAMP, "system", "messages[0].content", 10, 29, 10, 29, "a", "b",
        kept_chars=400, repeated_chars=500, total_chars=1000,
    )  # fmt: skip
    details = {record.request_id: StepDetail(record.request_id, Compared.CHANGED, change=change)}
    of_it = Repair(BOOKS, details, frozenset({BreakKind.TIMESTAMP}), "timestamp")
    of_others = Repair(BOOKS, details, frozenset({BreakKind.UUID}), "uuid")
    repaired, untouched = played([record], of_it, of_others).scenarios
    wanted = record.usage.prompt_tokens * 9 // 10
    assert repaired.hits == {record.request_id: wanted}
    spared = (wanted - 100) * HIT_SPARES
    assert repaired.sums["USD"].cost_nano == (record.charge.amount_nano or 0) - spared
    assert untouched.sums == played([record]).recorded.sums


def test_other_prices_are_those_of_the_same_tokens() -> None:
    records = [prefixed(n, "abc", BOOK, hits=n * 50) for n in range(3)]
    result = played(records, OtherPrices(DEARER, "c")).scenarios[0]
    assert result.sums["USD"].cost_nano == 2 * sum(record.charge.amount_nano or 0 for record in records)
    assert result.sums["USD"].hit_tokens == sum(record.usage.hit_tokens for record in records)


def test_only_what_is_counted_is_summed_and_all_of_it_is_played() -> None:
    records = [prefixed(0, "abc", BOOK, run="warmer"), prefixed(1, "abc", BOOK, run="asked")]
    found = compare(
        records,
        BOOKS,
        lambda _, stride: [PerfectPrefix(BOOKS, stride)],
        lambda record: record.link is not None and record.link.run_id == "asked",
    )
    assert found.scenarios[0].hits == {"req-1": 3 * STRIDE}
    assert found.recorded.sums["USD"].requests == 1


def test_what_cannot_be_played_is_counted_by_its_reason() -> None:
    record = prefixed(0, "ab", BOOK)
    others = [
        structs.replace(record, request_id="r1", prefix=None),
        structs.replace(record, request_id="r2", usage=Usage(source=UsageSource.MISSING)),
        structs.replace(record, request_id="r3", charge=Charge("USD", BOOK.version, unpriced_reason="x")),
        structs.replace(record, request_id="r4", charge=structs.replace(record.charge, price_version="other")),
    ]
    assert sum(played([record, *others]).left_out.values()) == 4
    with pytest.raises(ParameterError, match="prompt is not known"):
        played(others)


def test_fewer_hits_are_computed_and_the_slowest_are_lost_first() -> None:
    usage = Usage(100, 40, 30, 20, 10, 0, 5, source=UsageSource.ENGINE, write_tokens=50)
    for hits in range(0, 300, 7):
        found = with_hits(usage, hits)
        assert found.prompt_tokens == usage.prompt_tokens
        assert found.hit_tokens == min(hits, usage.prompt_tokens - 1)
    assert with_hits(usage, 75).hit_pool_tokens == 0
    assert with_hits(usage, 75).hit_disk_tokens == 5
    assert with_hits(usage, usage.hit_tokens) == usage


def test_an_instance_is_as_fast_as_its_median_answer() -> None:
    records = []
    for n, ms in enumerate((100, 200, 900)):
        record = prefixed(n, "a", BOOK, rest=72)
        at = record.stamps.arrived_ns
        records.append(
            structs.replace(record, stamps=structs.replace(record.stamps, sent_ns=at, first_token_ns=at + ms * 10**6))
        )
    assert ns_per_token(records) == {"engine-0": 200 * 10**6 / 200}


def test_more_host_memory_keeps_what_a_small_device_forgets() -> None:
    conversation = [prefixed(n, "abcdefgh"[: n + 1], BOOK, at_s=20 * n) for n in range(8)]
    strangers = [prefixed(100 + n, "ZYXWVU"[n:] + "zyxwvu"[:n], BOOK, at_s=20 * n + 10) for n in range(8)]
    records = sorted([*conversation, *strangers], key=lambda record: record.stamps.arrived_ns)
    engine = replace(PRESETS["llama8b-h100"], device_tokens=1_100)
    fleet = FleetAsItIs(engine, 1, "round-robin")
    found = compare(
        records,
        BOOKS,
        lambda known, stride: [
            SimulatedFleet(known, stride, BOOKS, fleet),
            SimulatedFleet(known, stride, BOOKS, fleet, FleetChange(more_host_tokens=100_000)),
        ],
    )
    as_it_was, with_more = found.scenarios
    assert with_more.sums["USD"].hit_tokens > as_it_was.sums["USD"].hit_tokens
    assert with_more.sums["USD"].cost_nano < as_it_was.sums["USD"].cost_nano
    assert as_it_was.title == "As it was, simulated"


def test_another_policy_scatters_a_conversation_over_two_engines() -> None:
    records = [prefixed(n, "abcdefgh"[: n + 1], BOOK, at_s=20 * n, instance=f"engine-{n % 2}") for n in range(8)]
    fleet = fleet_of(records, PRESETS["llama8b-h100"])
    assert (fleet.instances, fleet.policy) == (2, "expected-ttft")
    found = compare(
        records,
        BOOKS,
        lambda known, stride: [
            SimulatedFleet(known, stride, BOOKS, fleet),
            SimulatedFleet(known, stride, BOOKS, fleet, FleetChange(policy="round-robin")),
        ],
    )
    one, other = (scenario.sums["USD"].hit_tokens for scenario in found.scenarios)
    assert one == sum(range(8)) * STRIDE
    assert other == 21 * STRIDE  # the n-th step finds what the step before the last had

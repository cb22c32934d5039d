"""Which runs a filter leaves, and pages by key: every run once, whatever the times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.samples.agent_runs import RunShape, agent_run, plain_record, put
from tracing.errors import AmbiguousRunError
from tracing.record import Identity, Outcome, RunLink
from tracing.store import RunFilter, RunKey, TraceStore, TraceStoreOptions
from tracing.store_database import Place
from tracing.store_outline import step_outline


@pytest.fixture
def store(trace_place: Place) -> Iterator[TraceStore]:
    store = TraceStore(trace_place, TraceStoreOptions(max_age_ns=None))
    runs = [
        agent_run(RunShape(run_id="run-cold", seed=1, steps=1, agent="cold", model="large")),
        agent_run(RunShape(run_id="run-warm", seed=2, steps=9, agent="warm")),
        [
            replace(record, outcome=Outcome.ABORTED)
            for record in agent_run(RunShape(run_id="run-left", seed=3, steps=2))
        ],
    ]
    runs[0] = [replace(record, identity=Identity("default", "research", "k")) for record in runs[0]]
    put(store, *(record for run in runs for record in run))
    yield store
    store.close()


def names(store: TraceStore, where: RunFilter) -> set[str]:
    return {summary.run_id for summary in store.runs(100, where)}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (RunFilter(), {"run-cold", "run-warm", "run-left"}),
        (RunFilter(model="large"), {"run-cold"}),
        (RunFilter(agent="warm"), {"run-warm"}),
        (RunFilter(team="research"), {"run-cold"}),
        (RunFilter(team="nobody"), set()),
        (RunFilter(outcome="aborted"), {"run-left"}),
        (RunFilter(failed_only=True), {"run-left"}),
        (RunFilter(unfailed_only=True), {"run-cold", "run-warm"}),
        (RunFilter(hit_below_percent=1), {"run-cold"}),
        (RunFilter(hit_below_percent=100), {"run-cold", "run-warm", "run-left"}),
    ],
)
def test_a_filter_leaves_the_runs_that_it_means(store: TraceStore, where: RunFilter, expected: set[str]) -> None:
    assert names(store, where) == expected


def test_costs_above_a_bound_are_those_of_the_whole_run(store: TraceStore) -> None:
    costs = {summary.run_id: summary.money[0].cost_nano for summary in store.runs()}
    for bound in sorted(costs.values()):
        dearer = {run for run, cost in costs.items() if cost > bound}
        assert names(store, RunFilter(cost_above_nano=bound)) == dearer
    assert names(store, RunFilter(cost_above_nano=-1)) == set(costs)


def test_pages_by_key_show_every_run_once_though_all_end_in_one_moment(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "same.sqlite3", TraceStoreOptions(max_age_ns=None))
    put(store, *(plain_record(f"r{n}", link=RunLink(f"run-{n:02d}", 1, "new", 1.0)) for n in range(23)))
    seen: list[str] = []
    after: RunKey | None = None
    while page := store.runs(5, RunFilter(after=after)):
        seen += [summary.run_id for summary in page]
        after = RunKey(page[-1].last_ns, page[-1].tenant, page[-1].run_id)
    assert sorted(seen) == [f"run-{n:02d}" for n in range(23)]
    store.close()


def test_buckets_hold_every_record_of_their_time_once(store: TraceStore) -> None:
    records = list(store.records())
    since_ns = min(record.stamps.arrived_ns for record in records)
    until_ns = max(record.stamps.arrived_ns for record in records) + 1
    buckets = store.buckets(None, since_ns, until_ns, 1_500_000_000)
    assert sum(bucket.requests for bucket in buckets) == len(records)
    assert sum(bucket.hit_tokens for bucket in buckets) == sum(store.totals().hit_tokens)
    assert sum(bucket.failed for bucket in buckets) == 2
    for bucket in buckets:
        span = range(bucket.start_ns, bucket.start_ns + 1_500_000_000)
        inside = [record for record in records if record.stamps.arrived_ns in span]
        assert bucket.prompt_tokens == sum(record.usage.prompt_tokens for record in inside)
    assert store.buckets("nobody", since_ns, until_ns, 10**9) == []
    assert len(store.ttfts(None, since_ns, until_ns)) == len(records)
    assert len(store.ttfts(None, since_ns, until_ns, 3)) == 3


def test_names_to_filter_by_are_those_of_what_a_tenant_may_see(store: TraceStore) -> None:
    before = store.newest()
    put(store, replace(plain_record("other"), model="secret", identity=Identity("b", "theirs", "k")))
    assert store.newest() > before
    assert "secret" in store.choices(None).models
    mine = store.choices("default")
    assert (mine.models, mine.teams) == (("large", "smollm2-135m"), ("payments", "research"))
    assert store.choices("nobody").models == ()


def test_an_outline_has_the_sums_and_every_step_of_its_records(store: TraceStore) -> None:
    records = store.run("run-warm")
    outline = store.outline("run-warm")
    assert outline is not None
    assert list(outline.steps) == [step_outline(record) for record in records]
    assert outline.summary == next(summary for summary in store.runs() if summary.run_id == "run-warm")
    assert store.outline("none") is None
    assert store.outline("run-warm", "b") is None


def test_a_part_of_a_run_is_a_slice_of_its_records(store: TraceStore) -> None:
    records = store.run("run-warm")
    for start, steps in ((0, 4), (4, 3), (7, 10), (20, 5)):
        assert store.part("run-warm", "default", start, steps) == records[start : start + steps]


def test_the_outline_of_a_name_that_two_tenants_chose_asks_whose(store: TraceStore) -> None:
    other = RunLink("run-warm", 1, "header", 1.0)
    put(store, plain_record("other", identity=Identity("b", "theirs", "k"), link=other))
    with pytest.raises(AmbiguousRunError):
        store.outline("run-warm")

"""What every trace store keeps, in a file and in a server: one suite over both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from tests.samples.agent_runs import START_NS, RunShape, agent_run, plain_record, put
from tracing.detail import Comparison, Reproduction, StepDetail
from tracing.errors import AmbiguousRunError, UnstorableRecord
from tracing.received import ReceivedSpan
from tracing.record import Charge, Outcome, RequestRecord, ToolCall, Usage
from tracing.store import Money, RunFilter, TraceStore, TraceStoreOptions
from tracing.store_database import Place

KEEP_ALL = TraceStoreOptions(max_age_ns=None)


@pytest.fixture
def store(trace_place: Place) -> Iterator[TraceStore]:
    store = TraceStore(trace_place, KEEP_ALL)
    yield store
    store.close()


def test_a_run_comes_back_equal_in_step_order(store: TraceStore) -> None:
    records = agent_run()
    put(store, *reversed(records))
    assert store.run(records[0].link.run_id) == records
    assert store.record(records[3].request_id) == records[3]
    store.check()


def test_unknown_names_are_empty_answers(store: TraceStore) -> None:
    assert store.run("none") == []
    assert store.record("none") is None
    assert store.runs() == []
    assert (store.totals().requests, store.totals().money) == (0, ())


def test_a_record_appended_twice_is_stored_once(store: TraceStore) -> None:
    record = agent_run()[0]
    put(store, record, structs.replace(record, status=500))
    assert store.run(record.link.run_id) == [record]
    assert store.totals().money == (Money("USD", record.charge.amount_nano, record.charge.saved_nano, 0),)


def test_a_record_that_comes_again_under_another_run_leaves_no_empty_run(store: TraceStore) -> None:
    one, two = agent_run(RunShape(steps=1)), agent_run(RunShape(run_id="run-2", steps=1))
    put(store, *one)
    put(store, structs.replace(two[0], request_id=one[0].request_id))
    assert [summary.run_id for summary in store.runs()] == [one[0].link.run_id]
    store.check()


def test_a_summary_sums_the_records_to_the_nano(store: TraceStore) -> None:
    records = agent_run()
    records[2] = structs.replace(
        records[2], outcome=Outcome.ABORTED, charge=Charge("USD", "v", unpriced_reason="no price")
    )
    put(store, *records, plain_record())
    (summary,) = store.runs()
    priced = [record.charge for record in records if record.charge.amount_nano is not None]
    assert summary.money == (Money("USD", sum(c.amount_nano for c in priced), sum(c.saved_nano for c in priced), 1),)
    assert summary.prompt_tokens == sum(record.usage.prompt_tokens for record in records)
    assert sum(summary.hit_tokens) == sum(record.usage.hit_tokens for record in records)
    assert summary.output_tokens == sum(record.usage.output_tokens for record in records)
    assert (summary.steps, summary.failed, summary.agent) == (len(records), 1, "support-agent")
    assert (summary.first_ns, summary.last_ns) == (records[0].stamps.arrived_ns, records[-1].stamps.arrived_ns)
    assert summary.ttft_p50_ns == sorted(record.stamps.ttft_ns for record in records)[len(records) // 2]


def test_sums_beyond_64_bits_are_exact(store: TraceStore) -> None:
    huge = 2**62 + 12345
    charge = Charge("USD", "v", amount_nano=huge, saved_nano=-huge)
    put(store, *(plain_record(f"r{n}", charge=charge) for n in range(9)))
    assert store.totals().money == (Money("USD", 9 * huge, -9 * huge, 0),)


def test_currencies_are_never_added_up(store: TraceStore) -> None:
    one, two = agent_run(RunShape(steps=2))
    put(store, one, structs.replace(two, charge=structs.replace(two.charge, currency="EUR")))
    assert [money.currency for money in store.runs()[0].money] == ["EUR", "USD"]


def test_runs_are_listed_newest_first_filtered_and_paged(store: TraceStore) -> None:
    shapes = [
        RunShape(run_id=f"run-{n}", steps=2, start_ns=START_NS + n * 3600 * 10**9, agent=("coder", "writer")[n % 2],
                 tenant=("a", "b")[n % 2])
        for n in range(6)
    ]  # fmt: skip
    runs = [agent_run(shape) for shape in shapes]
    runs[4][1] = structs.replace(runs[4][1], outcome=Outcome.UPSTREAM_FAILED, model="other-model")
    put(store, *(record for run in runs for record in run))
    listed = store.runs(limit=3)
    assert [run.run_id for run in listed] == ["run-5", "run-4", "run-3"]
    rest = store.runs(limit=10, where=RunFilter(until_ns=listed[-1].last_ns))
    assert [run.run_id for run in rest] == ["run-2", "run-1", "run-0"]

    def found(where: RunFilter) -> list[str]:
        return [run.run_id for run in store.runs(where=where)]

    assert found(RunFilter(tenant="b")) == ["run-5", "run-3", "run-1"]
    assert found(RunFilter(text="CODER")) == ["run-4", "run-2", "run-0"]
    assert found(RunFilter(text="n-3")) == ["run-3"]
    assert found(RunFilter(text="%")) == []
    assert found(RunFilter(failed_only=True)) == ["run-4"]
    assert found(RunFilter(model="other-model")) == ["run-4"]
    assert found(RunFilter(since_ns=START_NS + 5 * 3600 * 10**9)) == ["run-5"]


def test_runs_of_two_tenants_with_one_name_are_two(store: TraceStore) -> None:
    mine = agent_run(RunShape(run_id="nightly", tenant="a", steps=2))
    theirs = [
        structs.replace(record, request_id="x" + record.request_id)
        for record in agent_run(RunShape(run_id="nightly", tenant="b", steps=3))
    ]
    put(store, *mine, *theirs)
    assert store.run("nightly", "a") == mine
    assert store.run("nightly", "b") == theirs
    with pytest.raises(AmbiguousRunError) as caught:
        store.run("nightly")
    assert caught.value.tenants == ("a", "b")
    assert sorted(summary.steps for summary in store.runs()) == [2, 3]


def test_the_bound_on_records_drops_the_oldest_runs_whole(trace_place: Place) -> None:
    options = TraceStoreOptions(max_records=25, max_age_ns=None, retention_records=1)
    store = TraceStore(trace_place, options)
    for n in range(10):
        put(store, *agent_run(RunShape(run_id=f"run-{n}", steps=5, start_ns=START_NS + n * 10**12)))
    assert store.count() <= 25
    assert [(run.run_id, run.steps) for run in store.runs()][:4] == [(f"run-{n}", 5) for n in (9, 8, 7, 6)]
    store.check()
    store.close()


def test_one_run_longer_than_the_bound_keeps_its_newest_steps(trace_place: Place) -> None:
    options = TraceStoreOptions(max_records=10, max_age_ns=None, retention_records=1)
    store = TraceStore(trace_place, options)
    records = agent_run(RunShape(steps=30))
    for record in records:
        put(store, record)
    assert store.run(records[0].link.run_id) == records[-10:]
    store.close()


def test_records_older_than_the_bound_go(trace_place: Place) -> None:
    store = TraceStore(trace_place, KEEP_ALL)
    now_ns = time.time_ns()
    put(store, *agent_run(RunShape(run_id="old", start_ns=now_ns - 10**15)), plain_record())
    put(store, *agent_run(RunShape(run_id="new", start_ns=now_ns)))
    store.close()
    store = TraceStore(trace_place, TraceStoreOptions(max_age_ns=10**14))
    put(store)
    assert [run.run_id for run in store.runs()] == ["new"]
    assert store.record("req-1") is None
    store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "lone \ud800 surrogate"},
        {"usage": Usage(fresh_tokens=2**70)},
        {"charge": Charge("USD", "v", amount_nano=2**63)},
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(store: TraceStore, changes: dict[str, object]) -> None:
    with pytest.raises(UnstorableRecord, match="req-1"):
        store.append(plain_record(**changes))
    put(store, plain_record("req-2"))
    assert store.count() == 1


def test_hostile_text_is_data(store: TraceStore) -> None:
    hostile = "x'; DROP TABLE records; --\0\u202e"
    record = plain_record(hostile, tool_calls=(ToolCall(hostile, hostile),), labels={"agent": hostile})
    put(store, record)
    assert store.record(hostile) == record


def test_details_spans_and_lives_are_kept_beside_records(store: TraceStore) -> None:
    records = agent_run(RunShape(steps=3))
    link = structs.replace(records[0].link, parent_run_id="above", parent_request_id="req-9", parent_call_id="call-1")
    records[0] = structs.replace(records[0], link=link)
    put(store, *records)
    made = Reproduction("m", "w", "sglang 1", "e0", "chatml@1", 7, {"temperature": 0.5}, "p", "t", "s")
    detail = StepDetail(records[1].request_id, Comparison.APPENDED, made, records[0].request_id)
    store.describe(detail)
    spans = [
        ReceivedSpan("a" * 32, f"{n:016x}", None, f"s{n}", 1, n, n, attributes={"keepwarm.run.id": link.run_id})
        for n in (2, 1)
    ]
    tenant = records[0].identity.tenant
    assert store.receive(tenant, spans, time.time_ns())
    assert store.receive(tenant, [replace(spans[0], name="again")], time.time_ns())
    store.began("e0", START_NS)
    store.began("e0", START_NS)
    store.began("e0", START_NS + 5)
    assert store.flush(30)
    assert store.details([record.request_id for record in records]) == {detail.request_id: detail}
    assert [span.name for span in store.spans_of(records)] == ["s1", "again"]
    assert store.lives() == {"e0": (START_NS, START_NS + 5)}
    assert store.lives(START_NS + 1, START_NS + 5) == {}
    assert [call.parent_run_id for call in store.called_runs(tenant, 0, 2**62)] == ["above"]
    assert store.outline(link.run_id).summary == store.summary(link.run_id, tenant) == store.runs()[0]
    assert store.part(link.run_id, tenant, 1, 1) == records[1:2]
    assert store.recent(2) == records[1:]
    assert [list(store.records(batch=2)), list(store.arrived(batch=2))] == [records, records]
    first_ns, last_ns = records[0].stamps.arrived_ns, records[-1].stamps.arrived_ns
    (bucket,) = store.buckets(None, first_ns, last_ns + 1, last_ns + 1 - first_ns)
    assert (bucket.requests, bucket.prompt_tokens) == (3, sum(record.usage.prompt_tokens for record in records))
    assert store.ttfts(tenant, 0, 2**62) == sorted(record.stamps.ttft_ns for record in records)
    assert store.newest() >= 3
    assert store.choices(tenant).teams == (records[0].identity.team,)
    store.check()


def test_writers_at_once_leave_each_record_once_and_in_order(trace_place: Place) -> None:
    """Two gateways of a fleet, or two workers of one."""
    stores = [TraceStore(trace_place, KEEP_ALL), TraceStore(trace_place, KEEP_ALL)]
    runs = [agent_run(RunShape(run_id=f"run-{n}", steps=2, seed=n)) for n in range(40)]

    def write(store: TraceStore, some: list[list[RequestRecord]]) -> None:
        for run in some:
            put(store, *run)

    threads = [
        threading.Thread(target=write, args=(store, some))
        for store, some in zip(stores, (runs[:30], runs[10:]), strict=True)
    ]
    for thread in threads:
        thread.start()
    seen = list[str]()
    while any(thread.is_alive() for thread in threads):
        seen = [record.request_id for record in stores[0].records(batch=7)]
        assert len(seen) == len(set(seen))
    for thread in threads:
        thread.join()
    assert sorted(record.request_id for run in runs for record in run) == sorted(
        record.request_id for record in stores[0].records()
    )
    assert [store.stats().dropped for store in stores] == [0, 0]
    for store in stores:
        store.check()
        store.close()

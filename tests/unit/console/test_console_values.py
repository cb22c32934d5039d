"""What pages show, as values: who computed what was hit, shared prefixes, stores, settings, files, forms."""

from __future__ import annotations

import csv
import io
import json

import msgspec
import pytest
from msgspec.structs import replace

from billing.prices import PriceBook
from gateway.access.roles import Right
from gateway.console.answers import nano_units, percentage
from gateway.console.exports import export
from gateway.console.first_token import first_token_parts
from gateway.console.formats import of
from gateway.console.frame import PLACES, render
from gateway.console.prefix_map import branches, prefix_map
from gateway.console.provenance import Writers, writers_of
from gateway.console.run_views import MAX_COLUMNS, called_tree, columns
from gateway.console.scale import TimeScale
from gateway.console.settings_view import HIDDEN, setting_sections, shown_url, shown_value
from gateway.console.step_views import step_view, tool_views
from gateway.console.stores import bytes_text, store_view, tier_facts
from gateway.console.visitor import Visitor, is_own_form
from gateway.settings import Settings
from kvstore.page import Tier
from tests.samples.agent_runs import MS, RunShape, agent_run, plain_record
from tests.samples.console_site import engine_metrics
from tests.samples.prefixed import STRIDE, marks_of, prefixed
from tracing.gaps import gaps
from tracing.received import ReceivedSpan
from tracing.record import Candidate, Decision, RequestRecord, Usage, UsageSource
from tracing.store_outline import RunCall, StepOutline, step_outline

BOOK = PriceBook.default()


def step(number: int, hits: int, prompt: int, *, output: int = 10, outcome: str = "ok") -> StepOutline:
    return StepOutline(number, f"r{number}", number * 10**9, outcome, "m", prompt, (hits, 0, 0, 0, 0), output, 5)


def device_writers(steps: list[StepOutline], wanted: str) -> Writers | None:
    return writers_of(steps, [wanted])[wanted][0]


def test_what_a_step_hits_was_computed_by_the_step_that_computed_it_last() -> None:
    steps = [step(1, 0, 100), step(2, 100, 200), step(3, 200, 300), step(4, 250, 400)]
    assert device_writers(steps, "r2") == Writers(1, 1, 1, 10**9, 10**9)
    assert device_writers(steps, "r4") == Writers(1, 3, 3, 10**9, 3 * 10**9)
    assert device_writers(steps, "r1") is None


def test_a_rewritten_middle_is_the_rewriter_s_and_what_it_kept_is_not() -> None:
    steps = [step(1, 0, 100), step(2, 100, 300), step(3, 50, 320), step(4, 320, 400)]
    assert device_writers(steps, "r4") == Writers(1, 3, 2, 10**9, 3 * 10**9)


def test_a_title_asked_for_beside_a_conversation_computes_nothing_of_it() -> None:
    steps = [step(1, 0, 1000), step(2, 0, 40), step(3, 1000, 1200)]
    assert device_writers(steps, "r3") == Writers(1, 1, 1, 10**9, 10**9)


def test_what_nobody_of_the_run_computed_was_there_before() -> None:
    steps = [step(1, 64, 100), step(2, 100, 200)]
    assert device_writers(steps, "r1") == Writers(None, None, 0, None, None)
    found = device_writers(steps, "r2")
    assert found is not None
    assert (found.oldest, found.newest) == (None, 1)


def test_a_bar_says_where_its_tokens_were_read_who_computed_them_and_how_old_they_are() -> None:
    records = agent_run()
    steps = [step_outline(record) for record in records]
    writers = writers_of(steps, [records[1].request_id])[records[1].request_id]
    title = step_view(records[1], writers=writers).bar[0].title
    age = records[1].stamps.arrived_ns - records[0].stamps.arrived_ns
    assert "read on engine-a; computed by step 1" in title
    assert f"{age / 1e9:.3g} s earlier" in title or f"{age / 1e6:.3g} ms earlier" in title


def decided(hits: tuple[int, int, int, int], queued: int, expected_ms: int) -> RequestRecord:
    """A prompt of 1,000 tokens, sent after 2 ms and answered 100 ms later; engines compute 10 tokens a ms."""
    record = plain_record()
    usage = Usage(1000 - sum(hits), *hits, output_tokens=5, source=UsageSource.ENGINE)
    cold = Candidate("engine-b", (0, 0, 0, 0), 0, 100 * MS)
    chosen = Candidate("engine-a", hits, queued, expected_ms * MS)
    stamps = replace(record.stamps, first_token_ns=(record.stamps.sent_ns or 0) + 100 * MS)
    decision = Decision("expected-ttft", "engine-a", (chosen, cold), sum(hits), True)
    return replace(record, usage=usage, decision=decision, stamps=stamps)


def test_the_time_to_a_first_token_is_split_without_a_rest() -> None:
    record = decided((0, 600, 0, 0), queued=200, expected_ms=80)
    parts = first_token_parts(record)
    assert [part.kind for part in parts] == ["route", "send", "queue", "fetch", "prefill"]
    assert sum(part.end_ns - part.start_ns for part in parts) == record.stamps.ttft_ns
    assert [part.start_ns for part in parts[1:]] == [part.end_ns for part in parts[:-1]]
    # queue 20 ms, fetch 20 ms, prefill 40 ms expected, of 100 ms measured
    assert [round((part.end_ns - part.start_ns) / MS) for part in parts[2:]] == [25, 25, 50]
    assert [part.is_estimate for part in parts] == [False, False, True, True, True]


def test_a_time_of_one_cause_is_no_estimate_and_no_decision_is_one_part() -> None:
    assert not any(part.is_estimate for part in first_token_parts(decided((500, 0, 0, 0), 0, 50)))
    assert [part.kind for part in first_token_parts(plain_record())] == ["route", "send", "prefill"]
    cut = plain_record()
    assert first_token_parts(replace(cut, stamps=replace(cut.stamps, first_token_ns=None))) == ()


def test_a_decision_says_where_pages_come_from() -> None:
    record = decided((500, 0, 0, 0), 0, 50)
    assert record.decision is not None
    told = replace(record, decision=replace(record.decision, fetch_from="engine-b"))
    assert step_view(told).routing_notes == ("Pages are read from engine-b.",)
    assert step_view(record).routing_notes == ()


def test_a_tool_stands_as_its_agent_tells_it_and_others_share_what_is_left() -> None:
    records = agent_run(RunShape(seed=5))
    gap = next(gap for gap in gaps(records) if len(gap.calls) == 2)
    span = ReceivedSpan("t", "s", None, "execute_tool", 1, gap.started_ns + MS, gap.started_ns + 5 * MS)
    clock = TimeScale([(gap.started_ns, gap.ended_ns)])
    told, inferred = tool_views(gap, clock, {gap.calls[0].id: span})
    assert (told.kind, told.bounded, told.label) == ("told", "4 ms", gap.calls[0].name)
    assert (inferred.kind, inferred.label) == ("tool", gap.calls[1].name)
    assert inferred.bounded.startswith("≤ ")
    assert len(tool_views(gap, clock, {call.id: span for call in gap.calls})) == 2


def test_called_runs_stand_behind_their_callers_once_whatever_clients_say() -> None:
    calls = [RunCall(child, parent, None, None) for child, parent in ("ba", "ca", "db", "ab", "ee")]
    assert [(call.run_id, depth) for call, depth in called_tree("a", calls)] == [("b", 1), ("d", 2), ("c", 1)]


def test_a_run_of_any_length_is_one_picture_of_bounded_size() -> None:
    steps = [step(number, number, 10 * number) for number in range(1, 5001)]
    found = columns(steps, page=3)
    assert len(found) <= MAX_COLUMNS
    assert found[0].step == 1
    assert any(column.is_shown for column in found)
    for column in found:
        assert sum(float(height[:-1]) for _, _, height in column.parts) <= 100.1


def test_shared_prefixes_are_cut_where_prompts_part() -> None:
    records = [prefixed(0, "abc", BOOK), prefixed(1, "abd", BOOK), prefixed(2, "abd", BOOK), prefixed(3, "x", BOOK)]
    found = {(branch.start_tokens, branch.end_tokens): branch for branch in branches(records)}
    assert {place: branch.requests for place, branch in found.items()} == {
        (0, 2 * STRIDE): 3,
        (2 * STRIDE, 3 * STRIDE): 2,
    }
    held = {marks_of("ab")[-1]: {"engine-a": (Tier.DEVICE,), "engine-b": (Tier.HOST, Tier.DISK)}}
    shown = prefix_map(records, lambda marks: [held.get(mark, {}) for mark in marks], 10**19)
    assert shown.holders == ("engine-a", "engine-b")
    assert [cell.kind for cell in shown.rows[0].cells] == ["device", "host"]
    assert shown.rows[0].holders == 2


def test_a_store_is_read_from_what_an_engine_tells() -> None:
    facts = tier_facts(engine_metrics())
    assert facts["host"].events["miss:absent"] == 120
    assert facts["disk"].used_bytes == 11 << 30
    view = store_view("e", engine_metrics())
    assert view.tiers is not None
    assert [tier.kind for tier in view.tiers] == ["device", "host", "disk"]
    assert view.tiers[1].misses[0][:2] == ("absent", "120")
    assert view.tiers[2].alarms == (("corrupt", "1"),)
    assert store_view("e", None).tiers is None
    assert store_view("e", "no { metrics").tiers is None
    assert [bytes_text(size) for size in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3 GiB"]


def test_settings_are_shown_without_any_secret() -> None:
    effective = Settings.model_construct().model_dump(mode="json")
    effective["ledger"]["url"] = "**********"
    effective["embedded"]["pool_url"] = "redis://user:letmein@pool:6379/0?token=x"
    effective["billing"]["alert_webhook"] = "https://hooks/abc"
    effective["keys"] = [{"id": "a", "sha256": "feed", "secret": "hunter2"}]
    shown = {
        row.path: row
        for section in setting_sections(effective, Settings.model_construct().model_dump(mode="json"))
        for row in section.rows
    }
    text = json.dumps([row.value for row in shown.values()])
    for secret in ("letmein", "hooks", "feed", "hunter2", "token=x"):
        assert secret not in text
    assert shown["embedded.pool_url"].value == "redis://pool:6379/0"
    assert shown["embedded.pool_url"].is_changed
    assert not shown["server.port"].is_changed
    assert shown["keys[0].secret"].value == HIDDEN
    assert shown_value("server.port", 8400) == "8400"
    assert shown_url("not a url") == "not a url"


def test_files_hold_the_numbers_and_no_formulas() -> None:
    rows = [{"name": "=HYPERLINK(1)", "n": 3, "list": ["a", "b"]}, {"name": 'x,"y"', "n": -1, "list": []}]
    read = list(csv.DictReader(io.StringIO(export(rows, "csv"))))
    assert read[0] == {"name": "'=HYPERLINK(1)", "n": "3", "list": "a b"}
    assert read[1]["n"] == "-1"
    assert json.loads(export(rows, "json"))["rows"][0]["name"] == "=HYPERLINK(1)"
    assert export([], "csv").strip() == ""


@pytest.mark.parametrize(
    ("headers", "word", "is_own"),
    [
        ({"sec-fetch-site": "same-origin", "origin": "http://h:1", "host": "h:1"}, "right", True),
        ({"host": "h:1"}, "right", True),
        ({"sec-fetch-site": "cross-site", "host": "h:1"}, "right", False),
        ({"sec-fetch-site": "same-site", "host": "h:1"}, "right", False),
        ({"origin": "http://evil", "host": "h:1"}, "right", False),
        ({"origin": "null", "host": "h:1"}, "right", False),
        ({"host": "h:1"}, "wrong", False),
        ({"host": "h:1"}, "", False),
        ({"host": "h:1"}, None, False),
    ],
)
def test_a_form_counts_only_from_our_own_pages(headers: dict[str, str], word: object, is_own: bool) -> None:
    assert is_own_form(Visitor(form_word="right"), headers, word) is is_own


@pytest.mark.parametrize(
    ("right", "seen"),
    [
        (Right.SEE_RUNS, {"overview", "runs", "breaks", "prefixes", "whatif"}),
        (Right.SEE_COSTS, {"cost"}),
        (Right.ADMINISTER, {"instances", "stores", "index", "settings", "keys"}),
    ],
)
def test_the_navigation_shows_what_a_visitor_may_see(right: Right, seen: set[str]) -> None:
    html = render("missing.html", Visitor("a", frozenset({right})), what="x")
    assert {place.name for place in PLACES if f'href="{place.href}">{place.label}<' in html} == seen


def test_numbers_of_a_form_are_taken_or_left() -> None:
    assert [nano_units(text) for text in ("0.05", "1e2", "-1", "x", "nan", "1e99")] == [
        50_000_000, 100 * 10**9, None, None, None, None,
    ]  # fmt: skip
    assert [percentage(text) for text in ("50", "0", "101", "x", "nan")] == [50.0, 0.0, None, None, None]


def test_a_record_s_outline_survives_its_encoding() -> None:
    record = agent_run()[4]
    again = msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord)
    assert step_outline(again) == step_outline(record)


def test_one_is_not_many() -> None:
    assert [of("step", number) for number in (0, 1, "1", 2, "1,000")] == [
        "0 steps", "1 step", "1 step", "2 steps", "1,000 steps",
    ]  # fmt: skip

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from msgspec.structs import replace

from gateway.console.formats import count, money
from gateway.console.frame import render, request_href, run_href
from gateway.console.pages import RunsQuery, diff_page, request_page, run_page, runs_page
from gateway.console.run_views import STEPS_PER_PAGE, page_of, run_view
from gateway.console.views import sum_money
from gateway.console.visitor import EVERYBODY
from tests.samples.agent_runs import RunShape, agent_run, plain_record, put
from tracing.record import Charge, Identity, Outcome, RequestRecord, ToolCall, Usage, UsageSource
from tracing.store import TraceStore, TraceStoreOptions

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;{{ 7*7 }}\u202e"
VOID = {"meta", "link", "input", "img", "br", "hr"}


class Page(HTMLParser):
    """A strict reader: every element closed in order, every id once; remembers elements, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    store = TraceStore(tmp_path / "t.sqlite3", TraceStoreOptions(max_age_ns=None))
    yield store
    store.close()


def listing(store: TraceStore, **query: str) -> str:
    summaries = store.runs(50)
    return runs_page(
        summaries, store.totals(), RunsQuery(**query), summaries[0].last_ns if summaries else 0, more=False
    )


def hostile_record() -> RequestRecord:
    record = agent_run(RunShape(steps=2))[1]
    return replace(
        record,
        request_id=HOSTILE,
        model=HOSTILE,
        served_model=HOSTILE,
        outcome=Outcome.UPSTREAM_FAILED,
        error=HOSTILE,
        identity=Identity(HOSTILE, HOSTILE, HOSTILE),
        link=structs.replace(record.link, run_id=HOSTILE, method=HOSTILE, previous_request_id=HOSTILE),
        decision=replace(
            record.decision,
            policy=HOSTILE,
            candidates=tuple(msgspec.structs.replace(each, instance=HOSTILE) for each in record.decision.candidates),
        ),
        attempts=tuple(replace(each, instance=HOSTILE, error=HOSTILE) for each in record.attempts * 2),
        tool_calls=(ToolCall(HOSTILE, HOSTILE),),
        labels={"agent": HOSTILE, "step_name": HOSTILE, HOSTILE: HOSTILE},
        usage_problems=(HOSTILE,),
        finish_reason=HOSTILE,
        charge=Charge(HOSTILE, HOSTILE, unpriced_reason=HOSTILE),
    )


def test_hostile_text_is_text_on_every_page(store: TraceStore) -> None:
    record = hostile_record()
    follower = replace(
        record,
        request_id="next",
        tool_results=(HOSTILE,),
        link=structs.replace(record.link, step=3, previous_request_id=HOSTILE),
    )
    follower = replace(follower, stamps=replace(record.stamps, arrived_ns=record.stamps.closed_ns + 5 * 10**8))
    put(store, record, follower)
    pages = (
        listing(store, q=HOSTILE, window=HOSTILE, model=HOSTILE),
        run_page(page_of([record, follower])),
        request_page(record),
        diff_page(record, follower, {}),
        render("missing.html", EVERYBODY, what=HOSTILE),
        render("choice.html", EVERYBODY, run_id=HOSTILE, tenants=[HOSTILE, "b"]),
    )
    for html in pages:
        page = Page(html)
        assert HOSTILE in page.text or HOSTILE in {value for _, each in page.elements for value in each.values()}
        assert [each for tag, each in page.elements if tag == "script"] == [
            {"defer": None, "src": next(each["src"] for tag, each in page.elements if tag == "script")}
        ]
        assert not {"img", "iframe", "object"} & {tag for tag, _ in page.elements}
        for _, attributes in page.elements:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
            for name in ("href", "src", "action"):
                assert re.match(r"^(/console|#|\?|$)", attributes.get(name) or "")


def test_pages_need_nothing_from_elsewhere_and_no_inline_code(store: TraceStore) -> None:
    put(store, *agent_run())
    for html in (listing(store), run_page(page_of(agent_run())), request_page(agent_run()[5])):
        assert "http://" not in html.replace("http://www.w3.org", "")
        assert "https://" not in html
        assert "<style" not in html
        assert not re.search(r"<script(?![^>]*\bsrc=)", html)


def test_the_list_shows_the_store_s_sums_to_the_nano(store: TraceStore) -> None:
    runs = [agent_run(RunShape(run_id=f"run-{n}", seed=n, steps=n + 2)) for n in range(4)]
    records = [record for run in runs for record in run]
    put(store, *records)
    page = Page(listing(store))
    (total,) = store.totals().money
    assert total.cost_nano == sum(record.charge.amount_nano for record in records)
    assert str(money(total.cost_nano, "USD")) in page.text
    assert str(money(total.saved_nano, "USD")) in page.text
    for run in runs:
        assert str(money(sum(record.charge.amount_nano for record in run), "USD")) in page.text
    assert count(sum(record.usage.prompt_tokens for record in records)) in page.text


def test_the_run_page_shows_totals_steps_and_the_same_money_as_the_store(store: TraceStore) -> None:
    records = agent_run(RunShape(steps=12))
    put(store, *records)
    assert sum_money(records) == store.runs()[0].money == store.totals().money
    page = Page(run_page(page_of(records)))
    (total,) = store.runs()[0].money
    assert str(money(total.cost_nano, "USD")) in page.text
    assert str(money(total.saved_nano, "USD")) in page.text
    for record in records:
        assert str(money(record.charge.amount_nano, "USD")) in page.text
        assert str(money(record.charge.saved_nano, "USD")) in page.text
        for line in record.charge.lines:
            assert str(money(line.amount_nano, "USD")) in page.text
    steps = [attributes["id"] for tag, attributes in page.elements if tag == "li" and "id" in attributes]
    assert steps == [f"step-{step}" for step in range(1, 13)]
    for words in ("connect_refused", "chosen", "unhealthy", "Pool", "Disk", "Host", "≤ ", "wait", "expected-ttft"):
        assert words in page.text


def test_prefix_bars_are_to_the_scale_of_the_longest_step() -> None:
    records = agent_run()
    view = run_view(page_of(records))
    longest = max(record.usage.total_tokens for record in records)
    for record, step in zip(records, view.steps, strict=True):
        filled = sum(float(segment.width[:-1]) for segment in step.bar)
        assert abs(filled - 100 * record.usage.total_tokens / longest) < 0.1
        kinds = [segment.kind for segment in step.bar]
        assert kinds == sorted(
            kinds, key=["device", "host", "disk", "pool", "unknown", "fresh", "written", "output"].index
        )


def test_time_bars_follow_one_another_on_the_common_axis() -> None:
    view = run_view(page_of(agent_run()))
    starts = [float(step.time[0].x[:-1]) for step in view.steps]
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    last = view.steps[-1].time[-1]
    assert abs(float(last.x[:-1]) + float(last.width[:-1]) - 100) < 0.1


def test_a_long_run_is_paged_and_keeps_its_totals() -> None:
    records = agent_run(RunShape(steps=STEPS_PER_PAGE * 2 + 7))
    first, last = run_view(page_of(records, 1)), run_view(page_of(records, 99))
    assert (first.page, first.pages, len(first.steps)) == (1, 3, STEPS_PER_PAGE)
    assert (last.page, len(last.steps)) == (3, 7)
    assert first.money == last.money == run_view(page_of(records, -5)).money
    assert last.steps[-1].step == len(records)
    page = Page(run_page(page_of(records, 2)))
    links = [attributes.get("href") for tag, attributes in page.elements if tag == "a" and "rel" in attributes]
    assert links == [f"{run_href(first.run_id, 'default')}?page={number}" for number in (1, 3)]


def test_a_request_without_price_answer_or_usage_says_so() -> None:
    record = plain_record(
        outcome=Outcome.TRUNCATED,
        status=200,
        error="stream_ended_early",
        usage=Usage(source=UsageSource.MISSING),
        charge=Charge("USD", "v", unpriced_reason="nobody counted"),
        attempts=(),
        finish_reason=None,
        stamps=replace(plain_record().stamps, first_token_ns=None, last_token_ns=None),
    )
    text = Page(request_page(record)).text
    for words in ("cut off: stream_ended_early", "unpriced", "nobody counted the tokens", "It was not routed."):
        assert words in text
    assert "$" not in text.replace('"currency": "USD"', "")


def test_an_empty_store_explains_what_to_do_and_an_empty_search_does_not(store: TraceStore) -> None:
    assert "base URL" in Page(listing(store)).text
    assert "No run matches." in Page(listing(store, q="x")).text


def test_currencies_stand_side_by_side() -> None:
    one, two = agent_run(RunShape(steps=2))
    two = replace(two, charge=replace(two.charge, currency="EUR"))
    text = Page(run_page(page_of([one, two]))).text
    assert str(money(one.charge.amount_nano, "USD")) in text
    assert str(money(two.charge.amount_nano, "EUR")) in text


def test_addresses_quote_what_clients_chose() -> None:
    assert run_href("a/b?c#d", "default") == "/console/runs/a%2Fb%3Fc%23d"
    assert run_href("a", "x&y") == "/console/runs/a?tenant=x%26y"
    assert request_href("../x") == "/console/requests/..%2Fx"


def test_the_record_on_a_request_page_is_the_whole_record() -> None:
    record = agent_run()[5]
    html = request_page(record)
    raw = unescape(html[html.index("<pre>") + 5 : html.index("</pre>")])
    assert msgspec.json.decode(raw.encode(), type=RequestRecord) == record

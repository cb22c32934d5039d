from __future__ import annotations

import re
from itertools import pairwise

import pytest
from msgspec import structs
from msgspec.structs import replace
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from tests.samples.agent_runs import MS, RunShape, agent_run, plain_record
from tracing.attributes import MAX_TEXT_CHARS, SemanticConventions
from tracing.gaps import GapKind, gaps
from tracing.record import Attempt, Candidate, Charge, Outcome, RequestRecord, ToolCall, Usage
from tracing.runs import LinkMethod
from tracing.spans import (
    MAX_CANDIDATES,
    SpanKind,
    SpanValue,
    attempt_span_id,
    request_spans,
    server_span_id,
    tool_spans,
    upstream_traceparent,
)

# Our own schema, written from the conventions' text: name -> (type, generations that have it)
BOTH = frozenset(SemanticConventions)
NEW, OLD = frozenset({SemanticConventions.V0_1}), frozenset({SemanticConventions.V1_41})
GEN_AI = {
    "gen_ai.operation.name": (str, BOTH),
    "gen_ai.provider.name": (str, BOTH),
    "gen_ai.request.model": (str, BOTH),
    "gen_ai.request.stream": (bool, BOTH),
    "gen_ai.agent.name": (str, BOTH),
    "gen_ai.conversation.id": (str, BOTH),
    "gen_ai.response.model": (str, BOTH),
    "gen_ai.response.finish_reasons": (tuple, BOTH),
    "gen_ai.response.time_to_first_chunk": (float, BOTH),
    "gen_ai.usage.input_tokens": (int, BOTH),
    "gen_ai.usage.output_tokens": (int, BOTH),
    "gen_ai.usage.cache_read.input_tokens": (int, BOTH),
    "gen_ai.usage.cache_write.input_tokens": (int, NEW),
    "gen_ai.usage.cache_creation.input_tokens": (int, OLD),
    "gen_ai.usage.reasoning.output_tokens": (int, BOTH),
    "gen_ai.tool.name": (str, BOTH),
    "gen_ai.tool.call.id": (str, BOTH),
    "gen_ai.tool.type": (str, BOTH),
}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUIRED = {"gen_ai.operation.name", "gen_ai.provider.name"}
FOREIGN = re.compile(r"^(keepwarm|llm|http|openinference)\.|^error\.type$|^session\.id$")


def verify(span: SpanValue, conventions: SemanticConventions) -> None:
    for name, value in span.attributes.items():
        if name.startswith("gen_ai."):
            kind, generations = GEN_AI[name]
            assert type(value) is kind, name
            assert conventions in generations, name
        else:
            assert FOREIGN.match(name), name
    if span.kind is SpanKind.CLIENT:
        assert span.attributes.keys() >= REQUIRED
    assert span.started_ns <= span.ended_ns
    assert 0 < span.span_id < 2**64
    assert 0 < span.trace_id < 2**128


@pytest.mark.parametrize("conventions", list(SemanticConventions))
def test_every_span_obeys_the_schema_of_its_generation(conventions: SemanticConventions) -> None:
    records = agent_run()
    records[1] = replace(
        records[1], usage=replace(records[1].usage, write_5m_tokens=64, write_1h_tokens=32, reasoning_tokens=5)
    )
    for record in [*records, plain_record(outcome=Outcome.REJECTED, status=401, attempts=(), usage=Usage())]:
        for span in request_spans(record, conventions):
            verify(span, conventions)
    for before, after in pairwise(records):
        for span in tool_spans(before, after):
            verify(span, conventions)
    write = request_spans(records[1], conventions)[1].attributes
    names = {SemanticConventions.V0_1: "cache_write", SemanticConventions.V1_41: "cache_creation"}
    assert write[f"gen_ai.usage.{names[conventions]}.input_tokens"] == 96


def test_the_old_names_are_those_of_the_published_package() -> None:
    published = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    assert {name for name, (_, generations) in GEN_AI.items() if SemanticConventions.V1_41 in generations} <= published


def test_input_tokens_include_cached_ones_and_stand_on_one_span_only() -> None:
    record = agent_run()[5]  # with a failed attempt before the one that answered
    spans = request_spans(record)
    assert [span.kind for span in spans] == [SpanKind.SERVER, SpanKind.CLIENT, SpanKind.CLIENT, SpanKind.INTERNAL]
    assert [span.attributes.get("gen_ai.usage.input_tokens") for span in spans] == [
        None, None, record.usage.prompt_tokens, None,
    ]  # fmt: skip
    assert spans[2].attributes["gen_ai.usage.cache_read.input_tokens"] == record.usage.hit_tokens
    assert spans[2].attributes["llm.token_count.prompt_details.cache_read"] == record.usage.hit_tokens
    assert spans[1].error == "connect_refused"


def test_the_tree_is_client_gateway_attempt_engine() -> None:
    server, attempt, engine = request_spans(plain_record(traceparent=f"00-{TRACE}-{PARENT}-01"))
    assert {server.trace_id, attempt.trace_id, engine.trace_id} == {int(TRACE, 16)}
    assert engine.parent_span_id == attempt.span_id == attempt_span_id("req-1", 1)
    assert attempt.started_ns <= engine.started_ns <= engine.ended_ns <= attempt.ended_ns
    assert server.parent_span_id == int(PARENT, 16)
    assert server.remote_parent
    assert attempt.parent_span_id == server.span_id == server_span_id("req-1")
    assert server.sampled


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
     f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01"],
)  # fmt: skip
def test_a_malformed_traceparent_is_no_parent(header: str) -> None:
    server = request_spans(plain_record(traceparent=header))[0]
    assert server.parent_span_id is None
    assert server.sampled


def test_a_client_that_does_not_sample_is_not_sampled() -> None:
    assert not any(span.sampled for span in request_spans(plain_record(traceparent=f"00-{TRACE}-{PARENT}-00")))


def test_the_steps_of_a_run_share_a_trace_and_two_tenants_do_not() -> None:
    ids = {span.trace_id for record in agent_run() for span in request_spans(record)}
    other = {span.trace_id for record in agent_run(RunShape(tenant="b")) for span in request_spans(record)}
    assert len(ids) == len(other) == 1
    assert ids != other


def test_span_ids_are_content_defined_and_distinct() -> None:
    records = agent_run()
    ids = [span.span_id for record in records for span in request_spans(record)]
    assert ids == [span.span_id for record in records for span in request_spans(record)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("method", list(LinkMethod))
@pytest.mark.parametrize("named", [None, "chat-7"])
def test_only_what_the_client_calls_the_conversation_is_its_id(method: LinkMethod, named: str | None) -> None:
    record = agent_run()[1]
    record = replace(record, link=structs.replace(record.link, method=method.value, conversation_id=named))
    server, attempt, _ = request_spans(record)
    expected = named
    assert attempt.attributes.get("gen_ai.conversation.id") == expected
    assert server.attributes["keepwarm.run.id"] == record.link.run_id
    assert server.attributes["keepwarm.run.link.method"] == method.value


def test_money_stands_on_the_request_as_integers_that_add_up() -> None:
    record = agent_run()[4]
    attributes = request_spans(record)[0].attributes
    lines = [
        value
        for name, value in attributes.items()
        if re.fullmatch(r"keepwarm\.cost\.(hit_\w+|fresh|output)_nano", name)
    ]
    assert attributes["keepwarm.cost.amount_nano"] == record.charge.amount_nano == sum(lines)
    unpriced = request_spans(plain_record(charge=Charge("USD", "v", unpriced_reason="no price")))[0].attributes
    assert "keepwarm.cost.amount_nano" not in unpriced
    assert unpriced["keepwarm.cost.unpriced_reason"] == "no price"


def test_decision_failover_and_first_token_are_events_in_order() -> None:
    record = agent_run()[5]
    events = request_spans(record)[0].events
    assert [event.name for event in events] == [
        "keepwarm.routing.decision", "keepwarm.failover", "keepwarm.first_token",
    ]  # fmt: skip
    assert events[0].attributes["keepwarm.routing.instance"] == "engine-b"
    assert len(events[0].attributes["keepwarm.routing.candidates"]) == 2
    assert "unhealthy" in events[0].attributes["keepwarm.routing.candidates"][0]
    assert (events[1].attributes["keepwarm.from"], events[1].attributes["keepwarm.to"]) == ("engine-a", "engine-b")
    assert events[2].at_ns == record.stamps.first_token_ns


@pytest.mark.parametrize(
    ("outcome", "status", "failed"),
    [(Outcome.OK, 200, False), (Outcome.REJECTED, 400, False), (Outcome.UPSTREAM_FAILED, 502, True),
     (Outcome.TRUNCATED, 200, True), (Outcome.ABORTED, 200, False)],
)  # fmt: skip
def test_a_server_span_is_an_error_when_the_server_failed(outcome: Outcome, status: int, failed: bool) -> None:
    span = request_spans(plain_record(outcome=outcome, status=status))[0]
    assert (span.error is not None) is failed
    assert ("error.type" in span.attributes) is (outcome is not Outcome.OK)


def test_a_span_is_bounded_and_encodable_whatever_the_record_holds() -> None:
    record = agent_run()[1]
    seen = tuple(Candidate(f"engine-{n}", (0, 0, 0, 0), 0, 0) for n in range(5000))
    record = replace(
        record,
        model="m\ud800" * 10_000,
        decision=replace(record.decision, candidates=seen),
        attempts=tuple(Attempt(f"engine-{n}", 0, 1, None, "refused") for n in range(5000)) + record.attempts,
        charge=replace(record.charge, amount_nano=2**80),
    )
    spans = request_spans(record)
    assert len(spans) < 20
    for span in spans:
        assert len(span.events) <= 32
        for value in [*span.attributes.values(), *(v for event in span.events for v in event.attributes.values())]:
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str):
                    assert len(text) <= MAX_TEXT_CHARS
                    text.encode()
                elif isinstance(text, int):
                    assert -(2**63) <= text < 2**63
    assert len(spans[0].events[0].attributes["keepwarm.routing.candidates"]) == MAX_CANDIDATES


def test_the_last_attempt_has_the_answer_even_when_attempts_were_left_out() -> None:
    record = agent_run()[1]
    failed = tuple(Attempt(f"engine-{n}", 0, 1, None, "refused") for n in range(40))
    spans = request_spans(replace(record, attempts=failed + record.attempts))
    assert spans[-2].attributes["gen_ai.usage.input_tokens"] == record.usage.prompt_tokens
    assert spans[-2].attributes["keepwarm.attempt"] == 41


def test_parallel_tool_calls_share_one_gap_that_is_labelled_an_upper_bound() -> None:
    records = agent_run()
    before, after = records[1], records[2]
    spans = tool_spans(before, after)
    assert [span.name for span in spans] == [f"execute_tool {call.name}" for call in before.tool_calls]
    assert len(spans) == 2
    for span in spans:
        assert (span.started_ns, span.ended_ns) == (before.stamps.closed_ns, after.stamps.arrived_ns)
        assert span.attributes["keepwarm.inferred"] is True
        assert span.attributes["keepwarm.duration.bound"] == "upper"
        assert span.attributes["keepwarm.tool.parallel_calls"] == 2
        assert span.parent_span_id == server_span_id(before.request_id)


def test_gaps_tell_tools_from_waits_and_skip_what_an_auxiliary_call_continues() -> None:
    records = agent_run(RunShape(steps=6))
    found = gaps(records)
    assert [gap.kind for gap in found] == [GapKind.TOOL, GapKind.TOOL, GapKind.TOOL, GapKind.WAIT, GapKind.TOOL]
    assert all(gap.duration_ns > 0 for gap in found)
    title = replace(records[1], request_id="title", tool_results=(), tool_calls=())
    assert gaps([records[0], title, *records[1:]]) == found


def test_a_request_that_overtakes_the_end_of_the_answer_leaves_a_gap_of_zero() -> None:
    before, after = agent_run(RunShape(steps=2))
    early = replace(after, stamps=replace(after.stamps, arrived_ns=before.stamps.closed_ns - MS))
    (gap,) = gaps([before, early])
    assert gap.duration_ns == 0


def test_a_call_whose_result_did_not_come_back_has_no_span() -> None:
    before, after = agent_run(RunShape(steps=2))
    extra: RequestRecord = replace(before, tool_calls=(*before.tool_calls, ToolCall("call_lost", "lost")))
    assert [span.name for span in tool_spans(extra, after)] == [f"execute_tool {before.tool_calls[0].name}"]


def test_engines_are_told_of_our_attempt_as_their_parent() -> None:
    record = plain_record()
    own = upstream_traceparent("req-1", 1, "default", None, None)
    theirs = upstream_traceparent("req-1", 2, "default", "run", f"00-{TRACE}-{PARENT}-00")
    server, attempt, _ = request_spans(record)
    assert own == f"00-{server.trace_id:032x}-{attempt.span_id:016x}-01"
    assert theirs == f"00-{TRACE}-{attempt_span_id('req-1', 2):016x}-00"


def test_what_is_fetched_is_one_number_that_every_exporter_takes() -> None:
    record = agent_run()[1]
    assert record.decision is not None
    record = replace(record, decision=replace(record.decision, fetch_tokens=(16, 0, 32, 0), fetch_from="engine-b"))
    event = next(event for event in request_spans(record)[0].events if event.name == "keepwarm.routing.decision")
    assert event.attributes["keepwarm.routing.fetch_tokens"] == 48

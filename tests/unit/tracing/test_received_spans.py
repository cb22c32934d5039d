"""Spans that agents send: both encodings, content by policy, bounds, and their place in a run's tree."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.samples.agent_runs import MS, agent_run
from tracing.content import ContentPolicy, content_value, redacted
from tracing.received import MAX_ATTRIBUTES, ReceivedSpan, UnreadableSpans, read_json, read_protobuf
from tracing.store import TraceStore
from tracing.tree import NodeKind, run_tree, walk

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "00f067aa0ba902b6"
SECRET = "write to jo@example.com with sk-abcdefghijklmnop"


def export(**changes: Any) -> dict[str, Any]:
    attributes = {"gen_ai.tool.call.id": "c1", "gen_ai.tool.name": "look", "gen_ai.tool.call.arguments": SECRET}
    span = {
        "traceId": TRACE,
        "spanId": SPAN,
        "parentSpanId": PARENT,
        "name": "execute_tool look",
        "kind": 1,
        "startTimeUnixNano": "1790000000000000000",
        "endTimeUnixNano": "1790000000500000000",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
        "status": {"code": 2, "message": "it broke"},
        **changes,
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}


def protobuf(**changes: Any) -> bytes:
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "agent"
    span = resource.scope_spans.add().spans.add(
        trace_id=bytes.fromhex(changes.get("trace", TRACE)),
        span_id=bytes.fromhex(SPAN),
        parent_span_id=bytes.fromhex(PARENT),
        name="execute_tool look",
        kind=1,
        start_time_unix_nano=1790000000000000000,
        end_time_unix_nano=1790000000500000000,
    )
    span.attributes.add(key="gen_ai.tool.call.id").value.string_value = "c1"
    span.attributes.add(key="gen_ai.tool.name").value.string_value = "look"
    span.attributes.add(key="gen_ai.tool.call.arguments").value.string_value = SECRET
    span.status.code, span.status.message = 2, "it broke"
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("policy", list(ContentPolicy))
def test_both_encodings_say_the_same(policy: ContentPolicy) -> None:
    (one,), none = read_json(json.dumps(export()).encode(), policy)
    (other,), nothing = read_protobuf(protobuf(), policy)
    assert (one, none) == (other, nothing)
    assert none == 0
    assert (one.trace_id, one.span_id, one.parent_id) == (TRACE, SPAN, PARENT)
    assert (one.tool_call_id, one.tool_name, one.service, one.error) == ("c1", "look", "agent", "it broke")
    assert one.ended_ns - one.started_ns == 500 * MS
    said = str(one.attributes.get("gen_ai.tool.call.arguments"))
    assert ("jo@example.com" in said) == (policy is ContentPolicy.FULL)
    assert ("gen_ai.tool.call.arguments" in one.attributes) == (policy is not ContentPolicy.OFF)


@pytest.mark.parametrize(
    "changes",
    [
        {"traceId": "0" * 32},
        {"traceId": None},
        {"spanId": "xyz"},
        {"startTimeUnixNano": "soon"},
        {"endTimeUnixNano": -1},
    ],
)
def test_what_is_malformed_is_left_out_and_counted(changes: dict[str, Any]) -> None:
    assert read_json(json.dumps(export(**changes)).encode(), ContentPolicy.FULL) == ([], 1)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"resourceSpans": 3}', b'{"resourceSpans": null}'])
def test_what_is_no_export_is_refused(body: bytes) -> None:
    with pytest.raises(UnreadableSpans):
        read_json(body, ContentPolicy.OFF)


def test_an_export_of_nothing_is_none_to_refuse() -> None:
    assert read_json(b"{}", ContentPolicy.OFF) == read_protobuf(b"", ContentPolicy.OFF) == ([], 0)


@pytest.mark.parametrize("number", ["²", "--5", "", "5" * 40, "1e3", True])
def test_an_attribute_that_is_no_whole_number_is_left_out(number: object) -> None:
    odd = [{"key": "n", "value": {"intValue": number}}, {"key": "m", "value": {"intValue": "-7"}}]
    (span,), _ = read_json(json.dumps(export(attributes=odd)).encode(), ContentPolicy.FULL)
    assert span.attributes == {"m": -7}


def test_an_attribute_that_is_too_deep_to_write_down_is_left_out() -> None:
    for depth in range(900, 1000):
        deep = f'{{"key":"k","value":{{"arrayValue":{"[" * depth}{"]" * depth}}}}}'
        body = json.dumps(export(attributes=["here"])).replace('"here"', deep)
        try:
            assert read_json(body.encode(), ContentPolicy.FULL)[1] == 0
        except UnreadableSpans:
            return
    pytest.fail("nothing was too deep")


def test_no_protobuf_is_refused_and_an_odd_id_left_out() -> None:
    with pytest.raises(UnreadableSpans):
        read_protobuf(b"\xff\xff\xff", ContentPolicy.OFF)
    assert read_protobuf(protobuf(trace="00" * 16), ContentPolicy.OFF) == ([], 1)


def test_attributes_are_bounded() -> None:
    many = [{"key": f"k{n}", "value": {"stringValue": "x" * 10_000}} for n in range(1000)]
    (span,), _ = read_json(json.dumps(export(attributes=many)).encode(), ContentPolicy.FULL)
    assert len(span.attributes) == MAX_ATTRIBUTES
    assert all(len(str(value)) <= 512 for value in span.attributes.values())


def test_redaction_takes_secrets_and_people() -> None:
    assert redacted(SECRET) == "write to [email] with [key]"
    assert content_value("x" * 10_000, ContentPolicy.HASHED) == content_value("x" * 10_000, ContentPolicy.HASHED)
    assert content_value("x", ContentPolicy.OFF) is None


def test_an_agents_own_span_stands_in_the_place_of_the_inferred_one(tmp_path: Path) -> None:
    records = [structs.replace(record, traceparent=f"00-{TRACE}-{PARENT}-01") for record in agent_run()]
    call = next(call for record in records for call in record.tool_calls)
    root = ReceivedSpan(TRACE, PARENT, None, "invoke_agent", 1, records[0].stamps.arrived_ns - MS, 2 * 10**18)
    tool = ReceivedSpan(TRACE, SPAN, PARENT, "x", 1, 1, 2, attributes={"gen_ai.tool.call.id": call.id})
    other = replace(tool, trace_id="f" * 32, span_id="1" * 16, attributes={})
    store = TraceStore(tmp_path / "t.sqlite3")
    for record in records:
        store.append(record)
    assert store.receive("default", [root, tool, other], time.time_ns())
    assert store.receive("another", [replace(root, name="theirs")], time.time_ns())
    assert store.flush(10)
    spans = store.spans_of(records)
    store.close()
    assert {span.name for span in spans} == {"invoke_agent", "x"}
    (tree,) = run_tree(records, spans)
    assert (tree.name, tree.kind) == ("invoke_agent", NodeKind.SPAN)
    nodes = [node for _, node in walk([tree])]
    of_call = [node for node in nodes if node.call_id == call.id]
    assert [(node.is_inferred, node.id) for node in of_call] == [(False, SPAN)]
    assert sum(node.kind is NodeKind.STEP for node in nodes) == len(records)
    without = [node for _, node in walk(run_tree(records))]
    assert any(node.is_inferred and node.call_id == call.id for node in without)


def test_spans_that_hang_under_themselves_are_roots() -> None:
    first = ReceivedSpan(TRACE, SPAN, PARENT, "a", 1, 1, 2)
    second = ReceivedSpan(TRACE, PARENT, SPAN, "b", 1, 1, 2)
    assert {node.name for _, node in walk(run_tree([], [first, second]))} == {"a", "b"}


def test_a_sub_agents_steps_hang_under_the_call_for_it() -> None:
    records = agent_run()
    asking = next(record for record in records if record.tool_calls)
    call = asking.tool_calls[0]
    assert asking.link is not None
    below = [
        structs.replace(
            record,
            request_id=f"child-{record.request_id}",
            link=structs.replace(
                record.link, run_id="child", parent_run_id=asking.link.run_id, parent_call_id=call.id,
                previous_request_id=None,
            ),
            tool_calls=(),
            tool_results=(),
        )
        for record in records[:2]
        if record.link is not None
    ]  # fmt: skip
    nodes = {node.id: node for _, node in walk(run_tree([*records, *below]))}
    assert {nodes[record.request_id].parent_id for record in below} == {f"tool:{asking.request_id}:{call.id}"}

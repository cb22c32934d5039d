"""Two consecutive requests compared, in each protocol: what differs first, where, and of what kind it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.diagnosis.compare import compare
from gateway.diagnosis.patterns import common_prefix, differing, told_apart
from gateway.diagnosis.sections import Kept, keep
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import EndpointProtocol, scan_body
from gateway.protocols.openai import CHAT
from tracing.detail import BreakKind, Comparison, PromptChange

Json = dict[str, Any]
FILL = "Follow the rules and be exact. " * 20


def kept(body: Json, protocol: EndpointProtocol = CHAT, answer: Json | None = None) -> Kept:
    return keep("r", protocol.read(scan_body(json.dumps(body).encode()), None), answer)


def chat() -> Json:
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": f"You help. {FILL}"},
            {"role": "user", "content": f"What is it? {FILL}"},
            {"role": "assistant", "content": "It is this."},
            {"role": "user", "content": f"Go on. {FILL}"},
        ],
    }


def messages() -> Json:
    return {
        "model": "m",
        "max_tokens": 10,
        "system": [{"type": "text", "text": f"You help. {FILL}"}],
        "tools": [{"name": "look", "description": FILL, "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"What? {FILL}"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": f"r {FILL}"}]},
        ],
    }


def told(
    make: Callable[[], Json], edit: Callable[[Json], object], protocol: EndpointProtocol
) -> tuple[Comparison, PromptChange | None]:
    body = copy.deepcopy(make())
    edit(body)
    return compare(kept(make(), protocol), kept(body, protocol), shows_words=True)


def _mark(body: Json) -> None:
    body["messages"][-1]["content"][0]["cache_control"] = {"type": "ephemeral"}


CASES: list[tuple[Callable[[], Json], Callable[[Json], object], EndpointProtocol, BreakKind, str]] = [
    (chat, lambda b: b.update(model="n"), CHAT, BreakKind.MODEL_CHANGED, "model"),
    (chat, lambda b: b.update(cache_salt="x"), CHAT, BreakKind.NAMESPACE_CHANGED, "cache_salt"),
    (chat, lambda b: b.update(chat_template_kwargs={"a": 1}), CHAT, BreakKind.TEMPLATE_CHANGED, "chat_template_kwargs"),
    (chat, lambda b: b.update(reasoning_effort="high"), CHAT, BreakKind.PARAMS_CHANGED, "reasoning_effort"),
    (chat, lambda b: b["messages"][0].update(content=f"You hinder. {FILL}"), CHAT, BreakKind.SYSTEM_EDITED,
     "messages[0].content"),
    (chat, lambda b: b["messages"][2].update(content="It is that."), CHAT, BreakKind.HISTORY_REWRITTEN,
     "messages[2].content"),
    (messages, lambda b: b["system"][0].update(text=f"You hinder. {FILL}"), MESSAGES, BreakKind.SYSTEM_EDITED,
     "system[0].text"),
    (messages, lambda b: b["tools"][0].update(description=f"x {FILL}"), MESSAGES, BreakKind.TOOLS_CHANGED,
     "tools[0].description"),
    (messages, lambda b: b["tools"].insert(0, {"name": "a", "input_schema": {"type": "object"}}), MESSAGES,
     BreakKind.TOOLS_CHANGED, "tools[0]"),
    (messages, _mark, MESSAGES, BreakKind.CACHE_CONTROL, "messages[2].content[0].cache_control"),
    (messages, lambda b: b["messages"][1]["content"][0].update(input={"a": 2}), MESSAGES, BreakKind.COUNTER,
     "messages[1].content[0].input.a"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case[3]} {case[4]}" for case in CASES])
def test_the_first_difference_is_named(
    case: tuple[Callable[[], Json], Callable[[Json], object], EndpointProtocol, BreakKind, str],
) -> None:
    make, edit, protocol, kind, path = case
    comparison, change = told(make, edit, protocol)
    assert comparison is Comparison.CHANGED
    assert change is not None
    assert (change.kind, change.path) == (kind, path)
    assert 0 <= change.kept_chars + change.repeated_chars <= change.total_chars + len(FILL)


def test_what_does_not_reach_the_prompt_changes_nothing() -> None:
    def edit(body: Json) -> None:
        body.update(temperature=0.5, max_tokens=7, user="u")
        body["messages"].append({"role": "assistant", "content": "more"})

    assert told(chat, edit, CHAT) == (Comparison.APPENDED, None)


def test_model_comes_before_messages_and_the_rest_is_named_too() -> None:
    def edit(body: Json) -> None:
        body["model"] = "n"
        body["messages"][1]["content"] = "else"

    _, change = told(chat, edit, CHAT)
    assert change is not None
    assert (change.path, change.also) == ("model", ("messages[1].content",))


@pytest.mark.parametrize(
    ("before", "after", "kind", "spans"),
    [
        ("at 2026-11-30 05:57:41 sharp", "at 2026-11-30 05:58:02 sharp", BreakKind.TIMESTAMP, (3, 22, 22)),
        ("Mon, Nov 30 2026", "Tue, Dec 1 2026", BreakKind.TIMESTAMP, (0, 16, 15)),
        ("now 1790000000 ok", "now 1790000060 ok", BreakKind.TIMESTAMP, (4, 14, 14)),
        ("today is Monday.", "today is Tuesday.", BreakKind.TIMESTAMP, (9, 15, 16)),
        ("step 9 of 20", "step 10 of 20", BreakKind.COUNTER, (5, 6, 7)),
        ("id 0f8fad5b-d9cb-469f-a165-70867728950e.", "id 7c9e6679-7425-40de-944b-e07fc1f90ae7.", BreakKind.UUID,
         (3, 39, 39)),
        ("req_8fK2mPq91LxZ here", "req_9aB7nQw02MyC here", BreakKind.UUID, (0, 16, 16)),
        ("a red fox", "a blue fox", None, (2, 5, 6)),
    ],
)  # fmt: skip
def test_dates_counters_and_identifiers_are_told_whole(
    before: str, after: str, kind: BreakKind | None, spans: tuple[int, int, int]
) -> None:
    found, spot = told_apart(before, after)
    assert found is kind
    assert (spot.start, spot.before_end, spot.after_end) == spans


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_texts_are_equal_around_what_differs(head: str, one: str, other: str, tail: str) -> None:
    before, after = head + one + tail, head + other + tail
    assert before[: common_prefix(before, after)] == after[: common_prefix(before, after)]
    if before == after:
        return
    spot = differing(before, after)
    assert before[: spot.start] == after[: spot.start]
    assert before[spot.before_end :] == after[spot.after_end :]
    assert before[spot.start : spot.before_end] != after[spot.start : spot.after_end]


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=6), st.data())
def test_a_history_that_only_grows_is_appended_and_any_prefix_of_it_shortened(
    words: list[str], data: st.DataObject
) -> None:
    history = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": f"{word} {FILL}"} for n, word in enumerate(words)
    ]
    cut = data.draw(st.integers(1, len(history)))
    whole, part = kept({"model": "m", "messages": history}), kept({"model": "m", "messages": history[:cut]})
    assert compare(part, whole, shows_words=False) == (Comparison.APPENDED, None)
    back = compare(whole, part, shows_words=False)
    assert back == ((Comparison.SHORTENED if cut < len(history) else Comparison.APPENDED), None)


def test_many_tools_are_each_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(500)]
    weighed: list[object] = []

    def counted(value: object) -> int:
        weighed.append(value)
        return len(json.dumps(value))

    monkeypatch.setattr("gateway.diagnosis.compare.weight", counted)
    added = {"type": "function", "function": {"name": "last"}}
    comparison, change = compare(
        kept({**chat(), "tools": tools}), kept({**chat(), "tools": [*tools, added]}), shows_words=False
    )
    assert comparison is Comparison.CHANGED
    assert change is not None
    assert (change.kind, change.path) == (BreakKind.TOOLS_CHANGED, "tools[500]")
    assert change.kept_chars == sum(len(json.dumps(tool)) for tool in tools)
    assert len(weighed) < 3 * len(tools)

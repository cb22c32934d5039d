"""A body of which the beginning is known is read as if nothing were known."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.beginnings import BodyMemo, _cost, words_of
from gateway.errors import BadRequest
from gateway.protocols.base import Sent, scan_body
from gateway.protocols.form import Form
from tracing.messages import message_chain, new_tool_result_ids, tool_result_ids

TEXTS = st.text(st.sampled_from('ab"\\\n é€𝄞[]{},:'), max_size=12)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
    optional={"tool_call_id": st.sampled_from(["c1", "c2"]), "extra": st.lists(st.integers(0, 3), max_size=2)},
)
ITEMS = st.one_of(MESSAGES, st.sampled_from([1, 12, "x", None, [1]]))
HEADS = st.lists(st.tuples(st.sampled_from(["model", "tools", "temperature"]), st.integers(0, 9)), max_size=3)
TAILS = st.lists(st.tuples(st.sampled_from(["stream", "messages", "n", "model"]), st.integers(0, 9)), max_size=3)
STYLES = st.tuples(st.booleans(), st.sampled_from(["", " ", "\n  "]))
Members = list[tuple[str, int]]


def written(
    head: list[tuple[str, int]], items: list[object], tail: list[tuple[str, int]], style: tuple[bool, str]
) -> bytes:
    """Return a body; names may stand in it twice."""
    ascii_only, space = style
    members = [(name, json.dumps(value)) for name, value in head]
    inner = f",{space}".join(json.dumps(item, ensure_ascii=ascii_only) for item in items)
    members.append(("messages", f"[{space}{inner}{space}]"))
    members += [(name, json.dumps(value)) for name, value in tail]
    return (
        space + "{" + f"{space},{space}".join(f'"{name}"{space}:{space}{value}' for name, value in members) + "}"
    ).encode()


def read(memo: BodyMemo, body: bytes, owner: str = "t") -> tuple[Form, bool]:
    """Read a body as the pipeline does; check everything against reading it whole."""
    known = memo.find(owner, body)
    sent = scan_body(body, "messages", known.opening if known is not None else None)
    form, whole = sent.form, scan_body(body).form
    assert form.members == whole.members
    assert form.values == whole.values
    assert (form.text, form.start, form.end) == (whole.text, whole.start, whole.end)
    assert form.edited({"stream": True}) == whole.edited({"stream": True})
    messages = form.values.get("messages")
    words = None
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        is_as_sent = sum(member.name == "messages" for member in form.members) == 1
        words = words_of(messages, known if is_as_sent else None)
        assert words.chain == message_chain(messages)
        assert words.result_ids == tool_result_ids(messages)
        assert words.new_result_ids == new_tool_result_ids(messages)
    memo.keep(owner, sent, "messages", known, words)
    return form, known is not None


@given(
    first=st.lists(ITEMS, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 8), st.lists(ITEMS, min_size=1, max_size=3)), max_size=5),
    head=HEADS,
    tails=st.lists(TAILS, min_size=6, max_size=6),
    style=STYLES,
)
def test_what_is_known_changes_nothing(
    first: list[object],
    steps: list[tuple[int, list[object]]],
    head: Members,
    tails: list[Members],
    style: tuple[bool, str],
) -> None:
    memo, items = BodyMemo(), list(first)
    read(memo, written(head, items, tails[0], style))
    for (kept, added), tail in zip(steps, tails[1:], strict=False):
        items = items[:kept] + added
        read(memo, written(head, items, tail, style))
        read(memo, written(head, items, tails[0], style))


@given(cut=st.integers(1, 60), junk=st.sampled_from(["", "]", "}", ",", '"', "]]", "]}}", "\x00", "\ud800"]))
def test_a_broken_body_is_refused_as_if_nothing_were_known(cut: int, junk: str) -> None:
    memo, items = BodyMemo(), [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    read(memo, written([], items, [], (True, "")))
    body = written([("model", 1)], [*items, {"role": "user", "content": "three"}], [("n", 1)], (True, ""))
    known = written([], [*items, {"role": "user", "content": "three"}], [("n", 1)], (True, ""))
    for text in (body, known):
        broken = text[: max(len(text) - cut, 1)] + junk.encode("utf-8", "surrogatepass")
        found = memo.find("t", broken)
        with pytest.raises(BadRequest) as whole:
            scan_body(broken)
        with pytest.raises(BadRequest) as behind:
            scan_body(broken, "messages", found.opening if found is not None else None)
        assert str(behind.value) == str(whole.value)


def test_only_the_new_messages_are_read() -> None:
    memo = BodyMemo()
    items: list[object] = [{"role": "system", "content": "s" * 5000}, {"role": "user", "content": "go"}]
    read(memo, written([], items, [], (True, " ")))
    for step in range(20):
        items += [{"role": "assistant", "content": f"a{step}"}, {"role": "user", "content": f"u{step}"}]
        body = written([], items, [("n", step)], (True, " "))
        known = memo.find("t", body)
        assert known is not None
        assert len(known.opening.items) == len(items) - 2
        form, _ = read(memo, body)
        assert len(form.ends) == 2


def test_only_the_new_messages_are_read_of_many_runs_in_turn() -> None:
    memo, rng, runs = BodyMemo(), random.Random(3), list[list[object]]()
    for number in range(120):  # one framework's prompt, and tasks of many lengths that begin alike
        task = f"Solve the following task: {'please ' * rng.randrange(60)}{number}"
        runs.append([{"role": "system", "content": "s" * 500}, {"role": "user", "content": task}])
    for step in range(12):
        for items in runs:
            items += [{"role": "assistant", "content": "a" * rng.randrange(300)}, {"role": "user", "content": "go on"}]
            body = written([], items, [], (True, " "))
            known = memo.find("t", body)
            if step:
                assert known is not None
                assert len(known.opening.items) == len(items) - 2
            read(memo, body)


def test_what_one_caller_sent_is_not_known_to_another() -> None:
    memo = BodyMemo()
    body = written([], [{"role": "user", "content": "secret"}], [], (True, ""))
    read(memo, body, "a")
    assert memo.find("a", body) is not None
    assert memo.find("b", body) is None


def test_memory_stays_within_its_bound_and_the_oldest_ends_go_first() -> None:
    memo, rng = BodyMemo(limit_bytes=200_000), random.Random(5)
    for _ in range(300):
        items = [{"role": "user", "content": rng.randbytes(300).hex()} for _ in range(rng.randrange(1, 9))]
        read(memo, written([], items, [], (True, "")))
        assert memo.used_bytes <= 200_000
    last = written([], items, [], (True, ""))
    assert memo.find("t", last) is not None
    memo.find("t", last)
    assert memo.used_bytes == _measured(memo)


def _measured(memo: BodyMemo) -> int:
    nodes = list(memo._roots.values())
    total = 0
    while nodes:
        below = list(nodes.pop().children._nodes.values())
        total += sum(map(_cost, below))
        nodes += below
    return total


def test_a_beginning_that_was_forgotten_meanwhile_is_not_gone_on_from() -> None:
    memo = BodyMemo(limit_bytes=10_000)
    items: list[object] = [{"role": "user", "content": "x" * 100}]
    body = written([], items, [], (True, ""))
    read(memo, body)
    longer = written([], [*items, {"role": "user", "content": "more"}], [], (True, ""))
    known = memo.find("t", longer)
    assert known is not None
    for number in range(20):
        read(memo, written([], [{"role": "user", "content": str(number) * 300}], [], (True, "")))
    sent: Sent = scan_body(longer, "messages", known.opening)
    memo.keep("t", sent, "messages", known, None)
    assert memo.find("t", longer) is None
    assert memo.used_bytes == _measured(memo)

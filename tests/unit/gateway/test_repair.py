"""Prefix repair: what each policy changes of a body's text, and that nothing else of it changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.form import scan
from gateway.repair.policies import POLICIES
from gateway.repair.splice import spliced


def repaired(name: str, body: str) -> str:
    form = scan(body.encode())
    return spliced(form.text, POLICIES[name](form))


def chat(system: Any, **members: Any) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Today is 2026-11-30, é"}]
    return json.dumps({"model": "m", "messages": messages, **members})


def test_a_date_at_the_front_goes_to_the_end() -> None:
    system = "You are an agent.\nToday's date: 2026-11-30.\nBe brief.\nNever guess."
    wanted = "You are an agent.\nBe brief.\nNever guess.\nToday's date: 2026-11-30."
    assert json.loads(repaired("move-volatile-lines", chat(system))) == json.loads(chat(wanted))


@pytest.mark.parametrize(
    "line",
    [
        "Current time: 09:31:07 UTC",
        "It is Monday, November 30, 2026",
        "session 3f2b8c1e-90ab-4cde-8123-0123456789ab",
        "run 9f86d081884c7d659a2feaa0c55ad015",
        "started at 1764489600",
    ],
)
def test_what_changes_from_run_to_run_is_known(line: str) -> None:
    moved = json.loads(repaired("move-volatile-lines", chat(f"{line}\nRules.")))
    assert moved["messages"][0]["content"] == f"Rules.\n{line}"


@pytest.mark.parametrize("system", ["Rules.", "Rules.\nMore rules of the house", "", "x" * 400 + " 2026-11-30\nRules"])
def test_what_does_not_change_stays(system: str) -> None:
    for name in POLICIES:
        assert repaired(name, chat(system)) == chat(system)


def test_a_date_that_stands_at_the_end_already_stays_where_it_is() -> None:
    body = chat("Rules.\nDate: 2026-11-30")
    assert repaired("move-volatile-lines", body) == body


def test_lines_of_several_blocks_go_to_the_end_of_the_last_and_an_empty_block_goes() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cch=ab12;"},
        {"type": "text", "text": "You are Claude.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Date: 2026-11-30\nTools follow."},
    ]
    body = json.dumps({"system": blocks, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9})
    told = json.loads(repaired("drop-attribution", body))
    assert told["system"] == blocks[1:]
    moved = json.loads(repaired("move-volatile-lines", body))["system"]
    assert moved[1] == blocks[1]
    assert moved[2]["text"] == "Tools follow.\nDate: 2026-11-30"


def test_escapes_and_spelling_stay() -> None:
    body = (
        '{"messages":[ {"content":"2026-01-01\\nA\\u00e9\\\\n \\/ \\"q\\"\\nB", "role":"system"} ] , "temperature":1.0}'
    )
    wanted = (
        '{"messages":[ {"content":"A\\u00e9\\\\n \\/ \\"q\\"\\nB\\n2026-01-01", "role":"system"} ] , "temperature":1.0}'
    )
    assert repaired("move-volatile-lines", body) == wanted


def test_tools_are_sorted_by_name_as_they_were_spelled() -> None:
    body = '{"tools":[ {"type":"function","function":{"name":"b","x":1.50}},\n {"function":{"name":"a"}} , {"odd":1}]}'
    wanted = (
        '{"tools":[ {"function":{"name":"a"}},\n {"type":"function","function":{"name":"b","x":1.50}} , {"odd":1}]}'
    )
    assert repaired("sort-tools", body) == wanted
    assert repaired("sort-tools", wanted) == wanted


def test_tools_that_only_their_vendors_models_know_are_taken_out() -> None:
    kept = ['{"type": "function", "name":"a"}', '{"name":"b","input_schema":{}}', '{"type":"custom","name":"c"}']
    kept += ['{"type":"namespace","name":"d","tools":[]}']
    body = (
        f'{{"tools":[ {{"type":"web_search"}},{kept[0]} , {kept[1]},\n{kept[2]},{{"type":"bash_20250124"}},{kept[3]}]}}'
    )
    wanted = f'{{"tools":[{",".join(kept)}]}}'
    assert repaired("drop-vendor-tools", body) == wanted
    assert repaired("drop-vendor-tools", wanted) == wanted
    assert repaired("drop-vendor-tools", '{"tools":[{"type":"web_search"}],"x":1.0}') == '{"tools":[],"x":1.0}'


def test_members_of_tools_are_put_in_order_at_every_depth() -> None:
    body = '{"b":1,"tools":[{"name":"t","input_schema":{"z":[{"d":1e3,"c":2}],"a":"\\u0041"}}],"a":2}'
    wanted = '{"b":1,"tools":[{"input_schema":{"a":"\\u0041","z":[{"c":2,"d":1e3}]},"name":"t"}],"a":2}'
    assert repaired("canonical-keys", body) == wanted


def test_a_name_that_stands_twice_is_left_alone() -> None:
    body = '{"tools":[{"b":1,"a":2,"b":3}]}'
    assert repaired("canonical-keys", body) == body


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.sampled_from('ab"\\\né 2026-11-30'), max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcname"), inner, max_size=3),
    max_leaves=12,
)


@given(
    system=VALUES,
    tools=VALUES,
    messages=VALUES,
    style=st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    raw=st.booleans(),
)
def test_any_body_stays_json_and_all_that_a_policy_does_not_mean_stays(
    system: Any, tools: Any, messages: Any, style: tuple[str, str] | None, raw: bool
) -> None:
    body = {"system": system, "tools": tools, "messages": messages, "n": 1}
    text = json.dumps(body, separators=style, ensure_ascii=raw)
    for name in POLICIES:
        once = repaired(name, text)
        told = json.loads(once)
        assert repaired(name, once) == once
        if name == "canonical-keys":
            assert told == body
        if name == "sort-tools":
            assert {**told, "tools": 0} == {**body, "tools": 0}
            if isinstance(tools, list):
                assert sorted(map(repr, told["tools"])) == sorted(map(repr, tools))
        if name == "drop-vendor-tools" and isinstance(tools, list):
            assert [tool for tool in tools if tool in told["tools"]] == told["tools"]
        if name in ("drop-attribution", "move-volatile-lines"):
            assert told["tools"] == tools

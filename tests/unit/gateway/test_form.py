"""Bodies stay as they were, byte for byte, except where an edit says so."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.protocols.form import LONG_CHARS, MAX_DEPTH, FormError, Raw, scan

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
_relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_names = st.sampled_from(["model", "messages", "stream", "cache_salt", "é", 'a"b', "x"]) | st.text(max_size=5)
_space = st.text(alphabet=" \t\r\n", max_size=2)


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    members, parts = [], []
    for _ in range(draw(st.integers(0, 6))):
        name, ascii_only = draw(_names), draw(st.booleans())
        text = json.dumps(draw(_json), ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
        members.append((name, text))
        key = json.dumps(name, ensure_ascii=ascii_only)
        parts.append(f"{draw(_space)}{key}{draw(_space)}:{draw(_space)}{text}{draw(_space)}")
    return draw(_space) + "{" + (",".join(parts) or draw(_space)) + "}" + draw(_space), members


@_relaxed
@given(_bodies())
def test_values_are_those_of_json_loads(body: tuple[str, list[tuple[str, str]]]) -> None:
    text = body[0].encode()
    form = scan(text)
    assert form.values == json.loads(text)
    assert [form.text[m.start : m.end] for m in form.members] == [value for _, value in body[1]]


@_relaxed
@given(_bodies())
def test_no_edit_means_the_same_object_text(body: tuple[str, list[tuple[str, str]]]) -> None:
    assert scan(body[0].encode()).edited({}).encode() == body[0].encode().strip(b" \t\r\n")


@_relaxed
@given(_bodies(), st.dictionaries(_names, _json, max_size=3), st.frozensets(_names, max_size=2))
def test_an_edit_changes_its_members_and_nothing_else(
    body: tuple[str, list[tuple[str, str]]], edits: dict[str, Any], drop: frozenset[str]
) -> None:
    form = scan(body[0].encode())
    after = scan(form.edited(edits, drop=drop).encode())
    expected = {k: v for k, v in form.values.items() if k not in drop} | {
        k: v for k, v in edits.items() if k not in drop
    }
    assert after.values == expected
    kept = [form.text[m.start : m.end] for m in form.members if m.name not in edits and m.name not in drop]
    old = {m.name for m in form.members}
    assert [after.text[m.start : m.end] for m in after.members if m.name not in edits and m.name in old] == kept


@_relaxed
@given(st.lists(_json, max_size=5), _space)
def test_long_texts_are_read_alike(items: list[Any], space: str) -> None:
    array = "[" + ",".join(f"{space}{json.dumps(item)}{space}" for item in items) + (space if not items else "") + "]"
    text = f'{{"long":"{"x" * LONG_CHARS}","items":{space}{array},"after":1}}'
    form = scan(text.encode())
    assert form.values == json.loads(text)
    assert form.edited({"after": 2}) == text[:-2] + "2}"


@pytest.mark.parametrize("array", ["[", "[1", "[1,", "[1,]", "[1 2]", "[,]", "[tru]"])
def test_long_texts_are_refused_alike(array: str) -> None:
    with pytest.raises(FormError):
        scan(f'{{"long":"{"x" * LONG_CHARS}","items":{array}'.encode())
    with pytest.raises(FormError):
        scan(f'{{"long":"{"x" * LONG_CHARS}","items":{array}}}'.encode())


def test_escapes_order_numbers_and_spaces_survive() -> None:
    body = (
        b'{ "b":1.0e2 , "a" : "\\u00e9\\/x", "n":123456789012345678901234567890,"stream":true , "z":{"y":1,"x":[1, 2]}}'
    )
    assert scan(body).edited({"stream": False}).encode() == body.replace(b"true", b"false")
    assert scan(body).edited({"new": Raw("[ 1]")}).encode() == body[:-1] + b',"new":[ 1]}'


def test_an_edit_reaches_every_occurrence_however_it_is_spelled() -> None:
    body = b'{"cache_salt":"a","x":1,"cache\\u005fsalt":"b"}'
    assert scan(body).edited({"cache_salt": "s"}) == '{"cache_salt":"s","x":1,"cache\\u005fsalt":"s"}'
    assert scan(body).values["cache_salt"] == "b"


@pytest.mark.parametrize(
    ("body", "drop", "left"),
    [
        ('{"a":1,"b":2}', {"a"}, '{"b":2}'),
        ('{"a":1,"b":2}', {"b"}, '{"a":1}'),
        ('{"a":1 , "b":2 }', {"b"}, '{"a":1 }'),
        ('{"a":1}', {"a"}, "{}"),
        ('{"a":1,"b":2,"c":3}', {"b", "c"}, '{"a":1}'),
        ('{"a":1,"b":2,"c":3}', {"a", "c"}, '{"b":2}'),
    ],
)
def test_a_dropped_member_takes_one_comma_with_it(body: str, drop: set[str], left: str) -> None:
    assert scan(body.encode()).edited({}, drop=frozenset(drop)) == left


def test_nested_objects_are_edited_in_place() -> None:
    form = scan(b'{"stream_options":{ "continuous_usage_stats":true },"m":1}')
    nested = form.nested("stream_options")
    assert nested is not None
    edit = Raw(nested.edited({"include_usage": True}))
    assert form.edited({"stream_options": edit}) == (
        '{"stream_options":{ "continuous_usage_stats":true,"include_usage":true },"m":1}'
    )
    assert form.nested("m") is None
    assert form.nested("absent") is None


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{bad", b"[]", b"null", b'"x"', b"{}{}", b"\xff{}", b"\xef\xbb\xbf{}", b"{1:2}", b"{,}"),
        *(b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1,}', b'{"a" 1}', b'{"a":}', b'{"a":"\x01"}', b'{"a":tru}'),
        *(b'{"a":1', b'{"a":"x', b'{"a":1 "b":2}', b'{"a":' + b"9" * 10_000 + b"}", b'{"a":' + b"[" * 200_000),
    ],
    ids=range(22),
)
def test_anything_but_one_object_is_refused_without_quoting_it(body: bytes) -> None:
    with pytest.raises(FormError) as caught:
        scan(body)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("where", ['{"model":%s}', '{"a":{"b":[%s]}}', '{"a":1,%s:2}', '{"a":%s,"a":1}'])
@pytest.mark.parametrize("half", ["\\ud800", "x\\uDC00", "\\ude00\\ud83d", "\\\\\\ud83d", "\\ud83d\\u0041"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(where: str, half: str) -> None:
    with pytest.raises(FormError):
        scan((where % f'"{half}"').encode())


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "\\\\ud83d", "\\ud7ff", "\\ue000"])
def test_whole_pairs_and_what_only_looks_like_half_of_one_are_read(text: str) -> None:
    body = f'{{"a":["{text}"]}}'
    assert scan(body.encode()).values == json.loads(body)


@pytest.mark.parametrize("mark", ["[]", "{}"])
def test_depth_has_a_limit_that_length_has_not(mark: str) -> None:
    def nested(depth: int) -> bytes:
        return (('{"a":' if mark == "{}" else "[") * depth + "1" + mark[1] * depth).encode()

    wide = b",".join([b"[1]"] * 1000)
    scan(b'{"v":[' + wide + b'],"w":' + nested(MAX_DEPTH) + b"}")
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(FormError, match="deep"):
            scan(b'{"v":[' + wide + b'],"w":' + nested(depth) + b"}")

"""The compiled reader of msgpack against the interpreted one, which stands on msgspec."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import unpack

READERS = [unpack.INTERPRETED, unpack.unpack]  # one and the same where nothing was compiled

integers = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 300) | st.integers(2**16 - 2, 2**16 + 2)
values = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | st.text(max_size=40) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=18),
    max_leaves=40,
)
numbers = st.lists(integers, max_size=70)


@given(values | numbers)
def test_both_readers_agree(value: object) -> None:
    raw = msgspec.msgpack.encode(value)
    assert unpack.unpack(raw) == unpack.INTERPRETED(raw)


@given(st.binary(max_size=60))
def test_both_readers_refuse_the_same_bytes(raw: bytes) -> None:
    def outcome(read: object) -> object:
        try:
            return ("value", repr(read(raw)))  # type: ignore[operator]
        except (ValueError, TypeError):
            return "refused"

    if not any(0xC7 <= byte <= 0xC9 or 0xD4 <= byte <= 0xD8 for byte in raw):  # extensions: None here, kept there
        assert outcome(unpack.unpack) == outcome(unpack.INTERPRETED)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1] * 7, [1] * 7),
        ([1] * 8, array("I", [1] * 8)),
        ([2**32 - 1] * 8, array("I", [2**32 - 1] * 8)),
        ([2**32] + [0] * 7, array("Q", [2**32] + [0] * 7)),
        ([-1] * 8, array("Q", [2**64 - 1] * 8)),
        ([2**64 - 1, -(2**63)] * 4, array("Q", [2**64 - 1, 2**63] * 4)),
        ([1, None] * 4, [1, None] * 4),
        ([1] * 8 + [[2] * 8], [*[1] * 8, array("I", [2] * 8)]),
        ([True] * 8, [True] * 8),
        ([1.0] * 8, [1.0] * 8),
    ],
)
def test_long_lists_of_integers_come_out_packed(read: object, value: object, expected: object) -> None:
    got = read(msgspec.msgpack.encode(value))  # type: ignore[operator]
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("width", [0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3])
def test_integers_need_not_be_in_their_shortest_form(read: object, width: int) -> None:
    one = bytes([width]) + (1).to_bytes(1 << ((width - 0xCC) & 3), "big")
    raw = b"\xdc\x00\x10" + one * 16
    assert read(raw) == array("I", [1] * 16)  # type: ignore[operator]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x01\x01",
     b"\xa1\xff", b"\xcf\x00", b"\xdc\x00\x09" + b"\x01" * 8],
)  # fmt: skip
def test_broken_bytes_are_refused(read: object, raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each reader words it in its own way
        read(raw)  # type: ignore[operator]


@pytest.mark.parametrize("read", READERS)
def test_bottomless_nesting_is_refused(read: object) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read(b"\x91" * 100_000)  # type: ignore[operator]

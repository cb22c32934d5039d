"""Sealed records: nothing that was damaged, moved or written by another format is believed."""

from __future__ import annotations

import pytest

from kvstore import codec
from kvstore.codec import IndexRecord, PageHeader, seal, sealed_length, unseal, verify_header
from kvstore.errors import RecordError
from tests.samples.pages import LAYOUT, chain

(KEY, META), (OTHER_KEY, _) = chain(2, salt="tenant")
HEADER = PageHeader(KEY, LAYOUT.page_bytes, 12345, META)


def refusal(key: bytes, data: bytes, kind: type = PageHeader) -> str:
    with pytest.raises(RecordError) as refused:
        unseal(key, data, kind)
    return refused.value.reason


def test_a_record_comes_back_with_its_length() -> None:
    sealed = seal(KEY, HEADER)
    assert unseal(KEY, sealed + b"page bytes", PageHeader) == (HEADER, len(sealed))
    assert sealed_length(sealed[:30]) == len(sealed)
    record = IndexRecord(HEADER, slot=3, generation=2**63 - 1, sequence=9)
    assert unseal(KEY, seal(KEY, record), IndexRecord)[0] == record


def test_every_flipped_bit_is_refused() -> None:
    sealed = seal(KEY, HEADER)
    for position in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[position // 8] ^= 1 << position % 8
        assert refusal(KEY, bytes(flipped)) in {"record", "format"}


def test_every_cut_is_refused() -> None:
    sealed = seal(KEY, HEADER)
    assert {refusal(KEY, sealed[:length]) for length in range(len(sealed))} == {"record"}


def test_a_record_under_another_key_is_refused() -> None:
    assert refusal(OTHER_KEY, seal(KEY, HEADER)) == "record"


def test_an_older_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "RECORD_VERSION", codec.RECORD_VERSION - 1)
    old = seal(KEY, HEADER)
    monkeypatch.undo()
    assert refusal(KEY, old) == "format"


def test_a_record_of_another_kind_is_refused() -> None:
    assert refusal(KEY, seal(KEY, HEADER), IndexRecord) == "format"


@pytest.mark.parametrize(("key", "length", "reason"), [(OTHER_KEY, LAYOUT.page_bytes, "key"), (KEY, 1, "length")])
def test_a_header_speaks_of_one_page(key: bytes, length: int, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        verify_header(HEADER, key, length)
    verify_header(HEADER, KEY, LAYOUT.page_bytes)


def test_what_is_no_record_claims_no_length() -> None:
    assert sealed_length(b"") == sealed_length(b"x" * 100) == 0

"""Keys and the environment: what is asked for is had or refused, and no key is used twice for a nonce."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from kvstore.at_rest import ALL, NONE, AtRest, Chosen, at_rest_from_environment
from kvstore.codec import PageHeader, StoredForm
from kvstore.encryption import KEY_BYTES, KeyRing, PageCipher, key_id
from kvstore.errors import MediumError, RecordError
from kvstore.page import Namespace
from tests.samples.pages import LAYOUT, chain, page_data

ONE, TWO = os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)
((KEY, META),) = chain(1, salt="tenant")
HEADER = PageHeader(KEY, LAYOUT.page_bytes, 1234, META)


def sealed(cipher: PageCipher, data: bytes) -> tuple[PageHeader, bytes]:
    out = bytearray(len(data))
    header = cipher.seal(HEADER, StoredForm(len(data)), memoryview(data), memoryview(out))
    return header, bytes(out)


def test_keys_are_read_in_hex_and_base64_and_never_quoted(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ONE.hex()}\n\n{base64.b64encode(TWO).decode()}\n")
    told = at_rest_from_environment({"KEEPWARM_PAGES_KEYS_FILE": str(path), "PATH": "/bin"})
    assert told.keys is not None
    assert told.keys.writing_id == key_id(ONE)
    assert (told.encrypts, told.fp8, told.is_plain) == (ALL, NONE, False)
    both = at_rest_from_environment({"KEEPWARM_PAGES_KEYS": f"{TWO.hex()},{ONE.hex()}"})
    assert both.keys is not None
    assert both.keys.writing_id == key_id(TWO)
    for text in ("", "secret", ONE.hex()[:-2], f"{ONE.hex()},secret"):
        path.write_text(text)
        with pytest.raises(MediumError, match="not one or more keys") as refused:
            KeyRing.from_file(path)
        assert "secret" not in str(refused.value).replace(str(path), "")
    with pytest.raises(MediumError, match="cannot be read"):
        at_rest_from_environment({"KEEPWARM_PAGES_KEYS_FILE": str(tmp_path / "none")})


def test_namespaces_are_named_in_the_environment() -> None:
    told = at_rest_from_environment({"KEEPWARM_PAGES_FP8": '[["tenant", null]]', "KEEPWARM_PAGES_FP8_OF": "bfloat16"})
    assert told == AtRest(fp8=Chosen(namespaces=frozenset({Namespace("tenant")})), fp8_of="bfloat16")
    assert Namespace("tenant") in told.fp8
    assert Namespace() not in told.fp8
    assert at_rest_from_environment({}) == AtRest()
    assert at_rest_from_environment({"KEEPWARM_PAGES_FP8": "all"}).fp8 == ALL


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("FP8", "some", "'all', 'none' or JSON"), ("ENCRYPT", "all", "without"), ("KEY", "x", "unknown")],
)
def test_what_cannot_be_had_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(MediumError, match=said):
        at_rest_from_environment({f"KEEPWARM_PAGES_{name}": value})


def test_equal_pages_look_different_and_open_alike() -> None:
    data, cipher = page_data(KEY), PageCipher(KeyRing([ONE]))
    written = [sealed(cipher, data), sealed(cipher, data), sealed(PageCipher(KeyRing([ONE])), data)]
    assert len({stored for _, stored in written}) == len({header.form.envelope.secret for header, _ in written}) == 3
    for header, stored in written:
        opened, out = cipher.open_header(header), bytearray(len(data))
        assert (opened.checksum, opened.meta) == (HEADER.checksum, META)
        cipher.open(opened, memoryview(stored), memoryview(out))
        assert bytes(out) == data


def test_a_page_under_another_name_or_length_or_key_is_refused() -> None:
    cipher = PageCipher(KeyRing([ONE]))
    header, stored = sealed(cipher, page_data(KEY))
    other = chain(1, salt="other")[0][0]
    moved = PageHeader(other, header.length, 0, header.meta, 0, header.form)
    with pytest.raises(RecordError, match="authentication"):
        cipher.open_header(moved)
    with pytest.raises(RecordError, match="authentication"):
        cipher.open(moved, memoryview(stored), memoryview(bytearray(len(stored))))
    with pytest.raises(RecordError, match="unknown_key"):
        PageCipher(KeyRing([TWO])).open_header(header)
    assert PageCipher(KeyRing([TWO, ONE])).open_header(header).meta == META


def test_a_child_of_a_fork_does_not_number_as_its_parent_does() -> None:
    cipher = PageCipher(KeyRing([ONE]))
    sealed(cipher, b"x" * 100)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            header, _ = sealed(cipher, b"x" * 100)
            os.write(writing, header.form.envelope.salt)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    header, _ = sealed(cipher, b"x" * 100)
    assert os.read(reading, 64) != header.form.envelope.salt
    os.close(reading)
    os.close(writing)

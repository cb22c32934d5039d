"""Pages that nobody reads who has the disk or the pool and not the key: AES-256-GCM from the ``cryptography`` library.

A page's bytes are encrypted, and so is what its header tells of it (tokens, salt, adapter, checksum). What stays in the
clear is its key (a digest of its tokens), its length, when it ends and which key it is under. The page's name is
authenticated with both, so that a page moved under another name is refused.

Each process that writes draws a salt, derives a key of its own from it (HKDF-SHA256) and numbers its messages: no nonce
is used twice under one key, however many processes write for however long. Reading derives the same key from the salt
that lies with the page. A key file holds one key a line, 32 bytes in hex or base64; the first writes, all read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.codec import Envelope, PageHeader, StoredForm
from kvstore.errors import MediumError, RecordError
from kvstore.page import PageKey, PageMeta

KEY_BYTES = 32
_NOTHING = PageMeta(None, b"")
_FORM = struct.Struct("<QQ")


class KeyRing:
    """Keys by what names them. The first writes; all read."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Raises ``MediumError`` unless there is one at least and each has 32 bytes."""
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise MediumError(f"keys for pages have {KEY_BYTES} bytes each, and there is one at least")
        self._keys = {key_id(key): key for key in keys}
        self.writing_id = key_id(keys[0])
        self.derived = lru_cache(maxsize=1024)(self._derive)  # by (key id, salt): one for each process that wrote

    @classmethod
    def parse(cls, text: str, where: str) -> KeyRing:
        """Read keys, one a line or after a comma. Raises ``MediumError``, which never quotes them."""
        try:
            return cls([_decode(word) for word in text.replace(",", "\n").split("\n") if word.strip()])
        except (ValueError, MediumError):
            raise MediumError(f"{where}: not one or more keys of {KEY_BYTES} bytes in hex or base64") from None

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Read a key file. Raises ``MediumError``."""
        try:
            return cls.parse(path.read_text(encoding="ascii"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise MediumError(f"the key file {path} cannot be read: {error}") from error

    def _derive(self, name: bytes, salt: bytes) -> bytes:
        key = self._keys.get(name)
        if key is None:
            raise RecordError("unknown_key")
        return HKDF(SHA256(), KEY_BYTES, salt, b"keepwarm page").derive(key)


class PageCipher:
    """Seals and opens the pages of one tier. Thread-safe."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._pid = 0
        self._salt = b""
        self._numbers = count()

    def seal(self, header: PageHeader, form: StoredForm, data: memoryview, out: memoryview) -> PageHeader:
        """Encrypt ``data`` into ``out`` of the same length; return the header that goes with it, in its ``form``."""
        salt, number = self._next()
        name = self._ring.writing_id
        key = self._ring.derived(name, salt)
        bound = _bound(header.key, form)
        body = Cipher(AES(key), GCM(_nonce(2 * number))).encryptor()
        body.authenticate_additional_data(bound)
        body.update_into(data, out)
        body.finalize()
        told = msgspec.msgpack.encode((header.checksum, header.meta))
        secret = AESGCM(key).encrypt(_nonce(2 * number + 1), told, bound)
        envelope = Envelope(name, salt, number, body.tag, secret)
        closed = StoredForm(form.length, form.narrow, envelope)
        return PageHeader(header.key, header.length, 0, _NOTHING, header.expires_at_s, closed)

    def open_header(self, header: PageHeader) -> PageHeader:
        """Return the header with what is told only to those who have the key. Raises ``RecordError``."""
        form = header.form
        if form is None or form.envelope is None:
            return header
        envelope = form.envelope
        key = self._ring.derived(envelope.key_id, envelope.salt)
        try:
            nonce = _nonce(2 * envelope.number + 1)
            told = AESGCM(key).decrypt(nonce, envelope.secret, _bound(header.key, form))
            checksum, meta = msgspec.msgpack.decode(told, type=tuple[int, PageMeta])
        except (InvalidTag, msgspec.DecodeError, OverflowError, ValueError):
            raise RecordError("authentication") from None
        return PageHeader(header.key, header.length, checksum, meta, header.expires_at_s, form)

    def open(self, header: PageHeader, stored: memoryview, out: memoryview) -> None:
        """Decrypt into ``out`` of the same length. Raises ``RecordError``; ``out`` then has unspecified content."""
        form = header.form
        envelope = None if form is None else form.envelope
        if form is None or envelope is None:
            raise ValueError("a page that is not encrypted is opened")
        key = self._ring.derived(envelope.key_id, envelope.salt)
        try:
            body = Cipher(AES(key), GCM(_nonce(2 * envelope.number), envelope.tag)).decryptor()
            body.authenticate_additional_data(_bound(header.key, form))
            body.update_into(stored, out)
            body.finalize()
        except (InvalidTag, OverflowError, ValueError):
            raise RecordError("authentication") from None

    def _next(self) -> tuple[bytes, int]:
        """Return this process's salt and a number that it has not used with it."""
        with self._lock:
            if self._pid != os.getpid():  # a child of a fork would number as its parent does
                self._pid, self._salt, self._numbers = os.getpid(), secrets.token_bytes(16), count()
            return self._salt, next(self._numbers)


def key_id(key: bytes) -> bytes:
    """Return the 8 bytes that name a key and tell nothing of it."""
    return hashlib.sha256(b"keepwarm key id" + key).digest()[:8]


def _bound(key: PageKey, form: StoredForm) -> bytes:
    return key + _FORM.pack(form.length, len(form.narrow)) + form.narrow.encode()


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _decode(word: str) -> bytes:
    text = word.strip()
    try:
        return bytes.fromhex(text)
    except ValueError:
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError("neither hex nor base64") from error

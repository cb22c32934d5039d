"""Token ids to text as they come: whole characters only, and nothing that may turn out to be a stop string.

A token is a run of bytes, and a character may be spread over several tokens. ``TokenBytes`` gives each token's bytes,
``TextStream`` feeds them to an incremental UTF-8 decoder and holds back what could be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every token of one tokenizer; special tokens have none. Immutable, so safe for any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the table: O(vocabulary), some 50 ms for 50,000 tokens."""
        added = tokenizer.get_added_tokens_decoder()
        convert = _from_byte_level if _is_byte_level(tokenizer) else _from_metaspace
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        table: list[bytes] = []
        for token_id in range(size):
            token = added.get(token_id)
            if token is not None:
                table.append(b"" if token.special else token.content.encode())
            else:
                table.append(convert(tokenizer.id_to_token(token_id) or ""))
        self._table = table

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes; none for an id beyond the vocabulary (models pad theirs)."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""


class TextStream:
    """The text of one answer as its tokens arrive."""

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = ()) -> None:
        """``stop`` are strings that end the answer and are not part of it; empty ones are ignored."""
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.matched_stop: str | None = None

    def feed(self, token_id: int) -> str:
        """Return the text that this token made certain, often none. Nothing comes after ``matched_stop`` is set."""
        if self.matched_stop is not None:
            return ""
        return self._release(self._decoder.decode(self._bytes[token_id]))

    def finish(self) -> str:
        """Return what was held back, with U+FFFD for a character that was never finished."""
        if self.matched_stop is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.matched_stop is not None else text + held

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:  # the earliest wins; of those, the longest
            at, _, self.matched_stop = min(found)
            certain, self._held = self._held[:at], ""
            return certain
        keep = max(overlap(self._held, stop) for stop in self._stop)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``mark``, but not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping of printable characters to bytes: those that print stand for themselves."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # a token outside the alphabet stands for itself
        return token.encode()


def _from_metaspace(token: str) -> bytes:
    """SentencePiece's ways: ``▁`` is a space and ``<0xE4>`` one byte."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

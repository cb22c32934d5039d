"""Words: what a byte-level tokenizer splits plain ASCII text into, each encoded once and remembered.

Such a tokenizer first cuts a text into words by regular expressions and then encodes each word by itself, so the ids of
a text are those of its words in a row. The library does both anew for every text, and carries along where each piece
came from; agents' texts are made of the same words again and again. Looking them up takes a tenth of the time.

Only what is certain is done here: the expressions are read from the tokenizer itself and translated for ASCII, where
Python's and the library's agree on every class. Any other tokenizer, and any other text, is left to the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from engine_adapter.ids import Ids
from engine_adapter.substrings import Substrings
from engine_adapter.word_table import word_table

MAX_CHARS = 1 << 15
"""Longer texts are the library's, which lets other threads run meanwhile."""

_MAX_WORD_CHARS = 64
_MAX_WORDS = 1 << 17
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASSES: Mapping[str, str] = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "Nd": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<=>\^`|~",
    "M": "",
    "Lt": "",
    "Lm": "",
    "Lo": "",
}
_BYTE_LEVEL = ByteLevel(add_prefix_space=False, use_regex=False)
_SPELLINGS = {code: _BYTE_LEVEL.pre_tokenize_str(chr(code))[0][0] for code in range(128)}
_PARTS = re.compile(r"\\p\{(\w+)\}|\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)


class Words:
    """One tokenizer's words. Threads may share it; it remembers a bounded number of short ones."""

    def __init__(self, tokenizer: Tokenizer, expressions: Sequence[str], added: Iterable[str]) -> None:
        """Raises ``re.error``."""
        self._tokenizer, self._expressions = tokenizer, expressions
        self._model = tokenizer.model  # asked for a word, it spares what the whole does for texts: 90 of 130 us
        self._added = Substrings(added)
        self._table = word_table(expressions)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words | None:
        """Return the words of a tokenizer; ``None`` for one whose way of splitting is not known here."""
        description = json.loads(tokenizer.to_str())
        model, added = description["model"], description["added_tokens"]
        if model.get("type") != "BPE" or model.get("dropout") or not _keeps_ascii(description["normalizer"]):
            return None
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
        try:
            expressions = [_without_groups(_for_ascii(each)) for each in _expressions(description["pre_tokenizer"])]
            return cls(tokenizer, expressions, [token["content"] for token in added if token["content"].isascii()])
        except (_Unknown, re.error):
            return None

    def encode(self, text: str) -> Ids | None:
        """Return the ids of a text; ``None`` where it may hold an added token or is not plain: then ask the library."""
        if not text.isascii() or len(text) > MAX_CHARS or self._added.are_in(text):
            return None
        data = self._encoded(text)
        return None if data is None else np.frombuffer(data, np.uint32)

    def encode_between(self, pieces: Sequence[str], tokens: Mapping[str, bytes]) -> bytes | None:
        """Return the ids (native ``uint32``) of plain texts with tokens between them, every second of ``pieces`` one of
        ``tokens``; ``None`` as ``encode``. Nobody but the caller knows whether the tokens leave the texts beside them
        as they are, and whether the texts are short enough and ASCII."""
        row = list[bytes]()
        for at, piece in enumerate(pieces):
            if at % 2:
                row.append(tokens[piece])
            elif piece:
                data = None if self._added.are_in(piece) else self._encoded(piece)
                if data is None:
                    return None
                row.append(data)
        return b"".join(row)

    def _encoded(self, text: str) -> bytes | None:
        table = self._table  # another thread may put a new one in its place
        data = table.encode(text, {})
        if not isinstance(data, bytes):
            learned = self._learn(list(dict.fromkeys(data)))
            if learned is None:
                return None
            data = table.encode(text, learned)
            assert isinstance(data, bytes)
        return data

    @property
    def remembered(self) -> int:
        """How many words are known by now."""
        return len(self._table)

    def _learn(self, words: Sequence[str]) -> dict[str, bytes] | None:
        """Encode words, each by itself; ``None`` where one would be split further than in its text."""
        if any(self._table.split(word) != [word] for word in words):
            return None
        short = [word for word in words if len(word) <= _MAX_WORD_CHARS]
        learned = {word: _packed([token.id for token in self._model.tokenize(_as_bytes(word))]) for word in short}
        if len(self._table) > _MAX_WORDS:
            self._table = word_table(self._expressions)
        for word, ids in learned.items():
            self._table.add(word, ids)
        if long := [word for word in words if word not in learned]:
            encodings = self._tokenizer.encode_batch_fast(long, add_special_tokens=False)  # other threads may run
            learned |= {word: _packed(encoding.ids) for word, encoding in zip(long, encodings, strict=True)}
        return learned


def _as_bytes(word: str) -> str:
    """Return ASCII text as byte-level models spell its bytes."""
    return word.translate(_SPELLINGS)


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.uint32).tobytes()


class _Unknown(Exception):
    """The tokenizer does something that is not translated here."""


def _keeps_ascii(normalizer: Mapping[str, Any] | None) -> bool:
    """Tell whether ASCII text comes out of it as it was."""
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return True
    return normalizer["type"] == "Sequence" and all(map(_keeps_ascii, normalizer["normalizers"]))


def _expressions(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the expressions by which text is split, one after the other. Raises ``_Unknown``."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*inner, {"type": "ByteLevel", "add_prefix_space": False, **last}]}:
            for stage in inner:
                match stage:
                    case {
                        "type": "Split",
                        "pattern": {"Regex": str(expression)},
                        "behavior": "Isolated",
                        "invert": False,
                    }:
                        yield expression
                    case {"type": "Digits", "individual_digits": bool(is_single)}:
                        yield r"\p{N}" if is_single else r"\p{N}+"
                    case _:
                        raise _Unknown
            if last["use_regex"]:
                yield _GPT2
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            yield _GPT2
        case _:
            raise _Unknown


def _without_groups(expression: str) -> str:
    """Return an expression as it is. Raises ``_Unknown`` where it captures parts of a match, and ``re.error``."""
    if re.compile(expression, re.ASCII).groups:
        raise _Unknown
    return expression


def _for_ascii(expression: str) -> str:
    """Write Unicode's classes out in ASCII. Raises ``_Unknown`` for a class or an escape that is not listed here."""
    out, is_inside = list[str](), False
    for part in _PARTS.finditer(expression):
        text, name = part[0], part[1]
        if name is not None:
            if name not in _CLASSES or not (is_inside or _CLASSES[name]):
                raise _Unknown
            text = _CLASSES[name] if is_inside else f"[{_CLASSES[name]}]"
        elif text.startswith("["):
            if is_inside:
                raise _Unknown  # a class within a class means something else to the library
            is_inside = True
        elif text == "]":
            is_inside = False
        elif text.startswith("\\") and text[1].isalnum() and text[1] not in "sSrnt":
            raise _Unknown
        out.append(text)
    return "".join(out)

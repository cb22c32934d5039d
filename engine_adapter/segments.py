"""Segments: the text between two control tokens, encoded by itself and remembered.

Tokenizers split text at added tokens before they merge anything, so the ids of a text are the ids of its segments in a
row. An agent's requests only append, so all segments but the last few are found in the memo and a step costs what is
new.

Each segment is encoded between its two neighbours, whose ids are then cut off: flags of added tokens that eat white
space, and tokenizers that treat a text's beginning differently, so have their effect exactly as in the whole text.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np
from tokenizers import Tokenizer

from engine_adapter.ids import Ids
from engine_adapter.markers import Markers
from engine_adapter.prompt_errors import PromptError
from engine_adapter.words import Words

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text a call: a pool of threads would only be in the way

_NO_IDS: Ids = np.empty(0, np.uint32)
_SHORT_CHARS = 48  # to put such a text together from its words takes no longer than to look it up
_DIRECT_CHARS = 1 << 13  # more than an agent's step, mostly, which nobody has seen before
_ID_BYTES = 4
_ENTRY_OVERHEAD_BYTES = 310  # the key (65), the array's object (112) and a slot of an ordered dictionary (about 120)


@dataclass(frozen=True, slots=True)
class MemoStats:
    """The memo at one moment."""

    hits: int
    misses: int
    entries: int
    used_bytes: int


class Seal(msgspec.Struct, frozen=True, gc=False):
    """A place behind a control token: whatever follows, the ids before it stay as they are."""

    tokens: int
    chars: int
    token: str
    """The control token, empty at a text's beginning."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids, and the last seal within the text that stays."""

    ids: Ids
    seal: Seal


class SegmentEncoder:
    """Text to ids for one tokenizer, split at its control tokens. Thread-safe; the memo stays within ``memo_bytes``."""

    def __init__(self, tokenizer: Tokenizer, markers: Markers, *, memo_bytes: int = 64 << 20) -> None:
        self._tokenizer = tokenizer
        self._literal = _without_control_tokens(tokenizer, markers)
        self._words = Words.of(tokenizer)
        self._plain = frozenset({"", *_plain_tokens(tokenizer)})
        self._markers = markers
        self._sealing = frozenset(t for t in markers.tokens if not _can_go_on(t, markers.tokens))
        self._control_ids = {text: _added_id(tokenizer, text) for text in markers.tokens}
        self._control_bytes = {"": b""} | {text: np.uint32(i).tobytes() for text, i in self._control_ids.items()}
        self._control_arrays = {text: np.array([number], np.uint32) for text, number in self._control_ids.items()}
        self._memo: OrderedDict[bytes, Ids] = OrderedDict()
        self._memo_limit_bytes, self._memo_used_bytes = memo_bytes, 0
        self._lock = threading.Lock()
        self._hits = self._misses = 0

    def encode(self, text: str, *, guard: str | None = None, cut: str | None = None) -> list[int]:
        """Return the ids of ``text``; see ``encode_on``."""
        return cast("list[int]", self.encode_on(text, guard=guard, cut=cut).ids.tolist())

    def encode_on(
        self, text: str, *, after: str = "", settled: int = 0, guard: str | None = None, cut: str | None = None
    ) -> Encoded:
        """Encode ``text``, which follows the control token ``after`` (or nothing), and find its last seal.

        ``guard`` is the character behind the first character of each marker that is ordinary text; ``cut`` one at which
        the text is split although there is no token. Neither is encoded. ``settled`` is how many of the characters stay
        when more text comes. Raises ``PromptError`` where the tokenizer makes a control token of ordinary text whatever
        we do. O(new text) plus one digest of the text.
        """
        pieces = self._markers.splitter.split(text)
        if len(text) <= _DIRECT_CHARS:
            encoded = self._by_words_alone(pieces, after, settled, cut)
            if encoded is not None:
                return encoded
        found: list[Ids] = []
        count, seal, at_char = 0, Seal(0, 0, after), 0
        for at in range(0, len(pieces), 2):
            before = pieces[at - 1] if at else after
            behind = pieces[at + 1] if at + 1 < len(pieces) else ""
            parts = pieces[at].split(cut) if cut else [pieces[at]]
            for index, part in enumerate(parts):
                left, right = before if index == 0 else "", behind if index == len(parts) - 1 else ""
                if part:
                    found.append(self._segment(left, part, right, guard if guard and guard in part else None))
                    count += len(found[-1])
            at_char += len(pieces[at]) + len(behind)
            if behind:
                found.append(self._control_arrays[behind])
                count += 1
                if at_char <= settled and behind in self._sealing:
                    seal = Seal(count, at_char, behind)
        return Encoded(np.concatenate(found) if found else _NO_IDS, seal)

    def _by_words_alone(self, pieces: Sequence[str], after: str, settled: int, cut: str | None) -> Encoded | None:
        """Do the same for plain text, in which every second piece is a control token; ``None`` where it isn't that."""
        words, plain = self._words, self._plain
        if words is None or after not in plain or not plain.issuperset(pieces[1::2]):
            return None
        if cut is not None:
            pieces = _cut_at(pieces, cut)
        if not all(map(str.isascii, pieces)):  # which marks are not
            return None
        chars, sealed, seal = 0, 0, Seal(0, 0, after)
        for at in range(1, len(pieces), 2):
            chars += len(pieces[at - 1]) + (len(pieces[at]) or 1)
            if chars > settled:
                break
            if pieces[at] in self._sealing:
                sealed, seal = at + 1, Seal(0, chars, pieces[at])
        before = words.encode_between(pieces[:sealed], self._control_bytes)
        behind = words.encode_between(pieces[sealed:], self._control_bytes) if before is not None else None
        if before is None or behind is None:
            return None
        return Encoded(
            np.frombuffer(before + behind, np.uint32), Seal(len(before) // _ID_BYTES, seal.chars, seal.token)
        )

    def stats(self) -> MemoStats:
        """Return the memo's counters."""
        with self._lock:
            return MemoStats(self._hits, self._misses, len(self._memo), self._memo_used_bytes)

    def _segment(self, left: str, text: str, right: str, guard: str | None) -> Ids:
        if guard is None and len(text) <= _SHORT_CHARS:
            ids = self._by_words(left, text, right)
            if ids is not None:
                return ids
        key = _memo_key(left, text, right, guard)
        with self._lock:
            known = self._memo.get(key)
            if known is not None:
                self._memo.move_to_end(key)
                self._hits += 1
                return known
            self._misses += 1
        raw = self._encode_literally(text, guard) if guard else self._encode_between(left, text, right)
        ids = np.asarray(raw, np.uint32)
        ids.flags.writeable = False
        self._remember(key, ids)
        return ids

    def _remember(self, key: bytes, ids: Ids) -> None:
        cost = _ENTRY_OVERHEAD_BYTES + ids.nbytes
        with self._lock:
            if key in self._memo or cost > self._memo_limit_bytes:
                return
            self._memo[key] = ids
            self._memo_used_bytes += cost
            while self._memo_used_bytes > self._memo_limit_bytes:
                _, dropped = self._memo.popitem(last=False)
                self._memo_used_bytes -= _ENTRY_OVERHEAD_BYTES + dropped.nbytes

    def _encode_between(self, left: str, text: str, right: str) -> Sequence[int] | Ids:
        known = self._by_words(left, text, right)
        if known is not None:
            return known
        ids = _encode(self._tokenizer, left + text + right)
        start, end = (1 if left else 0), len(ids) - (1 if right else 0)
        assert not left or ids[0] == self._control_ids[left]
        assert not right or ids[-1] == self._control_ids[right]
        return ids[start:end]

    def _by_words(self, left: str, text: str, right: str) -> Ids | None:
        if self._words is None or left not in self._plain or right not in self._plain:
            return None
        return self._words.encode(text)

    def _encode_literally(self, text: str, guard: str) -> list[int]:
        ids = _encode(self._literal, text.replace(guard, ""))
        forbidden = set(self._control_ids.values())
        if forbidden.isdisjoint(ids):
            return ids
        # A vocabulary that reaches a control token by merges: the guard stands inside each marker, so split there.
        ids = [i for piece in text.split(guard) for i in _encode(self._literal, piece)]
        if not forbidden.isdisjoint(ids):
            raise PromptError("a control token in the messages cannot be encoded as ordinary text by this tokenizer")
        return ids


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode one text without offsets, which takes about two thirds of the time, and without holding the GIL.

    Raises ``PromptError`` for a lone surrogate.
    """
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError:  # what the library says of a string that is no Unicode text
        raise PromptError("half of a surrogate pair is no text") from None
    return ids


def _cut_at(pieces: Sequence[str], cut: str) -> Sequence[str]:
    """Return the pieces with each ``cut`` as a control token that is empty."""
    found = list[str]()
    for at, piece in enumerate(pieces):
        if at % 2 or cut not in piece:
            found.append(piece)
        else:
            first, *others = piece.split(cut)
            found.append(first)
            for other in others:
                found += ("", other)
    return found


def _plain_tokens(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the added tokens that leave the text beside them as it is."""
    for token in tokenizer.get_added_tokens_decoder().values():
        if not (token.lstrip or token.rstrip or token.single_word):
            yield token.content


def _can_go_on(token: str, tokens: frozenset[str]) -> bool:
    """Tell whether text behind ``token`` can make it part of another control token."""
    return any(token in other[:-1] for other in tokens)


def _memo_key(left: str, text: str, right: str, guard: str | None) -> bytes:
    """Return a name for what is to be encoded: a strong digest, since a collision would give one client another's ids.

    The guard differs from request to request, so only its places count.
    """
    parts = text.split(guard) if guard else [text]
    shape = ",".join(str(len(part)) for part in (left, right, *parts))
    content = "".join((left, right, *parts))
    return hashlib.sha256(f"{shape};{content}".encode("utf-8", "surrogatepass")).digest()


def control_tokens(tokenizer: Tokenizer, template_text: str) -> dict[str, bool]:
    """Return the added tokens that can mean something to the model, with whether each is flagged special.

    ``template_text`` is all that the template may write itself. A token that the tokenizer doesn't find inside a text
    by itself (flags and normalizers can bring that about) is left out: a text must not be split there.
    """
    found: dict[str, bool] = {}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        text = token.content
        if text.isspace() or not (token.special or text in template_text):
            continue
        if token_id in tokenizer.encode(f"a{text}b", add_special_tokens=False).ids:
            found[text] = token.special
    return found


def _without_control_tokens(tokenizer: Tokenizer, markers: Markers) -> Tokenizer:
    """Return a copy of the tokenizer that takes control tokens as text and keeps every id."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in markers.tokens
    literal = Tokenizer.from_str(json.dumps(description))
    literal.encode_special_tokens = True
    return literal


def _added_id(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None, text
    return int(token_id)

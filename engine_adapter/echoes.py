"""Echoes: an answer comes back in the next request, and its tokens should come back with it.

An agent's client quotes the model's answer: it prints the JSON of a tool call anew, or the same words are cut into
other tokens than the model chose. From there on nothing matches the pages that were generated. Where an engine takes
token ids, the ids that it generated can stand in the prompt instead of the ones that rendering makes of the quotation.

That is done for an answer only when all of this holds:

* the message is the one that was answered, word for word, tool calls by value (``message_digest``);
* everything before it has the very ids to which the engine answered (``PrefixDigest``);
* the ids spell what the template writes of the message, but for white space and the spelling of JSON (``same_text``);
* they hold the control tokens that the template writes, and no others: a model can be talked into generating any.

So the ids mean what the client said. A template that drops or adds something (Qwen3 drops the reasoning of earlier
turns) has the last word, and the prompt says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import xxhash

from engine_adapter.answers import Answer, Answers, Echo, EchoState, exactly, message_digest
from engine_adapter.ids import Hashes, Ids, JoinedIds
from kvstore.block import routing_hash_array

PREFIX_CHAIN = (0, 64)
"""Seed and block size of the chain by which a prompt's beginning is recognized."""

_NO_IDS: Ids = np.empty(0, np.uint32)
_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Voice:
    """What it takes to compare ids: how they are spelled, which end an answer, and which steer the model."""

    decode: Callable[[Sequence[int]], str]
    stops: frozenset[int]
    control: frozenset[int]
    """Control tokens that no answer may hold unless the template writes them there."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a conversation's settled part says of its answers."""

    open_message: int = 0
    """Answers from this message on are looked for again: those before it are settled in the ids."""
    holds_known: bool = False
    """Some answer's ids are in the prompt as they were generated …"""
    holds_kept: bool = False
    """… and are not those that rendering makes."""


NO_PAST = Past()


@dataclass(frozen=True, slots=True)
class Echoed:
    """New ids with the answers in them."""

    ids: Ids
    echo: Echo
    past: Past
    """As it is at the end of what stays."""
    sealed: int
    """How many of ``ids`` stay when the conversation goes on."""
    holds_kept: bool
    """Some ids of the prompt, or of what stands before it, are not those that rendering makes."""


def with_answers(
    new: Ids,
    *,
    known: Ids,
    chain: Hashes | None,
    messages: Sequence[Mapping[str, object]],
    answers: Answers,
    scope: bytes,
    past: Past,
    sealed: int,
    settled_messages: int,
    voice: Voice,
) -> Echoed:
    """Return the ids ``new``, which follow ``known``, with generated ids in the place of quoted answers.

    ``chain``: the ``PREFIX_CHAIN`` of what is known. ``sealed``: how many of ``new`` stay when the conversation goes
    on; ``settled_messages``: the messages that they end with. O(new ids), and one look-up for each of the assistant's
    new messages.
    """
    walk = _Walk(new, known, chain, voice, sealed)
    state, open_message = EchoState.NONE, settled_messages
    for number in range(past.open_message, len(messages)):
        if messages[number].get("role") != "assistant":
            continue
        candidates = answers.to(number, scope)
        said = message_digest(messages[number]) if candidates else None
        answer = next((one for one in candidates if one.message == said), None)
        if answer is None:
            state = EchoState.CHANGED if candidates else EchoState.UNKNOWN
            if candidates:
                walk.see(candidates[0])
            continue
        state, is_settled = walk.take(answer)
        if not is_settled:
            open_message = min(open_message, number)
    holds_kept = past.holds_kept or walk.holds_kept
    echo = Echo(state)
    if state is EchoState.KEPT:
        echo = Echo(state, walk.newest_kept[1], walk.newest_kept[0])
    elif state in (EchoState.CHANGED, EchoState.TEMPLATE_REWRITES):
        echo = Echo(state, lost_tokens=walk.newest_lost)
    if state is EchoState.NONE and any(message.get("role") == "assistant" for message in messages):
        quotes_known = EchoState.KEPT if holds_kept else EchoState.SAME
        echo = Echo(quotes_known if past.holds_known else EchoState.UNKNOWN)
    settled = Past(open_message, past.holds_known or walk.settles_known, past.holds_kept or walk.settles_kept)
    return Echoed(walk.ids(), echo, settled, walk.sealed, holds_kept)


class _Walk:
    """Goes over new ids once, from answer to answer. Places are in the whole prompt, but for ``plain`` ones."""

    def __init__(self, new: Ids, known: Ids, chain: Hashes | None, voice: Voice, sealed: int) -> None:
        self._new, self._known_tokens, self._voice = new, len(known), voice
        self._stops = np.flatnonzero(np.isin(new, np.array(sorted(voice.stops), np.uint32)))
        self._control = np.array(sorted(voice.control), np.uint32)
        self._prefix = PrefixDigest(known, chain)
        self._plain_at, self._plain_sealed = 0, sealed
        self._shift = 0  # by how much the ids behind the last answer have moved
        self._pieces: list[Ids] = []
        self.sealed = sealed
        self.holds_kept = self.settles_known = self.settles_kept = False
        self.newest_kept = (0, 0)  # where the newest answer differs from its rendering, and its tokens from there on
        self.newest_lost = 0  # tokens of the newest answer's rendering behind what was generated so

    def take(self, answer: Answer) -> tuple[EchoState, bool]:
        """Put one answer in its place if it fits; return what became of it, and whether it is settled."""
        place = self._place(answer)
        if place is None:
            return EchoState.TEMPLATE_REWRITES, True
        start, end = place
        is_settled = end < self._plain_sealed
        state = self._compare(self._new[start:end], answer.ids)
        if state is EchoState.KEPT and not is_settled and start < self._plain_sealed:
            state = EchoState.TEMPLATE_REWRITES  # half of it stays: what comes next could not be put together
        if state is EchoState.TEMPLATE_REWRITES:
            self._lose(start, end, answer.ids)
            return state, is_settled
        self.settles_known = self.settles_known or is_settled
        if state is EchoState.KEPT:
            self._put(start, end, answer.ids, is_settled=is_settled)
        return state, is_settled

    def see(self, answer: Answer) -> None:
        """Note how much of an answer is computed again that is quoted otherwise than it was given."""
        place = self._place(answer)
        if place is not None:
            self._lose(*place, answer.ids)

    def ids(self) -> Ids:
        """Return all new ids."""
        return np.concatenate([*self._pieces, self._new[self._plain_at :]]) if self._pieces else self._new

    def _place(self, answer: Answer) -> tuple[int, int] | None:
        """Go to where an answer is quoted; return its begin and end, ``None`` where its prompt does not stand there."""
        self.newest_lost = 0
        start = answer.prompt_tokens - self._known_tokens - self._shift
        if not self._plain_at <= start <= len(self._new):
            return None
        self._go(start)
        stop = int(np.searchsorted(self._stops, start))
        if self._prefix.value() != answer.prompt_digest or stop == len(self._stops):
            return None
        return start, int(self._stops[stop])

    def _lose(self, start: int, end: int, said: Ids) -> None:
        self.newest_lost = end - start - _alike(self._new[start:end], said)

    def _go(self, to: int) -> None:
        passed = self._new[self._plain_at : to]
        self._prefix.feed(passed)
        self._pieces.append(passed)
        self._plain_at = to

    def _put(self, start: int, end: int, said: Ids, *, is_settled: bool) -> None:
        quoted = self._new[start:end]
        same = _alike(quoted, said)
        self.newest_kept = (self._known_tokens + start + self._shift + same, len(said) - same)
        moved = len(said) - len(quoted)
        self.holds_kept = True
        if is_settled:
            self.settles_kept = True
            self.sealed += moved
        self._pieces.append(said)
        self._prefix.feed(said)
        self._plain_at = end
        self._shift += moved

    def _compare(self, quoted: Ids, said: Ids) -> EchoState:
        if np.array_equal(quoted, said):
            return EchoState.SAME
        if not np.array_equal(quoted[np.isin(quoted, self._control)], said[np.isin(said, self._control)]):
            return EchoState.TEMPLATE_REWRITES
        decode = self._voice.decode
        is_same = same_text(decode(quoted.tolist()), decode(said.tolist()))
        return EchoState.KEPT if is_same else EchoState.TEMPLATE_REWRITES


def _alike(one: Ids, other: Ids) -> int:
    """Return how many ids both begin with."""
    common = min(len(one), len(other))
    differing = np.flatnonzero(one[:common] != other[:common])
    return int(differing[0]) if len(differing) else common


class PrefixDigest:
    """A digest of a prompt's ids up to a place, continued piece by piece."""

    def __init__(self, known: Ids, chain: Hashes | None) -> None:
        """Begin behind ``known``, of which ``chain`` (a ``PREFIX_CHAIN``) holds the blocks that were hashed before."""
        seed, size = PREFIX_CHAIN
        blocks = min(len(chain), len(known) // size) if chain is not None else 0
        self._parent = int(chain[blocks - 1]) if chain is not None and blocks else seed
        self._tail = _NO_IDS
        self.feed(known[blocks * size :])

    def feed(self, ids: Ids) -> None:
        """Go on by these ids."""
        seed, size = PREFIX_CHAIN
        data = np.concatenate([self._tail, ids])
        whole = len(data) // size * size
        if whole:
            hashes = routing_hash_array(cast("Sequence[int]", data[:whole]), size, seed, parent=self._parent)
            self._parent = int(hashes[-1])
        self._tail = data[whole:]

    def value(self) -> int:
        """Return the digest of everything up to here."""
        return xxhash.xxh3_64_intdigest(self._tail.tobytes(), seed=self._parent)


def prompt_digest(ids: JoinedIds, chain: Hashes) -> int:
    """Return what ``PrefixDigest`` comes to at the end of a prompt with this ``PREFIX_CHAIN``."""
    seed, size = PREFIX_CHAIN
    tail = ids.behind(len(chain) * size)
    return xxhash.xxh3_64_intdigest(tail.tobytes(), seed=int(chain[-1]) if len(chain) else seed)


def same_text(one: str, other: str) -> bool:
    """Tell whether two texts say the same, but for white space outside of strings and the spelling of JSON in them."""
    if one == other:
        return True
    at, other_at = 0, 0
    while True:
        at, other_at = _behind_space(one, at), _behind_space(other, other_at)
        if one[at : at + 1] != other[other_at : other_at + 1]:
            return False
        if at == len(one):
            return True
        left, right = _json_at(one, at), _json_at(other, other_at)
        if left is None or right is None:
            at, other_at = at + 1, other_at + 1
        elif exactly(left[0]) != exactly(right[0]):
            return False
        else:
            at, other_at = left[1], right[1]


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _json_at(text: str, at: int) -> tuple[object, int] | None:
    """Return the JSON object or array that begins here and where it ends, ``None`` where there is none."""
    if text[at] not in "{[":
        return None
    try:
        value, end = _json.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return value, end

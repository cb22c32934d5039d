"""The values between a conversation and its prompt: how it is asked for, what is rendered, what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from engine_adapter.answers import NO_ECHO, Answers, Echo
from engine_adapter.conversations import MAX_POINTS, Conversation, Known, Point, scope_of
from engine_adapter.echoes import NO_PAST, Past, prompt_digest
from engine_adapter.ids import Hashes, HashKey, Ids, JoinedIds
from engine_adapter.resumption import LoopState

_MAX_CHAINS = 8  # of one conversation: seeds times block sizes


class PromptOptions(msgspec.Struct, frozen=True, gc=False):
    """How a chat is rendered, beside its messages and tools."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """End inside the last message, so that the model goes on with it (as transformers does); no generation prompt."""
    variables: Mapping[str, object] | None = None
    """Further variables of the template, such as ``enable_thinking``."""


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt's ids, and its routing hashes by block size. Don't write to the arrays."""

    joined: JoinedIds
    hashes: Mapping[int, Hashes]
    has_markers: bool
    """Something in the messages or tools spells a control token; another encoder may take it for one."""
    echo: Echo = NO_ECHO
    holds_kept: bool = False
    """Some ids are those of answers as they were generated: only who is given the ids makes these of the messages."""
    scope: bytes | None = None
    """What the prompt depends on beside its messages; ``None`` where answers to it cannot be remembered."""
    prefix_chain: Hashes | None = None
    exact_tokens: int | None = None
    """How many of the ids an engine sees, where those behind them only name what is there; ``None``: all."""

    def __len__(self) -> int:
        return len(self.joined)

    @property
    def ids(self) -> Ids:
        """All ids, joined when asked for."""
        return self.joined.behind(0)

    def digest(self) -> int | None:
        """Return what an ``Answer`` to this prompt must name it by; ``None`` where it was made without ``answers``."""
        return None if self.prefix_chain is None else prompt_digest(self.joined, self.prefix_chain)


class Guarded(msgspec.Struct, frozen=True, gc=False):
    """What goes into the template, and the characters that mark something in it."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None
    variables: Mapping[str, object]
    guard: str
    cut: str
    tag: str


class Tokens(msgspec.Struct, frozen=True):
    """A prompt's ids, of which ``sealed`` stay when the conversation goes on."""

    ids: JoinedIds
    sealed: int
    seal: str
    open_text: str
    has_settled_markers: bool
    has_markers: bool
    echo: Echo = NO_ECHO
    past: Past = NO_PAST
    holds_kept: bool = False


def scope_of_prompt(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    options: PromptOptions,
    answers: Answers | None,
) -> bytes | None:
    """Return what the conversation is remembered under; ``None`` where it is not.

    Prompts that may hold an owner's generated ids are that owner's.
    """
    if options.continue_final_message or not messages:
        return None
    owner = answers.owner if answers is not None else None
    return scope_of(tools, options.add_generation_prompt, options.variables, owner)


def grown(
    content_bytes: int,
    guarded: Guarded,
    state: LoopState,
    tokens: Tokens,
    hashes: Mapping[HashKey, Hashes],
    base: Known | None,
) -> Conversation:
    """Return the conversation as it stands now, with the points that it had where it only grew."""
    point = Point(
        len(guarded.messages),
        content_bytes,
        state,
        tokens.sealed,
        tokens.seal,
        tokens.open_text,
        tokens.has_settled_markers,
        tokens.past,
    )
    earlier = base.conversation.points if base is not None and base.ends_there() else ()
    newest = list(hashes.items())[-_MAX_CHAINS:]
    return Conversation(
        messages=guarded.messages,
        tools=guarded.tools,
        variables=guarded.variables,
        guard=guarded.guard,
        cut=guarded.cut,
        points=(*earlier, point)[-MAX_POINTS:],
        hashes={key: chain[: tokens.sealed // key[1]] for key, chain in newest},
    )

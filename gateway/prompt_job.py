"""One prompt: from a request to token ids and block hashes, and what an engine gets in the place of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np
from msgspec.structs import replace

from engine_adapter.answers import NO_ECHO, Answer, AnswerMemo, Echo, message_digest, prompt_name
from engine_adapter.conversations import Anchors
from engine_adapter.media import has_media
from engine_adapter.prompt import EncodedPrompt, PromptEncoder, PromptError, PromptOptions
from gateway.errors import BadRequest
from gateway.models import SpecialTokens
from gateway.prompt_rules import Handling, PromptRules
from gateway.protocols.base import Ask
from gateway.text_chunks import BYTES_PER_TOKEN, chunk_hashes, conversation_bytes
from kvstore.block import routing_hash_array, routing_seed
from tracing.messages import MessageChain

_FOREIGN_OPTIONS = ("chat_template", "documents")
Hashes = Mapping[int, Sequence[int]]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's length in tokens, and its routing hashes for each block size that was asked for."""

    tokens: int
    hashes: Hashes
    is_exact: bool = True
    """The hashes are of the token ids that an engine will see; else of the text, which tells where it was before."""
    is_counted: bool = True
    """``tokens`` is a count; else an estimate, good for weighing load only."""
    is_comparable: bool = True
    """An engine that uses the same template and tokenizer counts the same, whatever the prompt says."""
    members: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Members of the body that the model's policies set."""
    ids_to_send: EncodedPrompt | None = None
    """The engine must be given these ids: it would make others of the messages."""
    special_tokens: Handling | None = None
    """What was done with special tokens that are spelled in the conversation; ``None``: there are none."""
    echo: Echo = NO_ECHO
    answerable: Answerable | None = None
    """How an answer's ids are to be remembered; ``None``: not at all."""

    @property
    def input_ids(self) -> Sequence[int] | None:
        """Return the ids to send. O(tokens)."""
        return None if self.ids_to_send is None else cast("list[int]", self.ids_to_send.ids.tolist())


@dataclass(frozen=True, slots=True)
class Answerable:
    """A prompt whose answer will be known again."""

    name: bytes
    encoded: EncodedPrompt
    stops: frozenset[int]

    def answer(self, message: Mapping[str, object], output_ids: Sequence[int]) -> Answer | None:
        """Return the answer as it is to be remembered; ``None`` where it could not be recognized."""
        said, digest = message_digest(message), self.encoded.digest()
        if said is None or digest is None or not output_ids or not 0 <= min(output_ids) <= max(output_ids) < 1 << 32:
            return None
        kept = output_ids[:-1] if output_ids[-1] in self.stops else output_ids
        return Answer(said, np.array(kept, np.uint32), len(self.encoded), digest)


class Quotations:
    """What one key's conversation may quote: the answers to each of its beginnings."""

    def __init__(self, memo: AnswerMemo, owner: bytes, chain: MessageChain) -> None:
        """``chain``: of all messages of the request."""
        self._memo, self.owner, self._chain = memo, owner, chain

    def to(self, messages: int, scope: bytes) -> Sequence[Answer]:
        """Return the answers to the first ``messages`` messages, the newest first."""
        return self._memo.to(prompt_name(self.owner, scope, self._chain[messages - 1].digest)) if messages else ()

    def name(self, scope: bytes) -> bytes:
        """Return the name of the whole conversation's prompt."""
        return prompt_name(self.owner, scope, self._chain[-1].digest)


class PromptJob(msgspec.Struct, frozen=True):
    """One prompt to be made; any thread may run it."""

    encoder: PromptEncoder | None
    ask: Ask
    body: bytes
    cached_as: tuple[str, str | None]  # the model and the adapter whose blocks the prompt's are
    salt: str | None
    block_sizes: Sequence[int]
    rules: PromptRules
    quotations: Quotations | None
    max_exact_bytes: int
    is_trusted: bool  # engines count this model's prompts as we do, as far as is known
    is_verified: bool  # … and some did lately
    anchors: Anchors | None = None
    """What earlier prompts left at the end of each message, where the messages are told apart already."""

    def run(self) -> Prompt | None:
        """Return the prompt: exact, or by its text, or ``None``.

        Raises ``BadRequest`` for ids that are no tokens of the model, and for what the model's policy refuses.
        """
        try:
            exact = self._exact()
        except (PromptError, UnicodeEncodeError, OverflowError):
            exact = None  # an odd role, a lone surrogate, an id out of range: the engine will say what is wrong
        if exact is not None and self.is_trusted and self.rules.are_alike:
            return exact
        by_text = self._by_text()
        if exact is None:
            return self._guarded(by_text)
        told = replace(exact, ids_to_send=None, answerable=None, is_exact=False)
        return told if by_text is None else replace(told, hashes=by_text.hashes)  # counted still, to see them agree

    def _exact(self) -> Prompt | None:
        ask, seed = self.ask, routing_seed(*self.cached_as, self.salt)
        if (ids := self._own_ids()) is not None:
            return self._of_ids(ids, seed)
        if self.encoder is None or len(self.body) > self.max_exact_bytes:
            return None
        if ask.messages is None:
            return self._of_ids(self.encoder.encode_text(ask.prompt), seed) if isinstance(ask.prompt, str) else None
        options = options_of(ask.form.values)
        return None if options is None else self._chat(self.encoder, ask.messages, options, seed)

    def _own_ids(self) -> Sequence[int] | None:
        """Return the ids that the client gives as its prompt. Raises ``BadRequest`` for tokens that do not exist."""
        ask, name = self.ask, "prompt"
        ids: object = ask.prompt
        if ask.messages is not None:
            name, ids = "input_ids", ask.form.values.get("input_ids")
            if not self.rules.takes_ids or ask.endpoint != "chat":
                return None  # the engine will not look at them
        if not isinstance(ids, list) or not ids or not all(type(token_id) is int for token_id in ids):
            return None
        if self.encoder is not None and not 0 <= min(ids) <= max(ids) < self.encoder.vocab_size:
            last = self.encoder.vocab_size - 1
            raise BadRequest(f"token ids must lie in 0 … {last}", param=name, code="out_of_vocabulary")
        return ids

    def _chat(
        self, encoder: PromptEncoder, messages: Sequence[Mapping[str, object]], options: PromptOptions, seed: int
    ) -> Prompt:
        rules, tools, members = self.rules, self.rules.tools, dict[str, object]()
        try:
            encoded = encoder.encode_chat_hashed(
                messages, tools, seed=seed, block_sizes=self.block_sizes, options=options,
                anchors=self.anchors, answers=self.quotations,
            )  # fmt: skip
        except PromptError:
            if not has_media(messages):  # asked only now: to look through all messages at every step would cost more
                raise
            return self._with_media(encoder, messages, options, seed)
        handling = self._handling(gives_ids=encoded.holds_kept or self.is_verified) if encoded.has_markers else None
        if handling is Handling.ESCAPED:
            members = self._escaped(encoder)
            messages, tools = encoder.escape(messages, tools)
            encoded = encoder.encode_chat_hashed(
                messages, tools, seed=seed, block_sizes=self.block_sizes, options=options, answers=self.quotations
            )
        sends = encoded.holds_kept or (handling is Handling.LITERAL and not rules.keeps_text)
        answerable = None
        if self.quotations is not None and encoded.scope is not None:
            answerable = Answerable(self.quotations.name(encoded.scope), encoded, encoder.stop_token_ids)
        return Prompt(
            len(encoded),
            cast("Hashes", encoded.hashes),
            is_comparable=not (encoded.has_markers or options.continue_final_message or sends),
            members=members,
            ids_to_send=encoded if sends else None,
            special_tokens=handling,
            echo=encoded.echo,
            answerable=answerable,
        )

    def _with_media(
        self, encoder: PromptEncoder, messages: Sequence[Mapping[str, object]], options: PromptOptions, seed: int
    ) -> Prompt:
        """Return a prompt that is exact up to its first medium: what engines put in its place is theirs to know."""
        encoded = encoder.encode_with_media(
            messages, self.rules.tools, seed=seed, block_sizes=self.block_sizes, options=options
        )
        made = Prompt(
            len(encoded), cast("Hashes", encoded.hashes), is_exact=False, is_counted=False, is_comparable=False
        )
        guarded = self._guarded(made)
        assert guarded is not None
        return guarded

    def _handling(self, *, gives_ids: bool) -> Handling:
        """Return what becomes of special tokens in the conversation. Raises ``BadRequest`` where they are refused."""
        rules = self.rules
        if rules.special_tokens is SpecialTokens.REJECT:
            raise BadRequest(
                "the conversation spells a special token of this model", param="messages", code="special_token"
            )
        if rules.special_tokens is SpecialTokens.PASS or not rules.reads_chat:
            return Handling.LITERAL if rules.keeps_text else Handling.PASSED
        if rules.special_tokens is SpecialTokens.ESCAPE:
            return Handling.ESCAPED
        if rules.keeps_text or (gives_ids and rules.takes_ids and self.is_trusted and rules.are_alike):
            return Handling.LITERAL
        return Handling.ESCAPED

    def _guarded(self, made: Prompt | None) -> Prompt | None:
        """Apply the policy for special tokens to a chat whose ids are not known. O(text)."""
        encoder, messages = self.encoder, self.ask.messages
        if made is None or encoder is None or messages is None or not isinstance(messages, Sequence):
            return made
        if not encoder.spells_control_tokens(messages, self.ask.tools):
            return made
        handling = self._handling(gives_ids=False)
        members = self._escaped(encoder) if handling is Handling.ESCAPED else {}
        return replace(made, members=members, special_tokens=handling)

    def _escaped(self, encoder: PromptEncoder) -> dict[str, object]:
        """Return the members that an engine must get instead of the client's."""
        messages, tools = encoder.escape(self.ask.messages or (), self.ask.tools)
        members: dict[str, object] = {"messages": messages}
        return members | {"tools": tools} if tools != self.ask.tools else members

    def _of_ids(self, token_ids: Sequence[int], seed: int) -> Prompt:
        hashes = {size: routing_hash_array(token_ids, size, seed) for size in self.block_sizes}
        return Prompt(len(token_ids), cast("Hashes", hashes))

    def _by_text(self) -> Prompt | None:
        ask = self.ask
        if ask.messages is None and ask.prompt is None:
            return None
        data = conversation_bytes(ask.messages, ask.tools, ask.prompt)
        if data is None:
            return None
        hashes = chunk_hashes(data, self.block_sizes, "\0".join(filter(None, self.cached_as)), self.salt)
        tokens = len(data) // BYTES_PER_TOKEN
        return Prompt(tokens, hashes, is_exact=False, is_counted=False, is_comparable=False)


def options_of(values: Mapping[str, object]) -> PromptOptions | None:
    """Return how the client wants its chat rendered; ``None`` where only the engine can know what comes of it."""
    variables, continues = values.get("chat_template_kwargs"), values.get("continue_final_message")
    if any(values.get(name) is not None for name in _FOREIGN_OPTIONS):
        return None
    if not (variables is None or isinstance(variables, dict)):
        return None
    return PromptOptions(
        add_generation_prompt=values.get("add_generation_prompt") is not False,
        continue_final_message=continues is True,
        variables=variables,
    )

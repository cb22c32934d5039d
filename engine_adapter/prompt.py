"""Prompts: OpenAI messages to the token ids that a model sees, for the gateway and for the embedded engine alike.

check → shape → guard markers → render → split at control tokens → encode each segment → hash blocks. See ``messages``,
``markers``, ``template``, ``segments`` and ``kvstore.block``; this module puts them together. What a known conversation
begins with is not done again: see ``conversations`` and ``resumption``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine_adapter.answers import Answers
from engine_adapter.conversations import Anchors, Content, ConversationMemo, ConversationStats, Known
from engine_adapter.echoes import NO_PAST, PREFIX_CHAIN, Voice, with_answers
from engine_adapter.encoded import EncodedPrompt, Guarded, PromptOptions, Tokens, grown, scope_of_prompt
from engine_adapter.ids import Hashes, Ids, JoinedIds
from engine_adapter.markers import Markers, contains_any, unused_marks
from engine_adapter.media import media_of, medium_ids, with_texts
from engine_adapter.messages import check_messages, check_tools, for_model_template, tag_end, up_to_tag
from engine_adapter.model_templates import DEFAULT_TEMPLATE, TemplateChoice, choose_template, read_json, stop_tokens
from engine_adapter.prompt_errors import PromptError, TemplateError
from engine_adapter.resumption import LoopState, Rendering
from engine_adapter.segments import MemoStats, SegmentEncoder, control_tokens
from engine_adapter.tekken import load_tekken
from kvstore.block import routing_hash_array

__all__ = [
    "DEFAULT_TEMPLATE",
    "EncodedPrompt",
    "PromptEncoder",
    "PromptError",
    "PromptOptions",
    "TemplateError",
]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_NO_IDS: Ids = np.empty(0, np.uint32)


class _Chat(msgspec.Struct, frozen=True):
    """What ``encode_chat_hashed`` is asked for."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None
    seed: int
    block_sizes: frozenset[int]
    options: PromptOptions
    scope: bytes | None
    answers: Answers | None
    anchors: Anchors | None


class PromptEncoder:
    """One model's template and tokenizer. Thread-safe; what it remembers stays within its two limits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        choice: TemplateChoice,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
        memo_bytes: int = 64 << 20,
        conversation_bytes: int = 256 << 20,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_name = choice.template.name
        sources = (choice.template.source + choice.tool_template.source).encode()
        self.template_id = f"{choice.template.name}@{blake2b(sources, digest_size=6).hexdigest()}"
        self.stop_token_ids = stop_token_ids
        self.vocab_size: int = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self._choice = choice
        self._joins_parts = not choice.template.reads_parts()
        written = choice.template.literal_text() + "\0" + choice.tool_template.literal_text()
        self._markers = Markers(control_tokens(tokenizer, written))
        self._segments = SegmentEncoder(tokenizer, self._markers, memo_bytes=memo_bytes)
        steering = frozenset(i for text in self._markers.steering if (i := tokenizer.token_to_id(text)) is not None)
        self._voice = Voice(self._decode, stop_token_ids, steering - stop_token_ids)
        self._conversations = ConversationMemo(conversation_bytes)
        self._text_prefix, self._text_suffix = _text_frame(tokenizer)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        template: str | None = None,
        memo_bytes: int = 64 << 20,
        conversation_bytes: int = 256 << 20,
    ) -> PromptEncoder:
        """Read a model's folder: ``tokenizer.json`` (or Mistral's ``tekken.json``) and its configuration files.

        ``template`` is a name of ``templates/README.md``, ``"model"`` for the model's own, or the path of a Jinja file.
        ``None`` takes the model's own where it can render tools and null content, else the named one for which the
        tokenizer has the control tokens, else the model's own with what it can. Raises ``TemplateError`` where there is
        none. ``memo_bytes`` bounds the memo of segments, ``conversation_bytes`` the one of conversations.
        """
        file = model_dir / "tokenizer.json"
        is_tekken = not file.is_file() and (model_dir / "tekken.json").is_file()
        tokenizer = load_tekken(model_dir / "tekken.json") if is_tekken else Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        choice = choose_template(model_dir, tokenizer, template)
        vocab_size = read_json(model_dir / "config.json").get("vocab_size")
        return cls(
            tokenizer,
            choice,
            stop_token_ids=stop_tokens(tokenizer, model_dir, choice.template.name),
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            memo_bytes=memo_bytes,
            conversation_bytes=conversation_bytes,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of the chat; text that spells a control token stays text. See ``encode_chat_hashed``."""
        options = PromptOptions(add_generation_prompt=add_generation_prompt)
        return cast("list[int]", self.encode_chat_hashed(messages, tools, options=options).ids.tolist())

    def encode_chat_hashed(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        seed: int = 0,
        block_sizes: Iterable[int] = (),
        options: PromptOptions | None = None,
        anchors: Anchors | None = None,
        answers: Answers | None = None,
    ) -> EncodedPrompt:
        """Return the chat's ids and their routing hashes under ``seed``.

        ``anchors``: one for each message, what earlier calls left at its end, where the messages up to there were the
        same; what this one leaves is put there. ``answers``: what is known of answers that the messages may quote;
        their ids are put in where they belong (see ``echoes``). Raises ``PromptError`` for a bad role or content and
        for what the template refuses. Costs O(new text) for a conversation that goes on from a known one, and copying
        the old ids (and, without ``anchors``, serializing and comparing the old text: about 0.5 µs a kB); O(text) for
        others, less the encoding of segments that are known.
        """
        options = options or PromptOptions()
        scope = scope_of_prompt(messages, tools, options, answers)
        chat = _Chat(messages, tools, seed, frozenset(block_sizes), options, scope, answers, anchors)
        known, content = self._find(chat)
        if known is None and scope is not None and anchors is not None and len(messages) > 1:
            known = self._without_last(chat)
        encoded, _ = self._encoded(chat, known, content)
        return encoded

    def _without_last(self, chat: _Chat) -> Known | None:
        """Know the conversation without its last message: that is another when an answer is asked for anew."""
        try:
            return self._encoded(replace(chat, messages=chat.messages[:-1]), None, None)[1]
        except PromptError:
            return None  # some templates refuse a conversation that ends there

    def goes_on(self, anchors: Anchors) -> bool:
        """Tell whether a conversation with these ``anchors`` goes on from a known one, so that little is to be done."""
        return self._conversations.goes_on(anchors)

    def _encoded(self, chat: _Chat, known: Known | None, content: Content | None) -> tuple[EncodedPrompt, Known | None]:
        """Encode, from ``known`` on; return also what is known from now on."""
        messages, tools, options, scope = chat.messages, chat.tools, chat.options, chat.scope
        answers, anchors = chat.answers, chat.anchors
        guarded = self._prepare_more(messages, known) if known is not None else None
        if known is None or guarded is None:
            known, guarded = None, self._prepare(messages, tools, options)
        rendered = self._render(guarded, known.point.state if known is not None else None, options)
        base = known if rendered.resumed else None
        tokens = self._encode(rendered, guarded, base)
        echoes = answers is not None and scope is not None
        if answers is not None and scope is not None:
            tokens = self._with_answers(tokens, messages, answers, scope, rendered.state, base)
        old = base.conversation.hashes if base is not None else {}
        keys = {(chat.seed, size) for size in chat.block_sizes} | ({PREFIX_CHAIN} if echoes else set())
        chains = {key: _chain(tokens, *key, old.get(key)) for key in keys}
        if scope is not None and rendered.state is not None and (base is None or base.point.messages < len(messages)):
            if content is None and anchors is None:
                content = Content.of(messages, scope)
            if content is not None or anchors is not None:
                length = content.length if content is not None else _length(rendered.text, base)
                conversation = grown(length, guarded, rendered.state, tokens, {**old, **chains}, base)
                ids = tokens.ids.up_to(tokens.sealed)
                known = self._conversations.keep(scope, content, conversation, ids, known, anchors)
        encoded = EncodedPrompt(
            tokens.ids,
            {size: chain for (at_seed, size), chain in chains.items() if at_seed == chat.seed},
            tokens.has_markers,
            tokens.echo,
            tokens.holds_kept,
            scope if echoes else None,
            chains.get(PREFIX_CHAIN),
        )
        return encoded, known

    def _find(self, chat: _Chat) -> tuple[Known | None, Content | None]:
        """Return what is known of the conversation, and its content where that had to be made."""
        if chat.scope is None:
            return None, None
        if chat.anchors is not None:
            return self._conversations.find_anchor(chat.anchors, chat.scope), None
        content = Content.of(chat.messages, chat.scope)
        return (self._conversations.find(content) if content is not None else None), content

    def encode_with_media(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        seed: int = 0,
        block_sizes: Iterable[int] = (),
        options: PromptOptions | None = None,
    ) -> EncodedPrompt:
        """Return a chat with media in it: its ids up to the first medium, and names from there on.

        ``exact_tokens`` are what an engine sees, up to the last control token before the first medium. What follows is
        text as ids and media by content, good for finding the same again and for nothing else. O(text and media).
        """
        (mark,) = unused_marks([messages, tools], 1)
        media = list(media_of(messages))
        shown = with_texts(messages, repeat(mark))
        guarded = self._prepare(shown, tools, options or PromptOptions())
        before, *behind = self._render(guarded, None, options or PromptOptions()).text.split(mark)
        if len(behind) != len(media):
            raise PromptError("the chat template does not show each medium once")
        encoded = self._segments.encode_on(before, settled=len(before), guard=guarded.guard, cut=guarded.cut)
        pieces = [encoded.ids[encoded.seal.tokens :]]
        for medium, text in zip(media, behind, strict=True):
            rest = self._segments.encode_on(text, guard=guarded.guard, cut=guarded.cut)
            pieces += [medium_ids(medium), rest.ids]
        joined = JoinedIds(encoded.ids[: encoded.seal.tokens], np.concatenate(pieces))
        ids = cast("Sequence[int]", joined.behind(0))
        hashes = {size: routing_hash_array(ids, size, seed) for size in set(block_sizes)}
        marked = self.spells_control_tokens(messages, tools)
        return EncodedPrompt(joined, hashes, marked, exact_tokens=encoded.seal.tokens)

    def spells_control_tokens(self, messages: Sequence[Mapping[str, object]], tools: object) -> bool:
        """Tell whether any text in the messages or tools spells a control token. O(text), and needs no template."""
        return self._markers.are_spelled_in(messages, tools)

    def escape(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None
    ) -> tuple[list[dict[str, object]], list[dict[str, object]] | None]:
        """Return messages and tools whose texts spell no control token: each got an invisible character."""
        return self._markers.escape(messages, tools)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a raw prompt as the model's tokenizer makes them: control tokens in it count as such."""
        return self._text_prefix + self._segments.encode(text) + self._text_suffix

    def count(self, text: str) -> int:
        """Return how many tokens a text has by itself. Raises ``PromptError`` for half of a surrogate pair."""
        return len(self._segments.encode(text))

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def memo_stats(self) -> MemoStats:
        """Return the counters of the memo of segments."""
        return self._segments.stats()

    def conversation_stats(self) -> ConversationStats:
        """Return the counters of the memo of conversations."""
        return self._conversations.stats()

    def _prepare(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        options: PromptOptions,
    ) -> Guarded:
        """Check, shape and guard a whole conversation."""
        checked = check_messages(messages, joins_parts=self._joins_parts)
        checked_tools, variables = check_tools(tools), options.variables or {}
        if reserved := _RESERVED & variables.keys():
            raise PromptError(f"a template's variable cannot be named {min(reserved)!r}", param="chat_template_kwargs")
        guard, cut, tag = unused_marks([checked, checked_tools, variables], 3)
        if options.continue_final_message:
            checked[-1] = tag_end(checked[-1], tag)
        guarded_tools = cast("list[dict[str, object]] | None", self._markers.guard_value(checked_tools, guard))
        guarded_variables = cast("dict[str, object]", self._markers.guard_value(variables, guard))
        shaped = self._markers.guard(self._shape(checked), guard)
        return Guarded(shaped, guarded_tools, guarded_variables, guard, cut, tag)

    def _prepare_more(self, messages: Sequence[Mapping[str, object]], known: Known) -> Guarded | None:
        """Do the same for the messages that are new; ``None`` where they contain a mark that is in use."""
        old, count = known.conversation, known.point.messages
        new = messages[count:]
        checked = check_messages(new, first=count, joins_parts=self._joins_parts) if new else []
        if contains_any(checked, (old.guard, old.cut)):
            return None
        added = self._markers.guard(self._shape(checked), old.guard)
        return Guarded([*old.messages[:count], *added], old.tools, old.variables, old.guard, old.cut, "")

    def _shape(self, checked: list[dict[str, object]]) -> list[dict[str, object]]:
        choice = self._choice
        if not choice.is_shaped:
            return checked
        return for_model_template(checked, null_as_empty=choice.null_as_empty, parse_arguments=choice.parse_arguments)

    def _render(self, guarded: Guarded, state: LoopState | None, options: PromptOptions) -> Rendering:
        template = self._choice.tool_template if guarded.tools else self._choice.template
        rendering = template.resume(
            guarded.messages,
            guarded.tools,
            state,
            add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
            **guarded.variables,
            **({} if self._choice.is_own else {"cut": guarded.cut}),
        )
        if options.continue_final_message:
            return Rendering("", "", up_to_tag(rendering.text, guarded.tag), None, resumed=False)
        return rendering

    def _encode(self, rendering: Rendering, guarded: Guarded, base: Known | None) -> Tokens:
        """Encode what was rendered, behind the ids that ``base`` brings."""
        point = base.point if base is not None else None
        text = (point.open_text if point is not None else "") + rendering.text
        settled = len(text) - len(rendering.rest)
        encoded = self._segments.encode_on(
            text,
            after=point.seal if point is not None else "",
            settled=settled,
            guard=guarded.guard,
            cut=guarded.cut,
        )
        known = base.conversation.ids[: base.point.tokens] if base is not None else _NO_IDS
        seal = encoded.seal
        marked_before = point is not None and point.has_markers
        marked_settled = marked_before or text.find(guarded.guard, 0, settled) >= 0
        return Tokens(
            JoinedIds(known, encoded.ids),
            len(known) + seal.tokens,
            seal.token,
            text[seal.chars : settled],
            marked_settled,
            marked_settled or guarded.guard in rendering.rest,
        )

    def _with_answers(
        self,
        tokens: Tokens,
        messages: Sequence[Mapping[str, object]],
        answers: Answers,
        scope: bytes,
        state: LoopState | None,
        base: Known | None,
    ) -> Tokens:
        """Put generated ids in the place of those that rendering made of quoted answers."""
        known = tokens.ids.known
        echoed = with_answers(
            tokens.ids.new,
            known=known,
            chain=base.conversation.hashes.get(PREFIX_CHAIN) if base is not None else None,
            messages=messages,
            answers=answers,
            scope=scope,
            past=base.point.past if base is not None else NO_PAST,
            sealed=tokens.sealed - len(known),
            settled_messages=state.position if state is not None else 0,
            voice=self._voice,
        )
        return replace(
            tokens,
            ids=JoinedIds(known, echoed.ids),
            sealed=len(known) + echoed.sealed,
            echo=echoed.echo,
            past=echoed.past,
            holds_kept=echoed.holds_kept,
        )


def _chain(tokens: Tokens, seed: int, size: int, old: Hashes | None) -> Hashes:
    """Hash the blocks that ``old`` does not hold."""
    keep = min(len(old), len(tokens.ids.known) // size) if old is not None else 0
    new = cast("Sequence[int]", tokens.ids.behind(keep * size))  # an array is all that hashing needs of a sequence
    if old is None or not keep:
        return routing_hash_array(new, size, seed)
    return np.concatenate([old[:keep], routing_hash_array(new, size, seed, parent=int(old[keep - 1]))])


def _length(text: str, base: Known | None) -> int:
    """Return about how long a conversation is that was found by its anchors."""
    return len(text) + (base.point.content_bytes if base is not None else 0)


def _text_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a raw text (a beginning-of-text token, mostly)."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    framed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    return framed[:start], framed[start + len(bare) :]

"""What another engine is asked when the one that was answering died: to go on from what was delivered.

=============  =======================================================  ==========================================
the engine     is given                                                 which holds for
=============  =======================================================  ==========================================
restores ids   the ids of the answer's tokens                           text, calls, schemas, seeds: all of it
reads ids      prompt and answer as ids                                 text and reasoning, without a grammar
goes on with   the conversation with the answer as its last message     text (and reasoning that is over)
a message
completes      the prompt and the text behind it                        completions
=============  =======================================================  ==========================================

What cannot be gone on with rightly is not: several choices, log-probabilities, and, where ids are not restored, a call
or a grammar's output that has begun. The client of such an answer is told honestly that it broke off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_adapter.base import OPENAI_ENDPOINTS, Begun, Capabilities, Continuation, whole_number
from engine_adapter.prompt import EncodedPrompt, PromptEncoder
from gateway.draft import Draft
from gateway.instance import Instance
from gateway.prompts import PromptBook
from gateway.protocols.base import Ask
from gateway.splice import Seam, Splice

_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf",
             "grammar", "json_schema", "structural_tag")  # fmt: skip
_LIMITS = ("max_completion_tokens", "max_tokens")
_THINK, _THOUGHT = "<think>", "</think>"

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine's part in an answer. ``members`` are set in the client's body beside what the adapter sets."""

    splice: Splice
    members: Mapping[str, object] = field(default_factory=dict)
    begun: Begun | None = None
    input_ids: Sequence[int] | None = None
    keeps_input_ids: bool = True  # the prompt's own ids, where there are some, are still what the engine must read


@dataclass(frozen=True, slots=True)
class _Measure:
    """Delivered text as the model's tokenizer sees it."""

    text_ids: Sequence[int]
    answer_ids: Sequence[int] | None  # reasoning, its marks and the text, as they follow the prompt's ids
    spells_control: bool


class Takeover:
    """An answer that lost its engine. Made once for each loss, whoever then goes on."""

    def __init__(self, ask: Ask, draft: Draft, measure: _Measure | None) -> None:
        reader = draft.reader
        assert reader is not None
        self._ask, self._draft, self._seen, self._measure = ask, draft, reader.seen, measure
        self._begun = draft.journal.begun()
        self._text = self._seen.text or ""
        self._in_reasoning = bool(self._seen.reasoning) and not self._text

    @classmethod
    async def of(cls, ask: Ask, draft: Draft, prompts: PromptBook) -> Takeover:
        """Return what is known of the answer so far. O(delivered text), in a thread."""
        assert draft.reader is not None
        seen, encoded = draft.reader.seen, _encoded(draft)
        text, reasoning, served = seen.text, seen.reasoning, draft.served_model
        measure = None
        if text or (text is not None and reasoning):
            said = text
            measure = await prompts.run(served, lambda encoder: _measured(encoder, encoded, said, reasoning))
        return cls(ask, draft, measure)

    @property
    def has_begun(self) -> bool:
        """Whether the client has got anything of the answer itself."""
        return self._seen.pieces > 0

    def can(self, instance: Instance) -> bool:
        """Tell whether the instance can go on with the answer, rightly and to its end."""
        if not self._goes_translated():
            return False
        able = instance.capabilities
        if not self.has_begun:
            return True
        if self._seen.text is None or self._has_arts():
            return False
        if able.continuation is Continuation.IDS:
            return self._begun is not None
        return self._has_room() and not self._has_grammar() and self._can_by_text(able)

    def plan(self, instance: Instance) -> Plan:
        """Return what to ask the instance, which ``can``."""
        able = instance.capabilities
        if not self.has_begun:
            return Plan(self._splice(instance, None))
        if able.continuation is Continuation.IDS:
            return Plan(self._splice(instance, None), begun=self._begun)
        limits = self._limits()
        if self._ask.endpoint == "completions":
            prompt, ids = self._ask.prompt, self._measure.text_ids if self._measure is not None else ()
            longer = prompt + self._text if isinstance(prompt, str) else [*(prompt or ()), *ids]
            return Plan(self._splice(instance, self._seam()), {**limits, "prompt": longer})
        encoded = _encoded(self._draft)
        if able.input_ids and encoded is not None and self._answer_ids is not None:
            raw = {"separate_reasoning": False} if self._in_reasoning else {}
            splice = self._splice(instance, self._seam(raw=True))
            return Plan(splice, {**limits, **raw}, input_ids=[*encoded.ids.tolist(), *self._answer_ids])
        said = self._text.rstrip()  # many templates trim; what the model says again is taken off in the splice
        splice = self._splice(instance, self._seam(held=self._text[len(said) :]))
        if not said:
            return Plan(splice, limits)
        members = {**limits, "messages": self._messages(said)}
        return Plan(splice, members, begun=Begun(), keeps_input_ids=False)

    @property
    def _answer_ids(self) -> Sequence[int] | None:
        return self._measure.answer_ids if self._measure is not None else None

    def _splice(self, instance: Instance, seam: Seam | None) -> Splice:
        is_same_kind = instance.spec.adapter.name == self._draft.adapter_name
        return Splice(
            self._seen.head, instance.spec.adapter, seam, shows_private=is_same_kind, hits=self._draft.begun_hits
        )

    def _seam(self, *, held: str = "", raw: bool = False) -> Seam:
        stops = self._ask.form.values.get("stop")
        named = [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else []
        return Seam(
            text=self._text,
            prompt_tokens=self._draft.prompt_tokens,
            said_tokens=self._said_tokens(),
            held=held,
            stops=[stop for stop in named if isinstance(stop, str) and stop],
            in_reasoning=self._in_reasoning,
            raw=raw,
        )

    def _said_tokens(self) -> int:
        measure = self._measure
        return self._seen.pieces if measure is None else len(measure.answer_ids or measure.text_ids)

    def _limits(self) -> dict[str, object]:
        """Return the limits of what is left to say."""
        said, least = self._said_tokens(), whole_number(self._ask.form.values.get("min_tokens"))
        left: dict[str, object] = {name: limit - said for name, limit in self._told_limits().items()}
        if least is not None:
            left["min_tokens"] = max(least - said, 0)
        return left

    def _told_limits(self) -> dict[str, int]:
        """Return the limits that the client set."""
        told = {name: whole_number(self._ask.form.values.get(name)) for name in _LIMITS}
        return {name: limit for name, limit in told.items() if limit is not None}

    def _has_room(self) -> bool:
        """Tell whether anything may be left to say: nobody but the engine knows how it ended at its limit."""
        limits = self._told_limits()
        if self._ask.endpoint == "completions" and not limits:
            return False  # the engine has a limit of its own there, which would begin anew
        return all(limit > self._said_tokens() for limit in limits.values())

    def _goes_translated(self) -> bool:
        """Tell whether the client's answer is made of OpenAI's: an engine's own streams of other kinds go unread."""
        return self._ask.endpoint in OPENAI_ENDPOINTS or not self._draft.is_native

    def _has_arts(self) -> bool:
        values = self._ask.form.values
        several = any((whole_number(values.get(name)) or 1) > 1 for name in ("n", "best_of"))
        return several or any(values.get(name) not in (None, False, 0) for name in ("logprobs", "top_logprobs"))

    def _has_grammar(self) -> bool:
        values = self._ask.form.values
        wanted = values.get("response_format")
        if isinstance(wanted, dict) and wanted.get("type") not in (None, "text"):
            return True
        choice = values.get("tool_choice")
        forced = choice == "required" or isinstance(choice, dict)
        return self._seen.has_calls or forced or any(values.get(name) is not None for name in _GRAMMARS)

    def _can_by_text(self, able: Capabilities) -> bool:
        if self._measure is not None and self._measure.spells_control:
            return False  # as text of a message it would be read as the token
        if self._ask.endpoint == "completions":
            values, prompt = self._ask.form.values, self._ask.prompt
            is_plain = not values.get("echo") and values.get("suffix") is None
            return is_plain and (isinstance(prompt, str) or (bool(prompt) and self._measure is not None))
        if able.input_ids and _encoded(self._draft) is not None and self._answer_ids is not None:
            return True
        goes_on = able.continuation in (Continuation.MESSAGE, Continuation.PREFILL)
        return goes_on and not self._in_reasoning and self._messages(self._text) is not None

    def _messages(self, said: str) -> list[Json] | None:
        """Return the conversation with what was said as its last message; ``None`` where that cannot be."""
        given = self._draft.prompt.members.get("messages") if self._draft.prompt is not None else None
        messages = list(given if isinstance(given, list) else self._ask.messages or ())
        if not messages:
            return None
        last = messages[-1]
        if last.get("role") == "assistant":
            content = last.get("content")
            if not isinstance(content, str):
                return None
            return [*messages[:-1], {**last, "content": content + said}]
        answer: dict[str, object] = {"role": "assistant", "content": said}
        if self._seen.reasoning:
            answer["reasoning_content"] = self._seen.reasoning
        return [*messages, answer]


def _encoded(draft: Draft) -> EncodedPrompt | None:
    """Return the prompt's ids as engines see them, where they are known to the last."""
    prompt = draft.prompt
    if prompt is None or not prompt.is_exact:
        return None
    if prompt.ids_to_send is not None:
        return prompt.ids_to_send
    return prompt.answerable.encoded if prompt.answerable is not None else None


def _measured(encoder: PromptEncoder, encoded: EncodedPrompt | None, text: str, reasoning: str) -> _Measure:
    """Count what was delivered, and write it as the ids that follow the prompt's."""
    text_ids = _ids(encoder, text)
    spells = encoder.spells_control_tokens([{"role": "assistant", "content": f"{reasoning}\n{text}"}], None)
    answer_ids: list[int] | None = text_ids
    if reasoning:
        answer_ids = None
        if encoded is not None and encoder.tokenizer.token_to_id(_THOUGHT) is not None:
            tail = encoder.tokenizer.decode(encoded.ids.tolist()[-8:], skip_special_tokens=False)
            opening = "" if tail.rstrip().endswith(_THINK) else f"{_THINK}\n"
            ending = f"\n{_THOUGHT}\n\n{text}" if text else ""
            answer_ids = _ids(encoder, f"{opening}{reasoning}{ending}")
    return _Measure(text_ids, answer_ids, spells)


def _ids(encoder: PromptEncoder, text: str) -> list[int]:
    ids: list[int] = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    return ids

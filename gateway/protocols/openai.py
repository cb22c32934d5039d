"""OpenAI's Chat Completions and Completions: what the gateway reads of a request and of an answer, and nothing more.

Everything that isn't read here goes through as it came. What an engine adds to an answer only because the gateway asked
for it (the usage of a stream, hits by tier) is taken out again unless the client asked for it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from billing.counts import UsageReading
from engine_adapter.base import EngineAdapter, whole_number
from gateway.errors import BadRequest, NotHere
from gateway.protocols.base import Answering, Ask, Sent, model_of, objects, salt_of, scan_body, stream_of
from gateway.protocols.counting import reading_of
from gateway.protocols.decode import json_object, refuse_half
from gateway.protocols.form import Form, Raw, scan, scan_text
from gateway.protocols.openai_errors import GAVE_UP, GAVE_UP_BODY, GAVE_UP_REASONS, OpenAIShape, error_class
from gateway.protocols.seen import Seen
from gateway.protocols.sse import data_of, event_of, with_data

_SAYING = ("content", "tool_calls", "reasoning_content", "reasoning", "refusal", "function_call")
_HEAD_MEMBERS = ("id", "created", "model", "system_fingerprint")
DONE = b"[DONE]"
DONE_EVENT = event_of(DONE)


@dataclass(frozen=True, slots=True)
class OpenAICompletions(OpenAIShape):
    """``chat`` or ``completions``, which engines speak themselves: bytes go through in both directions."""

    endpoint: str
    path: str
    forwarded: tuple[str, ...] = ()

    @property
    def grows(self) -> str | None:
        """A chat's messages."""
        return "messages" if self.endpoint == "chat" else None

    async def past(self, form: Form, tenant: str) -> None:
        """Nothing: each request says everything."""

    def read(self, sent: Sent, past: object = None) -> Ask:
        """Read a request. Raises ``BadRequest`` for what the gateway cannot work with; the engine judges the rest."""
        values = sent.form.values
        options = values.get("stream_options")
        model, stream, salt = model_of(values), stream_of(values), salt_of(values)
        if options is not None and not isinstance(options, dict):
            raise BadRequest("'stream_options' must be an object", param="stream_options")
        return Ask(
            form=sent.form,
            body=sent.body,
            native=sent,
            endpoint=self.endpoint,
            model=model,
            stream=stream,
            shows_usage=bool(options and options.get("include_usage")),
            shows_detail=bool(values.get("return_cached_tokens_details")),
            cache_salt=salt,
            messages=objects(values.get("messages")) if self.endpoint == "chat" else None,
            tools=objects(values.get("tools")),
            prompt=_prompt(values.get("prompt")) if self.endpoint == "completions" else None,
            refusal=NotHere(self.endpoint),
        )

    def reader(self, ask: Ask, adapter: EngineAdapter, answering: Answering, *, is_native: bool) -> AnswerReader:
        """Return what follows an answer."""
        renamed = answering.model if answering.model != answering.served_model else None
        reader = AnswerReader(
            adapter,
            shows_usage=ask.shows_usage,
            shows_detail=ask.shows_detail,
            shows_ids=ask.form.values.get("return_output_ids_in_sglext") is True,
            model=renamed,
        )
        reader.seen.may_call, reader.seen.choices = ask.may_call, _choices(ask.form.values)
        return reader

    def failed_stream(self, error_body: bytes) -> bytes:
        """Return the error as an event, and the end."""
        return event_of(error_body) + DONE_EVENT


CHAT = OpenAICompletions("chat", "/v1/chat/completions")
COMPLETIONS = OpenAICompletions("completions", "/v1/completions")


def read_ask(body: bytes, endpoint: str) -> Ask:
    """Read a request of ``chat`` or ``completions``. Raises ``BadRequest``."""
    return (CHAT if endpoint == "chat" else COMPLETIONS).read(scan_body(body))


def _choices(values: Mapping[str, object]) -> int:
    """Return how many choices are asked for: so many for each prompt."""
    prompt = values.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return prompts * (whole_number(values.get("n")) or 1)


def _prompt(value: object) -> str | Sequence[int] | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    return None


class AnswerReader:
    """Follows one answer: remembers what the record needs, and gives the client what it asked for."""

    def __init__(
        self,
        adapter: EngineAdapter,
        *,
        shows_usage: bool,
        shows_detail: bool,
        shows_ids: bool = False,
        model: str | None = None,
    ) -> None:
        """``shows_*``: what the client asked for itself. ``model``: the name to show instead of the engine's own."""
        self._adapter = adapter
        self._shows_usage, self._model = shows_usage, model
        self._hidden = frozenset[str]() if shows_detail or shows_ids else adapter.private_members
        self._ids = {} if shows_ids else adapter.id_members
        self._touched = self._hidden | self._ids.keys() | ({"model"} if model is not None else set())
        self.seen = Seen()

    def has_ended(self) -> bool:
        """Tell whether the stream's last event was seen."""
        return self.seen.is_done

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Take one event of a stream; return what the client gets of it, and whether it brought output."""
        data = data_of(event)
        if data is None:
            return event, False
        if data.strip() == DONE:
            self.seen.is_done = True
            return event, False
        chunk = json_object(data)
        if chunk is None:
            return event, False
        if "error" in chunk and "choices" not in chunk:
            self.seen.gave_up(error_class(chunk["error"]), data)
            return b"", False
        if self.seen.head is None:
            self.seen.head = {name: chunk[name] for name in _HEAD_MEMBERS if name in chunk}
        has_output = self._choices(chunk.get("choices"), "delta")
        self.seen.pieces += has_output
        if self.seen.finish_reason in GAVE_UP_REASONS:
            self.seen.gave_up(GAVE_UP.code, GAVE_UP_BODY)
            return b"", False
        return self._shown(event, data, chunk), has_output

    def answer(self, body: bytes) -> bytes:
        """Take a whole answer; return what the client gets of it. Raises ``UpstreamUnusable`` for a broken one."""
        answer = json_object(body)
        if answer is None:
            refuse_half(body)
            return body
        self._count(answer)
        self._choices(answer.get("choices"), "message")
        edited = self._edited(lambda: scan(body), answer, self._hidden_in(answer), {})
        return body if edited is None else edited.encode()

    def closing(self) -> bytes:
        """Return the end mark."""
        return DONE_EVENT

    def failure(self, error_body: bytes) -> bytes:
        """Return an error event and the end mark."""
        return event_of(error_body) + DONE_EVENT

    def usage(self) -> UsageReading | None:
        """Return the engine's counts."""
        seen = self.seen
        return reading_of(self._adapter, seen.usage, seen.extension)

    def _count(self, answer: Mapping[str, object]) -> None:
        self.seen.count(self._adapter.read_usage(answer))
        self.seen.served_in(answer)

    def _choices(self, choices: object, part_name: str) -> bool:
        has_output = False
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            self.seen.finish(choice)
            part = choice.get(part_name)
            if isinstance(part, dict):
                index = choice.get("index")
                self.seen.take(index if isinstance(index, int) else 0, part)
                has_output = has_output or _has_output(part)
            elif text := choice.get("text"):
                has_output = True
                if isinstance(text, str):
                    index = choice.get("index")
                    self.seen.take_text(index if isinstance(index, int) else 0, text)
        return has_output

    def _shown(self, event: bytes, data: bytes, chunk: Mapping[str, object]) -> bytes:
        self._count(chunk)
        if chunk.get("usage") is None and self._touched.isdisjoint(chunk):
            return event
        hidden = self._hidden_in(chunk)
        if not self._shows_usage and chunk.get("usage") is not None:
            hidden.add("usage")
        says_more = chunk.get("choices") or any(
            name in chunk and name not in hidden and chunk[name] for name in ("usage", *self._adapter.private_members)
        )
        if hidden and not says_more:
            return b""  # it came for us alone
        edited = self._edited(lambda: scan_text(data.decode()), chunk, hidden, self._lacking(chunk, hidden))
        return event if edited is None else with_data(event, edited.encode())

    def _hidden_in(self, answer: Mapping[str, object]) -> set[str]:
        """Return the members, or those in which something is, that the client didn't ask for."""
        hidden = {name for name in self._hidden if name in answer}
        for outer, inner in self._ids.items():
            if isinstance(held := answer.get(outer), dict) and held.keys() == {inner}:
                hidden.add(outer)
        return hidden

    def _lacking(self, chunk: Mapping[str, object], hidden: set[str]) -> Mapping[str, object]:
        """Return what clients need of a chunk of usage that its engine left out: they all look at ``choices``."""
        shows_usage = chunk.get("usage") is not None and "usage" not in hidden
        return {"choices": []} if shows_usage and not isinstance(chunk.get("choices"), list) else {}

    def _edited(
        self,
        read: Callable[[], Form],
        answer: Mapping[str, object],
        hidden: set[str],
        lacking: Mapping[str, object],
    ) -> str | None:
        """Return the text as the client gets it: without what is hidden, and without ids that it didn't ask for."""
        renamed = {**self._renamed(answer), **lacking}
        held = [name for name, ids in self._ids.items() if name not in hidden and _holds(answer.get(name), ids)]
        if not (hidden or renamed or held):
            return None
        form, edits = read(), dict(renamed)
        for name in held:
            inner = form.nested(name)
            assert inner is not None
            edits[name] = Raw(inner.edited({}, drop=frozenset({self._ids[name]})))
        return form.edited(edits, drop=frozenset(hidden))

    def _renamed(self, answer: Mapping[str, object]) -> Mapping[str, object]:
        named = self._model is not None and "model" in answer
        return {"model": self._model} if named else {}


def _has_output(part: Mapping[str, object]) -> bool:
    """Tell whether a message, or a piece of one, says anything."""
    return any(map(part.get, _SAYING))


def _holds(value: object, name: str) -> bool:
    return isinstance(value, dict) and name in value

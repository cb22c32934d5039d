"""Events that are taken without a parser, since they are like the one before them, are taken like all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from engine_adapter.openai_compatible import OpenAICompatible
from engine_adapter.sglang import Sglang
from gateway.protocols.anthropic.native import NativeMessageReader
from gateway.protocols.base import AnswerReader as Reader
from gateway.protocols.half_pairs import PairJoiner
from gateway.protocols.mould import Mould
from gateway.protocols.openai import AnswerReader
from gateway.protocols.sse import EventCutter
from gateway.protocols.translated import TranslatedReader
from gateway.relay import RelayOptions, _Course
from tests.property.test_translated_answers_property import _reader as translated_reader

_OPEN = b'data: {"id":"i","created":1,"model":"m","choices":[{"index":0,'
_CHAT = _OPEN + b'"delta":{"content":"%s"},"finish_reason":null}]}\n\n'
_NUMBER = _CHAT.replace(b'"i"', b'"5"').replace(b'"delta":{"content":"%s"}', b'"text":5')
_CALL = b'data: {"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"5","input":5}}\n\n'
_SHAPES = [
    *[_CHAT] * 4,
    _CHAT.replace(b'"created":1', b'"created":2'),
    _CHAT.replace(b'"index":0', b'"index":1'),
    _CHAT.replace(b"null", b'"stop"'),
    _CHAT.replace(b'"%s"', b'"%s","reasoning_content":"%s"'),
    _CHAT.replace(b'"%s"', b'"%s","reasoning":""'),
    _CHAT.replace(b'"content"', b'"reasoning_content"'),
    _CHAT.replace(b'"content":"%s"', b'"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"%s"}}]'),
    _CHAT.replace(b'"content":"%s"', b'"tool_calls":[{"index":0,"function":{"arguments":"%s"}}]'),
    _CHAT.replace(b'"i"', b'"%s"'),
    _CHAT.replace(b"]}\n", b'],"usage":{"completion_tokens":1}}\n'),
    _CHAT.replace(b"]}\n", b'],"sglext":{"x":1}}\n'),
    _CHAT.replace(b"data: {", b'data:{"error":"%s",'),
    _CHAT.replace(b"\n\n", b"\r\n\r\n"),
    _CHAT.replace(b'"choices"', b'\n"choices"'),
    _CHAT.replace(b'"choices"', b'\ndata: "choices"'),
    _CHAT.replace(b'"delta":{"content":"%s"}', b'"text":"%s"'),
    _NUMBER,
    b'data: {"error":{"message":"%s"}}\n\n',
    b": %s\n\n",
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":1}}}\n\n',
    b'data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":"%s"}}\n\n',
    _CALL,
    b'data: {"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"%s","input":{}}}\n\n',
    *[b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%s"}}\n\n'] * 2,
    b'data: {"type":"content_block_delta","index":1,"delta":{"type":"thinking_delta","thinking":"%s"}}\n\n',
    b'data: {"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"%s"}}\n\n',
    b"data: [DONE]\n\n",
]
_TEXTS = [b"", b" a", b"5", b"content", b"text_delta", b'x"', b'x","content":"y', b"\\n", b"\\", b'\\"', b"\\u00e9",
          b"\\ud83d", b"\\ude00", b"\\ud83d\\ude00", b"\n", b"\n\n", b"\r", b"\x00", b"\x7f", b"\xff", b"\xe2\x80\xa8",
          "Grüße 世界".encode()]  # fmt: skip
_EVENTS = st.builds(
    lambda shape, text: shape.replace(b"%s", text),
    st.sampled_from(_SHAPES),
    st.sampled_from(_TEXTS) | st.text(max_size=3).map(str.encode),
)
_READERS: list[Callable[[], Reader]] = [
    lambda: AnswerReader(OpenAICompatible(), shows_usage=False, shows_detail=False),
    lambda: AnswerReader(Sglang(), shows_usage=True, shows_detail=False, model="shown"),
    NativeMessageReader,
    lambda: translated_reader("messages"),
]


class _Whole:
    """All of a stream parsed, event by event."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self._cutter, self._pairs, self.outputs = reader, EventCutter(1 << 20), PairJoiner(), 0

    def take(self, data: bytes) -> bytes:
        shown = []
        for event in self._pairs.join(self._cutter.feed(data)):
            piece, has_output = self.reader.event(event)
            shown.append(piece)
            self.outputs += has_output
            if self.reader.seen.error_body is not None:
                break
        return b"".join(shown)

    @property
    def is_over(self) -> bool:
        return self.reader.has_ended() or self.reader.seen.error_body is not None


def _said(reader: Reader) -> object:
    blocks = [(b.kind, b.pieces) for b in reader._blocks.blocks] if isinstance(reader, TranslatedReader) else None
    return str(reader.seen), blocks


@given(st.sampled_from(_READERS), st.lists(st.lists(_EVENTS, min_size=1, max_size=2).map(b"".join), max_size=12))
@example(_READERS[0], [_CHAT % b"a", _CHAT % b"b", b'data: {"choices":[', b'{"text":"c"}]}\n\n', _CHAT % b"d"])
@example(_READERS[0], [_CHAT % b"a", _CHAT % b"\\n", _CHAT % b'","content":"', _CHAT % b"\n"])
@example(_READERS[0], [(_CHAT % b"\\u0061").replace(b'"i"', b'"%b"' % name) for name in (b"a", b"b")])
@example(_READERS[0], [_NUMBER, _NUMBER.replace(b'"5"', b'"6"')])
@example(_READERS[2], [_CALL, _CALL.replace(b'"5"', b'"6"')])
def test_a_stream_is_taken_as_if_every_event_were_parsed(make: Callable[[], Reader], reads: Sequence[bytes]) -> None:
    async def take() -> None:
        outputs: list[None] = []
        reader, whole = make(), _Whole(make())
        course = _Course(reader, RelayOptions(), lambda: outputs.append(None), lambda: None, None)
        for read in reads:
            assert course.take(read) == whole.take(read)
            assert (_said(reader), len(outputs), course.is_over) == (_said(whole.reader), whole.outputs, whole.is_over)
            if course.is_over:
                break

    asyncio.run(take())


def test_what_stands_between_engine_and_reader_sees_every_event() -> None:
    seen: list[bytes] = []
    reader = _READERS[0]()
    course = _Course(reader, RelayOptions(), lambda: None, lambda: None, lambda e: seen.append(e) or (e,))  # type: ignore[func-returns-value]
    events = [_CHAT % text for text in (b"a", b"b", b"c")]
    assert [course.take(event) for event in events] == events == seen


def test_an_event_like_the_last_one_is_not_parsed() -> None:
    mould, shown = Mould(), _CHAT.replace(b'"m"', b'"another"')
    mould.learn(_CHAT % b"one", shown % b"one", "one")
    assert mould.take(_CHAT % b"two") == ("two", shown % b"two")
    assert mould.take(_CHAT % b'\\"\\u00e9\\n') == ('"é\n', shown % b'\\"\\u00e9\\n')
    for other in (b"", b'"', b'","content":"', b"\n", b"\xff", b"\\", b"\\ud83d"):
        assert mould.take(_CHAT % other) is None
    assert mould.take((_CHAT % b"two").replace(b'"i"', b'"j"')) is None
    mould.forget()
    assert mould.take(_CHAT % b"two") is None


def test_a_place_that_is_not_certain_is_not_learned() -> None:
    for event, text in ((_CHAT % b"i", "i"), (_CHAT % b"content", "content"), (_CHAT % b"\\u0061", "a"), (_CHAT, "")):
        mould = Mould()
        mould.learn(event, event, text)
        assert mould.take(event.replace(b"%s", b"x")) is None
    for shown in (
        b"",
        b"a",
        (_CHAT % b"one").replace(b'"m"', b'"one"'),
        (_CHAT % b"one").replace(b'"m"', b'"\\u0061"'),
    ):
        mould = Mould()
        mould.learn(_CHAT % b"one", shown, "one")
        assert mould.take(_CHAT % b"two") is None

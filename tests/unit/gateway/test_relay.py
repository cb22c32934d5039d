"""Streams arrive whole for any cut, show what was asked for, and always end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine_adapter.errors import UpstreamBroken
from engine_adapter.sglang import Sglang
from gateway.errors import EngineGaveUp, GatewayError
from gateway.protocols.openai import AnswerReader
from gateway.protocols.openai_errors import error_body
from gateway.protocols.sse import EventCutter, EventTooLong, data_of
from gateway.relay import RelayOptions, StreamWriter, relay
from tests.scripted_engine import DONE, chunk, event, stream, usage, usage_chunk

_DETAIL = {"sglext": {"cached_tokens_details": {"device": 3, "host": 1, "storage": 0, "storage_backend": "keepwarm"}}}
_WORDS = ["Grüße, ", "世界 ", "🌍🌏", "\\n \u2028", "end"]
_PASSED = re.compile(rb"for [\d.]+ s|: keepwarm\n\n")  # what differs with the time that passes
_STREAM = b"".join(stream(_WORDS, cached=4, **_DETAIL))


class FakeUpstream:
    """Reads as a test wants them; then a clean end, a break, or silence."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, reads: Sequence[bytes], end: str = "clean", *, comes_while_waiting: bool = False) -> None:
        """With ``comes_while_waiting`` each read comes while somebody waits for it, else it is there before."""
        self._reads, self._end, self._comes_while_waiting = list(reads), end, comes_while_waiting
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], None] | None = None

    async def read_some(self) -> bytes:
        await asyncio.sleep(0)
        if self._comes_while_waiting and self._reads:
            await self._wait(self._come)
        if self._reads:
            return self._reads.pop(0)
        if self._end == "break":
            raise UpstreamBroken("gone")
        if self._end == "silence":
            await self._wait(lambda: None)
        return b""

    async def _wait(self, meanwhile: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        loop.call_soon(meanwhile)
        await self._waiter

    def _come(self) -> None:
        waiter = self._waiter
        assert waiter is not None
        if waiter.done():
            return
        if self._take is None or not self._reads:
            waiter.set_result(None)
            return
        self._take(self._reads.pop(0))
        asyncio.get_running_loop().call_soon(self._come)

    def carry(self, take: Callable[[bytes], None] | None) -> None:
        self._take = take

    def interrupt(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    async def read_all(self, limit_bytes: int) -> bytes:
        raise NotImplementedError

    def give_up(self) -> None: ...

    def close(self) -> None: ...


class FakeReply:
    """What a client got."""

    def __init__(self, *, keeps_up: bool = False) -> None:
        self.data, self.is_started, self.is_finished = b"", False, False
        self._keeps_up = keeps_up

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started = True

    def write_soon(self, data: bytes) -> bool:
        if self._keeps_up:
            self.data += data
        return self._keeps_up

    async def write(self, data: bytes) -> None:
        self.data += data

    async def finish(self) -> None:
        self.is_finished = True

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        raise NotImplementedError


async def _relayed(
    reads: Sequence[bytes],
    end: str = "clean",
    *,
    asks: bool = False,
    choices: int = 1,
    options: RelayOptions | None = None,
    comes_while_waiting: bool = False,
    keeps_up: bool = False,
) -> tuple[FakeReply, AnswerReader, GatewayError | None, list[str]]:
    reply, calls = FakeReply(keeps_up=keeps_up), list[str]()
    reader = AnswerReader(Sglang(), shows_usage=asks, shows_detail=asks)
    reader.seen.choices = choices
    options = options or RelayOptions()
    writer = StreamWriter(reply, options)
    await writer.start({})
    upstream = FakeUpstream(reads, end, comes_while_waiting=comes_while_waiting)
    error = await relay(upstream, writer, reader, options, lambda: calls.append("output"), lambda: calls.append("done"))
    if error is not None:
        own = error.engine_body if isinstance(error, EngineGaveUp) else error_body(error)
        await writer.end(reader.failure(own))
    assert reply.is_finished
    return reply, reader, error, calls


def _relay(*args: object, **more: object) -> tuple[FakeReply, AnswerReader, GatewayError | None, list[str]]:
    """Relay reads that are there before they are asked for, and that come while somebody waits, to a client that keeps
    up and to one that doesn't: it makes no difference."""
    ways = [
        asyncio.run(_relayed(*args, comes_while_waiting=comes_while_waiting, keeps_up=keeps_up, **more))  # type: ignore[arg-type]
        for comes_while_waiting in (False, True)
        for keeps_up in (False, True)
    ]
    results = {
        (_PASSED.sub(b"", reply.data), str(reader.seen), getattr(error, "code", None), tuple(calls))
        for reply, reader, error, calls in ways
    }
    assert len(results) == 1
    return ways[-1]


def _chunks(data: bytes) -> list[dict[str, object]]:
    lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line) for line in lines]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, len(_STREAM)), max_size=40), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]), st.booleans()
)
def test_any_cut_gives_the_same_bytes_and_the_same_usage(cuts: list[int], ends: bytes, asks: bool) -> None:
    data = _STREAM.replace(b"\n\n", ends)
    whole, reader, error, _ = _relay([data], asks=asks)
    places = sorted({0, len(data), *cuts})
    cut, cut_reader, cut_error, _ = _relay([data[a:b] for a, b in pairwise(places)], asks=asks)
    assert cut.data == whole.data
    assert cut_reader.seen.usage == reader.seen.usage == usage(10, 5, 4)
    assert cut_reader.seen.extension == _DETAIL["sglext"]
    assert (error, cut_error) == (None, None)
    if asks:
        assert whole.data == data


def test_byte_by_byte_damages_no_character() -> None:
    reply, reader, error, calls = _relay([_STREAM[i : i + 1] for i in range(len(_STREAM))])
    assert error is None
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in _chunks(reply.data)) == "".join(_WORDS)  # type: ignore[index]
    assert reader.seen.message() == {"role": "assistant", "content": "".join(_WORDS)}
    assert calls == ["output"] * 5 + ["done"]


def test_usage_is_shown_only_if_asked_for() -> None:
    shy, _, _, _ = _relay([_STREAM])
    assert b'"usage"' not in shy.data
    assert b"sglext" not in shy.data
    assert shy.data.endswith(DONE)
    assert shy.data == b"".join(piece for piece in stream(_WORDS) if b'"usage"' not in piece)


@pytest.mark.parametrize(
    "last",
    [
        {**chunk({}, finish="stop"), "usage": usage(7, 3)},
        {**chunk({"content": "x"}), "usage": usage(7, 3)},
    ],
)
def test_usage_in_a_chunk_with_choices_is_counted_and_taken_out(last: dict[str, object]) -> None:
    parts = [event(chunk({"content": "a"}, usage=None)), event(last), event(chunk({}, finish="stop", usage=None)), DONE]
    reply, reader, _, _ = _relay([b"".join(parts)])
    assert reader.seen.usage == usage(7, 3)
    shown = _chunks(reply.data)
    assert len(shown) == 3
    assert all(c.get("usage") is None for c in shown)
    assert shown[1]["choices"] == last["choices"]


@pytest.mark.parametrize(
    ("end", "code"), [("clean", "stream_truncated"), ("break", "stream_truncated"), ("silence", "upstream_timeout")]
)
@pytest.mark.parametrize("cut", [0, 1, 30, 200, 300])
def test_a_stream_that_stops_gets_an_error_and_an_end_and_no_finish(end: str, code: str, cut: int) -> None:
    data = b"".join(stream(_WORDS)[:4])[: cut or None] if cut else b""
    options = RelayOptions(idle_timeout_s=0.05, first_byte_timeout_s=0.05)
    reply, reader, error, calls = _relay([data] if data else [], end, options=options)
    assert error is not None
    assert error.code == code
    assert "done" not in calls
    assert reply.data.endswith(DONE)
    shown = _chunks(reply.data)
    assert shown[-1]["error"]["code"] == code  # type: ignore[index]
    assert not any(c["choices"][0]["finish_reason"] for c in shown[:-1])  # type: ignore[index]
    assert reader.seen.finish_reason is None


@pytest.mark.parametrize("end", ["clean", "break"])
def test_an_end_behind_the_first_of_two_choices_is_none(end: str) -> None:
    both = [chunk({"content": "a"}), chunk({"content": "b"}), chunk({}, finish="stop")]
    both[1]["choices"][0]["index"] = 1
    reply, _, error, calls = _relay([event(part) for part in both], end)
    assert error is not None
    assert error.code == "stream_truncated"
    assert calls == ["output", "output"]
    assert _chunks(reply.data)[-1]["error"]


@pytest.mark.parametrize("end", ["clean", "break"])
def test_an_end_before_the_second_of_two_choices_began_is_none(end: str) -> None:
    first = [event(chunk({"content": "a"})), event(chunk({}, finish="stop"))]
    reply, _, error, _ = _relay(first, end, choices=2)
    assert error is not None
    assert error.code == "stream_truncated"
    assert _chunks(reply.data)[-1]["error"]
    assert _relay([*first, DONE], choices=2)[2] is None, "an engine may make fewer, and says that it is done"


def test_nothing_goes_out_behind_the_end() -> None:
    late = event(chunk({"content": "late"}))
    for reads in ([*stream(["a"]), late], [b"".join([*stream(["a"]), late])]):
        reply, reader, error, _ = _relay(reads)
        assert error is None
        assert reply.data.endswith(DONE)
        assert reader.seen.text == "a"


def test_half_an_event_is_not_shown_though_it_ends_with_a_brace() -> None:
    last = stream(["a"])[1]
    cut = last.index(b"}") + 1
    reply, _, error, _ = _relay([stream(["a"])[0], last[:cut]])
    assert error is not None
    assert ["error" in shown for shown in _chunks(reply.data)] == [False, True]


def test_a_finished_answer_without_the_end_mark_is_whole() -> None:
    parts = stream(["a"])[:-1]
    reply, _, error, calls = _relay([b"".join(parts)])
    assert error is None
    assert reply.data.endswith(DONE)
    assert calls[-1] == "done"
    reply, _, error, _ = _relay([b"".join(parts) + b"data: [DONE]"])
    assert error is None
    assert reply.data.count(b"[DONE]") == 1


def test_an_error_event_goes_through_and_ends() -> None:
    bad = event({"error": {"message": "out of memory", "type": "engine_error", "code": 500}})
    reply, _, error, _ = _relay([event(chunk({"content": "a"})), bad])
    assert error is not None
    assert error.code == "engine_error"
    assert reply.data.endswith(bad + DONE)


def test_comments_go_through_and_heartbeats_fill_silence() -> None:
    reply, _, error, calls = _relay([b": engine ping\n\n", b"".join(stream(["a"]))])
    assert error is None
    assert reply.data.startswith(b": engine ping\n\n")
    assert calls == ["output", "done"]
    options = RelayOptions(heartbeat_s=0.01, idle_timeout_s=1.0, first_byte_timeout_s=1.0)
    reply, _, error, calls = _relay([], "silence", options=options)
    assert reply.data.count(b": keepwarm\n\n") >= 3
    assert calls == []


@pytest.mark.timeout(20)
def test_the_idle_limit_holds_from_the_first_output_on_however_long_one_waited_for_that() -> None:
    options = RelayOptions(heartbeat_s=3600, first_byte_timeout_s=3600, idle_timeout_s=0.01)
    _, _, error, calls = _relay([stream(["a"])[0], stream(["a"])[1]], "silence", options=options)
    assert error is not None
    assert (error.code, calls) == ("upstream_timeout", ["output"])


async def test_a_call_that_an_engine_holds_back_is_waited_for_while_somebody_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.relay._LOOK_S", 0.005)
    options = RelayOptions(heartbeat_s=3600, first_byte_timeout_s=3600, idle_timeout_s=0.01, call_timeout_s=3600)
    reader, reply, looks = AnswerReader(Sglang(), shows_usage=False, shows_detail=False), FakeReply(), list[int]()
    reader.seen.may_call = True
    writer = StreamWriter(reply, options)
    await writer.start({})

    def is_gone() -> bool:
        looks.append(reader.seen.pieces)
        return looks.count(1) > 9

    upstream = FakeUpstream(stream(["I write the file."])[:2], "silence")
    error = await relay(upstream, writer, reader, options, lambda: None, lambda: None, is_gone=is_gone)
    assert error is not None
    assert error.code == "upstream_timeout"
    assert looks.count(1) > 9  # and the idle limit, which was over long before, ended nothing


def test_one_event_is_bounded() -> None:
    cutter = EventCutter(100)
    assert cutter.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(EventTooLong):
        cutter.feed(b"y" * 10)
    reply, _, error, _ = _relay([b"data: " + b"x" * 200], options=RelayOptions(event_cap_bytes=100))
    assert error is not None
    assert error.code == "event_too_long"
    assert b"xxx" not in reply.data


def test_tool_calls_are_put_together_from_their_pieces() -> None:
    def call(index: int, **part: object) -> bytes:
        return event(chunk({"tool_calls": [{"index": index, **part}]}))

    parts = [
        call(0, id="call_a", type="function", function={"name": "look", "arguments": ""}),
        call(0, function={"arguments": '{"x":'}),
        call(1, id="call_b", type="function", function={"name": "find", "arguments": "{}"}),
        call(0, function={"arguments": "1}"}),
        event(chunk({}, finish="tool_calls")),
        event(usage_chunk(5, 4)),
        DONE,
    ]
    _, reader, error, calls = _relay(parts)
    assert error is None
    assert [(c.id, c.name) for c in reader.seen.tool_calls] == [("call_a", "look"), ("call_b", "find")]
    assert calls.count("output") == 4
    message = reader.seen.message()
    assert message is not None
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"x":1}', "{}"]  # type: ignore[index,attr-defined]


PIECES = st.sampled_from(["data: a", "\n", "\r\n", "\r", ": c", "event: e", "data:b", "x"])


@example(text="\n\n\n", cuts=[])
@example(text="data: a\n\n\n\n\n", cuts=[])
@given(
    text=st.lists(PIECES, max_size=30).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_quick_way_to_cut_events_is_the_slow_one(text: str, cuts: list[int]) -> None:
    data = text.encode()
    quick, at, told = EventCutter(1 << 20), 0, list[bytes]()
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        told += quick.feed(data[at:cut])
        at = cut
    assert b"".join(told) + quick.rest() == data
    assert told == _cut_slowly(data) or b"\r" in data  # a carriage return at a read's end waits for what follows
    for each in told:
        lines = [line[5:].removeprefix(b" ") for line in each.splitlines() if line.startswith(b"data:")]
        assert data_of(each) == (b"\n".join(lines) if lines else None)


def _cut_slowly(data: bytes) -> list[bytes]:
    events, start = list[bytes](), 0
    for found in re.finditer(rb"\n\n", data):
        if found.start() >= start:
            events.append(data[start : found.end()])
            start = found.end()
    return events

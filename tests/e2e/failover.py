"""Two real engines, fifty streams, and one engine dies: what do the clients see?

    .venv/bin/python -m tests.e2e.failover [--json FILE] [--streams N] [--tokens N] [--model small|default]

Three ways to die, one after the other: ``kill -9``, SIGSTOP, and a network that accepts and says nothing. Each time all
streams have begun; the same requests ran undisturbed before. 0 when no stream was lost, every greedy answer has the
same token ids as undisturbed, each request has one record with two attempts where its engine died and the undisturbed
run's counts, no stream of the other engine paused for over a second, and traffic returned within one period of
recovery.

What the machine itself makes of a second is shown beside it: the pauses of the undisturbed run, for which part of the
time gateway (with the clients, in this process) and engines ran or waited for a core, and how long this loop stood
still at most. On two cores that others use, the wait is the larger part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_adapter.embedded.folders import ensure_default_model
from gateway.protocols.sse import EventCutter, data_of
from tests.e2e.core_time import measured
from tests.gateways import Client, gateway_for
from tests.mortal_engines import MortalEngine, mortal_engines, small_model
from tracing.record import Outcome, RequestRecord

Json = dict[str, Any]
PERIOD_S, PAUSE_S = 1.0, 1.0
IDLE_S = {"small": 3.0, "default": 20.0}
"""Longer than a living engine is ever silent on a busy machine: where it isn't, streams leave engines that live."""

MODEL = "m"
TOPICS = ("the sea", "old maps", "bread", "a river", "clocks", "glass", "winter", "bridges", "salt", "letters")


class BlackHole:
    """A TCP proxy that can go on accepting and reading while nothing gets through any more."""

    def __init__(self, port: int) -> None:
        self._port, self._is_open = port, asyncio.Event()
        self._is_open.set()
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        finally:
            self._server.close()
            for task in self._pipes:
                task.cancel()

    def swallow(self) -> None:
        """Say nothing from now on."""
        self._is_open.clear()

    def heal(self) -> None:
        """Let everything through again."""
        self._is_open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, onward[1]), (onward[0], writer)):
            task = asyncio.create_task(self._pipe(source, sink))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._is_open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@dataclass
class Stream:
    """One client's stream."""

    number: int
    instance: str = ""
    request_id: str = ""
    text: str = ""
    ids: list[int] | None = None
    usage: Json = field(default_factory=dict)
    finish: str | None = None
    error: Json | None = None
    frames: set[tuple[object, ...]] = field(default_factory=set)
    roles: int = 0
    times: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two pieces of output."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def answer(self) -> object:
        """Return what must be the same as undisturbed."""
        return self.text, self.ids, self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"), self.finish

    async def run(self, client: Client, tokens: int) -> Stream:
        topic = TOPICS[self.number % len(TOPICS)]
        messages = [{"role": "user", "content": f"Note {self.number}. Write a long story about {topic}."}]
        body: Json = {
            "model": MODEL, "stream": True, "messages": messages, "max_tokens": tokens, "temperature": 0,
            "stream_options": {"include_usage": True}, "return_output_ids_in_sglext": True,
        }  # fmt: skip
        cutter = EventCutter(1 << 20)
        async with client.session.post(f"{client.url}/v1/chat/completions", json=body) as response:
            self.instance = response.headers["x-keepwarm-instance"]
            self.request_id = response.headers["x-keepwarm-request-id"]
            async for data in response.content.iter_any():
                for event in cutter.feed(data):
                    told = data_of(event)
                    if told is not None and told != b"[DONE]":
                        self._take(json.loads(told))
        self.begun.set()
        return self

    def _take(self, chunk: Json) -> None:
        self.error = chunk.get("error") or self.error
        self.usage = chunk.get("usage") or self.usage
        if chunk.get("sglext"):
            self.ids = chunk["sglext"]["output_ids"][0]
        if not chunk.get("choices"):
            return
        self.frames.add((chunk["id"], chunk["created"], chunk["model"]))
        (choice,) = chunk["choices"]
        self.roles += "role" in choice["delta"]
        self.finish = choice["finish_reason"] or self.finish
        if choice["delta"].get("content"):
            self.text += choice["delta"]["content"]
            self.times.append(time.monotonic())
            self.begun.set()


@dataclass
class Disturbance:
    """A way to die, and to come back. ``instance``: which one; ``survivor``: the other."""

    name: str
    instance: str
    survivor: MortalEngine
    strike: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]]


async def scene(client: Client, way: Disturbance, alone: list[Stream], tokens: int) -> Json:
    """Let an engine die under streams; return what was measured."""
    streams = [Stream(stream.number) for stream in alone]
    tasks = [asyncio.create_task(stream.run(client, tokens)) for stream in streams]
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    async with measured({"gateway and clients": os.getpid(), "the engine that goes on": way.survivor.pid}) as cores:
        struck_s = time.monotonic()
        await way.strike()
        await asyncio.gather(*tasks)
    returned_s = await _recovery(client, way)
    await client.until(client.at_rest)
    records = {record.request_id: record for record in client.stored()}
    hurt, others = list[Stream](), list[Stream]()
    for stream in streams:
        (hurt if stream.instance == way.instance and stream.times[-1] > struck_s else others).append(stream)
    went_on = [stream for stream in hurt if len(records[stream.request_id].attempts) > 1]
    wrong = [
        stream.number
        for stream, before in zip(streams, alone, strict=True)
        if stream.answer() != before.answer()
        or stream.error is not None
        or len(stream.frames) != 1
        or stream.roles != 1
    ]
    pauses_s = [_pause_over(stream, struck_s) for stream in others]
    return {
        "streams": len(streams),
        "on the engine that died": len(hurt),
        "went on": len(went_on),
        "lost": sum(stream.finish is None for stream in streams),
        "not as undisturbed": wrong,
        "records as they should be": all(
            _is_right(records[s.request_id], records[b.request_id], s in went_on)
            for s, b in zip(streams, alone, strict=True)
        ),
        "pause where it died, s": spread([_pause_over(stream, struck_s) for stream in went_on]),
        "longest pause of others, s": spread(pauses_s),
        "no other paused over a second": max(pauses_s, default=0.0) <= PAUSE_S,
        "cores": cores.told(),
        "traffic returned after, s": round(returned_s, 3),
        "within a period": returned_s <= PERIOD_S,
        "in flight at the end": client.gateway.flights.count,
    }


def _pause_over(stream: Stream, at_s: float) -> float:
    """Return the longest pause that this moment was in, or that came after it."""
    pauses = [(a, b - a) for a, b in zip(stream.times, stream.times[1:], strict=False) if b >= at_s]
    return max((pause for _, pause in pauses), default=0.0)


def _is_right(record: RequestRecord, before: RequestRecord, is_hurt: bool) -> bool:
    same = (record.usage.prompt_tokens, record.usage.output_tokens) == (
        before.usage.prompt_tokens,
        before.usage.output_tokens,
    )
    return record.outcome is Outcome.OK and same and (len(record.attempts) == 2) == is_hurt


async def _recovery(client: Client, way: Disturbance) -> float:
    """Heal the engine; return how long after it could answer again a request was sent there."""
    await way.heal()
    began_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        stream = await Stream(0).run(client, 2)
        if stream.instance == way.instance:
            return asked_s - began_s


def spread(values: list[float]) -> Json:
    """Return what is usual, rare and most among values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {
        name: ordered[min(int(len(ordered) * share), len(ordered) - 1)] for name, share in (("p50", 0.5), ("p90", 0.9))
    }
    return {name: round(value, 3) for name, value in {**at, "max": ordered[-1]}.items()}


async def main(streams: int, tokens: int, model: str, home: Path) -> Json:
    """Run the three scenes on one start of the engines."""
    folder = ensure_default_model() if model == "default" else small_model(home / "model")
    arguments = ("--model", str(folder), "--served-model-name", MODEL, "--device-tokens", "24576", "--threads", "1",
                 "--max-running", "64")  # fmt: skip
    async with mortal_engines(home, 2, arguments) as engines:
        hole = BlackHole(int(engines[1].url.rpartition(":")[2]))
        async with hole.listening() as url:
            instances = [
                {"id": "e0", "url": engines[0].url, "adapter": "embedded"},
                {"id": "e1", "url": url, "adapter": "embedded"},
            ]
            async with gateway_for(
                [], home / "gateway", ready_count=2, ready_limit_s=120, instances=instances,
                stream={"idle_timeout_s": IDLE_S[model]}, routing={"policy": "fewest-requests"},
                health={"interval_s": PERIOD_S, "timeout_s": 1.0, "slow_start_s": 0},
            ) as client:  # fmt: skip
                pids = {"gateway and clients": os.getpid(), **{f"e{n}": e.pid for n, e in enumerate(engines)}}
                async with measured(pids) as cores:
                    alone = await asyncio.gather(*(Stream(number).run(client, tokens) for number in range(streams)))
                found: Json = {
                    "cores": os.cpu_count(), "load average": os.getloadavg()[0], "model": model, "tokens": tokens,
                    "period, s": PERIOD_S, "idle limit, s": IDLE_S[model],
                    "undisturbed": {
                        "longest pause, s": spread([stream.longest_pause_s for stream in alone]),
                        "cores": cores.told(),
                    },
                }  # fmt: skip
                print(json.dumps(found, indent=1), file=sys.stderr, flush=True)
                for way in _ways(engines, hole):
                    found[way.name] = await scene(client, way, list(alone), tokens)
                    print(json.dumps({way.name: found[way.name]}, indent=1), file=sys.stderr, flush=True)
                    await client.gateway.fleet.until_ready(2)
    found["passed"] = all(_passed(found[name]) for name in ("kill -9", "SIGSTOP", "black hole"))
    return found


def _ways(engines: list[MortalEngine], hole: BlackHole) -> list[Disturbance]:
    async def stop() -> None:
        engines[0].send(signal.SIGSTOP)

    async def go() -> None:
        engines[0].send(signal.SIGCONT)

    async def swallow() -> None:
        hole.swallow()

    async def heal() -> None:
        hole.heal()

    return [
        Disturbance("kill -9", "e0", engines[1], engines[0].kill, engines[0].live),
        Disturbance("SIGSTOP", "e0", engines[1], stop, go),
        Disturbance("black hole", "e1", engines[0], swallow, heal),
    ]


def _passed(found: Json) -> bool:
    whole = not found["lost"] and not found["not as undisturbed"] and found["records as they should be"]
    is_soon = found["no other paused over a second"] and found["within a period"]
    return bool(whole and found["went on"] and is_soon and not found["in flight at the end"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", choices=["small", "default"], default="default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keepwarm-failover-") as scratch:
        told = asyncio.run(main(options.streams, options.tokens, options.model, Path(scratch)))
    text = json.dumps(told, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(0 if told["passed"] else 1)

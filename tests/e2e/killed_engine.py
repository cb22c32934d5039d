"""One of two real engines is killed under streams: did every stream go on, and was every token billed once?

What the runs in front of llama.cpp, SGLang and vLLM have in common; see ``real_llamacpp_failover``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine_adapter.embedded.folders import ensure_default_model
from tests.e2e.failover import MODEL, Stream, spread
from tests.gateways import gateway_for
from tracing.record import AttemptRole, Outcome, RequestRecord

Json = dict[str, Any]
_ROLES = ([AttemptRole.ANSWER], [AttemptRole.ANSWER, AttemptRole.CONTINUATION])


@dataclass(frozen=True)
class Pair:
    """Two real engines of one kind. ``kill`` ends the first one as a crash would."""

    urls: Sequence[str]
    adapter: str
    kill: Callable[[], None]


@dataclass(frozen=True)
class Options:
    """What is asked of them."""

    streams: int
    tokens: int
    json: Path | None


def spoken_model(folder: Path) -> Path:
    """Return the default model as others' servers load it: its configuration names the class."""
    source = ensure_default_model()
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "config.json"
    told = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**told, "architectures": ["LlamaForCausalLM"]}))
    return folder


def options(description: str | None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=40)
    told = parser.parse_args()
    return Options(told.streams, told.tokens, told.json)


class Server(Protocol):
    """A real engine in a process of its own."""

    url: str

    def start(self) -> None: ...
    def until_ready(self) -> None: ...
    def version(self) -> str: ...
    def stop(self, sign: signal.Signals = ...) -> None: ...


def of_two(servers: Sequence[Server], name: str, adapter: str, model: Path, home: Path, options: Options) -> Json:
    """Start both servers of a model, let the first be killed, and return what was found, under the engine's name."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.until_ready()
        version = servers[0].version()
        pair = Pair([server.url for server in servers], adapter, lambda: servers[0].stop(signal.SIGKILL))
        models = [{"name": MODEL, "tokenizer": str(model), "template": "model"}]
        health = {"interval_s": 0.5, "timeout_s": 30.0, "slow_start_s": 0}
        return {name: version, **asyncio.run(killed(pair, home, options, models=models, health=health))}
    finally:
        for server in servers:
            server.stop()


async def killed(pair: Pair, home: Path, options: Options, **settings: Any) -> Json:
    """Let the streams run undisturbed, then again, and kill the first engine when all have begun."""
    instances = [{"id": f"e{n}", "url": url, "adapter": pair.adapter} for n, url in enumerate(pair.urls)]
    routing = {"policy": "fewest-requests"}
    async with gateway_for(
        [], home, ready_count=2, ready_limit_s=120, instances=instances, routing=routing, **settings
    ) as client:
        numbers = range(options.streams)
        alone = await asyncio.gather(*(Stream(number).run(client, options.tokens) for number in numbers))
        streams = [Stream(number) for number in numbers]
        running = [asyncio.create_task(stream.run(client, options.tokens)) for stream in streams]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        before = [stream.text for stream in streams]
        await asyncio.to_thread(pair.kill)  # which may wait for it to be gone
        await asyncio.gather(*running)
        records = {record.request_id: record for record in await client.records(2 * options.streams)}
    hurt = [stream for stream in streams if stream.instance == "e0"]
    went_on = [stream for stream in hurt if len(records[stream.request_id].attempts) == 2]
    faults = {
        stream.number: wrong
        for stream, first, told in zip(streams, alone, before, strict=True)
        if (wrong := _faults(stream, told, records[stream.request_id], records[first.request_id], options.tokens))
    }
    return {
        "streams": options.streams,
        "on the killed engine": len(hurt),
        "went on": len(went_on),
        "wrong": faults,
        "what the wrong ones said": {n: (before[n], streams[n].text, streams[n].error) for n in faults},
        "same text as undisturbed": sum(a.text == b.text for a, b in zip(streams, alone, strict=True)),
        "pause where it died, s": spread([stream.longest_pause_s for stream in went_on]),
        "longest pause of others, s": spread([s.longest_pause_s for s in streams if s not in hurt]),
        "longest pause undisturbed, s": spread([stream.longest_pause_s for stream in alone]),
        "an answer that went on": went_on[0].text if went_on else None,
        "its first part": before[went_on[0].number] if went_on else None,
        "passed": bool(went_on) and not faults,
    }


def _faults(stream: Stream, told: str, record: RequestRecord, undisturbed: RequestRecord, tokens: int) -> list[str]:
    """Return what is wrong with a stream of which ``told`` was delivered before the kill."""
    usage = record.usage
    holds = {
        "what was delivered is no prefix": stream.text.startswith(told),
        "several ids": len({identity for identity, *_ in stream.frames}) == 1,  # llama.cpp's times change as they go
        "not one role": stream.roles == 1,
        "no finish": stream.finish is not None,
        "an error": stream.error is None,
        "the client was told other counts": (usage.prompt_tokens, usage.output_tokens)
        == (stream.usage.get("prompt_tokens"), stream.usage.get("completion_tokens")),
        "the prompt was counted otherwise": usage.prompt_tokens == undisturbed.usage.prompt_tokens,
        "tokens were counted twice": 0 < (usage.output_tokens or 0) <= tokens + 1,  # text may part otherwise at the cut
        "not ok": record.outcome is Outcome.OK,
        "other attempts": [attempt.role for attempt in record.attempts] in _ROLES,
    }
    return [wrong for wrong, is_right in holds.items() if not is_right]


def show(found: Json, path: Path | None) -> int:
    """Print what was found, keep it where that is wanted; return the exit status."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    print(text)
    if path is not None:
        path.write_text(text + "\n")
    return 0 if found["passed"] else 1

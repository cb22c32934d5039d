"""Ten thousand requests whose clients leave at random points: is anything left behind?

    .venv/bin/python -m tests.e2e.aborts [--requests N] [--seed N] [--json FILE]

Whole answers and streams on four endpoints, against engines that answer, refuse, break off in the middle (so that
another goes on) and keep silent. 0 when afterwards every counter is exactly 0 (requests in flight, each instance's
requests, queued tokens and open answers, the engines' own) and each request that was let in has one record and one row.
The same at a smaller scale stands in ``tests/fault/test_aborts.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, stream

Json = dict[str, Any]
AT_ONCE = 40
PATHS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 50},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    "/v1/responses": {"input": "hi"},
}


class Moods:
    """What an engine does next, by chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def script(self, asked: Asked) -> Script:
        streams, words = bool(asked.json.get("stream")), list("abcdefgh")
        mood = self._chance.random()
        if mood < 0.08:
            return Script(status=429, body={"error": {"message": "later"}})
        if mood < 0.12:
            return Script(status=500, body={"error": {"message": "ouch"}})
        if not streams:
            return Script(end="reset") if mood < 0.2 else Script(body=answer("x"), wait_for=self._soon())
        if mood < 0.3:
            return Script(events=stream(words)[: self._chance.randrange(1, 8)], end="reset")
        if mood < 0.36:
            return Script(events=stream(words)[: self._chance.randrange(1, 8)], end="hang")
        slow = self._chance.randrange(12)
        return Script(events=stream(words), pause=lambda number: self._soon() if number == slow else None)

    def _soon(self) -> asyncio.Event:
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(self._chance.random() * 0.02, gate.set)
        return gate


class Visitors:
    """Clients that ask, and leave at some point, or don't: after a time, at the head, or behind some pieces."""

    def __init__(self, client: Client, chance: random.Random) -> None:
        self._client, self._chance = client, chance
        self._usual_s = 0.02  # what an answer takes on this machine now: times to leave at are drawn up to twice that

    async def visit(self) -> None:
        """One request."""
        chance = self._chance
        path, mood, began_s = chance.choice(list(PATHS)), chance.random(), time.monotonic()
        body = {"model": "m", "stream": chance.random() < 0.7, **PATHS[path]}
        leaves_s = chance.random() * 2 * self._usual_s if mood < 0.5 else None
        pieces = chance.choice((0, 1, chance.randrange(2, 9))) if 0.5 <= mood < 0.8 else None
        try:
            async with (
                asyncio.timeout(leaves_s),
                self._client.session.post(f"{self._client.url}{path}", json=body) as response,
            ):
                while pieces is None or pieces > 0:
                    if not await response.content.readany():
                        self._usual_s += 0.05 * (time.monotonic() - began_s - self._usual_s)
                        return
                    pieces = None if pieces is None else pieces - 1
                response.close()
        except (TimeoutError, aiohttp.ClientError):
            pass


async def storm(home: Path, requests: int, seed: int) -> Json:
    """Run it; return what was found."""
    chance, began_s = random.Random(seed), time.monotonic()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine()) for _ in range(3)]
        for number, engine in enumerate(engines):
            engine.script_for = Moods(random.Random(seed + number + 1)).script
        settings: Json = {
            "stream": {"idle_timeout_s": 0.2, "first_byte_timeout_s": 2.0},
            "retry": {"repeats": True},
            "health": {"interval_s": 1.0, "timeout_s": 60.0, "breaker_failures": 1000},
        }
        client = await stack.enter_async_context(gateway_for(engines, home, **settings))
        left, visitors = iter(range(requests)), Visitors(client, chance)

        async def visitor() -> None:
            for _ in left:
                await visitors.visit()

        await asyncio.gather(*(visitor() for _ in range(min(AT_ONCE, requests))))
        await client.until(lambda: client.at_rest() and not any(e.in_flight for e in engines), limit_s=60)
        gateway = client.gateway
        assert await asyncio.to_thread(gateway.ledger.flush, 30.0)
        assert await asyncio.to_thread(gateway.traces.flush, 30.0)
        rows = [row.request_id for row in gateway.ledger.rows()]
        records = gateway.traces.recent(2 * requests)
        instances = gateway.fleet.instances.values()
        return {
            "requests": requests,
            "seed": seed,
            "asked of engines": sum(len(engine.asked) for engine in engines),
            "in flight": gateway.flights.count,
            "running at instances": sum(instance.load.running for instance in instances),
            "queued tokens at instances": sum(instance.load.queued_tokens for instance in instances),
            "open answers": sum(len(instance.answers) for instance in instances),
            "in flight at engines": sum(engine.in_flight for engine in engines),
            "records": len(records),
            "rows": len(rows),
            "doubled": len(rows) - len(set(rows)),
            "without a row": len({record.request_id for record in records} - set(rows)),
            "outcomes": _counted([record.outcome.value for record in records]),
            "attempts": _counted([str(len(record.attempts)) for record in records]),
            "seconds": round(time.monotonic() - began_s, 1),
        }


def passed(found: Json) -> bool:
    """Tell whether nothing was left behind."""
    zeros = ("in flight", "running at instances", "queued tokens at instances", "open answers", "in flight at engines",
             "doubled", "without a row")  # fmt: skip
    return not any(found[name] for name in zeros) and found["rows"] == found["records"]


def _counted(words: list[str]) -> dict[str, int]:
    return {word: words.count(word) for word in sorted(set(words))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # the engines' side of every client that leaves
    with tempfile.TemporaryDirectory(prefix="keepwarm-aborts-") as scratch:
        told = asyncio.run(storm(Path(scratch), options.requests, options.seed))
    text = json.dumps({**told, "passed": passed(told)}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(0 if passed(told) else 1)

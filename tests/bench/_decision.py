"""What it takes to decide where an agent's next step goes: the part of ``./bench index`` that begins with bytes.

For each size of context some agents' runs, with a tool call and its result a step, have just reached that size, each
warm on one of 64 instances; their next steps are decided as the gateway does it (``BodyReader``, ``PromptBook``,
``Dispatcher``). Contexts of 5k and 100k tokens take turns, so that what a long body does to the caches falls
on both; those of 8k are by themselves. Milliseconds of the wall clock, the way to the tokenizing thread included:

* ``whole``: from the body's bytes to the instance; ``body``: of it, reading the JSON, which is linear in it.
* ``tokens``, ``hash``, ``match``, ``pick``: the rest of it. ``tokens`` is all of making the prompt but the hashing.

Every decision is asserted to find its run's blocks again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import uvloop

import engine_adapter.prompt as prompt_module
from engine_adapter.base import InstanceFacts
from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.http import UpstreamClient
from engine_adapter.prompt import PromptEncoder
from engine_adapter.sglang import Sglang
from engine_adapter.wire_client import WireClient
from gateway.commands.serve import collect_rarely
from gateway.dispatch import Dispatcher
from gateway.fleet import Fleet
from gateway.instance import InstanceSpec
from gateway.prompts import Prompt, PromptBook
from gateway.protocols.openai import CHAT
from gateway.reading import BodyReader
from gateway.routing import EngineCosts, ExpectedTtft, Rates
from kvstore.page import Tier
from radix_index.base import Matches
from radix_index.index import RadixIndex
from tests.bench.prompt import BLOCK_SIZE, TOOL, Agent

MODEL, INSTANCES, STEPS = "m", 64, 8
PARTS = ("whole", "body", "tokens", "hash", "match", "pick")


class Stopwatch:
    """Adds up the time of what runs under it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started

    def take_ms(self) -> float:
        """Return what has been added up, and begin anew."""
        milliseconds, self.seconds = self.seconds * 1e3, 0.0
        return milliseconds


class TimedIndex(RadixIndex):
    """The index, its matches timed."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch

    def match(self, *arguments: Any, **named: Any) -> Matches:
        """Match under the stopwatch."""
        with self._watch:
            return super().match(*arguments, **named)


class Case:
    """Agents that have reached one context and grow alike, and what their decisions took."""

    def __init__(self, name: str, context: int, growth: int, agents: int, encoder: PromptEncoder) -> None:
        self.name, self.context = name, context
        self.agents = [Agent(encoder, growth, seed=context + seed) for seed in range(agents)]
        for agent in self.agents:
            agent.grow(context)
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self.known_tokens = [0] * agents

    def result(self) -> dict[str, dict[str, float]]:
        """Return P50 and P99 of each part."""
        return {
            part: {"p50": float(np.quantile(times, 0.5)), "p99": float(np.quantile(times, 0.99))}
            for part, times in self.times.items()
        }


class Decisions:
    """A gateway's deciding parts, in front of 64 instances that nobody has to run."""

    def __init__(self, book: PromptBook, client: UpstreamClient) -> None:
        self.hashing, self.matching = Stopwatch(), Stopwatch()
        self.index, self._book, self._reader = TimedIndex(self.matching), book, BodyReader()
        rates = Rates(prefill=1e4, host=1e6, disk=1e5, pool=1e5)
        specs = [InstanceSpec(f"i{n}", "http://127.0.0.1:1", Sglang(), models=(MODEL,)) for n in range(INSTANCES)]
        self._fleet = Fleet(specs, client=client, index=self.index, rates=rates)
        costs = EngineCosts(rates)  # instances of one kind share theirs
        for instance in self._fleet.instances.values():
            instance.load.costs = costs
            instance.facts = InstanceFacts(models=(MODEL,), block_size=BLOCK_SIZE)
            instance.is_healthy = True
            self.index.add_instance(instance.id, block_size=BLOCK_SIZE)
        self._dispatcher = Dispatcher(self._fleet, self.index, ExpectedTtft(), 1, lambda _, call: call())

    async def decide(self, case: Case, number: int, *, timed: bool) -> None:
        """Decide one agent's next step; with ``timed`` remember what it took, and that its blocks were found."""
        agent = case.agents[number]
        agent.messages = agent.step(agent.messages)
        body = json.dumps({"model": MODEL, "messages": agent.messages, "tools": [TOOL]}).encode()
        began = time.perf_counter()
        scanned = await self._reader.scan(CHAT, body, "bench")
        reading = await self._reader.read(CHAT, scanned, "bench")
        read = time.perf_counter()
        prompt = await self._book.encode(
            MODEL,
            reading.ask,
            None,
            self._dispatcher.block_sizes(MODEL),
            body,
            anchors=reading.anchors,
            new_bytes=scanned.new_bytes,
        )
        made = time.perf_counter()
        route = self._dispatcher.route(MODEL, prompt, len(body), frozenset())
        ended = time.perf_counter()
        assert prompt is not None
        assert prompt.is_exact
        assert route is not None
        hashing, matching = self.hashing.take_ms(), self.matching.take_ms()
        if timed:
            times = {"whole": (ended - began) * 1e3, "body": (read - began) * 1e3}
            times |= {"tokens": (made - read) * 1e3 - hashing, "hash": hashing}
            times |= {"match": matching, "pick": (ended - made) * 1e3 - matching}
            for part, spent in times.items():
                case.times[part].append(spent)
            assert (
                route.decision.predicted_hit_tokens >= case.known_tokens[number] // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
            )
        route.release()
        self._store(route.instance.id, prompt)
        case.known_tokens[number] = prompt.tokens

    def _store(self, instance: str, prompt: Prompt) -> None:
        """Tell the index what the chosen instance's events would."""
        self.index.stored(instance, Tier.DEVICE, prompt.hashes[BLOCK_SIZE])


async def _measure(cases: Sequence[tuple[str, int, int]], agents: int) -> dict[str, dict[str, dict[str, float]]]:
    folder, book = ensure_default_model(), PromptBook()
    async with WireClient() as client:
        decisions = Decisions(book, client)
        hashed = prompt_module.routing_hash_array

        def timed_hash(*arguments: Any, **named: Any) -> Any:
            with decisions.hashing:
                return hashed(*arguments, **named)

        prompt_module.routing_hash_array = timed_hash  # the one place where prompts are hashed
        try:
            assert await book.load(MODEL, folder, None)
            encoder = PromptEncoder.load(folder, conversation_bytes=1 << 30, memo_bytes=1 << 26)
            standing = [Case(*case, agents, encoder) for case in cases]
            for case in standing:
                for number in range(agents):
                    await decisions.decide(case, number, timed=False)
            collect_rarely()  # as in a gateway
            gc.collect()
            gc.freeze()  # what stands here is the benchmark's
            for case in standing:  # the collector went through all memory, which no gateway does before a step
                for number in range(agents):
                    await decisions.decide(case, number, timed=False)
            for _ in range(STEPS):
                for number in range(agents):
                    for case in standing:
                        await decisions.decide(case, number, timed=True)
            gc.unfreeze()
        finally:
            prompt_module.routing_hash_array = hashed
            book.close()
    return {case.name: case.result() for case in standing}


def measure_decisions(agents: int) -> dict[str, Any]:
    """Return the decisions' times in the keys of ``./bench index``, and the ratio of long to short contexts."""
    by_itself = _run((("8k", 8_000, 500),), agents)
    in_turn = _run((("5k", 5_000, 300), ("100k", 100_000, 300)), agents)
    rest = {name: case["whole"]["p50"] - case["body"]["p50"] for name, case in in_turn.items()}
    return {
        "decision_ms": by_itself["8k"]["whole"],
        "decision_ms_5k": in_turn["5k"]["whole"]["p50"],
        "decision_ms_100k": in_turn["100k"]["whole"]["p50"],
        "body_ms_5k": in_turn["5k"]["body"]["p50"],
        "body_ms_100k": in_turn["100k"]["body"]["p50"],
        "decision_parts_ms": by_itself | in_turn,
        "decision_100k_to_5k_less_body": rest["100k"] / rest["5k"],
    }


def _run(cases: Sequence[tuple[str, int, int]], agents: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure on the event loop that the gateway runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(cases, agents))

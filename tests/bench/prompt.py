"""``./bench prompt [--json FILE]``: what it costs to make block hashes of an agent's next step.

For each size of context (5k, 8k and 100k tokens) and each growth (300 and 500 tokens) some agents' runs, with a tool
call and its result a step, have just reached that size; their next steps are measured, all in turn:

* ``body_ms``: reading the body, which is by what is known of its beginning (``BodyMemo``).
* ``prompt_ms``: messages to ids and routing hashes (``PromptEncoder.encode_chat_hashed``); of it ``hash_ms`` for the
  hashes and ``tokens_ms`` for all the rest.
* ``echo_ms``: the same once more, with its text's segments known by now, where each call was generated in other tokens
  than rendering makes of it, and these are kept.
* ``whole_ms``: the same without memory of conversations; ``naive_ms``: without any memory.

Times are of the wall clock; with ``cpu`` in the name, the thread's own, for machines that others use as well.
``ratios``: each context's ``prompt_ms`` to that of 5k with the same growth, and ``whole_ms`` to ``prompt_ms``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine_adapter.prompt as prompt_module
from engine_adapter.answers import AnswerMemo, Answers, EchoState
from engine_adapter.conversations import Anchors
from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.prompt import EncodedPrompt, PromptEncoder
from gateway.beginnings import BodyMemo, words_of
from gateway.prompt_job import Answerable, Quotations
from gateway.protocols.base import Ask, scan_body
from gateway.protocols.openai import CHAT
from tracing.messages import message_chain

CONTEXTS = (5_000, 8_000, 100_000)
GROWTHS = (300, 500)
BLOCK_SIZE = 16
STEPS = 4
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Return the text of a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_WORDS = (
    "def",
    "return",
    "import",
    "self",
    "value",
    "items",
    "index",
    "error",
    "while",
    "class",
    "none",
    "path",
    "read",
)


Times = list[tuple[float, float]]


class Agent:
    """A scripted agent's conversation that grows by about so many tokens a step."""

    def __init__(self, encoder: PromptEncoder, growth: int, seed: int) -> None:
        self._encoder, self._growth, self._chance = encoder, growth, random.Random(seed)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You repair programs. " + self._text(400)},
            {"role": "user", "content": "Find out why the test fails."},
        ]

    def step(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a longer conversation: one more call and its result."""
        path = f"src/part_{self._chance.randrange(10**6)}.py"
        call_id = f"call_{self._chance.randrange(16**8):08x}"
        call = {"name": "read_file", "arguments": json.dumps({"path": path})}
        return [
            *messages,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": self._text((self._growth - 60) * 5 // 6)},
        ]

    def grow(self, tokens: int) -> None:
        """Take steps, each encoded as it comes, until the prompt has so many tokens."""
        while len(_prompt(self._encoder, self.messages)) < tokens - self._growth:
            self.messages = self.step(self.messages)

    def _text(self, tokens: int) -> str:
        words = [self._chance.choice(_WORDS) for _ in range(tokens * 3 // 4)]
        lines = [" ".join(words[at : at + 8]) for at in range(0, len(words), 8)]
        return "\n".join(f"{number:4}  {line}" for number, line in enumerate(lines))


class Hashing:
    """Times what is hashed for prompts, in the one place where that is done."""

    def __init__(self) -> None:
        self._hash, self._spent = prompt_module.routing_hash_array, (0.0, 0.0)

    def __enter__(self) -> Hashing:
        prompt_module.routing_hash_array = self._timed
        return self

    def __exit__(self, *_: object) -> None:
        prompt_module.routing_hash_array = self._hash

    def _timed(self, *arguments: Any, **named: Any) -> Any:
        wall, own = time.perf_counter_ns(), time.thread_time_ns()
        hashes = self._hash(*arguments, **named)
        spent = (time.perf_counter_ns() - wall) / 1e6, (time.thread_time_ns() - own) / 1e6
        self._spent = self._spent[0] + spent[0], self._spent[1] + spent[1]
        return hashes

    def take_ms(self) -> tuple[float, float]:
        """Return the time since the last call, on the wall clock and the thread's own."""
        spent, self._spent = self._spent, (0.0, 0.0)
        return spent


class Echoes:
    """One agent's prompts where every call stands as it was generated: a token for each character."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder, self._memo = encoder, AnswerMemo()
        self._asked: Answerable | None = None

    def answered(self, message: Mapping[str, Any]) -> None:
        """Take in the answer to the last prompt."""
        function = message["tool_calls"][0]["function"]
        text = f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
        generated = [i for char in text for i in self._encoder.tokenizer.encode(char, add_special_tokens=False).ids]
        assert self._asked is not None
        answer = self._asked.answer(message, generated)
        assert answer is not None
        self._memo.remember(self._asked.name, answer)

    def prompt(self, messages: Sequence[Mapping[str, object]], anchors: Anchors | None, times: Times) -> EncodedPrompt:
        """Make the next prompt, timed; the chain of messages is the gateway's, for which runs are known."""
        quotations = Quotations(self._memo, b"bench", message_chain(messages))
        made = _timed(times, lambda: _prompt(self._encoder, messages, anchors, quotations))
        assert isinstance(made, EncodedPrompt)
        assert made.scope is not None
        self._asked = Answerable(quotations.name(made.scope), made, self._encoder.stop_token_ids)
        return made


class Case:
    """Agents that have reached one context and grow alike, and what was measured of them."""

    def __init__(self, encoders: Encoders, context: int, growth: int, agents: int, hashing: Hashing) -> None:
        self.encoders, self.context, self._hashing = encoders, context, hashing
        self.agents = [Agent(encoders.ours, growth, seed=context * 1000 + growth + seed) for seed in range(agents)]
        self.times: dict[str, Times] = {
            name: [] for name in ("body", "prompt", "tokens", "hash", "echo", "whole", "naive")
        }
        self.new_tokens: list[int] = []
        self._lengths = []
        for agent in self.agents:
            agent.grow(context)
            self._lengths.append(len(_prompt(encoders.ours, agent.messages)))
            _prompt(encoders.forgetful, agent.messages)
        self._echoes = [Echoes(encoders.ours) for _ in self.agents]
        for echoes, agent in zip(self._echoes, self.agents, strict=True):
            echoes.prompt(agent.messages, None, [])
        self.body_bytes, self._memo = 0, BodyMemo()

    def step(self, number: int) -> None:
        """Take one agent's next step, and measure it."""
        agent, encoders, times = self.agents[number], self.encoders, self.times
        agent.messages = agent.step(agent.messages)
        body = json.dumps({"model": "m", "messages": agent.messages, "tools": [TOOL]}).encode()
        self.body_bytes = len(body)
        ask, anchors = _timed(times["body"], lambda: _read(self._memo, body))
        self._hashing.take_ms()
        prompt = _timed(times["prompt"], lambda: _prompt(encoders.ours, ask.messages, anchors))
        times["hash"].append(hashed := self._hashing.take_ms())
        wall, own = times["prompt"][-1]
        times["tokens"].append((wall - hashed[0], own - hashed[1]))
        self._echoes[number].answered(agent.messages[-2])
        echoed = self._echoes[number].prompt(ask.messages or (), anchors, times["echo"])
        assert echoed.echo.state is EchoState.KEPT
        self.new_tokens.append(len(prompt) - self._lengths[number])
        self._lengths[number] = len(prompt)
        if number < 3:
            whole = _timed(times["whole"], lambda: _prompt(encoders.forgetful, ask.messages))
            again = _timed(times["naive"], lambda: _prompt(encoders.naive, ask.messages))
            assert prompt.ids.tolist() == whole.ids.tolist() == again.ids.tolist()
            assert prompt.hashes[BLOCK_SIZE].tolist() == again.hashes[BLOCK_SIZE].tolist()

    def result(self) -> dict[str, Any]:
        """Return what was measured."""
        return {
            "context_tokens": self._lengths[0],
            "new_tokens": sum(self.new_tokens) / len(self.new_tokens),
            "messages": len(self.agents[0].messages),
            "body_bytes": self.body_bytes,
            **{f"{name}_ms": _quantiles([wall for wall, _ in values]) for name, values in self.times.items()},
            **{f"{name}_cpu_ms": _quantiles([own for _, own in values]) for name, values in self.times.items()},
        }


@dataclass(frozen=True)
class Encoders:
    """One model's encoder with all its memory, without memory of conversations, and with none."""

    ours: PromptEncoder
    forgetful: PromptEncoder
    naive: PromptEncoder


def _read(memo: BodyMemo, body: bytes) -> tuple[Ask, Anchors | None]:
    """Read a body as the gateway does, with what its messages are known by."""
    known = memo.find("bench", body)
    sent = scan_body(body, CHAT.grows, known.opening if known is not None else None)
    ask = CHAT.read(sent)
    words = words_of(ask.messages or (), known)
    return ask, memo.keep("bench", sent, "messages", known, words)


def _prompt(
    encoder: PromptEncoder,
    messages: Sequence[Mapping[str, object]],
    anchors: Anchors | None = None,
    answers: Answers | None = None,
) -> EncodedPrompt:
    return encoder.encode_chat_hashed(
        messages, [TOOL], seed=1, block_sizes=[BLOCK_SIZE], anchors=anchors, answers=answers
    )


def _timed(times: Times, work: Callable[[], Any]) -> Any:
    """Do the work; add its time on the wall clock and the thread's own, in ms."""
    wall, own = time.perf_counter_ns(), time.thread_time_ns()
    result = work()
    times.append(((time.perf_counter_ns() - wall) / 1e6, (time.thread_time_ns() - own) / 1e6))
    return result


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[min(int(len(ordered) * part), len(ordered) - 1)] for name, part in at.items()}


def run(agents: int) -> dict[str, Any]:
    """Measure everything in one process, the cases in turn, so that what else the machine does falls on all alike."""
    model_dir = ensure_default_model()
    encoders = Encoders(
        PromptEncoder.load(model_dir, conversation_bytes=1 << 31, memo_bytes=1 << 28),
        PromptEncoder.load(model_dir, conversation_bytes=0, memo_bytes=1 << 28),
        PromptEncoder.load(model_dir, conversation_bytes=0, memo_bytes=0),
    )
    with Hashing() as hashing:
        running = {
            f"{context // 1000}k+{growth}": Case(encoders, context, growth, agents, hashing)
            for context in CONTEXTS
            for growth in GROWTHS
        }
        gc.collect()
        gc.freeze()  # what stands here is the benchmark's
        for _ in range(STEPS):
            for number in range(agents):
                for case in running.values():
                    case.step(number)
        gc.unfreeze()
    cases = {name: case.result() for name, case in running.items()}
    ratios: dict[str, float] = {}
    for name, case in cases.items():
        growth = name.split("+")[1]
        small = cases[f"5k+{growth}"]
        ratios[f"{name} to 5k+{growth}"] = case["prompt_ms"]["p50"] / small["prompt_ms"]["p50"]
        ratios[f"{name} to 5k+{growth} cpu"] = case["prompt_cpu_ms"]["p50"] / small["prompt_cpu_ms"]["p50"]
        ratios[f"{name} whole to resumed"] = case["whole_ms"]["p50"] / case["prompt_ms"]["p50"]
    return {
        "benchmark": "prompt",
        "agents": agents,
        "steps": STEPS,
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("tokenizers", "jinja2", "numpy")}},
        "conversations": asdict(encoders.ours.conversation_stats()),
        "cases": cases,
        "ratios": ratios,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark and print what it measured."""
    parser = argparse.ArgumentParser(prog="./bench prompt", description="Messages to ids and block hashes.")
    parser.add_argument("--agents", type=int, default=25, help="agents in each case (default 25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    text = json.dumps(run(args.agents), indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Break injection through agent frameworks: one change at each step of a real client's run.

    python -m tests.e2e.client_breaks --clients FOLDER [--only openai-agents-chat,litellm] [--json FILE]

``FOLDER`` holds ``mock_llm.py PORT LOG STEPS`` (a scripted model that asks for a tool until STEPS results are there and
counts what it has of each prompt) and ``py/``, a script for each client, which takes ``BASE_URL`` from its
environment; the clients' own environments are under ``$BENCH_HOME/venvs``. Between a client and the gateway stands a
proxy that puts a time, an identifier and a counter in front of the system prompt and two more tools behind the
client's, and then, from the third request on, changes one more thing at each request for good. So the clients' own
spelling of everything is what the gateway sees, and nothing in a client has to be changed. Told are, for each client
and change, the class, the path and the characters that the gateway found, and whether the money is the lost tokens at
the difference of the ledger's prices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from billing.ledger_read import LedgerReader
from engine_adapter.embedded.launch import free_port
from gateway.diagnosis.cards import BreakCard, diagnose
from tests.gateways import Client, gateway_for
from tests.scripted_engine import Json
from tracing.detail import BreakKind, StepDetail

CLIENTS = {
    "openai-chat": ("clients", "openai_chat.py", {}),
    "openai-chat-stream": ("clients", "openai_chat.py", {"STREAM": "1"}),
    "openai-responses": ("clients", "openai_responses.py", {}),
    "anthropic": ("clients", "anthropic_messages.py", {}),
    "openai-agents-chat": ("clients", "openai_agents.py", {}),
    "langchain-chat": ("clients", "langchain_agent.py", {}),
    "langchain-messages": ("clients", "langchain_agent.py", {"API": "messages"}),
    "pydantic-ai-chat": ("clients", "pydantic_ai_agent.py", {}),
    "pydantic-ai-responses": ("clients", "pydantic_ai_agent.py", {"API": "responses"}),
    "pydantic-ai-messages": ("clients", "pydantic_ai_agent.py", {"API": "messages"}),
    "smolagents-toolcalling": ("clients-smol", "smolagents_agent.py", {}),
    "litellm": ("litellm", "litellm_loop.py", {}),
}
FRESH, HIT = 1_000, 100  # nano-units a token
PRICES = (
    'name = "t"\ncurrency = "USD"\n[[price]]\nmodels = ["*"]\nrates = { fresh = 1, hit = 0.1, output = 3, write = 1 }\n'
)
TIMES = "2026-11-30T08:15:42Z", "2026-11-30T08:15:57Z"
IDS = "0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950f"
FIRST = 3  # the first request that is changed
STEPS = 9
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade"})


@dataclass
class Head:
    """What stands in front of the system prompt."""

    time: str = TIMES[0]
    id: str = IDS[0]
    turn: int = 7
    mood: str = "careful"
    gap: str = " "

    def text(self) -> str:
        return f"You are {self.mood}. Now: {self.time};{self.gap}request {self.id}; turn {self.turn}. "


@dataclass
class Run:
    """What is changed of one client's requests."""

    head: Head = field(default_factory=Head)
    requests: int = 0
    is_reversed: bool = False
    is_turned: bool = False
    is_rewritten: bool = False

    def apply(self, body: Json) -> None:
        """Change a request as all changes until now say."""
        tools = body["tools"]
        tools += [_renamed(tools[0], suffix) for suffix in ("_b", "_c")]
        if self.is_turned:
            inner = tools[-1].get("function", tools[-1])
            name = "input_schema" if "input_schema" in inner else "parameters"
            inner[name] = dict(reversed(inner[name].items()))
        if self.is_reversed:
            tools.reverse()
        where, name = _system_of(body)
        where[name] = self.head.text() + (where.get(name) or "")
        if self.is_rewritten:
            part, member = _asked(body)
            part[member] = f"Please: {part[member]}"


def _renamed(tool: Json, suffix: str) -> Json:
    copied: Json = json.loads(json.dumps(tool))
    copied.pop("cache_control", None)
    inner = copied.get("function", copied)
    inner["name"] += suffix
    return copied


def _system_of(body: Json) -> tuple[Json, str]:
    """Return where a system prompt's text stands: a member of an object; made where there is none."""
    if "input" in body:
        return body, "instructions"
    if "max_tokens" in body and "system" in body:
        return (body, "system") if isinstance(body["system"], str) else (body["system"][0], "text")
    first = body["messages"][0]
    if first["role"] not in ("system", "developer"):
        if "input_schema" in body["tools"][0]:
            return body, "system"
        first = {"role": "system", "content": ""}
        body["messages"].insert(0, first)
    return (first, "content") if isinstance(first["content"], str) else (first["content"][0], "text")


def _asked(body: Json) -> tuple[Json, str]:
    """Return where the words of the first message of the user stand."""
    messages = body.get("messages") or body["input"]
    message = next(each for each in messages if each.get("role") == "user")
    content = message["content"]
    return (message, "content") if isinstance(content, str) else (content[0], "text")


def _head_to(name: str, value: object) -> Callable[[Run], None]:
    return lambda run: setattr(run.head, name, value)


def _to(name: str) -> Callable[[Run], None]:
    return lambda run: setattr(run, name, True)


START = len("You are careful. Now: ")
CHANGES: list[tuple[str, Callable[[Run], None], BreakKind, tuple[int, int] | None]] = [
    ("time", _head_to("time", TIMES[1]), BreakKind.TIMESTAMP, (START, START + 20)),
    ("uuid", _head_to("id", IDS[1]), BreakKind.UUID, (START + 30, START + 66)),
    ("counter", _head_to("turn", 8), BreakKind.COUNTER, (START + 73, START + 74)),
    ("tool order", _to("is_reversed"), BreakKind.TOOLS_REORDERED, None),
    ("key order", _to("is_turned"), BreakKind.SPELLING, None),
    ("white space", _head_to("gap", "  "), BreakKind.SPELLING, (START + 22, START + 23)),
    ("system", _head_to("mood", "reckless"), BreakKind.SYSTEM_EDITED, (8, 16)),
    ("history", _to("is_rewritten"), BreakKind.HISTORY_REWRITTEN, (0, 8)),
]


class ChangingProxy:
    """Stands in front of the gateway; a client's run is known by the label in its path."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.runs: dict[str, Run] = {}
        self.asked: dict[str, list[str]] = {}  # request ids by label, in order

    async def __aenter__(self) -> ChangingProxy:
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        label, body = request.path.split("/")[2], await request.read()
        is_call = request.method == "POST" and body.startswith(b"{") and b'"tools"' in body
        if is_call:
            run = self.runs.setdefault(label, Run())
            run.requests += 1
            if FIRST <= run.requests < FIRST + len(CHANGES):
                CHANGES[run.requests - FIRST][1](run)
            asked = json.loads(body)
            run.apply(asked)
            body = json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method, self.target + request.path_qs, data=body, headers=headers
        ) as found:
            if is_call and found.status == 200:
                self.asked.setdefault(label, []).append(found.headers["x-keepwarm-request-id"])
            kept = {name: value for name, value in found.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=found.status, headers=kept)
            await response.prepare(request)
            async for piece in found.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


async def _one(label: str, python: Path, script: Path, more: dict[str, str], url: str) -> int:
    environment = os.environ | {"BASE_URL": f"{url}/c/{label}", "MODEL": "mock-model", "API_KEY": "sk-local"} | more
    process = await asyncio.create_subprocess_exec(
        str(python), str(script), env=environment, cwd=script.parent,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(240):
        said, _ = await process.communicate()
    if process.returncode:
        print(said.decode(errors="replace")[-1500:], file=sys.stderr)
    return process.returncode or 0


def _verdict(change: int, detail: StepDetail | None, cards: Sequence[BreakCard]) -> str:
    """Return ``ok``, with what was lost, or what was said instead."""
    _, _, kind, chars = CHANGES[change]
    found = detail.change if detail is not None else None
    if found is None:
        return "nothing was told"
    place = f"{found.kind} {found.path} [{found.start}:{found.end}]"
    if found.kind is not kind or (chars is not None and (found.start, found.end) != chars):
        return f"told: {place}"
    card = next((card for card in cards if card.kind is kind), None)
    if card is None:
        return f"ok {found.path}, nothing lost"
    if card.lost_nano != card.lost_tokens * (FRESH - HIT):
        return f"money: {card.lost_nano} for {card.lost_tokens}"
    return f"ok {found.path} [{found.start}:{found.end}] {card.lost_tokens} tokens {card.lost_nano} nano"


async def _tell(client: Client, proxy: ChangingProxy) -> dict[str, dict[str, str]]:
    gateway, ids = client.gateway, [id_ for some in proxy.asked.values() for id_ in some]
    assert gateway.compared is not None
    await client.until(lambda: len(client.stored()) >= len(ids))
    await asyncio.to_thread(gateway.compared.flush, 10.0)
    assert await asyncio.to_thread(gateway.traces.flush, 10.0)
    records, details = client.stored(), gateway.traces.details(ids)
    with LedgerReader(gateway.ledger_place) as reader:
        cards = diagnose(records, details, reader.price_books(), restarts=gateway.traces.lives())
    told: dict[str, dict[str, str]] = {}
    for label, asked in proxy.asked.items():
        told[label] = {}
        for at, (name, *_) in enumerate(CHANGES):
            if len(asked) < FIRST + at:
                told[label][name] = "ok: its run was over"
                continue
            id_ = asked[FIRST - 1 + at]
            told[label][name] = _verdict(at, details.get(id_), [card for card in cards if card.request_id == id_])
    return told


async def _main(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    home, port = Path(tempfile.mkdtemp(prefix="keepwarm-breaks-")), free_port()
    (home / "prices.toml").write_text(PRICES)
    venvs = Path(os.environ.get("BENCH_HOME", Path.home() / ".cache" / "keepwarm-bench")) / "venvs"
    mock = await asyncio.create_subprocess_exec(
        sys.executable, str(args.clients / "mock_llm.py"), str(port), str(home / "mock.jsonl"), str(STEPS)
    )
    instance = {"id": "mock", "url": f"http://127.0.0.1:{port}", "adapter": "openai", "models": ["mock-model"],
                "events": "off", "speaks": ["chat", "responses", "messages"]}  # fmt: skip
    models = [{"name": "mock-model", "tokenizer": "none"}]
    billing = {"prices": str(home / "prices.toml")}
    try:
        async with (
            gateway_for([], home, ready_count=1, instances=[instance], models=models, billing=billing,
                        health={"interval_s": 1.0, "timeout_s": 10.0}) as client,
            ChangingProxy(client.url) as proxy,
        ):  # fmt: skip
            for label, (venv, script, more) in CLIENTS.items():
                python = venvs / venv / "bin" / "python"
                if (args.only and label not in args.only.split(",")) or not python.exists():
                    continue
                status = await _one(label, python, args.clients / "py" / script, more, proxy.url)
                print(f"{label}: exit {status}, {len(proxy.asked.get(label, ()))} requests", file=sys.stderr)
            return await _tell(client, proxy)
    finally:
        mock.terminate()
        await mock.wait()


def main(argv: Sequence[str]) -> int:
    """Run the clients and print what was told; 1 where something was told otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.client_breaks")
    parser.add_argument("--clients", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="NAME[,…]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    told = asyncio.run(_main(args))
    for label, some in told.items():
        print(label)
        for name, verdict in some.items():
            print(f"  {name:12} {verdict}")
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if told and all(v.startswith("ok") for some in told.values() for v in some.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The agents' side: requests through the gateway; for each what was predicted, reported and said."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.identity import Caller, effective_salt
from tests.e2e.real_sglang_index.processes import Json
from tests.e2e.real_vllm.processes import Gateway, VllmServer
from tracing.record import Identity

WORDS = ("read", "the", "file", "list", "write", "a", "test", "open", "path", "value", "index", "page", "token", "why")
SETTLE_LIMIT_S = 60.0
RED_SALT = effective_salt(Caller(Identity("red", "red", "red"), is_salted=True), None)
"""What the gateway salts the requests of tenant red with: for those that go past it."""
_TIERS = ("device", "host", "disk", "pool", "unknown")


@dataclass
class Row:
    """One request. ``predicted_tiers``: where the index saw its hits."""

    part: str
    instance: str
    prompt_tokens: int
    predicted: int
    reported: int
    exact: bool
    predicted_tiers: dict[str, int]
    ttft_ms: float
    text: str

    @property
    def is_equal(self) -> bool:
        return self.predicted == self.reported


class Agents:
    """Whoever asks the gateway."""

    def __init__(self, gateway: Gateway, servers: Mapping[str, VllmServer]) -> None:
        self.gateway, self.servers = gateway, dict(servers)
        self.rows: list[Row] = []
        self.part = ""
        self._chance = random.Random(11)

    def words(self, count: int) -> str:
        return " ".join(self._chance.choice(WORDS) for _ in range(count))

    def prompt(self, seed: str = "") -> list[Json]:
        return [
            {"role": "system", "content": f"You are an agent. {seed} {self.words(150)}"},
            {"role": "user", "content": self.words(40)},
        ]

    def until(self, name: str, *, healthy: bool) -> None:
        """Wait until the gateway has noticed that a server lives, or doesn't."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while self.gateway.instances()[name]["healthy"] is not healthy:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name}: the gateway did not notice")
            time.sleep(0.1)

    def settle(self) -> None:
        """Wait until the gateway has folded every batch that the servers have published, and none comes any more."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        calm = 0
        before: dict[str, int] = {}
        while calm < 3:
            known = self.gateway.instances()
            alive = {name: each for name, each in self.servers.items() if known[name]["healthy"]}
            now = {name: each.next_batch() for name, each in alive.items()}
            folded = all(known[name]["next_event_batch"] == number for name, number in now.items())
            whole = all(known[name]["events"] == "complete" for name in alive)
            calm = calm + 1 if folded and whole and now == before else 0
            before = now
            if time.monotonic() > deadline:
                raise RuntimeError(f"did not settle: {now}, {known}")
            time.sleep(0.1)

    def only(self, name: str | None) -> None:
        """Let new requests go to this server only; ``None``: to all."""
        for each in self.servers:
            self.gateway.ask(f"/keepwarm/v1/instances/{each}/{'resume' if name in (None, each) else 'drain'}", {})

    def chat(self, messages: list[Json], key: str = "red", *, settled: bool = True, **more: object) -> Row:
        """Send a conversation and keep its row."""
        if settled:
            self.settle()
        body = {"model": "tiny", "temperature": 0, "max_tokens": 20, "messages": messages, **more}
        answer, headers = self.gateway.ask("/v1/chat/completions", body, key)
        record = self._record(headers["x-keepwarm-request-id"], headers["x-keepwarm-run"], key)
        usage, decision = record["usage"], record["decision"]
        hits = sum(usage[f"hit_{tier}_tokens"] for tier in _TIERS)
        chosen = next(each for each in decision["candidates"] if each["instance"] == decision["instance"])
        row = Row(
            self.part,
            decision["instance"],
            hits + usage["fresh_tokens"],
            decision["predicted_hit_tokens"],
            hits,
            decision["exact"],
            dict(zip(_TIERS, chosen["hit_tokens"], strict=False)),
            _ttft_ms(record),
            str(answer["choices"][0]["message"]["content"]),
        )
        self.rows.append(row)
        return row

    def step(self, messages: list[Json], key: str = "red") -> Row:
        """Take one step of an agent: ask, quote the answer, add what a tool says."""
        row = self.chat(messages, key)
        messages += [{"role": "assistant", "content": row.text}, {"role": "user", "content": self.words(60)}]
        return row

    def _record(self, request_id: str, run_id: str, key: str) -> Json:
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            try:
                records = self.gateway.ask(f"/keepwarm/v1/runs/{run_id}", key=key)[0]["records"]
            except OSError:
                records = []
            for record in records:
                if record["request_id"] == request_id:
                    found: Json = record
                    return found
            time.sleep(0.05)
        raise RuntimeError(f"no record of {request_id}")


def _ttft_ms(record: Json) -> float:
    stamps = record.get("stamps") or {}
    first, began = stamps.get("first_token_ns") or stamps.get("ended_ns"), stamps.get("arrived_ns")
    return (first - began) / 1e6 if first and began else 0.0

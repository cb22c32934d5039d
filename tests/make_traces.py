"""Make the small traces of ``tests/traces`` anew: ``python -m tests.make_traces``. Synthetic, from a fixed seed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "traces"
SEED = 7
BLOCK = 64


def agent_sessions(chance: random.Random, sessions: int = 14, steps: int = 10) -> Iterable[list[object]]:
    """Yield rst1 rows: sessions that share one of two system prompts and grow by a few blocks a step."""
    next_id = 10_000
    for session in range(sessions):
        system = 1 + 1_000 * (session % 2)
        blocks, keep = 40, 0
        runs = [system, 40]
        at_s = 0.0
        for step in range(chance.randint(steps // 2, steps)):
            think_s = 0.0 if step == 0 else round(chance.expovariate(1 / 4), 3)
            at_s = round(at_s + think_s, 3)
            grown = chance.randint(2, 20)
            runs += [next_id, grown]
            next_id, blocks = next_id + grown, blocks + grown
            prompt = blocks * BLOCK + chance.randrange(BLOCK)
            yield [session, 0, at_s, think_s, prompt, chance.randint(1, 300), keep, runs]
            keep, runs = blocks, []


def chat(chance: random.Random, requests: int = 120) -> Iterable[dict[str, object]]:
    """Yield Mooncake requests: conversations that are continued now and then, in order of arrival."""
    conversations: list[list[int]] = []
    next_id, at_ms = 1, 0
    for _ in range(requests):
        at_ms += round(chance.expovariate(1 / 400))
        open_ones = [ids for ids in conversations if len(ids) < 18]
        if open_ones and chance.random() < 0.7:
            ids = chance.choice(open_ones)
        else:
            ids = [0]
            conversations.append(ids)
        grown = chance.randint(1, 8)
        ids += range(next_id, next_id + grown)
        next_id += grown + 1
        partial = [*ids, next_id - 1]
        length = len(ids) * 512 + chance.randint(1, 511)
        yield {"timestamp": at_ms, "input_length": length, "output_length": chance.randint(1, 400), "hash_ids": partial}


def main() -> None:
    """Write both files; equal seeds give equal bytes."""
    FOLDER.mkdir(exist_ok=True)
    chance = random.Random(SEED)
    header = {"format": "rst1", "name": "agents", "block": BLOCK, "closed": True, "license": "Apache-2.0"}
    lines = [json.dumps(header), *(json.dumps(row, separators=(",", ":")) for row in agent_sessions(chance))]
    packed = gzip.compress("\n".join(lines).encode() + b"\n", mtime=0)
    (FOLDER / "agents.rst.gz").write_bytes(packed)
    rows = [json.dumps(row, separators=(",", ":")) for row in chat(chance)]
    (FOLDER / "chat.jsonl").write_text("\n".join(rows) + "\n", "utf-8")


if __name__ == "__main__":
    main()

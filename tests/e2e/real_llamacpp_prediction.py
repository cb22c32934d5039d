"""A scripted agent run against real llama.cpp, which publishes no events: how true are the gateway's predictions?

    KEEPWARM_LLAMACPP_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_llamacpp_prediction [--json FILE]

The interpreter needs ``xllamacpp`` (``pip install xllamacpp``). One server with two slots serves the default model; two
agents take turns, an old conversation is taken up again, and a third agent crowds one of them out. 0 when every step of
an undisturbed agent was predicted to the block.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_adapter.embedded.folders import default_gguf, ensure_default_model
from tests.gateways import Client, gateway_for

PYTHON_VARIABLE = "KEEPWARM_LLAMACPP_PYTHON"
WORDS = ("order", "item", "shelf", "count", "box", "list", "paper", "table", "garden", "letter", "river", "stone")
SLOTS, CONTEXT_TOKENS = 2, 4096
_SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.use_jinja, params.warmup, params.model_alias = True, True, {"smollm2"}
server = xllamacpp.Server(params)
print(xllamacpp.__version__, server.listening_address, flush=True)
sys.stdin.read()
"""
Json = dict[str, Any]


@contextmanager
def llama_cpp(python: str, scratch: Path) -> Iterator[tuple[str, str]]:
    """Serve while the context lasts; yields version and URL. Raises ``RuntimeError`` where it does not start."""
    command = [python, "-c", _SERVE, str(default_gguf(scratch)), str(CONTEXT_TOKENS), str(SLOTS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            hello = server.stdout.readline().split()
            if len(hello) != 2:
                raise RuntimeError(f"{python} cannot serve with xllamacpp")
            yield hello[0], hello[1]
        finally:
            server.stdin.close()


class Agent:
    """A conversation that grows by answers and by what tools say."""

    def __init__(self, client: Client, name: str, rows: list[Json]) -> None:
        self._client, self._name, self._rows = client, name, rows
        self._chance = random.Random(name)
        system = f"You are {name} and keep a desk. {self.words(60)}"
        self.messages: list[Json] = [{"role": "system", "content": system}]

    def words(self, count: int) -> str:
        return " ".join(self._chance.choice(WORDS) for _ in range(count))

    async def step(self, part: str) -> None:
        """Say something, and note what was predicted and what was reported."""
        self.messages.append({"role": "user", "content": self.words(25)})
        body = {"model": "smollm2", "messages": self.messages, "max_tokens": 12, "temperature": 0}
        async with self._client.session.post(f"{self._client.url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            record = await self._client.record(response.headers["x-keepwarm-request-id"])
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert record.decision is not None
        row = {
            "part": part,
            "agent": self._name,
            "prompt": record.usage.prompt_tokens,
            "counted": record.gateway_prompt_tokens,
            "predicted": record.decision.predicted_hit_tokens,
            "reported": record.usage.hit_tokens,
        }
        print("  {part:34} {agent:6} {prompt:5} tokens, predicted {predicted:5}, reported {reported:5}".format(**row))
        self._rows.append(row)


async def drive(url: str, home: Path) -> Json:
    """Run the script; return its rows and the gateway's own scores."""
    rows: list[Json] = []
    models = [{"name": "smollm2", "tokenizer": str(ensure_default_model())}]
    instances = [{"id": "llama", "url": url, "adapter": "llamacpp"}]
    async with gateway_for([], home, models=models, instances=instances, ready_count=1, ready_limit_s=60) as client:
        ada, bob, cleo = (Agent(client, name, rows) for name in ("Ada", "Bob", "Cleo"))
        for _ in range(5):
            await ada.step("one agent")
        for _ in range(3):
            await bob.step("two agents take turns")
            await ada.step("two agents take turns")
        for _ in range(3):
            await cleo.step("three agents, two slots")
            await ada.step("three agents, two slots")
            await bob.step("three agents, two slots")
        async with client.session.get(f"{client.url}/keepwarm/v1/instances") as response:
            (facts,) = (await response.json())["instances"]
    return {"rows": rows, "prediction": facts["prediction"], "predicted": facts["predicted"]}


def main() -> int:
    """Run it."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write every row there")
    options = arguments.parse_args()
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        print(f"{PYTHON_VARIABLE} names no Python with xllamacpp", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="keepwarm-llamacpp-") as scratch,
        llama_cpp(python, Path(scratch)) as (version, url),
    ):
        print(f"llama.cpp (xllamacpp {version}), {SLOTS} slots")
        figures = asyncio.run(drive(url, Path(scratch) / "home"))
    print(f"scores: {figures['prediction']}; capacity as learned: {figures['predicted']}")
    if options.json is not None:
        options.json.write_text(json.dumps({"xllamacpp": version, **figures}, indent=1))
    undisturbed = [row for row in figures["rows"] if row["part"] == "one agent"]
    return 0 if all(row["predicted"] // 16 == row["reported"] // 16 for row in undisturbed) else 1


if __name__ == "__main__":
    raise SystemExit(main())

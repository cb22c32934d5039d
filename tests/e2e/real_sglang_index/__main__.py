"""A scripted agent run against real SGLang: is the predicted hit what the engine then reports, for every request?

    KEEPWARM_SGLANG_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_sglang_index [--json FILE] [--keep FOLDER]

See the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.real_sglang_index.processes import HERE, GatewayProcess, Json, SglangServer, sglang_python

WORDS = ("read", "the", "file", "list", "write", "a", "test", "open", "path", "value", "index", "page", "token", "why")
SETTLE_LIMIT_S = 30.0


@dataclass
class Row:
    """One request: what was predicted when it was routed, and what the engine reported."""

    part: str
    instance: str
    prompt_tokens: int
    predicted: int
    reported: int
    exact: bool

    @property
    def is_equal(self) -> bool:
        return self.predicted == self.reported


class Run:
    """The agents' side."""

    def __init__(self, gateway: GatewayProcess, servers: list[SglangServer]) -> None:
        self.gateway, self.servers = gateway, {server.name: server for server in servers}
        self.rows: list[Row] = []
        self.part = ""
        self._chance = random.Random(7)

    def words(self, count: int) -> str:
        return " ".join(self._chance.choice(WORDS) for _ in range(count))

    def settle(self) -> None:
        """Wait until the gateway has folded every batch that the servers have published."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        waiting = dict(self.servers)
        while waiting:
            known = self.gateway.instances()
            for name in list(waiting):
                now = known[name]
                if now["events"] == "complete" and now["next_event_batch"] == waiting[name].next_batch():
                    del waiting[name]
            if waiting and time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(waiting)} did not settle: {known}")

    def only(self, name: str | None) -> None:
        """Let new requests go to this server only; ``None``: to all."""
        for each in self.servers:
            action = "resume" if name in (None, each) else "drain"
            self.gateway.ask(f"/keepwarm/v1/instances/{each}/{action}", {})

    def send(self, path: str, body: Json, key: str = "red", *, settled: bool = True) -> Json:
        """Send one request and keep its row."""
        if settled:
            self.settle()
        body = {"model": "tiny", "temperature": 0, "max_tokens": 20, **body}
        answer, headers = self.gateway.ask(path, body, key)
        request_id, run_id = headers["x-keepwarm-request-id"], headers["x-keepwarm-run"]
        self.rows.append(self._row(request_id, run_id, key))
        return answer

    def _row(self, request_id: str, run_id: str, key: str) -> Row:
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            try:
                records = self.gateway.ask(f"/keepwarm/v1/runs/{run_id}", key=key)[0]["records"]
            except OSError:
                records = []
            for record in records:
                if record["request_id"] == request_id:
                    usage, decision = record["usage"], record["decision"]
                    hits = sum(usage[f"hit_{tier}_tokens"] for tier in ("device", "host", "disk", "pool", "unknown"))
                    return Row(
                        self.part,
                        decision["instance"],
                        hits + usage["fresh_tokens"],
                        decision["predicted_hit_tokens"],
                        hits,
                        decision["exact"],
                    )
            time.sleep(0.05)
        raise RuntimeError(f"no record of {request_id}")

    def chat(self, messages: list[Json], key: str = "red", *, settled: bool = True, **more: object) -> str:
        answer = self.send("/v1/chat/completions", {"messages": messages, **more}, key, settled=settled)
        return str(answer["choices"][0]["message"]["content"])

    def agent(self, steps: int, key: str = "red", seed: str = "", *, settled: bool = True) -> list[Json]:
        """A conversation that grows by its answers and what tools say."""
        messages: list[Json] = [
            {"role": "system", "content": f"You are an agent. {seed} {self.words(150)}"},
            {"role": "user", "content": self.words(30)},
        ]
        for _ in range(steps):
            text = self.chat(messages, key, settled=settled)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self.words(40)}]
        return messages


def scripted(run: Run, gateway: GatewayProcess, record: Path | None) -> None:
    """Everything that an index must follow, on each server by itself, then on all."""
    for server in run.servers.values():
        run.only(server.name)
        run.part = f"{server.name}: agent steps"
        talk = run.agent(6)
        run.part = f"{server.name}: the same again"
        run.chat(talk)
        run.chat(talk)
        run.part = f"{server.name}: text and ids"
        text = run.words(120)
        for _ in range(2):
            run.send("/v1/completions", {"prompt": text})
            run.send("/v1/completions", {"prompt": list(range(300, 300 + 97))})
        run.part = f"{server.name}: another tenant, another salt"
        run.chat(talk, "blue")
        run.chat(talk, "blue")
        run.chat(talk, cache_salt="the client's own")
        run.chat(talk, cache_salt="the client's own")
        run.part = f"{server.name}: eviction"
        for number in range(10):
            run.agent(2, seed=f"agent {number}")
        run.chat(talk)
        run.part = f"{server.name}: flush"
        server.flush()
        run.chat(talk)
        run.chat(talk)
        if record is not None:
            run.settle()
            server.record(record / f"sglang_kv_events_{server.name}_{server.version()}.bin")
        run.part = f"{server.name}: server restarted"
        server.stop(signal.SIGKILL)
        server.start()
        server.until_ready()
        _until_served(gateway, server.name)
        run.chat(talk)
        run.chat(talk)
    run.only(None)
    run.part = "all: agents side by side"
    for number in range(4):
        run.agent(3, seed=f"worker {number % 2}")
    run.part = "all: gateway killed in mid-traffic"
    talk = run.agent(2, seed="survivor")
    time.sleep(2.5)  # a snapshot falls due every second
    run.agent(2, seed="after the snapshot")
    gateway.stop(signal.SIGKILL)
    gateway.start()
    gateway.until_ready()
    for name in run.servers:
        _until_served(gateway, name)
    for _ in range(2):
        run.chat(talk)
    run.agent(3, seed="survivor")


def hurried(run: Run) -> None:
    """Steps as fast as answers come, without waiting for any event: what an agent sees."""
    run.part = "all: without waiting"
    messages: list[Json] = [{"role": "system", "content": run.words(200)}, {"role": "user", "content": run.words(20)}]
    for _ in range(8):
        answer = run.send("/v1/chat/completions", {"messages": messages}, settled=False)
        text = str(answer["choices"][0]["message"]["content"])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": run.words(30)}]
    run.part = "all: four agents at once"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: run.agent(3, seed=f"at once {number % 2}", settled=False), range(4)))


def _until_served(gateway: GatewayProcess, name: str) -> None:
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while not gateway.instances()[name]["healthy"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not come back")
        time.sleep(0.2)


def report(rows: list[Row], version: str) -> Json:
    """Print a line a part; return the figures."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.part, []).append(row)
    print(f"SGLang {version}: predicted hit = reported cached tokens?")
    for part, listed in parts.items():
        equal = sum(row.is_equal for row in listed)
        hits, prompt = sum(row.reported for row in listed), sum(row.prompt_tokens for row in listed)
        inexact = sum(not row.exact for row in listed)
        note = f", {inexact} not called exact" if inexact else ""
        print(f"  {part:44} {equal:3} of {len(listed):3} equal; {hits:6} of {prompt:6} prompt tokens were cached{note}")
        for row in listed:
            if not row.is_equal:
                print(
                    f"      {row.instance}: predicted {row.predicted}, reported {row.reported} of {row.prompt_tokens}"
                )
    return {"sglang": version, "requests": len(rows), "equal": sum(row.is_equal for row in rows),
            "rows": [asdict(row) for row in rows]}  # fmt: skip


def main() -> int:
    """Run it; 0 when every settled request was predicted to the token."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write every row there")
    arguments.add_argument("--record", type=Path, help="write each server's event frames into this folder")
    arguments.add_argument("--keep", type=Path, help="keep logs, model and state in this folder")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaving by an exception ends every process
    python = sglang_python()
    if python is None:
        return 2
    with tempfile.TemporaryDirectory(prefix="keepwarm-sglang-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        if not (model / "config.json").is_file():
            subprocess.run([python, str(HERE / "tiny_model.py"), str(model)], check=True)
        servers = [
            SglangServer(python, model, "page16", page=16, tokens=4096, folder=folder),
            SglangServer(python, model, "page1", page=1, tokens=4096, folder=folder),
        ]
        gateway = GatewayProcess(servers, folder)
        try:
            for process in (*servers, gateway):
                process.start()
            for process in (*servers, gateway):
                process.until_ready()
            run = Run(gateway, servers)
            for server in servers:
                _until_served(gateway, server.name)
            version = servers[0].version()
            try:
                scripted(run, gateway, options.record)
                strict = list(run.rows)
                hurried(run)
            finally:
                figures = report(run.rows, version)
        finally:
            for process in (gateway, *servers):
                process.stop()
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if all(row.is_equal and row.exact for row in strict) else 1


if __name__ == "__main__":
    raise SystemExit(main())

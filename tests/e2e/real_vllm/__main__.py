"""Two real vLLM servers with our connector behind a gateway: see the README beside this file.

KEEPWARM_VLLM_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_vllm [--json FILE] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from kvstore.tiers.pool_server import PoolServer
from tests.e2e.real_sglang_index.processes import Json
from tests.e2e.real_vllm import parts
from tests.e2e.real_vllm.agents import Agents, Row
from tests.e2e.real_vllm.processes import Gateway, VllmServer
from tests.samples.ports import free_ports

PYTHON_VARIABLE = "KEEPWARM_VLLM_PYTHON"
_DEVICE_BLOCKS = 300
_LEDGER_LIMIT_S = 60.0
_PARTS = ("steps", "strangers", "slow", "redis")
_ROOT = Path(__file__).parents[3]
_SOURCES = {"device": "device", "host": "host", "disk": "disk", "pool": "external_unspecified"}
"""What vLLM's metrics call our tiers."""
_UNJUDGED = frozenset({"Redis stopped in mid-run", "Redis back"})
"""Parts in which the pool forgets what it was said to hold: a prediction may be wrong there, an answer not."""


def _stores(folder: Path, pool: str) -> dict[str, Json]:
    """Return the connectors' options. Whatever is held is claimed, so that each tier is seen to work."""
    common: Json = {"disk_gb": 0.3, "pool": pool, "pool_gb": 0.4, "host_gb": 0.0131}  # 400 pages
    common |= {"prefill_tokens_per_s": 1.0, "deadline_ms": 20_000}  # a busy machine is no fault
    return {name: {"disk": str(folder / f"disk-{name}"), **common} for name in ("a", "b")}


def _models(python: str, folder: Path) -> tuple[Path, Path]:
    made = []
    for seed in (0, 1):
        model = folder / f"model-{seed}"
        if not (model / "config.json").is_file():
            command = [python, "-m", "tests.e2e.real_vllm.tiny_model", str(model), str(seed)]
            subprocess.run(command, check=True, cwd=_ROOT)
        made.append(model)
    return made[0], made[1]


def bill(gateway: Gateway, servers: list[VllmServer], lives: parts.Lives, requests: int) -> tuple[parts.Faults, Json]:
    """Hold what the ledger bills against what the engines counted, token by token."""
    command = [sys.executable, "-m", "gateway", "report", "--by", "instance", "--json", "--config"]
    deadline = time.monotonic() + _LEDGER_LIMIT_S
    while True:
        told = subprocess.run([*command, str(gateway.settings)], capture_output=True, text=True, check=True, cwd=_ROOT)
        rows = {row["instance"]: row for row in json.loads(told.stdout)["groups"]}
        if sum(row["requests"] for row in rows.values()) >= requests or time.monotonic() > deadline:
            break
    faults: parts.Faults = []
    shown: Json = {}
    for server in servers:
        counted, billed = lives.sums(server), rows[server.name]
        pairs = {
            "prompt tokens": (billed["prompt_tokens"], counted["prompt_tokens"]),
            "cached tokens": (billed["hit_tokens"], counted["prompt_tokens_cached"]),
            "output tokens": (billed["output_tokens"], counted["generation_tokens"]),
        }
        shown[server.name] = {name: {"bill": ours, "engine": theirs} for name, (ours, theirs) in pairs.items()}
        shown[server.name]["hits by tier"] = {
            tier: {"bill": billed[f"hit_{tier}_tokens"], "engine": counted.get(f"cached_{source}", 0)}
            for tier, source in _SOURCES.items()
        }
        faults += [
            f"{server.name}: {name}: the bill says {ours}, the engine {theirs}"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]
    return faults, shown


def _predictions(rows: list[Row]) -> parts.Faults:
    judged = [row for row in rows if row.part not in _UNJUDGED]
    return [
        f"{row.part}: {row.instance} predicted {row.predicted}{'' if row.exact else ' (not exact)'}, "
        f"reported {row.reported} of {row.prompt_tokens}"
        for row in judged
        if not (row.is_equal and row.exact)
    ]


def _show(rows: list[Row]) -> None:
    by_part: dict[str, list[Row]] = {}
    for row in rows:
        by_part.setdefault(row.part, []).append(row)
    for part, listed in by_part.items():
        equal, hits = sum(row.is_equal for row in listed), sum(row.reported for row in listed)
        prompt = sum(row.prompt_tokens for row in listed)
        print(
            f"  {part:52} {equal:3} of {len(listed):3} as predicted; {hits:6} of {prompt:6} prompt tokens were cached"
        )


def _try(folder: Path, python: str, figures: Json, chosen: Collection[str]) -> parts.Faults:
    model, other_model = _models(python, folder)
    faults: parts.Faults = []
    (port,) = free_ports(1)
    with PoolServer(max_bytes=512 << 20, port=port) as pool:
        stores = _stores(folder, pool.url)

        def make(name: str, store: Json, **more: object) -> VllmServer:
            arguments: Json = {"dtype": "float32", "model": model, **more}
            return VllmServer(
                python,
                arguments.pop("model"),
                name,
                folder,
                store,
                more=("--num-gpu-blocks-override", str(_DEVICE_BLOCKS)),
                **arguments,
            )

        servers = {name: make(name, store, tells_all=name == "a") for name, store in stores.items()}
        gateway, lives = Gateway(list(servers.values()), folder), parts.Lives()
        try:
            for process in (*servers.values(), gateway):
                process.start()
            for process in (*servers.values(), gateway):
                process.until_ready()
            figures["vllm"] = servers["a"].version()
            agents = Agents(gateway, servers)
            for name in servers:
                agents.until(name, healthy=True)
            talk = agents.prompt("the talk")
            try:
                faults += parts.tiers(agents, servers["a"], talk)
                cold = agents.rows[0]
                faults += parts.salts(agents, talk)
                faults += parts.pool(agents, servers["b"], talk, cold)
                if "steps" in chosen:
                    faults += parts.ten_steps(agents, servers["a"], servers["b"], lives)
                if "strangers" in chosen:
                    store = {**stores["a"], "disk_gb": 1.5}
                    more, figures["cached by strangers"] = parts.strangers(make, other_model, store, talk)
                    faults += more
                if "slow" in chosen:
                    more, figures["a slow pool"] = parts.slow_pool(make, agents, pool, port)
                    faults += more
                if "redis" in chosen:
                    more, figures["without the pool"] = parts.redis_stopped(agents, list(servers.values()), pool, talk)
                    faults += more
                agents.settle()
                more, figures["bill"] = bill(gateway, list(servers.values()), lives, len(agents.rows))
                faults += more
            finally:
                figures["rows"] = [{**asdict(row), "equal": row.is_equal} for row in agents.rows]
                _show(agents.rows)
            faults += _predictions(agents.rows)
        finally:
            for process in (gateway, *servers.values()):
                process.stop()
    return faults


def main() -> int:
    """Run it; 0 when nothing differed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write every row and figure there")
    arguments.add_argument("--keep", type=Path, help="keep logs, models and state in this folder")
    arguments.add_argument("--only", nargs="*", choices=_PARTS, default=_PARTS, help="of the longer parts, these")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaving by an exception ends every process
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        print(
            f"{PYTHON_VARIABLE} names no Python with vllm: see {Path(__file__).parent / 'README.md'}", file=sys.stderr
        )
        return 2
    figures: Json = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepwarm-vllm-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        faults = _try(folder, python, figures, options.only)
    figures |= {"seconds": round(time.monotonic() - began), "faults": faults}
    for fault in faults:
        print(f"  WRONG: {fault}")
    print(json.dumps({name: value for name, value in figures.items() if name != "rows"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

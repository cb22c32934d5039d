"""Real SGLang servers with our store: the same output from every tier, nobody else's pages, and a bill that is right.

    KEEPWARM_SGLANG_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_sglang [--json FILE] [--only PART]

See the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kvstore.tiers.pool_server import PoolServer
from tests.e2e.real_sglang import agent_run
from tests.e2e.real_sglang import on_one_machine as direct
from tests.e2e.real_sglang.checks import Checks
from tests.e2e.real_sglang.servers import PluginServer
from tests.e2e.real_sglang_index.processes import HERE, sglang_python
from tests.samples.ports import free_ports
from tests.samples.slow_way import SlowWay

PARTS = ("tiers", "isolation", "faults", "agent")
POOL_BYTES = 256 << 20


class Servers:
    """Starts servers and ends them all."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.model = folder / "model"
        if not (self.model / "config.json").is_file():
            subprocess.run([python, str(HERE / "tiny_model.py"), str(self.model)], check=True)
        (self.pool_port,) = free_ports(1)
        self.pool = PoolServer(max_bytes=POOL_BYTES, port=self.pool_port)
        self.pool.start()
        self.way = SlowWay(self.pool_port)
        self._all: list[PluginServer] = []

    def make(self, name: str, *, slow_way: bool = False, **different: object) -> PluginServer:
        """Return a server, not started."""
        port = self.way.port if slow_way else self.pool_port
        server = PluginServer(self.python, self.model, name, self.folder, pool_port=port, **different)  # type: ignore[arg-type]
        self._all.append(server)
        return server

    def start(self, *servers: PluginServer) -> None:
        """Start these side by side and wait for them."""
        began_s = time.monotonic()
        for server in servers:
            server.start()
        for server in servers:
            server.until_ready()
        print(f"  {', '.join(s.name for s in servers)} started in {time.monotonic() - began_s:.0f} s", flush=True)

    def close(self) -> None:
        """End everything."""
        for server in self._all:
            server.stop()
        self.way.close()
        self.pool.stop()


def perform(servers: Servers, parts: tuple[str, ...], checks: Checks) -> None:
    """All parts, on as few starts as they need."""
    # On a busy machine a tiny model's pages come hardly sooner than it computes them: a claims always, b unless a page
    # is four times slower, so that what is held against predictions does not depend on who else is busy.
    a = servers.make("a", storage={"deadline_ms": 1000 * direct.DEADLINE_S, "claim_margin": 0.01})
    patient = {"deadline_ms": 5000, "least_mb_per_s": 0.05}  # slow is not broken: the bar is what decides
    b = servers.make("b", slow_way=True, storage={**patient, "claim_margin": 0.25})
    servers.start(a, b)
    checks.figures["sglang"] = a.version()
    seen = direct.prompt()
    if "tiers" in parts:
        print("hits from every tier")
        direct.same_output_from_every_tier(a, checks, seen)
        direct.detached_and_attached(a, checks)
        print("a shared pool, and a slow one")
        direct.shared_through_the_pool(a, b, checks)
        direct.slow_pool_is_not_waited_for(a, b, servers.way, checks)
    if "isolation" in parts:
        print("other servers on the same pool and disk")
        a.generate(seen)
        beside = {"disk": servers.folder / "disk-a", "storage": {"disk_gb": 0.1}}  # half of which is a's
        strangers = [
            (servers.make("float16", arguments=["--dtype", "float16"], **beside), "dtype"),
            (servers.make("page32", page=32, zero_copy=False), "page size"),
            (servers.make("renamed", served="other"), "model name"),
        ]
        for wave in (strangers[:2], strangers[2:]):  # more at a time would take more than 8 GB
            servers.start(*(stranger for stranger, _ in wave))
            for stranger, what in wave:
                direct.never_another_servers_page(stranger, checks, seen, what)
                stranger.stop()
    if "faults" in parts:
        print("faults")
        direct.killed_and_served_from_disk(a, servers.pool, checks, seen)
        direct.pool_stops(a, servers.pool, checks)
    if "agent" in parts:
        print("an agent run through the gateway")
        for server in (a, b):
            server.flush()
        agent_run.ten_steps([a, b], servers.folder, checks)


def main() -> int:
    """Run it; 0 when everything held."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures there")
    arguments.add_argument("--keep", type=Path, help="keep logs, model and state in this folder")
    arguments.add_argument("--only", choices=PARTS, action="append", help="only this part (again for more)")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaving by an exception ends every process
    python = sglang_python()
    if python is None:
        return 2
    checks = Checks()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="keepwarm-sglang-"))
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        servers = Servers(python, folder)
        stack.callback(servers.close)
        perform(servers, tuple(options.only or PARTS), checks)
    figures = {**checks.figures, "passed": checks.passed, "failures": checks.failures}
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    return 1 if checks.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

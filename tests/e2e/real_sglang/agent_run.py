"""A ten-step agent run through the gateway, over two servers of which one is killed and replaced on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.real_sglang.checks import Checks
from tests.e2e.real_sglang.servers import SETTLE_LIMIT_S, PluginServer
from tests.e2e.real_sglang_index.__main__ import Row, Run
from tests.e2e.real_sglang_index.processes import GatewayProcess, Json

RUN = "ten-steps"
QUIET_S = 1.5
NANO_PER_TOKEN = {"fresh": 4000, "hit_device": 100, "hit_host": 200, "hit_disk": 300, "hit_pool": 400, "output": 9000}
"""Prices, in nano-units a token, so that nothing needs rounding. What SGLang calls storage is disk or pool: hits that
the bill could not place would have no price."""


def price_book() -> str:
    """Return a price book of these prices, a million tokens each."""
    rates = "\n".join(f"{name} = {nano / 1000}" for name, nano in NANO_PER_TOKEN.items())
    return f'name = "e2e"\ncurrency = "USD"\n[[price]]\nmodels = ["tiny"]\n[price.rates]\n{rates}\n'


class AgentRun(Run):
    """Steps of one run, each sent when everything that the one before left has been told."""

    def settle(self) -> None:
        """Wait until the servers have told all, and the gateway knows it."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            numbers = {name: server.next_batch() for name, server in self.servers.items()}
            time.sleep(QUIET_S)
            if numbers == {name: server.next_batch() for name, server in self.servers.items()}:
                break
            if time.monotonic() > deadline:
                raise RuntimeError("the servers do not come to rest")
        super().settle()

    def send(self, path: str, body: Json, key: str = "red", *, settled: bool = True) -> Json:
        """Send one step of the run and keep its row."""
        if settled:
            self.settle()
        body = {"model": "tiny", "temperature": 0, "max_tokens": 24, **body}
        answer, headers = self.gateway.ask(path, body, key, {"x-keepwarm-run": RUN})
        self.rows.append(self._row(headers["x-keepwarm-request-id"], headers["x-keepwarm-run"], key))
        return answer


def ten_steps(servers: list[PluginServer], folder: Path, checks: Checks) -> None:
    """Run it; hold predictions, reports and the bill against what the engines count."""
    prices = folder / "prices.toml"
    prices.write_text(price_book())
    gateway = GatewayProcess(servers, folder, more_settings=f'[billing]\nprices = "{prices}"\n')
    gateway.start()
    try:
        gateway.until_ready()
        run = AgentRun(gateway, list(servers))
        for server in servers:
            _until_served(gateway, server.name)
        counted = dict.fromkeys(servers[0].counters(), 0)
        baseline = {server.name: server.counters() for server in servers}
        messages: list[Json] = [
            {"role": "system", "content": f"You are an agent. {run.words(220)}"},
            {"role": "user", "content": run.words(30)},
        ]

        def step() -> Row:
            text = run.chat(messages)
            messages.extend([{"role": "assistant", "content": text}, {"role": "user", "content": run.words(40)}])
            row = run.rows[-1]
            name = f"step {len(run.rows)} at {row.instance} ({run.part})"
            checks.equal(f"{name}: predicted = reported of {row.prompt_tokens}", row.predicted, row.reported)
            checks.true(f"{name}: called exact", row.exact)
            return row

        run.part = "both up"
        for _ in range(3):
            step()
        home = run.servers[run.rows[-1].instance]
        other = next(server for server in servers if server is not home)
        _add(counted, home.counters(), baseline[home.name])
        home.stop(signal.SIGKILL)
        _until_served(gateway, home.name, wanted=False)
        del run.servers[home.name]
        run.part = "its server killed: from the pool"
        checks.true("pages came from the pool", step().reported > 0)
        step()
        home.start()
        home.until_ready()
        _until_served(gateway, home.name)
        run.servers[home.name] = home
        baseline[home.name] = home.counters()
        run.only(home.name)
        run.part = "replaced: from its disk and the pool"
        row = step()
        checks.true("pages came from the disk of the life before", row.reported > 0)
        step()
        run.only(other.name)
        run.part = "back to the other"
        step()
        run.only(None)
        run.part = "both up again"
        for _ in range(2):
            step()
        run.settle()
        for server in servers:
            _add(counted, server.counters(), baseline[server.name])
        _bill(gateway, run, counted, checks)
    finally:
        gateway.stop()


def _bill(gateway: GatewayProcess, run: AgentRun, counted: dict[str, int], checks: Checks) -> None:
    """The ledger's amount against the engines' counts, priced by hand."""
    records = gateway.ask(f"/keepwarm/v1/runs/{RUN}", key="red")[0]["records"]
    usage = [record["usage"] for record in records]
    billed = {
        "prompt": sum(row.prompt_tokens for row in run.rows),
        "output": sum(each["output_tokens"] for each in usage),
        "device": sum(each["hit_device_tokens"] for each in usage),
        "host": sum(each["hit_host_tokens"] for each in usage),
    }
    placed = {tier: sum(each[f"hit_{tier}_tokens"] for each in usage) for tier in ("disk", "pool", "unknown")}
    billed["storage"] = sum(placed.values())
    checks.equal("ten steps", len(records), 10)
    checks.equal("all that came from storage is billed as disk or pool", placed["unknown"], 0)
    checks.true("both are in the bill", placed["disk"] > 0 and placed["pool"] > 0, f"{placed}")
    checks.note("storage, as billed", placed)
    checks.equal("tokens billed are those that the engines counted", billed, counted)
    fresh = counted["prompt"] - counted["device"] - counted["host"] - counted["storage"]
    wanted = (
        fresh * NANO_PER_TOKEN["fresh"]
        + counted["device"] * NANO_PER_TOKEN["hit_device"]
        + counted["host"] * NANO_PER_TOKEN["hit_host"]
        + placed["disk"] * NANO_PER_TOKEN["hit_disk"]
        + placed["pool"] * NANO_PER_TOKEN["hit_pool"]
        + counted["output"] * NANO_PER_TOKEN["output"]
    )
    checks.equal("the run's bill in nano-units, from the ledger", _ledger_nano(gateway), wanted)
    checks.note("the run's tokens", counted)
    checks.note("the run's bill in nano-units", wanted)


def _ledger_nano(gateway: GatewayProcess) -> int:
    """Ask the command for the run's sum."""
    command = [sys.executable, "-m", "gateway", "report", "--config", str(gateway.settings)]
    command += ["--home", str(gateway.home), "--run", RUN, "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return sum(total["amount_nano"] for total in told["totals"])


def _add(counted: dict[str, int], now: dict[str, int], before: dict[str, int]) -> None:
    for name in counted:
        counted[name] += now[name] - before[name]


def _until_served(gateway: GatewayProcess, name: str, *, wanted: bool = True) -> None:
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while gateway.instances()[name]["healthy"] is not wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} is not {'back' if wanted else 'gone'} in the gateway's eyes")
        time.sleep(0.2)

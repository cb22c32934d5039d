"""``./bench gateway [--requests N] [--quick]``: what the gateway's way of a request costs, with all of its work on.

In front of two engines that compute nothing (processes of their own, over real HTTP), in one run:

* ``cpu_ms``: CPU time of the gateway's processes for one request whose body is about 1, 32 and 500 kB: 16 agents with a
  common system prompt, histories of their own and a new last turn each time. Keys, tokens, hashes, routing, bill and
  trace are all on; the figure has every thread in it.
* ``chunk_us``: CPU time for one chunk of 64 streams whose chunks come 20 ms apart.
* ``added_ms``: the median time of a small request at a fixed pace, less that of the engine alone.
* ``growth``: resident memory at the end over that at half of ``--requests`` small requests (default 20,000; 300,000
  take a quarter of an hour), a tenth of which begin like nothing before.

``ratios`` hold each figure against a plain aiohttp proxy that reads nothing (``tests/bench/_chat_server.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench._chat_load import Tally, bodies, numbered, run
from tests.bench._chat_server import MODEL

KEY = "sk-bench-gateway"
SIZES = {"1k": 1_000, "32k": 32_000, "500k": 500_000}
CHUNKS, GAP_MS, STREAMS = 200, 20, 64


def main(arguments: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="./bench gateway", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=20_000, help="of the growth phase; 0 leaves it out")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    options = parser.parse_args(arguments)
    scale = 0.1 if options.quick else 1.0
    found: dict[str, dict[str, float]] = {}
    with _engines() as engines:
        direct = asyncio.run(_paced(int(engines[0].rsplit(":", 1)[1]), scale))
        for name, starts in {"plain-proxy": _proxy, "keepwarm": _gateway}.items():
            with tempfile.TemporaryDirectory() as home, starts(engines, Path(home)) as (port, pid):
                found[name] = figures = _figures(port, pid, scale)
                figures["added_ms"] = (asyncio.run(_paced(port, scale)) - direct) * 1e3
                if name == "keepwarm" and options.requests:
                    figures["growth"] = _growth(port, pid, int(options.requests * scale))
    ours, plain = found["keepwarm"], found["plain-proxy"]
    ratios = {key: ours[key] / plain[key] for key in plain if key != "added_ms" and plain[key]}
    result = {"keepwarm": ours, "plain-proxy": plain, "ratios": ratios}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result))
    return 0


def _figures(port: int, pid: int, scale: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, size in SIZES.items():
        count = int({"1k": 4000, "32k": 2000, "500k": 400}[name] * scale)
        source = numbered(bodies(size, 16))
        _checked(asyncio.run(run(port, source, connections=16, requests=64, key=KEY)))
        began = _cpu_s(pid)
        _checked(asyncio.run(run(port, source, connections=16, requests=count, key=KEY)))
        figures[f"cpu_ms_{name}"] = (_cpu_s(pid) - began) / count * 1e3
    source = numbered(bodies(4_000, 16, stream=True))
    began = _cpu_s(pid)
    tally = _checked(asyncio.run(run(port, source, connections=STREAMS, requests=STREAMS, key=KEY, gap_s=0.4)))
    figures["chunk_us"] = (_cpu_s(pid) - began) / tally.pieces * 1e6
    return figures


async def _paced(port: int, scale: float) -> float:
    """Return the median time of small requests, 50 a second."""
    source, count = numbered(bodies(SIZES["1k"], 16)), max(int(300 * scale), 50)
    tally = await run(port, source, connections=5, requests=count, key=KEY, gap_s=0.1)
    return statistics.median(_checked(tally).seconds)


def _growth(port: int, pid: int, requests: int) -> float:
    """Return resident memory at the end over that at half."""
    source, halves = numbered(bodies(SIZES["1k"], 16), fresh_share=0.1), []
    for _ in range(2):
        _checked(asyncio.run(run(port, source, connections=16, requests=requests // 2, key=KEY)))
        halves.append(_rss_bytes(pid))
    return halves[1] / halves[0]


def _checked(tally: Tally) -> Tally:
    assert tally.requests, "nothing was asked"
    assert not tally.errors, f"{tally.errors} of {tally.requests} requests failed"
    return tally


@contextmanager
def _engines() -> Iterator[list[str]]:
    ports = [_free_port(), _free_port()]
    arguments = [
        [sys.executable, "-m", "tests.bench._chat_server", "engine", str(p), str(CHUNKS), str(GAP_MS)] for p in ports
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    processes = [subprocess.Popen(each) for each in arguments]
    try:
        for url in urls:
            _until_up(f"{url}/v1/models")
        yield urls
    finally:
        for process in processes:
            _end(process)


@contextmanager
def _proxy(engines: list[str], home: Path) -> Iterator[tuple[int, int]]:
    port = _free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.bench._chat_server", "proxy", str(port), *engines])
    try:
        _until_up(f"http://127.0.0.1:{port}/")
        yield port, process.pid
    finally:
        _end(process)


@contextmanager
def _gateway(engines: list[str], home: Path) -> Iterator[tuple[int, int]]:
    port = _free_port()
    instances = [
        f'[[instances]]\nid = "e{n}"\nurl = "{url}"\nadapter = "openai"\nmodels = ["{MODEL}"]\n'
        for n, url in enumerate(engines)
    ]
    config = home / "keepwarm.toml"
    config.write_text(
        f'home = "{home}"\n[server]\nport = {port}\n[log]\nlevel = "warning"\naccess = false\n'
        f'[[keys]]\nid = "bench"\nsecret = "{KEY}"\n'
        f'[[models]]\nname = "{MODEL}"\ntokenizer = "default"\nusage_counts = "ignored"\n' + "".join(instances)
    )
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _until_up(f"http://127.0.0.1:{port}/readyz", limit_s=120)
        yield port, process.pid
    finally:
        _end(process)


def _until_up(url: str, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])

"""The processes of the run: SGLang's real server, and a gateway that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from tests.samples.ports import free_ports

HERE = Path(__file__).parent
PYTHON_VARIABLE = "KEEPWARM_SGLANG_PYTHON"
START_LIMIT_S = 600.0
Json = dict[str, Any]


def sglang_python() -> str | None:
    """Return the interpreter that has SGLang; say what is missing where none is named."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        print(f"{PYTHON_VARIABLE} names no Python with sglang: see {HERE / 'README.md'}", file=sys.stderr)
    return python or None


def get_json(
    url: str, body: Json | None = None, headers: Mapping[str, str] | None = None
) -> tuple[Json, Mapping[str, str]]:
    """Ask with GET, or with POST where there is a body; return the answer and its headers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read()
        return (json.loads(text) if text[:1] in b"{[" and text else {"text": text.decode()}), dict(response.headers)


class Process:
    """A child with a log, answering under ``url``."""

    def __init__(
        self, command: list[str], url: str, ready_path: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.command, self.url, self._ready_path, self.log = command, url, ready_path, log
        self._environment = {**os.environ, **environment}
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; ``until_ready`` waits."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def until_ready(self) -> None:
        """Wait until it answers 200. Raises ``RuntimeError`` with the end of its log when it dies or takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self._child is None or self._child.poll() is not None:
                break
            try:
                get_json(self.url + self._ready_path)
                return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"{self.command[0]} did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and every process that it started."""
        if self._child is None:
            return
        group = os.getpgid(self._child.pid) if self._child.poll() is None else self._child.pid
        for step in (number, signal.SIGKILL):
            try:
                os.killpg(group, step)
                self._child.wait(30)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._child = None


class SglangServer(Process):
    """One real server; ``page`` is its page size, ``tokens`` what its cache holds, ``more`` further arguments."""

    def __init__(
        self,
        python: str,
        model: Path,
        name: str,
        *,
        page: int,
        tokens: int,
        folder: Path,
        more: Sequence[str] = (),
        python_path: Sequence[Path] = (),
        served: str = "tiny",
    ) -> None:
        self.name, self.page, self.tokens = name, page, tokens
        port, self.events_port, self.replay_port = free_ports(3)
        events = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", served,
                   "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native",
                   "--disable-overlap-schedule", "--mem-fraction-static", "0.1", "--max-total-tokens", str(tokens),
                   "--page-size", str(page), "--enable-cache-report",
                   "--kv-events-config", json.dumps(events), *more]  # fmt: skip
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "shim", *python_path))),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(command, f"http://127.0.0.1:{port}", "/health", folder / f"sglang-{name}.log", environment)

    def version(self) -> str:
        """Return what it says of itself."""
        return str(get_json(f"{self.url}/server_info")[0].get("version"))

    def flush(self) -> None:
        """Empty its cache."""
        deadline = time.monotonic() + 30
        while True:
            try:
                get_json(f"{self.url}/flush_cache", {})
                return
            except OSError:  # it refuses while a request is being put away
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def published(self) -> list[list[bytes]]:
        """Return topic, number and payload of every batch that its replay socket still has."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.linger, asker.rcvtimeo = 0, 20_000
            asker.connect(f"tcp://127.0.0.1:{self.replay_port}")
            asker.send_multipart([b"", (0).to_bytes(8, "big")])
            found = []
            while (frames := asker.recv_multipart())[-2] != b"\xff" * 8:
                found.append(frames[-3:])
            return found

    def next_batch(self) -> int:
        """Return the number that its next batch of events will have."""
        published = self.published()
        return int.from_bytes(published[-1][1], "big") + 1 if published else 0

    def record(self, path: Path) -> None:
        """Write what it published as ``tests/captures`` holds such frames: each after its length, big-endian."""
        frames = [frame for batch in self.published() for frame in batch]
        path.write_bytes(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))


class GatewayProcess(Process):
    """A gateway in front of the servers."""

    def __init__(self, servers: Sequence[SglangServer], folder: Path, *, more_settings: str = "") -> None:
        (port,) = free_ports(1)
        self.settings, self.home = folder / "keepwarm.toml", folder / "home"
        self.settings.write_text(_settings(servers, port) + more_settings)
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(self.settings)]
        environment = {"KEEPWARM_HOME": str(self.home)}
        super().__init__(command, f"http://127.0.0.1:{port}", "/healthz", folder / "gateway.log", environment)

    def ask(
        self, path: str, body: Json | None = None, key: str = "admin", headers: Mapping[str, str] | None = None
    ) -> tuple[Json, Mapping[str, str]]:
        """Ask with one of the keys of the settings."""
        return get_json(self.url + path, body, {"authorization": f"Bearer secret-of-{key}", **(headers or {})})

    def instances(self) -> dict[str, Json]:
        """Return what the gateway knows of the servers, by name."""
        return {each["id"]: each for each in self.ask("/keepwarm/v1/instances")[0]["instances"]}


@contextmanager
def running(server: SglangServer, gateway: GatewayProcess) -> Iterator[None]:
    """Have both up, and the gateway hear the events of the server, which is its "one"."""
    try:
        server.start()
        server.until_ready()
        gateway.start()
        gateway.until_ready()
        while gateway.instances()["one"].get("events") != "complete":
            time.sleep(0.2)
        print(f"SGLang {server.version()}")
        yield
    finally:
        gateway.stop()
        server.stop()


def _settings(servers: Sequence[SglangServer], port: int) -> str:
    lines = [
        "[server]",
        f"port = {port}",
        "[health]",
        "interval_s = 0.5",
        "timeout_s = 30.0",
        "[routing]",
        "index_snapshot_s = 1.0",
    ]
    for key, more in (("admin", "admin = true"), ("red", 'tenant = "red"'), ("blue", 'tenant = "blue"')):
        lines += ["[[keys]]", f'id = "{key}"', f'secret = "secret-of-{key}"', more]
    for server in servers:
        lines += ["[[instances]]", f'id = "{server.name}"', f'url = "{server.url}"', 'adapter = "sglang"']
    return "\n".join(lines) + "\n"

"""The demonstration's stage: a gateway in a child process, on a settings file that a user could have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY_LIMIT_S = 840.0
STOP_LIMIT_S = 40.0

SETTINGS = """\
# Two engines on one machine. Host memory and disk are private to an engine, the pool is shared by both.
home = "{home}"

[server]
port = {port}

[embedded]
enabled = true
instances = 2
model = "{model}"
threads = {threads}
device_tokens = 12288
host_bytes = {host_bytes}
disk_bytes = {disk_bytes}
pool_bytes = {pool_bytes}
"""


class StageError(Exception):
    """The gateway did not start, or did not do as it was told. The text says what and where its log lies."""


class Stage:
    """A running gateway with two embedded engines. Everything that it writes lies in ``folder``."""

    def __init__(self, folder: Path, *, port: int, model: str) -> None:
        self.folder, self.config, self.log = folder, folder / "keepwarm.toml", folder / "gateway.log"
        self.home = folder / "home"
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.config.write_text(
            SETTINGS.format(
                home=self.home,
                port=port,
                model=model,
                threads=os.cpu_count() or 1,
                host_bytes=768 << 20,
                disk_bytes=1 << 30,
                pool_bytes=1 << 30,
            )
        )

    def start(self) -> None:
        """Start the gateway and wait until it is ready; the first time the model is fetched and converted."""
        guarded = [sys.executable, "-P", "-m", "engine_adapter.embedded.guarded", str(os.getpid())]
        command = [*guarded, "gateway", "serve", "--config", str(self.config)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._wait_for("the gateway", lambda: self._get("/readyz") is not None)

    def instances(self) -> list[dict[str, Any]]:
        """Return what the gateway says of its instances."""
        listed: list[dict[str, Any]] = self._json("GET", "/keepwarm/v1/instances")["instances"]
        return listed

    def restart(self, instance: str) -> None:
        """Restart one engine and wait until it serves again."""
        self._json("POST", f"/keepwarm/v1/instances/{instance}/restart", timeout_s=READY_LIMIT_S)
        self._wait_for(f"instance {instance}", lambda: self._healthy(instance))

    def drain(self, instance: str) -> None:
        """Send nothing new to this engine."""
        self._json("POST", f"/keepwarm/v1/instances/{instance}/drain")

    def resume(self, instance: str) -> None:
        """Take this engine back into service."""
        self._json("POST", f"/keepwarm/v1/instances/{instance}/resume")

    def wait(self) -> int:
        """Stay until the gateway ends; a keyboard interrupt ends it."""
        assert self._process is not None
        try:
            return self._process.wait()
        except KeyboardInterrupt:
            return 0

    def stop(self) -> None:
        """Stop the gateway and with it everything that it started. Idempotent."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _healthy(self, instance: str) -> bool:
        return any(entry["id"] == instance and entry["healthy"] for entry in self.instances())

    def _wait_for(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise StageError(
                    f"the gateway ended with {self._process.returncode}; its log: {self.log}\n{self._tail()}"
                )
            if ready():
                return
            time.sleep(0.2)
        raise StageError(f"{what} was not ready within {READY_LIMIT_S:.0f} s; the log: {self.log}\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def _get(self, path: str) -> bytes | None:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return bytes(answer.read())
        except (urllib.error.URLError, OSError):
            return None

    def _json(self, method: str, path: str, timeout_s: float = 30.0) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, method=method, data=b"" if method == "POST" else None)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                decoded: dict[str, Any] = json.load(answer)
                return decoded
        except urllib.error.HTTPError as error:
            raise StageError(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise StageError(f"{method} {path}: {error}") from None

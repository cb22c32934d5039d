"""vLLM's real server with our connector, and the gateway in front of two of them."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq

from tests.e2e.real_sglang_index.processes import Json, Process, get_json
from tests.samples.ports import free_ports

_ROOT = Path(__file__).parents[3]


class VllmServer(Process):
    """One server. ``store``: the connector's options; without them it runs without one."""

    def __init__(
        self,
        python: str,
        model: Path,
        name: str,
        folder: Path,
        store: Mapping[str, object] | None,
        *,
        served: str = "tiny",
        block: int = 32,
        dtype: str = "bfloat16",
        tells_all: bool = True,
        more: Sequence[str] = (),
    ) -> None:
        """``tells_all``: with the routes of vLLM's development mode, ``/server_info`` and resets among them."""
        self.name, self.block, self.tells_all = name, block, tells_all
        port, self.events_port, self.replay_port = free_ports(3)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "kv",
        }
        arguments: list[object] = [
            Path(python).parent / "vllm", "serve", model, "--host", "127.0.0.1", "--port", port,
            "--served-model-name", served, "--dtype", dtype, "--max-model-len", 8192, "--max-num-seqs", 8,
            "--enforce-eager", "--block-size", block, "--enable-prefix-caching", "--enable-prompt-tokens-details",
            "--kv-events-config", json.dumps(events), *more,
        ]  # fmt: skip
        if store is not None:
            arguments += ["--kv-transfer-config", json.dumps(connector(store))]
        environment = {
            "PYTHONPATH": str(_ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1" if tells_all else "0",
        }
        url = f"http://127.0.0.1:{port}"
        super().__init__([str(each) for each in arguments], url, "/health", folder / f"vllm-{name}.log", environment)

    def version(self) -> str:
        """Return what it says of itself."""
        return str(get_json(f"{self.url}/version")[0]["version"])

    def forget_device(self) -> None:
        """Empty the engine's own cache; our tiers keep their pages."""
        get_json(f"{self.url}/reset_prefix_cache", {})

    def next_batch(self) -> int:
        """Return the number that its next batch of events will have."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.linger, asker.rcvtimeo = 0, 20_000
            asker.connect(f"tcp://127.0.0.1:{self.replay_port}")
            asker.send_multipart([b"", (0).to_bytes(8, "big")])
            following = 0
            while (frames := asker.recv_multipart())[-2] != b"\xff" * 8:
                following = int.from_bytes(frames[-2], "big") + 1
            return following

    def counters(self) -> dict[str, int]:
        """Return what it counted in this life: prompt, cached and generated tokens, and cached ones by source."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith("vllm:")]
        counted = {}
        for line in lines:
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0].removeprefix("vllm:")
            if name == "prompt_tokens_cached_by_source_total":
                counted[f"cached_{series.partition('source=')[2].split(chr(34))[1]}"] = int(float(value))
            elif name in ("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"):
                counted[name.removesuffix("_total")] = int(float(value))
        return counted

    def ask(self, messages: list[Json], **more: object) -> Json:
        """Ask it alone, past any gateway."""
        body: Json = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0, **more}
        return get_json(f"{self.url}/v1/chat/completions", body)[0]

    def cached(self, messages: list[Json], **more: object) -> int:
        """Ask it alone; return how many tokens of the prompt were cached."""
        return int(self.ask(messages, **more)["usage"]["prompt_tokens_details"]["cached_tokens"])


def connector(store: Mapping[str, object]) -> Json:
    """Return what ``--kv-transfer-config`` is given: see ``docs/vllm.md``."""
    return {
        "kv_connector": "Keepwarm",
        "kv_connector_module_path": "kvstore.plugins.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(store),
    }


class Gateway(Process):
    """A gateway of its own in front of the servers."""

    def __init__(self, servers: Sequence[VllmServer], folder: Path) -> None:
        (port,) = free_ports(1)
        self.home, self.settings = folder / "home", folder / "keepwarm.toml"
        self.settings.write_text(_settings(servers, port, self.home))
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(self.settings)]
        super().__init__(command, f"http://127.0.0.1:{port}", "/healthz", folder / "gateway.log", {})

    def ask(self, path: str, body: Json | None = None, key: str = "admin") -> tuple[Json, Mapping[str, str]]:
        """Ask with one of the keys of the settings."""
        return get_json(self.url + path, body, {"authorization": f"Bearer secret-of-{key}"})

    def instances(self) -> dict[str, Json]:
        """Return what the gateway knows of the servers, by name."""
        return {each["id"]: each for each in self.ask("/keepwarm/v1/instances")[0]["instances"]}


def _settings(servers: Sequence[VllmServer], port: int, home: Path) -> str:
    lines = [f'home = "{home}"', "[server]", f"port = {port}", "[health]", "interval_s = 0.5", "timeout_s = 30.0"]
    for key, more in (("admin", "admin = true"), ("red", 'tenant = "red"'), ("blue", 'tenant = "blue"')):
        lines += ["[[keys]]", f'id = "{key}"', f'secret = "secret-of-{key}"', more]
    for server in servers:
        lines += ["[[instances]]", f'id = "{server.name}"', f'url = "{server.url}"', 'adapter = "vllm"', 'pool = "p"']
        if not server.tells_all:  # what a server without its development routes can't say
            lines += ['tiers = ["device", "host", "disk"]', "[instances.kv_events]"]
            lines += [f'endpoint = "tcp://127.0.0.1:{server.events_port}"']
            lines += [f'replay_endpoint = "tcp://127.0.0.1:{server.replay_port}"', 'topic = "kv"']
    return "\n".join(lines) + "\n"

"""Real SGLang servers that keep their pages in our store."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.wire_events import decode_batch
from kvstore.block import content_hashes, event_hash
from kvstore.events import BlocksStored
from kvstore.page import Tier
from kvstore.plugins.sglang.blocks import storage_root
from tests.e2e.real_sglang_index.processes import Json, SglangServer, get_json
from tests.samples.ports import two_free_ports

REPOSITORY = Path(__file__).parents[3]
ADMIN_KEY = "only-for-this-run"
SETTLE_LIMIT_S = 60.0
_UNSIGNED = 2**64 - 1
_COUNTERS = {
    "sglang:prompt_tokens_total": "prompt",
    "sglang:generation_tokens_total": "output",
    "sglang:cached_tokens_total": "",  # by its source: device, host, storage
}


@dataclass(frozen=True)
class Answer:
    """What a server generated, and where the prompt's pages came from."""

    output: tuple[int, ...]
    prompt_tokens: int
    device: int
    host: int
    storage: int
    took_s: float

    @property
    def cached(self) -> int:
        """All of them."""
        return self.device + self.host + self.storage


class PluginServer(SglangServer):
    """One server with host tier and our storage; its events are those of our relay."""

    def __init__(
        self,
        python: str,
        model: Path,
        name: str,
        folder: Path,
        *,
        pool_port: int,
        disk: Path | None = None,
        page: int = 16,
        zero_copy: bool = True,
        served: str = "tiny",
        storage: Json | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        relay_port = two_free_ports()
        self.storage: Json = {
            "backend_name": "keepwarm",
            "module_path": "kvstore.plugins.sglang.hicache",
            "class_name": "Keepwarm",
            "interface_v1": int(zero_copy),
            "prefetch_threshold": 1,
            "disk": str(disk if disk is not None else folder / f"disk-{name}"),
            "disk_gb": 0.05,
            "buffer_gb": 0.02,
            "pool": f"redis://127.0.0.1:{pool_port}",
            "pool_name": "the pool of this run",  # whichever way it is reached
            "pool_gb": 0.2,
            "events": f"tcp://127.0.0.1:{relay_port}",
            **(storage or {}),
        }
        more = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct",
                "--hicache-mem-layout", "page_first_direct", "--hicache-write-policy", "write_through",
                "--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", "dynamic",
                "--hicache-storage-backend-extra-config", json.dumps(self.storage), "--enable-metrics",
                "--admin-api-key", ADMIN_KEY, *arguments]  # fmt: skip
        super().__init__(
            python, model, name, page=page, tokens=4096, folder=folder, more=more, python_path=[REPOSITORY]
        )
        self.command[self.command.index("--served-model-name") + 1] = served
        self.replay_port = relay_port + 1

    def generate(self, ids: Sequence[int], *, new_tokens: int = 16, **more: object) -> Answer:
        """Send a prompt as ids."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0},
            "return_cached_tokens_details": True,
            **more,
        }
        began_s = time.monotonic()
        answer, _ = get_json(f"{self.url}/generate", body)
        took_s = time.monotonic() - began_s
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            tuple(answer["output_ids"]),
            meta["prompt_tokens"],
            details.get("device", 0),
            details.get("host", 0),
            details.get("storage", 0),
            took_s,
        )

    def flush(self) -> None:
        """Empty device and host."""
        self._when_idle("/flush_cache", {})

    def detach(self) -> None:
        """Take the storage away at run time."""
        self._when_idle("/hicache/storage-backend", method="DELETE")

    def _when_idle(self, path: str, body: Json | None = None, method: str = "POST") -> None:
        """Ask what is refused while a page is still being put away."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            try:
                self.administer(path, body, method)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def administer(self, path: str, body: Json | None = None, method: str = "POST") -> None:
        """Ask what only operators may."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()

    def attach(self) -> None:
        """Attach the storage at run time, with what the server was started with."""
        self.administer(
            "/hicache/storage-backend",
            {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config_json": json.dumps(self.storage),
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_write_policy": "write_through",
            },
            method="PUT",
        )

    def until_told(self, ids: Sequence[int], tier: Tier, *, salt: str | None = None) -> None:
        """Wait until the relay has told that every full page of these tokens is in this tier."""
        wanted = {event_hash(h) & _UNSIGNED for h in content_hashes(ids, self.page, parent=storage_root(salt))}
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            told: set[int] = set()
            for _, number, payload in self.published():
                for event in decode_batch(int.from_bytes(number, "big"), payload).events:
                    if isinstance(event, BlocksStored) and event.tier is tier:
                        told.update(event.hashes)
            if wanted <= told:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {len(wanted - told)} of {len(wanted)} pages not told in {tier.label}")
            time.sleep(0.2)

    def counters(self) -> dict[str, int]:
        """Return the engine's own counts of tokens since it started."""
        text = get_json(f"{self.url}/metrics")[0]["text"]
        found = {"prompt": 0, "output": 0, "device": 0, "host": 0, "storage": 0}
        for line in text.splitlines():
            name, _, rest = line.partition("{")
            key = _COUNTERS.get(name)
            if key is None:
                continue
            source = rest.partition('cache_source="')[2].partition('"')[0]
            found[key or source] += int(float(rest.rpartition(" ")[2]))
        return found

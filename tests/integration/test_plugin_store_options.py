"""What operators write for the plug-ins, against real tiers: lives and quotas by salt, and memory in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.block import content_hashes, event_hash
from kvstore.event_wire import encode_sglang
from kvstore.events import BlocksStored, EventBatch
from kvstore.page import PageKey, PageLayout, Tier, page_key
from kvstore.plugins.sglang.blocks import storage_root
from kvstore.plugins.vllm.assembly import open_lookup, open_tiers
from kvstore.plugins.vllm.options import read_options
from kvstore.shared_host import SharedHost
from kvstore.tiers.base import PageTier
from kvstore.tiers.pool_server import PoolServer
from tests.samples import sglang_host
from tests.samples.paged_engine import BLOCK, PAGE_BYTES, PagedEngine, Request, layout

GB = 1e9
HOUR_S = 3600.0
PROMPT = list(range(1000, 1000 + 10 * BLOCK + 3))
KEPT_PAGES = 4
BY_SALT = {
    "brief": {"ttl_s": HOUR_S},
    "small": {"ttl_s": None, "quota_gb": (KEPT_PAGES + 0.5) * PAGE_BYTES / GB},
}
PATIENT = {"prefill_tokens_per_s": 0.001, "deadline_ms": 20_000.0}
"""Whatever is held is worth loading, and a busy machine is no fault."""


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=64 << 20) as running:
        yield running


@dataclass
class Starter:
    """Starts engines, which end with the test."""

    stack: ExitStack

    def vllm(self, given: dict[str, Any], weights: str) -> PagedEngine:
        options = read_options({"host_gb": 64 * PAGE_BYTES / GB, **PATIENT, **given})

        def tiers(mine: PageLayout) -> list[PageTier]:
            return open_tiers(options, mine)

        engine = PagedEngine(tiers, lookup=lambda layouts: open_lookup(options, layouts), weights=weights)
        self.stack.callback(engine.close)
        return engine

    def sglang(self, given: dict[str, Any]) -> sglang_host.Engine:
        engine = sglang_host.Engine({"prefill_tokens_per_s": 0.001, **given})
        self.stack.callback(engine.backend.close)
        return engine


@pytest.fixture
def starter() -> Iterator[Starter]:
    with ExitStack() as stack:
        yield Starter(stack)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SharedHost]:
    host = SharedHost(tmp_path / "host.sock", capacity_bytes=1 << 20)
    threading.Thread(target=host.serve, daemon=True).start()
    yield host
    host.close()


def ends(tier: PageTier, keys: Sequence[PageKey]) -> list[int | None]:
    """Return when each page ends, of the wall clock (0: never); ``None`` for those that are not there."""
    out = [memoryview(bytearray(tier.page_bytes)) for _ in keys]
    return [None if found is None else found.expires_at_s for found in tier.get(keys, out)]


def tiers_of(engine: PagedEngine) -> dict[Tier, PageTier]:
    return {tier.tier: tier for tier in engine.workers[0]._store.tiers}


@pytest.mark.parametrize("is_shared", [False, True], ids=["own memory", "memory in common"])
def test_vllms_pages_live_as_long_as_their_salts_may(
    is_shared: bool, daemon: SharedHost, tmp_path: Path, server: PoolServer, starter: Starter
) -> None:
    given: dict[str, Any] = {"disk": str(tmp_path / "disk"), "disk_gb": 0.01, "pool": server.url, "by_salt": BY_SALT}
    if is_shared:
        given["host_socket"] = str(tmp_path / "host.sock")
    engine = starter.vllm(given, weights=f"lives {is_shared}")
    earliest = int(time.time() + HOUR_S)
    for salt in ("brief", "small", None):
        engine.serve(Request(str(salt), PROMPT, cache_salt=salt))
    engine.idle()
    latest = int(time.time() + HOUR_S)
    fingerprint = layout(weights=f"lives {is_shared}").fingerprint
    for at, tier in tiers_of(engine).items():
        told = {
            salt: ends(
                tier, [page_key(fingerprint, name) for name in Request("", PROMPT, cache_salt=salt).block_hashes]
            )
            for salt in ("brief", "small", None)
        }
        assert all(end is not None and earliest <= end <= latest for end in told["brief"]), at
        assert sum(end == 0 for end in told["small"]) == KEPT_PAGES, at
        assert told["small"].count(None) == len(told["small"]) - KEPT_PAGES, at
        assert told[None] == [0] * 10, at
    assert engine.serve(Request("again", PROMPT, cache_salt="brief")).loaded == 10


def test_a_life_for_everybody_and_none_for_some(tmp_path: Path, starter: Starter) -> None:
    given = {"disk": str(tmp_path), "disk_gb": 0.01, "ttl_s": HOUR_S, "by_salt": {"": {"ttl_s": None}}}
    engine = starter.vllm(given, weights="for everybody")
    for salt in (None, "anybody"):
        engine.serve(Request(str(salt), PROMPT, cache_salt=salt))
    engine.idle()
    fingerprint = layout(weights="for everybody").fingerprint
    for tier in tiers_of(engine).values():
        mine, others = (
            ends(tier, [page_key(fingerprint, name) for name in Request("", PROMPT, cache_salt=salt).block_hashes])
            for salt in (None, "anybody")
        )
        assert mine == [0] * 10
        assert all(others)


def test_vllms_engines_of_a_machine_have_their_memory_in_common(
    daemon: SharedHost, tmp_path: Path, starter: Starter
) -> None:
    given = {"host_socket": str(tmp_path / "host.sock")}
    first, second = (starter.vllm(given, weights="in common") for _ in range(2))
    other = starter.vllm(given, weights="another model")
    assert first.serve(Request("a", PROMPT, cache_salt="red")).loaded == 0
    first.idle()
    request = Request("b", PROMPT, cache_salt="red")
    assert all(first.tiers_of(name) == {Tier.HOST} for name in request.block_hashes)
    assert second.serve(request).loaded == 10  # though it was never told of them
    assert all(second.tiers_of(name) == {Tier.HOST} for name in request.block_hashes)  # now it was
    assert second.serve(Request("c", PROMPT, cache_salt="blue")).loaded == 0
    assert other.serve(Request("d", PROMPT, cache_salt="red")).loaded == 0
    daemon.close()
    assert second.serve(Request("e", PROMPT, cache_salt="red")).loaded == 0
    assert second.serve(Request("f", PROMPT, cache_salt="red")).computed == 10


def learn(engine: sglang_host.Engine, tokens: Sequence[int], salt: str | None) -> list[str]:
    """Have SGLang's event told that it computed these tokens; return the keys that its storage has for them."""
    assert engine.backend._opened is not None
    names = tuple(event_hash(digest) for digest in content_hashes(tokens, 16, salt=salt))
    event = BlocksStored(names, None, tuple(tokens), 16, Tier.DEVICE, salt=salt)
    assert engine.backend._opened.relay.book.learn(encode_sglang(EventBatch(0, 0.0, (event,))))
    return [digest.hex() for digest in content_hashes(tokens, 16, parent=storage_root(salt))]


@pytest.mark.parametrize("is_shared", [False, True], ids=["own memory", "memory in common"])
def test_sglangs_pages_live_as_long_as_their_salts_may(
    is_shared: bool, daemon: SharedHost, tmp_path: Path, server: PoolServer, starter: Starter
) -> None:
    page_bytes = sglang_host.FakeHostPool().page_bytes
    quota = {"quota_gb": 2.5 * page_bytes / GB}
    given: dict[str, Any] = {
        "disk": str(tmp_path / "disk"), "disk_gb": 0.01, "pool": server.url, "namespace": str(is_shared),
        "by_salt": {"brief": {"ttl_s": HOUR_S}, "small": quota}, "buffer_gb": 0.0005,
    }  # fmt: skip
    if is_shared:
        given["host_socket"] = str(tmp_path / "host.sock")
    engine = starter.sglang(given)
    keys = {salt: learn(engine, range(1000, 1064), salt) for salt in ("brief", "small", None)}
    earliest = int(time.time() + HOUR_S)
    for each in keys.values():
        assert engine.store(each) == [True] * 4
    latest = int(time.time() + HOUR_S)
    shelf = engine.backend.shelves["kv"]
    for tier in shelf.store.tiers:
        told = {
            salt: ends(tier, [page_key(shelf.layout.fingerprint, bytes.fromhex(key)) for key in each])
            for salt, each in keys.items()
        }
        if tier.tier is Tier.HOST:  # without names in the buffer: nobody's pages live longer there than anybody's may
            assert all(end is not None and earliest <= end <= latest for ends in told.values() for end in ends)
            continue
        assert all(end is not None and earliest <= end <= latest for end in told["brief"]), tier.tier
        assert sorted(told["small"], key=str) == [0, 0, None, None], tier.tier
        assert told[None] == [0] * 4, tier.tier


def test_sglangs_servers_of_a_machine_have_their_memory_in_common(
    daemon: SharedHost, tmp_path: Path, starter: Starter
) -> None:
    given = {"host_socket": str(tmp_path / "host.sock"), "host_gb": 0.0003, "buffer_gb": 0.0}
    first, second = starter.sglang(given), starter.sglang(given)
    keys = sglang_host.key_chain(6)
    assert first.store(keys) == [True] * 6
    assert second.backend.batch_exists(keys) == 6
    assert second.load(keys) == [True] * 6
    assert starter.sglang({**given, "weights_id": "others"}).backend.batch_exists(keys) == 0
    daemon.close()
    assert second.backend.batch_exists(keys) == 0
    assert second.load(keys) == [False] * 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"by_salt": {"red": {"ttl": 5}}}, "ttl"),
        ({"by_salt": {"red": {"quota_gb": -1}}}, "negative"),
        ({"by_salt": {"red": {"ttl_s": 0}}}, "ttl_s"),
        ({"quota_gb": -0.5}, "negative"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"by_salt": 7}, "by_salt"),
    ],
)
def test_lives_and_quotas_that_are_none_are_refused_with_what_is_wrong(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_options(given)

"""``keepwarm store`` on a real disk tier and a real Valkey."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from gateway.cli import main
from kvstore.at_rest import AtRest
from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.encryption import KeyRing, key_id
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier
from tests.samples.pages import LAYOUT, PATIENCE, chain, page, page_data

PATIENT = PoolOptions(read_s=PATIENCE, write_s=PATIENCE)
PAGES = [*chain(3), *chain(2, salt="tenant")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "instances" / "embedded-0" / "disk"
    tier = DiskTier(LAYOUT, path, capacity_bytes=8 * LAYOUT.page_bytes)
    assert all(tier.put([page(entry) for entry in PAGES]))
    tier.close()
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=32 << 20) as started:
        yield started


def test_the_homes_disk_tiers_are_counted_verified_and_cleared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "stat", "--home", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{folder}: 5 pages" in said
    assert f"layout {LAYOUT.fingerprint.hex()}: 5 pages" in said
    assert "salt tenant, adapter -: 2 pages" in said
    assert main(["store", "verify", "--home", str(tmp_path)]) == 0
    assert "each read and right" in capsys.readouterr().out
    assert main(["store", "clear", "--disk", str(folder)]) == 0
    assert main(["store", "stat", "--disk", str(folder)]) == 1
    assert "there is no disk tier" in capsys.readouterr().err
    tier = DiskTier(LAYOUT, folder, capacity_bytes=8 * LAYOUT.page_bytes)
    assert list(tier.scan()) == []
    tier.close()


def test_a_flipped_bit_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slab = folder / "pages.slab"
    data = bytearray(slab.read_bytes())
    data[data.index(page_data(PAGES[1][0])) + 7] ^= 1
    slab.write_bytes(data)
    assert main(["store", "verify", "--disk", str(folder), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pages"], found["bad"]) == (4, {"checksum": 1})


def test_a_tier_in_use_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = DiskTier(LAYOUT, folder, capacity_bytes=8 * LAYOUT.page_bytes)
    assert main(["store", "stat", "--disk", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"5 pages, 0.0 MB of {8 * LAYOUT.page_bytes / 1e6:.1f} MB, in use by process {os.getpid()}" in said
    assert "salt tenant, adapter -: 2 pages" in said
    for action in ("verify", "clear"):
        assert main(["store", action, "--disk", str(folder)]) == 1
        assert "another process" in capsys.readouterr().err
    assert len(list(tier.scan())) == 5
    tier.close()


def test_a_pool_is_counted_verified_and_cleared(server: PoolServer, capsys: pytest.CaptureFixture[str]) -> None:
    tier = PoolTier(LAYOUT, server.url, capacity_bytes=64 * LAYOUT.page_bytes, options=PATIENT)
    assert all(tier.put([page(entry) for entry in PAGES]))
    tier.close()
    assert main(["store", "verify", "--pool", server.url]) == 0
    assert "5 pages" in capsys.readouterr().out
    with redis.Redis.from_url(server.url) as client:
        name = next(client.scan_iter())
        client.setrange(name, len(client.get(name)) - 5, b"\0\0\0\0\0")
        assert main(["store", "verify", "--pool", server.url, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)[0]["bad"] == {"checksum": 1}
        assert main(["store", "clear", "--pool", server.url, "--layout", "00" * 16]) == 0
        assert client.dbsize() == 5
        assert main(["store", "clear", "--pool", server.url]) == 0
        assert client.dbsize() == 0
    assert "5 pages removed" in capsys.readouterr().out


def test_encrypted_pages_are_looked_into_by_who_has_the_key(
    tmp_path: Path, server: PoolServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = bytes(range(32))
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    at_rest = AtRest(KeyRing([key]))
    folder, size = tmp_path / "disk", 8 * LAYOUT.page_bytes
    disk = DiskTier(LAYOUT, folder, capacity_bytes=size, options=DiskOptions(at_rest=at_rest))
    pool = PoolTier(LAYOUT, server.url, capacity_bytes=size, options=replace(PATIENT, at_rest=at_rest))
    for tier in (disk, pool):
        assert all(tier.put([page(entry) for entry in PAGES]))
        tier.close()
    places = ["--disk", str(folder), "--pool", server.url]
    assert main(["store", "verify", *places]) == 1
    assert capsys.readouterr().out.count(f"under key {key_id(key).hex()}, which is not here: 5 pages") == 2
    monkeypatch.setenv("KEEPWARM_PAGES_KEYS", key.hex())
    assert main(["store", "verify", *places]) == 0
    assert capsys.readouterr().out.count("salt tenant, adapter -: 2 pages") == 2
    slab = folder / "pages.slab"
    data = bytearray(slab.read_bytes())
    data[4096 + 7] ^= 1
    slab.write_bytes(data)
    assert main(["store", "verify", "--disk", str(folder), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pages"], found["bad"]) == (4, {"authentication": 1})


def test_a_host_tier_is_served_until_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "host.sock"
    monkeypatch.setattr("signal.signal", lambda *_: None)
    words = ["store", "serve-host", "--socket", str(path), "--gb", "0.001"]
    daemon = threading.Thread(target=main, args=(words,), daemon=True)
    daemon.start()
    options = SharedHostOptions(ask_s=Allowance(60.0), breaker=BreakerOptions(first_probe_s=0.01, longest_probe_s=0.05))
    tier = SharedHostTier(LAYOUT, path, capacity_bytes=8 * LAYOUT.page_bytes, options=options)
    assert tier.breaker.wait_closed(60)
    assert all(tier.put([page(entry) for entry in PAGES]))
    assert main(words) == 1
    assert "cannot serve a host tier" in capsys.readouterr().err
    tier.close()


@pytest.mark.parametrize(
    "words",
    [["serve-host", "--socket", "s", "--gb", "0"], ["serve-host", "--socket", "s", "--gb", "-1"],
     ["serve-host", "--socket", "s", "--gb", "nan"], ["clear", "--pool", "redis://localhost", "--layout", "abc"]],
    ids=" ".join,
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_done(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["store", *words])
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stat", "--home", str(tmp_path)]) == 1
    assert "no disk tier there" in capsys.readouterr().err
    assert main(["store", "stat", "--pool", "http://nowhere"]) == 1
    assert "is not the URL" in capsys.readouterr().err
    assert main(["store", "stat", "--pool", f"unix://{tmp_path}/none.sock"]) == 1
    assert "stopped answering" in capsys.readouterr().err

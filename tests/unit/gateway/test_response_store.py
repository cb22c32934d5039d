"""Stored responses: whose they are, how many fit, and that they outlive a process."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.protocols.responses.store import ResponseStore, Stored, StoreLimits

Json = dict[str, Any]


def stored(name: str, parent: str | None = None, *, words: int = 1) -> Stored:
    item: Json = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": "w" * words}
    return Stored(parent, [{"id": f"in_{name}", "role": "user", "content": "hi"}], {"id": name, "output": [item]})


async def test_a_chain_is_read_from_its_end_and_outlives_the_process(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r")
    for name, parent in (("a", None), ("b", "a"), ("c", "b")):
        store.put("t", stored(name, parent))
    chain = await store.chain("t", "c")
    assert chain is not None
    assert [one.response["id"] for one in chain] == ["a", "b", "c"]
    store.close()
    store = ResponseStore(tmp_path / "r")
    assert await store.chain("t", "c") == chain
    assert await store.items("t", ["msg_b", "in_a", "nothing"]) == {
        "msg_b": chain[1].output()[0],
        "in_a": chain[0].input[0],
    }
    assert await store.delete("t", "a")
    assert not await store.delete("t", "a")
    assert await store.chain("t", "c") is None
    assert await store.items("t", ["in_a"]) == {}
    store.close()


async def test_tenants_share_nothing_even_under_one_id(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r")
    store.put("t", stored("a", words=1))
    store.put("u", stored("a", words=2))
    mine, theirs = await store.get("t", "a"), await store.get("u", "a")
    assert mine is not None
    assert theirs is not None
    assert mine.output() != theirs.output()
    assert await store.delete("u", "a")
    assert await store.get("t", "a") == mine
    store.close()


async def test_what_was_used_longest_ago_goes_first_and_a_tenant_displaces_only_itself(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r", StoreLimits(tenant_bytes=4000, total_bytes=1 << 20))
    store.put("u", stored("theirs"))
    store.put("t", stored("old", words=1000))
    store.put("t", stored("newer", words=1000))
    assert await store.get("t", "old") is not None  # used again
    store.put("t", stored("newest", words=1000))
    store.put("t", stored("latest", words=1000))
    kept = [name for name in ("old", "newer", "newest", "latest") if await store.get("t", name) is not None]
    assert kept == ["old", "newest", "latest"]
    assert await store.get("u", "theirs") is not None
    store.close()


async def test_all_tenants_together_are_bounded_and_a_chain_has_an_end(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r", StoreLimits(total_bytes=3000, chain=3))
    for number in range(10):
        store.put(f"t{number}", stored("a", words=1000))
    assert [number for number in range(10) if await store.get(f"t{number}", "a")] == [8, 9]
    store.put("loop", stored("x", "x"))
    assert await store.chain("loop", "x") is None
    store.close()


async def test_a_store_that_cannot_be_read_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(tmp_path / "r")
    store.put("t", stored("a"))
    assert await store.get("t", "a") is not None
    with closing(sqlite3.connect(tmp_path / "r")) as db, db:
        db.execute("DROP TABLE items")
        db.execute("UPDATE responses SET response = x'7b'")
    assert await store.get("t", "a") is None
    assert await store.chain("t", "a") is None
    assert await store.items("t", ["msg_a"]) == {}
    store.put("t", stored("b"))
    assert await store.get("t", "b") is None  # nothing half-written either
    assert "cannot be read" in caplog.text
    assert "is not kept" in caplog.text
    store.close()

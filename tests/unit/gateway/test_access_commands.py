"""``keepwarm key``, ``team``, ``tenant`` and ``audit`` on a store, as people type them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.identity import digest_of


def say(home: Path, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main([*words, "--home", str(home)]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_a_key_s_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(tmp_path, capsys, "tenant", "create", "acme", "--model", "m,n")
    say(tmp_path, capsys, "team", "create", "acme", "red")
    made = say(tmp_path, capsys, "key", "create", "agent", "--tenant", "acme", "--team", "red", "--role", "viewer",
               "--expires", "30d", "--note", "for nights")  # fmt: skip
    secret = made.removeprefix("the key, shown this once: ").strip()
    assert secret.startswith("sk-kw-")
    listed = say(tmp_path, capsys, "key", "list")
    assert "agent  acme    red   viewer" in listed
    assert "for nights" in listed
    shown = json.loads(say(tmp_path, capsys, "key", "show", "agent", "--json"))["key"]
    assert [note["prefix"] for note in shown["secrets"]] == [secret[:10]]
    again = json.loads(say(tmp_path, capsys, "key", "rotate", "agent", "--overlap", "1h", "--json"))
    assert [note["expires_at"] is None for note in again["key"]["secrets"]] == [False, True]
    assert say(tmp_path, capsys, "key", "revoke", "agent").count("revoked at: 2") == 1
    assert "is revoked" in say(tmp_path, capsys, "key", "rotate", "agent", status=1)
    assert "there is no key 'x'" in say(tmp_path, capsys, "key", "show", "x", status=1)
    log = say(tmp_path, capsys, "audit")
    assert [line.split()[4] for line in log.splitlines()[1:]] == [
        "key.revoke", "key.rotate", "key.create", "team.put", "tenant.put",
    ]  # fmt: skip
    with sqlite3.connect(tmp_path / "access.sqlite3") as connection:
        dump = "\n".join(connection.iterdump())
    assert secret not in dump
    assert digest_of(secret) in dump
    assert again["secret"] not in dump
    assert (tmp_path / "access.sqlite3").stat().st_mode & 0o077 == 0


def test_limits_of_each_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(tmp_path, capsys, "tenant", "create", "acme")
    say(tmp_path, capsys, "team", "create", "acme", "red")
    told = say(tmp_path, capsys, "key", "limit", "agent", "--requests", "60", "--money", "2.50/day")
    assert [line.split() for line in told.splitlines()] == [
        ["kind", "amount", "period", "on", "outage"],
        ["money", "2.5", "day", "deny"],
        ["requests", "60", "minute", "admit"],
    ]
    told = say(tmp_path, capsys, "key", "limit", "agent", "--requests", "none", "--money", "none/day")
    assert len(told.splitlines()) == 1
    assert "1000" in say(tmp_path, capsys, "team", "limit", "acme", "red", "--tokens", "1000", "--on-outage", "deny")
    assert "8" in say(tmp_path, capsys, "tenant", "limit", "acme", "--concurrency", "8")
    assert "no team" in say(tmp_path, capsys, "team", "limit", "acme", "blue", "--tokens", "1", status=1)
    assert "no such limit" in say(tmp_path, capsys, "tenant", "limit", "acme", "--tokens", "none", status=1)
    assert "whole number" in say(tmp_path, capsys, "tenant", "limit", "acme", "--tokens", "many", status=1)


def test_an_entry_for_the_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "settings", "research", "--team", "lab", "--admin"]) == 0
    told = capsys.readouterr().out
    secret = told.splitlines()[0].rpartition(" ")[2]
    assert f'sha256 = "{digest_of(secret)}"' in told
    assert "admin = true" in told
    assert not list(tmp_path.iterdir())

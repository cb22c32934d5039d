"""The command line: help for strangers, and errors that say where to look."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from billing.ledger import Ledger
from gateway.cli import COMMANDS, main
from gateway.errors import SettingsError
from gateway.home import claimed, holder_of
from gateway.identity import digest_of


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out.replace("\n", " \n")  # a long name stands on a line of its own
    assert all(f"    {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"keepwarm {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["prices", "show"], ["ledger", "verify"]])
def test_a_reader_that_has_enough_ends_a_command_quietly(words: list[str], tmp_path: Path) -> None:
    """As in ``keepwarm store stat | head -1``: the pipe breaks before all is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with Ledger(tmp_path / "ledger.sqlite3"):
        pass
    command = [sys.executable, "-u", "-m", "gateway", *words]  # unbuffered: it breaks at the first line
    with os.fdopen(writer) as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "KEEPWARM_HOME": str(tmp_path)},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", [[], ["dance"], ["serve", "--prot", "1"]])
def test_a_wrong_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_typo_stops_the_start(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keepwarm.toml"
    path.write_text("[server]\nprot = 1\n")
    assert main([command, "--config", str(path)]) == 1
    assert f"{path}: server.prot: there is no such setting" in capsys.readouterr().err


def test_check_names_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keepwarm.toml"
    path.write_text(
        "home = 'state'\n[billing]\nprices = 'none.toml'\n[[instances]]\nid = 'a'\nurl = 'http://127.0.0.1:1'\n"
        "[[models]]\nname = 'm'\ntokenizer = '/nowhere'\n"
    )
    assert main(["check", "--config", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "ok   settings" in out
    assert "ok   home" in out
    for name in ("prices", "instance a", "tokenizer of m"):
        assert f"FAIL {name}" in err


def test_a_new_key_is_shown_once_and_its_digest_is_what_goes_into_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "settings", "dev", "--team", "red"]) == 0
    out = capsys.readouterr().out
    secret = out.split("shown this once: ")[1].split()[0]
    assert out.count(secret) == 1
    assert f'sha256 = "{digest_of(secret)}"' in out
    assert 'team = "red"' in out


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ('[embedded]\nmodel = "{folder}/none"\n', "neither a folder"),
        ('[embedded]\nmodel = "./none"\n', "neither a folder"),
        ('[embedded]\nmodel = "{folder}"\n', "no config.json"),
        ('[embedded]\npool_url = "wizard"\n', "no URL of a Redis"),
        ("[server]\nport = {taken}\n", "cannot listen on 127.0.0.1:{taken}"),
    ],
)
def test_check_tells_before_the_start_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, complaint: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"folder": str(tmp_path), "taken": taken.getsockname()[1]}
        path = tmp_path / "keepwarm.toml"
        path.write_text(settings.format_map(known))
        home = ["--home", str(tmp_path / "home")]
        assert main(["check", "--config", str(path), *home]) == 1
        assert complaint.format_map(known) in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_anything_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that had been started for nothing would have to load before it could be ended."""
    for of_the_process in ("configure_logging", "collect_rarely", "give_back_large_blocks"):
        monkeypatch.setattr(f"gateway.commands.serve.{of_the_process}", lambda *_: None)
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--home", str(home), "--port", str(port)]) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    begun = {path.name for path in home.iterdir()}
    assert begun <= {"lock", "access.sqlite3"}  # whether it may listen there at all hangs on the keys


def test_check_of_a_gateway_that_runs_says_so_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as listening, claimed(home):
        path = tmp_path / "keepwarm.toml"
        path.write_text(f"[server]\nport = {listening.getsockname()[1]}\n")
        assert main(["check", "--config", str(path), "--home", str(home)]) == 0
        assert f"in use by the gateway with process id {os.getpid()}" in capsys.readouterr().out
        with pytest.raises(SettingsError, match=f"process id {os.getpid()}"), claimed(home):
            pass
    assert holder_of(home) is None


@pytest.mark.parametrize(
    "words",
    [
        ("ledger", "verify"), ("reconcile", "counts"), ("credits", "list"), ("prices", "show"), ("store", "stat"),
        ("trace", "list"), ("key", "list"), ("team", "list"), ("tenant", "list"),
    ],
)  # fmt: skip
def test_settings_may_stand_before_an_action_and_behind_it(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, empty = tmp_path / "wrong.toml", tmp_path / "empty.toml"
    wrong.write_text("[server]\nprot = 1\n")
    empty.write_text("")
    command, action = words
    for line in (
        (command, "--config", str(wrong), action),
        (command, action, "--config", str(wrong)),
        (command, "--config", str(empty), action, "--config", str(wrong)),  # what stands behind it holds
    ):
        assert main(line) == 1
        assert f"{wrong}: server.prot: there is no such setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("report", "--ledger", "none"), ("ledger", "verify", "--ledger", "none"), ("doctor", "--traces", "none"),
        ("credits", "list", "--ledger", "none"), ("trace", "list", "--store", "none"),
        ("trace", "--store", "none", "list"),
    ],
)  # fmt: skip
def test_settings_that_are_named_are_read_whatever_else_is_named(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[server]\nprot = 1\n")
    assert main([*words, "--config", str(wrong)]) == 1
    assert f"{wrong}: server.prot: there is no such setting" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc")
def test_what_a_long_body_took_is_given_back_however_many_came_before() -> None:
    """Of glibc's own account: the second large block has pages of its own as the first one had."""
    code = """
import ctypes, gateway.commands.serve as serve
class Account(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd u f uordblks fordblks k".split()]
told = ctypes.CDLL(None).mallinfo2
told.restype = Account
serve.give_back_large_blocks()
before = told().hblkhd
del (first := [bytes(24 << 20)])[:]
second = bytes(24 << 20)
print(told().hblkhd - before >= len(second))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("wrong", ["none", "folder", "binary", "loop", "text/x"])
@pytest.mark.parametrize(
    "words",
    [
        ("reconcile", "invoice"), ("reconcile", "engine", "--instance", "a", "--after"), ("ledger", "storage"),
        ("ledger", "reprice", "--reason", "x", "--prices"), ("prices", "check"), ("prices", "verify-cases"),
        ("replay",), ("report", "--config"), ("key", "list", "--config"), ("report", "--ledger"),
        ("trace", "list", "--store"), ("doctor", "--traces"), ("report", "--home"), ("audit", "--home"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    words: tuple[str, ...],
    wrong: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path / "home"))
    Path("folder").mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    Path("text").write_text("hello\n")
    Path("loop").symlink_to("loop")
    status, (out, err) = main([*words, wrong]), capsys.readouterr()
    if words == ("audit", "--home") and wrong in ("none", "folder"):
        assert status == 0  # a home is made when it is wanted
        return
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "Errno" not in err
    assert wrong in err
    assert err.startswith(f"keepwarm {words[0]}: ") or words == ("prices", "check")


@pytest.mark.parametrize("words", [("key", "limit", "k"), ("team", "limit", "t", "k"), ("tenant", "limit", "t")])
def test_a_window_that_is_none_is_told(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path / "home"))
    assert main([*words, "--money", "none/x"]) == 1
    assert "--money none/x: 'none' for a month's" in capsys.readouterr().err


@pytest.mark.parametrize("number", [("--limit", "0"), ("--limit", "9" * 23), ("--before", "-1")])
def test_numbers_beyond_what_can_be_are_refused(number: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", *number])
    assert ended.value.code == 2
    assert f"argument {number[0]}: " in capsys.readouterr().err

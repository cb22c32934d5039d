"""``keepwarm ledger`` and ``report`` over a ledger in a file and in a server, as the command line runs them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from billing.database import Place
from billing.ledger import Ledger
from billing.postgres.database import postgres_database
from billing.prices import PriceBook
from gateway.assembly import ledger_place
from gateway.commands import check, report
from gateway.commands import ledger as ledger_command
from gateway.errors import SettingsError
from gateway.settings import load_settings
from tests.samples.billed import many
from tests.samples.postgres import Server


def run(command: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(arguments)))


@pytest.fixture(params=["file", "server"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Settings of a gateway whose ledger holds 30 requests of September 2026."""
    file = tmp_path / "keepwarm.toml"
    text = f'home = "{tmp_path}"\n[[instances]]\nid = "a"\nurl = "http://127.0.0.1:1"\n[ledger]\nkeep_months = 1\n'
    place: Place = tmp_path / "ledger.sqlite3"
    if request.param == "server":
        server: Server = request.getfixturevalue("postgres")
        url = server.database()
        text += f'url = "{url}"\nmigrate = "never"\n'
        file.write_text(text)
        assert run(ledger_command, "migrate", "--config", str(file)) == 0
        place = postgres_database(url, tmp_path / "ledger.journal")
    file.write_text(text)
    with Ledger(place) as opened:
        opened.register(PriceBook.default())
        for record in many(30):
            opened.append(record)
    return file


def test_a_months_life(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(command: ModuleType, *arguments: str) -> str:
        assert run(command, *arguments, "--config", str(config)) == 0
        return capsys.readouterr().out

    total = json.loads(told(report, "--json"))["totals"][0]
    assert total["requests"] == 30
    assert "verified 30 rows: 0 faults" in told(ledger_command, "verify")
    assert run(ledger_command, "remove", "--before", "2026-10-01", "--config", str(config)) == 1
    assert "close it first" in capsys.readouterr().err
    assert "closed until 2026-10-01" in told(ledger_command, "close", "2026-10-01")
    assert "30 rows removed" in told(ledger_command, "remove", "--before", "2026-10-01")
    assert "0 rows removed" in told(ledger_command, "remove", "--before", "2026-10-01")
    assert json.loads(told(report, "--by", "team", "--json"))["totals"][0] == total
    assert run(report, "--by", "run,team", "--config", str(config)) == 1
    assert "have been removed" in capsys.readouterr().err
    assert run(report, "--focus", "--config", str(config)) == 1
    assert "have been removed" in capsys.readouterr().err
    assert "verified 0 rows: 0 faults" in told(ledger_command, "verify")
    assert total["amount"] in told(ledger_command, "periods")


def test_the_url_may_stand_on_the_command_line(
    postgres: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.database()
    config = tmp_path / "keepwarm.toml"
    config.write_text(f'home = "{tmp_path}"\n[ledger]\nurl = "{url}"\n[embedded]\npool_bytes = 0\n')
    run(check, "--config", str(config))
    assert "no tables yet" in capsys.readouterr().out
    assert run(report, "--ledger", url, "--home", str(tmp_path)) == 1
    assert "keepwarm ledger migrate" in capsys.readouterr().err
    assert run(ledger_command, "migrate", "--ledger", url, "--home", str(tmp_path)) == 0
    assert "schema none -> 0001" in capsys.readouterr().out
    assert run(report, "--ledger", url, "--home", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["totals"] == []
    run(check, "--config", str(config))
    assert ", schema 0001" in capsys.readouterr().out


def test_settings_name_one_ledger(tmp_path: Path) -> None:
    file = tmp_path / "keepwarm.toml"
    file.write_text('[ledger]\nurl = "postgresql://u:secret@h/d"\n[billing]\nledger = "x.sqlite3"\n')
    with pytest.raises(SettingsError, match="two ledgers"):
        load_settings(file, environment={})
    file.write_text('[ledger]\nurl = "postgresql://u:secret@h/d"\njournal = "waiting"\n')
    settings = load_settings(file, environment={})
    assert settings.ledger_journal_path == tmp_path / "waiting"
    place = ledger_place(settings)
    assert not isinstance(place, Path)
    assert "secret" not in place.name + repr(settings) + repr(place)

"""A wrong setting stops the start and is told with its place."""

from pathlib import Path

import pytest

from gateway import assembly
from gateway.errors import SettingsError
from gateway.settings import load_settings


def _file(folder: Path, text: str) -> Path:
    path = folder / "keepwarm.toml"
    path.write_text(text)
    return path


def test_without_a_file_the_embedded_engine_runs() -> None:
    settings = load_settings(environment={})
    assert settings.runs_embedded
    assert settings.embedded.instances == 1
    assert settings.home == Path("~/.keepwarm").expanduser()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "[server]\nport = 1\nhost = '::1'\n[stream]\nheartbeat_s = 2\nidle_timeout_s = 3\n")
    variables = {"KEEPWARM_SERVER__PORT": "2", "KEEPWARM_STREAM__HEARTBEAT_S": "4.5", "KEEPWARM_HOME": "/srv/kw"}
    settings = load_settings(path, {"server": {"port": 3}}, variables)
    assert (settings.server.port, settings.server.host) == (3, "::1")
    assert (settings.stream.heartbeat_s, settings.stream.idle_timeout_s) == (4.5, 3)
    assert settings.home == Path("/srv/kw")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[server]\nprot = 1\n", "server.prot: there is no such setting"),
        ("[sever]\nport = 1\n", "sever: there is no such setting"),
        ("[server]\nport = 'x'\n", "server.port"),
        ("[[instances]]\nid = 'a'\nurl = 'http://h:1'\nadaptor = 'openai'\n", "instances.0.adaptor"),
        ("[[instances]]\nid = 'a'\n", "instances.0.url"),
        ("[[keys]]\nid = 'k'\n", "keys.0"),
        ("[server\n", ""),
    ],
)
def test_a_typo_is_told_with_its_path_and_file(tmp_path: Path, text: str, place: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environment={})
    assert str(caught.value).startswith(f"{path}: {place}")


@pytest.mark.parametrize("name", ["KEEPWARM_SEVER__PORT", "KEEPWARM_SERVER__PROT", "KEEPWARM_SERVER__PORT"])
def test_a_typo_in_the_environment_is_told(name: str) -> None:
    with pytest.raises(SettingsError, match=f"environment variable {name}"):
        load_settings(environment={name: "many"})


def test_variables_of_others_are_left_alone() -> None:
    names = (
        "KEEPWARM_PORT",
        "KEEPWARM_PORT_8400_TCP",
        "KEEPWARM_SERVICE_HOST",
        "KEEPWARM_TORCH",
        "PATH",
        "SERVER__PORT",
    )
    assert load_settings(environment=dict.fromkeys(names, "x")).server.port == 8400


def test_instances_in_the_file_replace_the_embedded_engine(tmp_path: Path) -> None:
    path = _file(tmp_path, "[[instances]]\nid = 'a'\nurl = 'http://127.0.0.1:9/v1/'\n")
    settings = load_settings(path, environment={})
    assert not settings.runs_embedded
    assert settings.instances[0].url == "http://127.0.0.1:9"
    with pytest.raises(SettingsError, match="named twice"):
        load_settings(path, {"instances": [{"id": "a", "url": "http://h"}, {"id": "a", "url": "http://g"}]}, {})


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    path = _file(
        tmp_path,
        "home = 'state'\n[billing]\nprices = 'prices.toml'\n[embedded]\nmodel = 'models/m'\n"
        "[[models]]\nname = 'm'\ntokenizer = './models/m'\n",
    )
    settings = load_settings(path, environment={})
    assert settings.home == tmp_path / "state"
    assert settings.billing.prices == tmp_path / "prices.toml"
    assert settings.embedded.model == settings.models[0].tokenizer == str(tmp_path / "models" / "m")


def test_secrets_do_not_show_in_errors_or_reprs(tmp_path: Path) -> None:
    path = _file(tmp_path, "[[keys]]\nid = 'k'\nsecret = 'sk-hush'\nsha256 = 'zz'\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environment={})
    assert "sk-hush" not in str(caught.value)
    settings = load_settings(_file(tmp_path, "[[keys]]\nid = 'k'\nsecret = 'sk-hush'\n"), environment={})
    assert "sk-hush" not in repr(settings)


def test_a_budget_is_in_a_currency_that_a_price_book_has() -> None:
    budget = {"name": "b", "unit": "money", "limit": "1", "window": "day"}
    for currency, told in ((None, "USD"), ("USD", "USD")):
        settings = load_settings(None, {"billing": {"budgets": [budget | {"currency": currency}]}}, {})
        assert [each.currency for each in assembly.budgets_of(settings, assembly.price_shelf(settings))] == [told]
    settings = load_settings(None, {"billing": {"budgets": [budget | {"currency": "EUR"}]}}, {})
    with pytest.raises(SettingsError, match="budget 'b' is in EUR, price books in USD"):
        assembly.budgets_of(settings, assembly.price_shelf(settings))
    with pytest.raises(SettingsError, match="only money has one"):
        load_settings(None, {"billing": {"budgets": [budget | {"unit": "calls", "currency": "USD"}]}}, {})

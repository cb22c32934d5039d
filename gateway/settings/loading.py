"""From flags, environment and file to settings, and from what is wrong there to words."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from gateway.errors import SettingsError
from gateway.settings.engines import InstanceSettings, InstancesFile
from gateway.settings.serving import ServerSettings
from gateway.settings.whole import ENVIRONMENT_PREFIX, Settings

CONFIG_VARIABLE = "KEEPWARM_CONFIG"

_NOT_SETTINGS = re.compile(r"KEEPWARM_(CONFIG$|(\w+_)?PYTHON$|TORCH|PAGES_|SERVICE_(HOST|PORT)|PORT(_|$))")
"""Variables of the scripts here and of pages at rest (``kvstore.at_rest``), and those that Kubernetes puts beside a
service that is called ``keepwarm``."""


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a socket on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of a process. Raises ``SettingsError``, which names each wrong value and where it stands.

    ``path``: the file; without it ``$KEEPWARM_CONFIG``; without that, defaults. ``flags``: nested values from the
    command line.
    """
    environment = os.environ if environment is None else environment
    if path is None and environment.get(CONFIG_VARIABLE):
        path = Path(environment[CONFIG_VARIABLE])
    file = _read(path) if path is not None else {}
    _check_variables(environment)
    try:
        settings = _layered(file, environment)(**(flags or {}))
    except ValidationError as error:
        raise SettingsError(_explain(error, file, flags or {}, path)) from None
    return _with_paths(settings, path.parent if path is not None else Path.cwd())


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None


def read_instances(path: Path) -> tuple[InstanceSettings, ...]:
    """Return the instances that a file names. Raises ``SettingsError``."""
    file = _read(path)
    try:
        found = InstancesFile.model_validate(file).instances
    except ValidationError as error:
        raise SettingsError(_explain(error, file, {}, path)) from None
    names = [instance.id for instance in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"{path}: instances: {', '.join(twice)} is named twice")
    return found


def _check_variables(environment: Mapping[str, str]) -> None:
    for name in environment:
        if not name.startswith(ENVIRONMENT_PREFIX) or _NOT_SETTINGS.match(name):
            continue
        head = name.removeprefix(ENVIRONMENT_PREFIX).split("__")[0].lower()
        if head not in Settings.model_fields:
            raise SettingsError(f"environment variable {name}: there is no setting {head!r}")


def _layered(file: dict[str, Any], environment: Mapping[str, str]) -> type[Settings]:
    """Return ``Settings`` with the file below the environment. Its sources are fixed, so nothing global is read."""
    from pydantic_settings import EnvSettingsSource, InitSettingsSource

    class FromEnvironment(EnvSettingsSource):
        def _load_env_vars(self) -> Mapping[str, str | None]:
            return {name.lower(): value for name, value in environment.items()}

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, FromEnvironment(settings_cls), InitSettingsSource(settings_cls, file)

    return Layered


def _explain(error: ValidationError, file: Mapping[str, Any], flags: Mapping[str, Any], path: Path | None) -> str:
    lines = []
    for problem in error.errors(include_input=False, include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        if _has(flags, problem["loc"]):
            source = "the command line"
        elif path is not None and _has(file, problem["loc"]):
            source = str(path)
        elif problem["loc"]:
            source = f"environment variable {ENVIRONMENT_PREFIX}{'__'.join(str(p).upper() for p in problem['loc'])}"
        else:
            source = str(path) if path is not None else "the settings"
        message = "there is no such setting" if problem["type"] == "extra_forbidden" else problem["msg"]
        message = message.removeprefix("Value error, ")
        lines.append(f"{source}: {where}: {message}" if where else f"{source}: {message}")
    return "\n".join(lines)


def _has(tree: object, place: tuple[int | str, ...]) -> bool:
    """Tell whether the place, or for a missing value its table, stands in this source."""
    for depth, part in enumerate(place):
        if isinstance(tree, Mapping):
            if part not in tree:
                return depth > 0 and depth == len(place) - 1
            tree = tree[part]
        elif isinstance(tree, list | tuple) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return depth > 0
    return bool(place)


def _with_paths(settings: Settings, folder: Path) -> Settings:
    def resolved(path: Path | None) -> Path | None:
        try:
            return None if path is None else (folder / path.expanduser()).resolve()
        except (OSError, RuntimeError) as error:  # a loop of links, a user that there is not
            raise SettingsError(f"{path}: {error}") from None

    def folder_or_word(word: str) -> str:
        return (
            word
            if "/" not in word or word.startswith("/") or not (folder / word).exists()
            else str((folder / word).resolve())
        )

    models = tuple(m.model_copy(update={"tokenizer": folder_or_word(m.tokenizer)}) for m in settings.models)
    return settings.model_copy(
        update={
            "home": resolved(settings.home),
            "models": models,
            "embedded": settings.embedded.model_copy(update={"model": folder_or_word(settings.embedded.model)}),
            "billing": settings.billing.model_copy(
                update={
                    "prices": resolved(settings.billing.prices),
                    "books": tuple(
                        book.model_copy(update={"prices": resolved(book.prices)}) for book in settings.billing.books
                    ),
                    "ledger": resolved(settings.billing.ledger),
                }
            ),
            "ledger": settings.ledger.model_copy(update={"journal": resolved(settings.ledger.journal)}),
            "tracing": settings.tracing.model_copy(update={"store": resolved(settings.tracing.store)}),
            "access": settings.access.model_copy(update={"store": resolved(settings.access.store)}),
            "server": _with_tls_paths(settings.server, resolved),
            "discovery": settings.discovery.model_copy(
                update={"files": tuple(resolved(file) for file in settings.discovery.files)}
            ),
        }
    )


def _with_tls_paths(server: ServerSettings, resolved: Callable[[Path | None], Path | None]) -> ServerSettings:
    if server.tls is None:
        return server
    files = {"certificate": resolved(server.tls.certificate), "key": resolved(server.tls.key)}
    return server.model_copy(update={"tls": server.tls.model_copy(update=files)})

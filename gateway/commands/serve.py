"""``keepwarm serve``: run the gateway."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import importlib.util
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from billing.errors import BillingError
from engine_adapter.errors import LaunchError
from gateway.app import Gateway, serve
from gateway.errors import SettingsError
from gateway.settings import LogSettings, Settings, load_settings
from gateway.settings.arguments import add_settings_arguments
from gateway.workers.place import WorkerPlace
from gateway.workers.supervisor import supervise
from tracing.errors import TracingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_settings_arguments(parser)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1; others need [[keys]])")
    parser.add_argument("--port", type=int, help="port to listen on (default 8400; 0: any free one)")
    parser.add_argument("--workers", type=int, help="processes on the port (default 1)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="default: info")


def settings_from(args: argparse.Namespace) -> Settings:
    """Return the settings that the command line names. Raises ``SettingsError``."""
    flags: dict[str, Any] = {}
    server = {name: value for name in ("host", "port", "workers") if (value := getattr(args, name, None)) is not None}
    if server:
        flags["server"] = server
    if getattr(args, "log_level", None) is not None:
        flags["log"] = {"level": args.log_level}
    if args.home is not None:
        flags["home"] = str(args.home.absolute())
    return load_settings(args.config, flags)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the faster event loop, where there is one for the platform."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


_COLLECTOR = (50_000, 20, 20)
"""How many objects more than before the collector waits for, and how many of its rounds before a longer one. A gateway
holds millions of small objects for long (words, prompts, names of blocks): going through them at the usual pace takes
a sixth of its time. Reference counts free nearly all that requests leave behind; cycles still go, in larger lots."""


_LARGE_BYTES = 16 << 20
"""From this size on a block of glibc's has pages of its own, which its end gives back. Left alone the bound grows to
32 MiB at the first large block that is freed; the next long bodies and their texts then lie in the heap, whose holes
stay with the process. Far below 16 MiB every prompt's buffers would come and go page by page, a sixth of its CPU."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's <malloc.h>


def give_back_large_blocks() -> None:
    """Let the memory of a long body go with it, where the C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)  # as glibc has it when it moves the other one itself


def collect_rarely() -> None:
    """Set the collector of cyclic garbage as a gateway needs it."""
    gc.set_threshold(*_COLLECTOR)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 after an orderly end, 1 when the gateway could not start or live."""
    try:
        settings = settings_from(args)
        configure_logging(settings.log)
        if settings.server.workers == 1:
            return _serve(settings)
        return supervise(settings, lambda place, listens: _serve(settings, place, listens))
    except SettingsError as error:
        return _told(error)


def _serve(settings: Settings, place: WorkerPlace | None = None, listens: Callable[[], None] = lambda: None) -> int:
    """Be the gateway, or one worker of it; return the exit status."""
    collect_rarely()
    give_back_large_blocks()
    if settings.runs_embedded and importlib.util.find_spec("torch") is None:
        return _told(
            SettingsError("the embedded engine needs torch: pip install 'keepwarm[embedded]', or name [[instances]]")
        )

    def announce(gateway: Gateway) -> None:
        listens()
        if place is None or place.is_first:
            _announce(gateway)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings, announce, place))
    except (SettingsError, BillingError, TracingError, LaunchError) as error:
        return _told(error)
    except BaseExceptionGroup as group:
        known, rest = group.split((SettingsError, BillingError, TracingError, LaunchError))
        if rest is not None or known is None:
            raise
        return _told(_first(known))
    return 0


def configure_logging(settings: LogSettings) -> None:
    """Send the process's log to standard error, a line each, times in UTC."""
    handler = logging.StreamHandler(sys.stderr)
    form = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("keepwarm.access").setLevel(logging.INFO if settings.access else logging.WARNING)


def _announce(gateway: Gateway) -> None:
    logging.getLogger(__name__).info("listening on %s (base URL for agents: %s/v1)", gateway.url, gateway.url)


def _told(error: BaseException) -> int:
    print(f"keepwarm serve: {error}", file=sys.stderr)
    return 1


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

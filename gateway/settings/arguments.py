"""Where settings come from, as commands are told it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from gateway.settings.loading import load_settings
from gateway.settings.whole import Settings


def add_settings_arguments(parser: argparse.ArgumentParser, *actions: argparse.ArgumentParser) -> None:
    """Declare them for a command: they may stand before its action as well as behind it."""
    config = "settings file (TOML; default: $KEEPWARM_CONFIG)"
    add_to_all("--config", parser, actions, type=Path, metavar="FILE", help=config)
    add_to_all(
        "--home", parser, actions, type=Path, metavar="FOLDER", help="folder for all state (default ~/.keepwarm)"
    )


def add_to_all(
    name: str,
    parser: argparse.ArgumentParser,
    actions: Iterable[argparse.ArgumentParser],
    *,
    type: Callable[[str], object] = str,
    dest: str | None = None,
    metavar: str,
    help: str,
) -> None:
    """Declare an option of a command and of its actions. What stands before an action holds unless it is said again."""
    dest = dest or name.removeprefix("--")
    parser.add_argument(name, type=type, dest=dest, metavar=metavar, help=help)
    for action in actions:
        action.add_argument(name, type=type, dest=dest, metavar=metavar, help=help, default=argparse.SUPPRESS)


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings that the arguments name. Raises ``SettingsError``."""
    return load_settings(args.config, {} if args.home is None else {"home": str(args.home.absolute())})

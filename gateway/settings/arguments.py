"""Where settings come from, as commands are told it."""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway.settings.loading import load_settings
from gateway.settings.whole import Settings


def add_settings_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Declare them. ``default``: ``argparse.SUPPRESS`` behind an action, where they may stand before it as well."""
    text = "settings file (TOML; default: $KEEPWARM_CONFIG)"
    parser.add_argument("--config", type=Path, metavar="FILE", default=default, help=text)
    text = "folder for all state (default ~/.keepwarm)"
    parser.add_argument("--home", type=Path, metavar="FOLDER", default=default, help=text)


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings that the arguments name. Raises ``SettingsError``."""
    return load_settings(args.config, {} if args.home is None else {"home": str(args.home.absolute())})

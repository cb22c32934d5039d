"""The effective settings without their secrets: every value, and whether it is other than the default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "(set, not shown)"
_SECRET_NAMES = ("secret", "password", "token", "sha256", "api_key", "webhook")
_NOT_SECRET = ("tokenizer", "tokens", "tokenize", "tokens_per_s", "api_key_header")


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One value by its path."""

    path: str
    value: str
    is_changed: bool


@dataclass(frozen=True, slots=True)
class SettingSection:
    """The values of one table of the file."""

    name: str
    rows: tuple[SettingRow, ...]


def setting_sections(effective: Mapping[str, object], defaults: Mapping[str, object]) -> list[SettingSection]:
    """Return the values by table. Both as a settings object dumps itself, secrets and all their kin hidden."""
    standard = dict(_leaves(defaults, ""))
    sections: dict[str, list[SettingRow]] = {}
    for path, value in _leaves(effective, ""):
        name, _, rest = path.partition(".")
        shown = shown_value(path, value)
        is_changed = path not in standard or standard[path] != value
        sections.setdefault(name if rest else "", []).append(SettingRow(path, shown, is_changed))
    return [SettingSection(name, tuple(rows)) for name, rows in sorted(sections.items())]


def shown_value(path: str, value: object) -> str:
    """Return a value as text that may be shown: no secrets, and of addresses neither passwords nor queries."""
    name = path.rpartition(".")[2].partition("[")[0]
    if value is None or value == "":
        return "–"
    if any(word in name for word in _SECRET_NAMES) and not name.endswith(_NOT_SECRET):
        return HIDDEN
    if isinstance(value, str):
        return shown_url(value) if "://" in value else HIDDEN if set(value) == {"*"} else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def shown_url(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return HIDDEN
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    elif isinstance(value, list | tuple):
        yield path, ", ".join(map(str, value))
    else:
        yield path, value

"""How pages lie on disk and in a pool where that is not how the engine has them: encrypted, in fp8, or both.

Off by default, and by namespace where it is on. It is asked for in code, or through the environment, which reaches the
tiers inside any engine whatever opens them there:

=============================  =======================================================================================
``KEEPWARM_PAGES_KEYS_FILE``   a file of keys, one a line; the first encrypts, all are tried (``kvstore.encryption``)
``KEEPWARM_PAGES_KEYS``        the keys themselves, with commas between
``KEEPWARM_PAGES_ENCRYPT``     whose pages: ``all`` (the default where there are keys) or ``[["salt", "adapter"], …]``
``KEEPWARM_PAGES_FP8``         whose pages are kept in fp8: ``none`` (the default), ``all`` or JSON as above
``KEEPWARM_PAGES_FP8_OF``      what the engine's elements are, where its layout tells only of bytes: ``bfloat16`` …
=============================  =======================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvstore.errors import MediumError
from kvstore.page import Namespace

if TYPE_CHECKING:
    from kvstore.encryption import KeyRing

PREFIX = "KEEPWARM_PAGES_"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some namespaces, or all."""

    is_all: bool = False
    namespaces: frozenset[Namespace] = frozenset()

    def __contains__(self, namespace: Namespace) -> bool:
        return self.is_all or namespace in self.namespaces

    def __bool__(self) -> bool:
        return self.is_all or bool(self.namespaces)


ALL, NONE = Chosen(is_all=True), Chosen()


@dataclass(frozen=True, slots=True)
class AtRest:
    """What is done to pages before they are stored. ``fp8_of``: the dtype of elements that the layout does not name."""

    keys: KeyRing | None = None
    encrypts: Chosen = field(default=ALL)
    fp8: Chosen = field(default=NONE)
    fp8_of: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done."""
        return (self.keys is None or not self.encrypts) and not self.fp8


def at_rest_from_environment(environ: Mapping[str, str] = os.environ) -> AtRest:
    """Return what the environment asks for. Raises ``MediumError`` for what cannot be had: nothing is stored then."""
    told = {name.removeprefix(PREFIX): value for name, value in environ.items() if name.startswith(PREFIX) and value}
    unknown = told.keys() - {"KEYS_FILE", "KEYS", "ENCRYPT", "FP8", "FP8_OF"}
    if unknown:
        raise MediumError(f"unknown: {', '.join(sorted(PREFIX + name for name in unknown))}")
    if not told:
        return AtRest()
    keys = _keys(told)
    if keys is None and "ENCRYPT" in told:
        raise MediumError(f"{PREFIX}ENCRYPT without {PREFIX}KEYS_FILE or {PREFIX}KEYS")
    encrypts, fp8 = _chosen("ENCRYPT", told.get("ENCRYPT", "all")), _chosen("FP8", told.get("FP8", "none"))
    return AtRest(keys, encrypts, fp8, told.get("FP8_OF"))


def _keys(told: Mapping[str, str]) -> KeyRing | None:
    if "KEYS_FILE" not in told and "KEYS" not in told:
        return None
    try:
        from kvstore.encryption import KeyRing  # needs a library that those do without who do not encrypt
    except ImportError as error:
        raise MediumError(f"pages cannot be encrypted: {error}; pip install cryptography") from error
    if "KEYS_FILE" in told:
        return KeyRing.from_file(Path(told["KEYS_FILE"]))
    return KeyRing.parse(told["KEYS"], PREFIX + "KEYS")


def _chosen(name: str, value: str) -> Chosen:
    if value in ("all", "none"):
        return ALL if value == "all" else NONE
    try:
        pairs = msgspec.json.decode(value, type=list[tuple[str | None, str | None]])
    except msgspec.DecodeError:
        raise MediumError(f"{PREFIX}{name}: 'all', 'none' or JSON like [[\"salt\", null]], not {value!r}") from None
    return Chosen(namespaces=frozenset(Namespace(salt or None, adapter or None) for salt, adapter in pairs))

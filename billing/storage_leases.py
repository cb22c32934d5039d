"""Reading leases: which prompts a provider kept cached, from a table (CSV) or from what Gemini's API lists. Pure.

The table has the columns ``id``, ``model``, ``tokens``, ``since``, ``until`` and, where they are known, ``tenant``,
``team``, ``key`` and ``region``. The JSON is the answer of Gemini's ``cachedContents.list``: of each cache its name,
model, ``usageMetadata.totalTokenCount``, ``createTime`` and ``expireTime``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime

from billing.counts import MAX_COUNT
from billing.errors import StorageError
from billing.storage import Lease

_NEEDED = ("id", "model", "tokens", "since", "until")
_WRITTEN = ("id", "model", "tenant", "team", "key", "region")  # into the rows
_SECOND_NS = 10**9


def read_leases(text: str, *, tenant: str = "default", team: str = "default", key_id: str = "default") -> list[Lease]:
    """Read leases. ``tenant``, ``team``, ``key_id``: whose they are where the text does not say.

    Raises ``StorageError`` with the entry that cannot be read.
    """
    whose = {"tenant": tenant, "team": team, "key": key_id}
    entries = _listed(text) if text.lstrip().startswith(("{", "[")) else _table(text)
    leases = []
    for number, entry in enumerate(entries, 1):
        try:
            leases.append(_lease({**whose, **{name: value for name, value in entry.items() if value}}))
        except KeyError as error:
            raise StorageError(f"cached prompt {number} has no {error.args[0]}") from error
        except (ValueError, OverflowError) as error:
            raise StorageError(f"cached prompt {number} cannot be read: {error}") from error
    return leases


def _table(text: str) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        if missing := [name for name in _NEEDED if name not in (reader.fieldnames or ())]:
            columns = ", ".join(reader.fieldnames or ())
            raise StorageError(f"the table has no column {', '.join(missing)}, only {columns!r:.200}")
        return list(reader)
    except csv.Error as error:  # a field without an end
        raise StorageError(f"line {reader.line_num + 1} of the table: {error}") from error


def _listed(text: str) -> list[dict[str, str]]:
    """Turn what Gemini's API lists into the table's names."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and content.get("nextPageToken"):  # the rest of it would be stored free of charge
            raise StorageError("the list goes on at its nextPageToken: put the entries of all pages into one array")
        listed = content["cachedContents"] if isinstance(content, dict) and content else content  # {}: there are none
        return [
            {
                "id": str(each["name"]).rpartition("/")[2],
                "model": str(each["model"]).rpartition("/")[2],
                "tokens": str(each["usageMetadata"]["totalTokenCount"]),
                "since": str(each["createTime"]),
                "until": str(each["expireTime"]),
            }
            for each in listed
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"this is no list of cached contents: {type(error).__name__}: {error}") from error


def _lease(entry: Mapping[str, str]) -> Lease:
    tokens, since_ns, until_ns = int(entry["tokens"]), _instant(entry["since"]), _instant(entry["until"])
    if not 0 <= tokens <= MAX_COUNT or not 0 <= since_ns <= until_ns:  # nobody cached anything before 1970
        raise ValueError(f"{entry['tokens']:.40} tokens from {entry['since']} until {entry['until']}")
    if unprintable := [name for name, value in entry.items() if name in _WRITTEN and not value.isprintable()]:
        raise ValueError(f"its {unprintable[0]} is {entry[unprintable[0]]!a:.200}")
    return Lease(
        id=entry["id"],
        model=entry["model"],
        tokens=tokens,
        since_ns=since_ns,
        until_ns=until_ns,
        tenant=entry["tenant"],
        team=entry["team"],
        key_id=entry["key"],
        region=entry.get("region"),
    )


def _instant(text: str) -> int:
    """Return an ISO instant in ns, to the microsecond; without a zone it is UTC."""
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return int(moment.replace(microsecond=0).timestamp()) * _SECOND_NS + moment.microsecond * 1000

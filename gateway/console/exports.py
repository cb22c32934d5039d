"""What a page shows, as rows for machines: JSON with the numbers as they are, CSV with the same columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Final

from billing.tables import spreadsheet_text

Rows = Sequence[Mapping[str, object]]
CONTENT_TYPES: Final = {"csv": "text/csv", "json": "application/json"}


def export(rows: Rows, form: str) -> str:
    """Return rows that share their columns in a form of :data:`CONTENT_TYPES`."""
    return _csv(rows) if form == "csv" else json.dumps({"rows": list(rows)}, indent=2, ensure_ascii=False) + "\n"


def _csv(rows: Rows) -> str:
    text = io.StringIO()
    columns = list(rows[0]) if rows else []
    writer = csv.DictWriter(text, columns, lineterminator="\r\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(row[name]) for name in columns})
    return text.getvalue()


def _cell(value: object) -> object:
    """Lists as words; text as it cannot steer a spreadsheet."""
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return spreadsheet_text(value) if isinstance(value, str) else value

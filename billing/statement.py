"""Statements: what each unit is shown or charged for a period, from list price to what is due. Pure.

::

    list cost     what the usage costs without prices made for a team
    charges       what it costs by the prices that hold, as it was first written, cache storage included
    corrections   what was corrected since
    allowances    what was free (negative)
    lost hits     what the platform gives back (negative)
    transfers     what it pays to or gets from other units for shared prefixes, where the price book shares writes
    due           the sum of the five before

A *showback* is this table for information; a *chargeback* is the column ``due``, which comes to the ledger's total to
the nano-unit, since transfers sum to 0.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from billing.credits import ALLOWANCE, LOST_HITS, is_credit
from billing.errors import ReportError
from billing.focus import FocusExport
from billing.posting import is_correction
from billing.reports import format_money
from billing.row import LedgerRow
from billing.tables import aligned, printable, spreadsheet_text

#: Units that a statement can be for, and where a FOCUS key has them.
STATEMENT_UNITS = {"tenant": "tenant", "team": "team", "key": "key_id", "agent": "agent", "model": "model"}
_ROW_FIELDS = STATEMENT_UNITS | {"model": "served_model"}
_COLUMNS = ("list", "charges", "corrections", "allowances", "lost hits", "transfers", "due", "saved")


@dataclass(slots=True)
class StatementLine:
    """One unit's sums in nano-units of the statement's currency."""

    list_nano: int = 0
    charges_nano: int = 0
    corrections_nano: int = 0
    allowances_nano: int = 0
    lost_hits_nano: int = 0
    transfers_nano: int = 0
    saved_nano: int = 0

    @property
    def due_nano(self) -> int:
        """What the unit pays."""
        return (
            self.charges_nano + self.corrections_nano + self.allowances_nano + self.lost_hits_nano + self.transfers_nano
        )

    def amounts(self) -> tuple[int, ...]:
        """Return the columns in order."""
        return (
            self.list_nano,
            self.charges_nano,
            self.corrections_nano,
            self.allowances_nano,
            self.lost_hits_nano,
            self.transfers_nano,
            self.due_nano,
            self.saved_nano,
        )


Statement = dict[str, StatementLine]


def unit_of_row(row: LedgerRow, by: str) -> str:
    """Return whose a row is."""
    return str(getattr(row, _ROW_FIELDS[by]) or "-")


def statement(
    rows: Iterable[LedgerRow],
    dataset: FocusExport,
    by: str,
    transfers: Mapping[str, int] | None = None,
) -> Statement:
    """Sum the rows of the dataset's currency. ``dataset``: the export of the same rows, for their list costs.

    Raises ``ReportError`` for a unit that there is none of. Cost: one pass over both.
    """
    if by not in STATEMENT_UNITS:
        raise ReportError(f"a statement is for {', '.join(STATEMENT_UNITS)}, not for {by!r}")
    found: Statement = {}
    for row in rows:
        if row.currency != dataset.currency:
            continue
        line, amount = found.setdefault(unit_of_row(row, by), StatementLine()), row.amount_nano or 0
        line.saved_nano += row.saved_nano or 0
        if is_credit(row):
            if row.request_id.startswith(ALLOWANCE):
                line.allowances_nano += amount
            else:
                assert row.request_id.startswith(LOST_HITS)
                line.lost_hits_nano += amount
        elif is_correction(row):
            line.corrections_nano += amount
        else:
            line.charges_nano += amount
    for unit, list_nano in dataset.list_costs(STATEMENT_UNITS[by]).items():
        found.setdefault(unit or "-", StatementLine()).list_nano += list_nano
    for unit, transfer_nano in (transfers or {}).items():
        found.setdefault(unit, StatementLine()).transfers_nano += transfer_nano
    return found


def total_of(found: Statement) -> StatementLine:
    """Return the sum of all lines."""
    total = StatementLine()
    for line in found.values():
        for name, value in asdict(line).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def render_statement(found: Statement, by: str, currency: str) -> str:
    """Return an aligned table, the largest due first, and its total."""
    lines = [[by, *_COLUMNS, "currency"]]
    for unit, line in _ordered(found):
        lines.append([printable(unit), *map(format_money, line.amounts()), currency])
    lines.append(["total", *map(format_money, total_of(found).amounts()), currency])
    return aligned(lines, 1)


def render_statement_csv(found: Statement, by: str, currency: str) -> str:
    """Return one line for each unit, with a header."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([by, "currency", *(name.replace(" ", "_") for name in _COLUMNS)])
    for unit, line in _ordered(found):
        writer.writerow([spreadsheet_text(unit), currency, *map(format_money, line.amounts())])
    return out.getvalue()


def statement_json(found: Statement, by: str, currency: str) -> dict[str, object]:
    """Return it as values that JSON holds."""

    def entry(line: StatementLine) -> dict[str, object]:
        return {**asdict(line), "due_nano": line.due_nano, "due": format_money(line.due_nano)}

    units = [{by: unit, **entry(line)} for unit, line in _ordered(found)]
    return {"by": by, "currency": currency, "units": units, "total": entry(total_of(found))}


def _ordered(found: Statement) -> list[tuple[str, StatementLine]]:
    return sorted(found.items(), key=lambda each: (-each[1].due_nano, each[0]))

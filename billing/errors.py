"""What billing raises.

::

    BillingError
    ├── PriceBookError        a price book that is malformed or contradicts itself; names the path in the file
    ├── CaseFileError         a file of worked examples that cannot be read
    ├── ReportError           a report that was asked for by a name that there is none of
    ├── CorrectionError       a correction that cannot be computed: no price, another currency
    ├── ReconcileError        what the ledger should be compared with cannot be read
    ├── StorageError          cache storage that cannot be charged: unreadable, told in two ways, without a price
    ├── PeriodError           a period that cannot be closed: closed already, or not over
    ├── BudgetExceeded        a request would go over a budget, or the budget cannot be judged and denies by its policy
    ├── BudgetStoreError      the store of budgets cannot be asked, or forgot what it had counted
    └── LedgerError           the ledger cannot be opened, read or written
        ├── LedgerUnavailable the database is away or busy: the same again may succeed
        ├── RowsRefused       a row that the table cannot hold, however often it is tried
        ├── RowsRemoved       what is asked for needs rows that retention has removed
        ├── LedgerFullError   so much waits to be written that no further row is accepted
        └── LedgerClosedError a row came after close()
"""

from __future__ import annotations


class BillingError(Exception):
    """The root of this package's errors."""


class PriceBookError(BillingError):
    """A price book cannot be used. ``problems`` holds one line each, led by the path in the file."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        told = f" {problems[0]}" if len(problems) == 1 else "".join(f"\n  {line}" for line in problems)
        super().__init__(f"price book {source} cannot be used:{told}")


class CaseFileError(BillingError):
    """A file of worked examples cannot be read."""


class ReportError(BillingError):
    """A report was asked for in words that it does not know."""


class CorrectionError(BillingError):
    """A correction cannot be computed."""


class ReconcileError(BillingError):
    """What the ledger should be compared with cannot be read."""


class StorageError(BillingError):
    """Cache storage cannot be charged."""


class PeriodError(BillingError):
    """A period cannot be closed."""


class BudgetExceeded(BillingError):
    """A budget has no room. ``why``: exhausted, unavailable (the store), unpriced; ``until_ns``: its window's end."""

    def __init__(self, budget: str, why: str, until_ns: int) -> None:
        self.budget, self.why, self.until_ns = budget, why, until_ns
        super().__init__(f"budget {budget}: {why}")


class BudgetStoreError(BillingError):
    """Budgets cannot be judged. ``concerns``: the counters; ``None``: all."""

    def __init__(self, text: str, concerns: frozenset[str] | None = None) -> None:
        self.concerns = concerns
        super().__init__(text)


class LedgerError(BillingError):
    """The ledger could not be opened, read or written."""


class LedgerUnavailable(LedgerError):
    """The database cannot be reached, or others keep it busy: trying again may help."""


class RowsRefused(LedgerError):
    """The table cannot hold a row, whenever it is tried."""


class RowsRemoved(LedgerError):
    """A question about a period whose rows retention has removed, and that sums do not answer."""


class LedgerFullError(LedgerError):
    """Too much waits to be written: the medium has been failing and the limit is reached."""


class LedgerClosedError(LedgerError):
    """A row was appended after the ledger had been closed."""

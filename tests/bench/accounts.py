"""``./bench accounts [--requests N] [--ledger sqlite|postgresql]``: do all accounts agree, whatever went wrong?

``--requests`` (default 1,000,000) simulated requests come from four processes that write to one ledger, and to a trace
store each: answers, aborts, refusals, failures, failovers of two attempts, retries of the same request id, unknown
prices. Again and again a worker is killed with SIGKILL: at each step of the ledger's write path in turn (half a record
written, journaled, before BEGIN, INSERT and COMMIT, after it, before a journal file goes, while another's is imported,
before rollups are brought up) and at random instants. What it had admitted and not written down then has a row that
says so (``died``); a new worker goes on after it. One more process, the driver, has the ledger open and idle, as a
second gateway would.

At the end every sum is computed in every way there is and compared exactly: rows, report, CSV, JSON, counters begun
with the ledger, FOCUS, traces. What a request costs is a function of its number (2,002 kinds recur), so every row is
compared with what it must be; every row has a trace, and the two say the same outcome, tokens and money. Every amount
is verified as well.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from msgspec import structs

from billing.counters import LedgerCounters
from billing.database import Place, database_at
from billing.focus import export
from billing.focus_check import focus_faults
from billing.ledger import Ledger, LedgerOptions
from billing.ledger_read import LedgerReader
from billing.postgres.database import postgres_database
from billing.prices import PriceBook
from billing.reports import SUM_NAMES, Sums, render_csv, render_json
from billing.row import LedgerRow, row_of
from billing.verify import verify_ledger
from gateway.recovery import TraceFollower
from tests.samples.billed import altered, billed, died_in_flight, unpriced
from tests.samples.kill_points import STEPS, arm, die
from tests.samples.postgres import running
from tracing.record import Attempt, Outcome, RequestRecord, Usage
from tracing.store import TraceStore, TraceStoreOptions

PROCESSES, IN_FLIGHT = 4, 8
PATTERNS = 2 * 7 * 11 * 13  # unpriced, unlucky and failed-over requests come in every combination
TOLD_EVERY, FLUSHED_EVERY = 256, 4096  # requests of one worker
WALKED_BY_ALL = 200_000
ROOT = Path(__file__).parents[2]
KEEP_ALL = TraceStoreOptions(max_records=None, max_age_ns=None)  # simulated requests bear dates of their own
OPTIONS = LedgerOptions(adopt_interval_s=0.5)
_OUTCOMES = (Outcome.ABORTED, Outcome.REJECTED, Outcome.UPSTREAM_FAILED, Outcome.TRUNCATED)


def simulated(number: int) -> RequestRecord:
    """Return request ``number``: the same number gives the same record, always."""
    return _at(_patterns()[number % PATTERNS][0], number)


def died(number: int) -> RequestRecord:
    """Return what stands for it when its process dies before it ends."""
    return _at(_patterns()[number % PATTERNS][1], number)


@cache
def _patterns() -> list[tuple[RequestRecord, RequestRecord]]:
    """Return what requests look like, and what would stand for them; made once: the ledger is to have the processor."""
    book = PriceBook.default()
    return [(_pattern(number, book), died_in_flight(number, book)) for number in range(PATTERNS)]


def _at(record: RequestRecord, number: int) -> RequestRecord:
    """Return a pattern as request ``number``, at its time and in its run."""
    later_ns = number // PATTERNS * PATTERNS * 10**9
    stamps, charge, link = record.stamps, record.charge, record.link
    assert charge.basis is not None
    assert link is not None
    return structs.replace(
        record,
        request_id=f"req-{number}",
        stamps=structs.replace(stamps, arrived_ns=stamps.arrived_ns + later_ns, closed_ns=stamps.closed_ns + later_ns),
        charge=structs.replace(charge, basis=structs.replace(charge.basis, at_ns=charge.basis.at_ns + later_ns)),
        link=structs.replace(link, run_id=f"run-{number // 10}"),
    )


def _pattern(number: int, book: PriceBook) -> RequestRecord:
    if number % 91 == 0:
        return unpriced(number, book)
    record = billed(number, book)
    if number % 11 == 0:
        outcome = _OUTCOMES[number // 11 % len(_OUTCOMES)]
        record = altered(record, outcome=outcome, status=499)
        if outcome is Outcome.REJECTED:
            free = billed(number, book, usage=Usage())
            record = altered(record, usage=free.usage, charge=free.charge, attempts=())
    if number % 13 == 0:
        first = record.stamps.arrived_ns
        record = altered(record, attempts=(Attempt("engine-9", first, first + 1, 503), *record.attempts))
    return record


def place_of(folder: Path, url: str) -> Place:
    """Return the ledger of a simulation; without a URL it is a file."""
    return postgres_database(url, folder / "journal") if url else folder / "ledger.sqlite3"


@contextmanager
def opened(folder: Path, url: str, name: str) -> Iterator[tuple[Ledger, TraceStore]]:
    """Open the ledger and a trace store that follows it, as a gateway does."""
    traces = TraceStore(folder / f"traces-{name}.sqlite3", KEEP_ALL)
    with Ledger(place_of(folder, url), OPTIONS, follower=TraceFollower(traces)) as ledger:
        ledger.register(PriceBook.default())
        yield ledger, traces
    assert traces.stats().dropped == 0, "the trace store dropped records"
    assert traces.close(60), "the trace store did not keep up"


class Worker:
    """One process. Which requests are its own follows from ``name``; it begins with the first that has no row."""

    def __init__(self, folder: Path, url: str, name: int, step: str, after: int) -> None:
        self._folder, self._url, self._name = folder, url, name
        self._step, self._after = step, after

    def run(self, told: int, requests: int) -> None:
        """Go on behind ``told`` up to ``requests``; tell from time to time what is done."""
        with opened(self._folder, self._url, str(self._name)) as (ledger, traces):
            os.write(1, f"writer {ledger.writer_id}\n".encode())
            numbers = range(self._first_free(told), requests, PROCESSES)
            flying: deque[RequestRecord] = deque()
            for count, number in enumerate(numbers):
                if count == self._after:
                    self._arm(ledger)
                ledger.admit(died(number))
                flying.append(simulated(number))
                if len(flying) > IN_FLIGHT:
                    self._answer(flying.popleft(), ledger, traces, count)
                if count % TOLD_EVERY == TOLD_EVERY - 1:
                    os.write(1, b"%d\n" % (number - IN_FLIGHT * PROCESSES))
            while flying:
                self._answer(flying.popleft(), ledger, traces, 0)
            assert ledger.flush(600)
        os.write(1, b"done\n")

    @staticmethod
    def _answer(record: RequestRecord, ledger: Ledger, traces: TraceStore, count: int) -> None:
        ledger.append(record)
        if count % 101 == 100:
            ledger.append(record)  # a retry that came through twice
        traces.append(record)
        if count % FLUSHED_EVERY == FLUSHED_EVERY - 1:  # no faster than the disk takes it
            assert traces.flush(120)
            assert ledger.flush(300)

    def _first_free(self, told: int) -> int:
        """Return the first own number that has no row: whoever died had admitted all before it."""
        margin = PROCESSES * (TOLD_EVERY + 4 * IN_FLIGHT)
        candidates = range(told, told + 2 * margin, PROCESSES)
        session = database_at(place_of(self._folder, self._url)).open_readonly()
        taken = {str(values[0]) for values in session.rows_of([f"req-{number}" for number in candidates])}
        session.close()
        return next(number for number in candidates if f"req-{number}" not in taken)

    def _arm(self, ledger: Ledger) -> None:
        if self._step in STEPS:
            arm(self._step, ledger)
        elif self._step == "random":
            threading.Timer(Random(self._after).random(), die).start()


def plan(name: int, requests: int) -> deque[tuple[str, int]]:
    """Return where the workers of one name are killed, one after another, and after how many requests of each.

    In a large simulation the workers of each name walk all steps, in a small one those of all names together.
    """
    random, steps = Random(name), [*STEPS, "random", "random"]
    each = len(steps) if requests >= WALKED_BY_ALL else -(-len(steps) // PROCESSES)
    share = max(requests // PROCESSES // (each + 1), 4)
    turned = [*steps, *steps][name * 3 : name * 3 + each]
    return deque((step, random.randrange(share // 4, share)) for step in turned)


class Driver:
    """Runs the workers, and others in the place of those that were killed."""

    def __init__(self, folder: Path, url: str, requests: int) -> None:
        self._folder, self._url, self._requests = folder, url, requests
        self._plans = {name: plan(name, requests) for name in range(PROCESSES)}
        self._told = {name: name for name in range(PROCESSES)}
        self._steps = dict.fromkeys(range(PROCESSES), "")
        self.kills: Counter[str] = Counter()

    def run(self) -> None:
        """Return when every request has been told."""
        journal = database_at(place_of(self._folder, self._url)).journal_dir
        with opened(self._folder, self._url, "driver"):
            running = {name: self._start(name) for name in range(PROCESSES)}
            writers = dict.fromkeys(running, "")
            while running:
                for name, process in list(running.items()):
                    assert process.stdout is not None
                    word, _, rest = process.stdout.readline().decode().strip().partition(" ")
                    if word == "writer":
                        writers[name] = rest
                    elif word == "done":
                        assert process.wait() == 0
                        del running[name]
                    elif word:
                        self._told[name] = int(word)
                    else:
                        if process.wait() != -signal.SIGKILL:
                            raise RuntimeError(f"worker {name} ended with {process.returncode}")
                        self.kills[self._steps[name]] += 1
                        while any(journal.glob(f"{writers[name]}-*.journal")):
                            time.sleep(0.02)  # another process imports what it left
                        running[name] = self._start(name)

    def _start(self, name: int) -> subprocess.Popen[bytes]:
        self._steps[name], after = self._plans[name].popleft() if self._plans[name] else ("none", -1)
        words = [str(self._folder), self._url, str(name), self._steps[name], str(after)]
        place = [str(self._told[name]), str(self._requests)]
        command = [sys.executable, "-m", "tests.bench.accounts", "--worker", *words, *place]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


@dataclass(slots=True)
class Accounts:
    """The sums that all have to say."""

    requests: int = 0
    amount_nano: int = 0
    saved_nano: int = 0
    unpriced: int = 0
    tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        """Add what a trace says."""
        charge, usage = record.charge, record.usage
        self.requests += 1
        self.amount_nano += charge.amount_nano or 0
        self.saved_nano += charge.saved_nano or 0
        self.unpriced += charge.amount_nano is None
        self.tokens += usage.prompt_tokens + usage.output_tokens


def of_sums(sums: Iterable[Sums]) -> Accounts:
    """Return what reports and counters say."""
    total = Sums()
    for part in sums:
        total.add(part)
    tokens = total.prompt_tokens + total.output_tokens
    return Accounts(total.requests, total.amount_nano, total.saved_nano, total.unpriced, tokens)


class Money:
    """What stands for each request: outcome, tokens, amount, saving; by number, compactly."""

    def __init__(self, requests: int) -> None:
        self._said: list[tuple[str, int, int, int | None, int | None] | None] = [None] * requests

    def note(self, number: int, record: RequestRecord) -> bool:
        """Note a record or compare it with the one of its request; ``False``: it is the first."""
        usage, charge = record.usage, record.charge
        said = (
            sys.intern(record.outcome.value),
            usage.prompt_tokens,
            usage.output_tokens,
            charge.amount_nano,
            charge.saved_nano,
        )
        before = self._said[number]
        assert before in (None, said), f"{record.request_id}: {before} and {said}"
        self._said[number] = said
        return before is not None

    def missing(self) -> list[int]:
        """Return the requests that nobody told of."""
        return [number for number, said in enumerate(self._said) if said is None]


def compare(folder: Path, url: str, requests: int) -> dict[str, object]:
    """Compute every sum in every way; raise ``AssertionError`` where two differ."""
    place = place_of(folder, url)
    ways: dict[str, Accounts] = {"rows": Accounts()}
    rows_say, outcomes = Money(requests), Counter[str]()
    with LedgerReader(place) as reader:

        def checked() -> Iterator[LedgerRow]:
            for row in reader.rows():
                number = int(row.request_id.removeprefix("req-"))
                record = (died if row.outcome == Outcome.DIED else simulated)(number)
                assert row == row_of(record), f"{row.request_id} is not what it must be"
                assert not rows_say.note(number, record), f"{row.request_id} is there twice"
                ways["rows"].add(record)
                outcomes[row.outcome] += 1
                yield row

        focus = export(checked(), reader.price_books(), "USD")
        report, whole = reader.report(("team", "outcome")), reader.report()
    assert rows_say.missing() == [], "a row is lost"
    right = ways["rows"]
    ways["report"] = of_sums(total.sums for total in whole.totals)
    ways["report by team and outcome"] = of_sums(group.sums for group in report.groups)
    ways["csv"] = of_sums(_parsed(line) for line in csv.DictReader(io.StringIO(render_csv(report))))
    ways["json"] = of_sums(_parsed(line) for line in json.loads(render_json(report))["groups"])
    counters = LedgerCounters(place)
    ways["counters"] = of_sums(counters.refresh().values())
    counters.close()
    assert focus_faults(focus.lines(), right.amount_nano, "USD") == []
    ways["focus"] = replace(right, requests=focus.requests, amount_nano=focus.billed_nano, unpriced=focus.unpriced)
    ways["traces"] = traced(folder, requests, rows_say)
    for name, way in ways.items():
        assert way == right, f"{name}: {way}, rows: {right}"
    return {"equal": list(ways), "sums": asdict(right), "outcomes": dict(outcomes), "focus_lines": len(focus.sums)}


def traced(folder: Path, requests: int, rows_say: Money) -> Accounts:
    """Compare every trace with its row; return the sums of the traces, each request once."""
    seen, sums = Money(requests), Accounts()
    for path in sorted(folder.glob("traces-*.sqlite3")):
        store = TraceStore(path, read_only=True)
        for record in store.records(5000):
            number = int(record.request_id.removeprefix("req-"))
            assert rows_say.note(number, record), "a trace without a row"
            if not seen.note(number, record):  # the import of a dead worker's journal may repeat what it had stored
                sums.add(record)
        store.close()
    assert seen.missing() == [], f"{len(seen.missing())} rows have no trace"
    return sums


def _parsed(line: Mapping[str, object]) -> Sums:
    return Sums(**{name: int(str(line[name])) for name in SUM_NAMES})


def simulate(folder: Path, url: str, requests: int) -> dict[str, object]:
    """Run the simulation, then compare; verification runs beside, in a process of its own."""
    started = time.perf_counter()
    driver = Driver(folder, url, requests)
    driver.run()
    written_s = time.perf_counter() - started
    verifying = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.accounts", "--verify", str(folder), url], cwd=ROOT, stdout=subprocess.PIPE
    )
    compared = compare(folder, url, requests)
    told, _ = verifying.communicate()
    assert verifying.returncode == 0, told.decode()
    return {
        "benchmark": "accounts",
        "ledger": "postgresql" if url else "sqlite",
        "requests": requests,
        "processes": PROCESSES,
        "killed": dict(driver.kills),
        "written_s": round(written_s, 1),
        "requests_per_s": round(requests / written_s),
        "compared_s": round(time.perf_counter() - started - written_s, 1),
        "verified_rows": int(told),
        **compared,
    }


def verified(folder: Path, url: str) -> int:
    """Verify every amount; print the number of rows."""
    verification = verify_ledger(place_of(folder, url))
    assert verification.passed, verification.faults
    print(verification.rows)
    return 0


def main(argv: list[str]) -> int:
    """Run the simulation and print what was compared."""
    parser = argparse.ArgumentParser(prog="./bench accounts", description="Do all accounts agree?")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--ledger", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    parser.add_argument("--verify", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        folder, url, name, step, after, told, requests = args.worker
        Worker(Path(folder), url, int(name), step, int(after)).run(int(told), int(requests))
        return 0
    if args.verify:
        return verified(Path(args.verify[0]), args.verify[1])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepwarm-accounts-")))
        url = stack.enter_context(running(syncs=True)).database() if args.ledger == "postgresql" else ""
        result = simulate(folder, url, args.requests)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

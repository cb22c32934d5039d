"""What can be asked of a trace store. Everything blocks: use a thread. Each answer is of one state of the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tracing import store_outline, store_series
from tracing.detail import StepDetail, decode_detail
from tracing.errors import AmbiguousRunError, TraceStoreError
from tracing.received import ReceivedSpan, decode_span
from tracing.record import RequestRecord
from tracing.store_database import Place, TraceSession, database_at, listed
from tracing.store_lists import RunFilter, RunSummary, StoreTotals, condition_of, summaries, summary, totals
from tracing.store_outline import RunCall, RunOutline
from tracing.store_schema import COLUMNS, decode_record, row_of
from tracing.store_series import Bucket, Choices

_CHUNK = 500  # requests asked for at once


class TraceReader:
    """The reading half of :class:`tracing.store.TraceStore`. Methods raise ``TraceStoreError``."""

    def __init__(self, place: Place) -> None:
        self._database = database_at(place)

    @property
    def name(self) -> str:
        """What people call the place; holds no secret."""
        return self._database.name

    def record(self, request_id: str) -> RequestRecord | None:
        """One request's record."""
        with self._database.reading() as session:
            rows = session.query("SELECT body FROM records WHERE request_id = :id", {"id": request_id})
        return decode_record(rows[0][0]) if rows else None

    def detail(self, request_id: str) -> StepDetail | None:
        """One request's detail."""
        return self.details([request_id]).get(request_id)

    def details(self, request_ids: Iterable[str]) -> dict[str, StepDetail]:
        """The details of these requests, as far as there are any."""
        found: dict[str, StepDetail] = {}
        wanted = list(request_ids)
        for at in range(0, len(wanted), _CHUNK):
            names, values = listed("id", wanted[at : at + _CHUNK])
            with self._database.reading() as session:
                rows = session.query(
                    f"SELECT request_id, detail FROM records WHERE detail IS NOT NULL AND request_id IN ({names})",
                    values,
                )
            found |= {request_id: decode_detail(body) for request_id, body in rows}
        return found

    def spans_of(self, records: Sequence[RequestRecord], limit: int = 5000) -> list[ReceivedSpan]:
        """The spans that agents sent of one run: of its traces, of its tool calls, and those that name it."""
        if not records or (link := records[0].link) is None:
            return []
        tenant = records[0].identity.tenant
        wanted = [
            ("run_id", [link.run_id]),
            ("trace_id", list({r.traceparent[3:35] for r in records if r.traceparent is not None})),
            ("tool_call_id", list({call.id for record in records for call in record.tool_calls if call.id})),
        ]
        found: dict[tuple[str, str], ReceivedSpan] = {}
        for column, values in wanted:
            for at in range(0, len(values), _CHUNK):
                names, some = listed("name", values[at : at + _CHUNK])
                with self._database.reading() as session:
                    rows = session.query(
                        f"SELECT body FROM spans WHERE tenant = :tenant AND {column} IN ({names}) LIMIT :limit",
                        {"tenant": tenant, "limit": limit, **some},
                    )
                for (body,) in rows:
                    span = decode_span(body)
                    found[span.trace_id, span.span_id] = span
        return sorted(found.values(), key=lambda span: (span.started_ns, span.span_id))[:limit]

    def run(self, run_id: str, tenant: str | None = None) -> list[RequestRecord]:
        """A run's records in step order; empty when there is none.

        Run ids that clients choose may be the same for several tenants: raises :class:`AmbiguousRunError` when they
        are and ``tenant`` is not given.
        """
        with self._database.reading() as session:
            tenant = _tenant_of(session, run_id, tenant)
            rows = session.query(
                "SELECT body FROM records WHERE tenant = :tenant AND run_id = :run_id ORDER BY step, seq",
                {"tenant": tenant, "run_id": run_id},
            )
        return [decode_record(row[0]) for row in rows]

    def outline(self, run_id: str, tenant: str | None = None) -> RunOutline | None:
        """A run's sums and its steps in outline; ``None`` when there is none. Raises as :meth:`run`."""
        with self._database.reading() as session:
            tenant = _tenant_of(session, run_id, tenant)
            return None if tenant is None else store_outline.outline(session, tenant, run_id)

    def part(self, run_id: str, tenant: str, start: int, steps: int) -> list[RequestRecord]:
        """Some of a run's records in step order, counted from 0. Cost: those, and a walk over an index before them."""
        with self._database.reading() as session:
            rows = session.query(
                "SELECT body FROM records WHERE seq IN (SELECT seq FROM records WHERE tenant = :tenant"
                " AND run_id = :run_id ORDER BY step, seq LIMIT :steps OFFSET :start) ORDER BY step, seq",
                {"tenant": tenant, "run_id": run_id, "steps": steps, "start": start},
            )
        return [decode_record(row[0]) for row in rows]

    def called_runs(self, tenant: str, since_ns: int, until_ns: int, limit: int = 200) -> list[RunCall]:
        """The runs that began in a time because another run called for them, oldest first."""
        with self._database.reading() as session:
            return store_outline.called_runs(session, tenant, since_ns, until_ns, limit)

    def summary(self, run_id: str, tenant: str) -> RunSummary | None:
        """One run's sums, ``None`` where there is none of that name."""
        with self._database.reading() as session:
            return summary(session, tenant, run_id)

    def runs(self, limit: int = 100, where: RunFilter | None = None) -> list[RunSummary]:
        """The most recent runs, newest first. Cost: the records of the runs that are returned."""
        condition, values = condition_of(where or RunFilter())
        with self._database.reading() as session:
            return summaries(session, condition, values, limit)

    def recent(self, limit: int) -> list[RequestRecord]:
        """The last ``limit`` records, oldest first, of runs or not; what a restarted run linker takes up again."""
        with self._database.reading() as session:
            rows = session.query("SELECT body FROM records ORDER BY seq DESC LIMIT :limit", {"limit": limit})
        return [decode_record(row[0]) for row in reversed(rows)]

    def records(self, batch: int = 500) -> Iterator[RequestRecord]:
        """Every record in the order of arrival at the store; reads ``batch`` at a time and holds nothing between."""
        after = 0
        while True:
            with self._database.reading() as session:
                rows = session.query(
                    "SELECT seq, body FROM records WHERE seq > :after ORDER BY seq LIMIT :batch",
                    {"after": after, "batch": batch},
                )
            for seq, body in rows:
                after = seq
                yield decode_record(body)
            if not rows:
                return

    def arrived(
        self, since_ns: int | None = None, until_ns: int | None = None, batch: int = 500
    ) -> Iterator[RequestRecord]:
        """The records of a time span in order of arrival; reads ``batch`` at a time and holds nothing between."""
        place = (-(2**63) if since_ns is None else since_ns, 0)
        while True:
            with self._database.reading() as session:
                rows = session.query(
                    "SELECT arrived_ns, seq, body FROM records"
                    " WHERE arrived_ns >= :from_ns AND (arrived_ns, seq) > (:from_ns, :seq) AND arrived_ns < :until"
                    " ORDER BY arrived_ns, seq LIMIT :batch",
                    {"from_ns": place[0], "seq": place[1], "batch": batch,
                     "until": 2**63 - 1 if until_ns is None else until_ns},
                )  # fmt: skip
            for arrived_ns, seq, body in rows:
                place = (arrived_ns, seq)
                yield decode_record(body)
            if not rows:
                return

    def totals(self, tenant: str | None = None, since_ns: int | None = None) -> StoreTotals:
        """Exact sums over the records of a time span. Cost: every record in it."""
        with self._database.reading() as session:
            return totals(session, tenant, since_ns)

    def buckets(self, tenant: str | None, since_ns: int, until_ns: int, bucket_ns: int) -> list[Bucket]:
        """Sums over a time by bucket, empty ones left out. Cost: every record in it."""
        with self._database.reading() as session:
            return store_series.buckets(session, tenant, since_ns, until_ns, bucket_ns)

    def ttfts(self, tenant: str | None, since_ns: int, until_ns: int, limit: int = 20_000) -> list[int]:
        """Times to the first token (ns, ascending) of the newest ``limit`` records of a time."""
        with self._database.reading() as session:
            return store_series.ttfts(session, tenant, since_ns, until_ns, limit)

    def newest(self) -> int:
        """A number that grows with every record, whichever process stored it: whether there is something new."""
        with self._database.reading() as session:
            return store_series.newest(session)

    def choices(self, tenant: str | None, newest_records: int = 2_000) -> Choices:
        """Models, agents and teams of the newest records."""
        with self._database.reading() as session:
            return store_series.choices(session, tenant, newest_records)

    def count(self) -> int:
        """How many records are stored."""
        with self._database.reading() as session:
            return int(session.query("SELECT count(*) FROM records")[0][0])

    def lives(self, since_ns: int | None = None, until_ns: int | None = None) -> Mapping[str, tuple[int, ...]]:
        """When engines began anew, by instance, oldest first."""
        with self._database.reading() as session:
            rows = session.query(
                "SELECT instance, began_ns FROM lives WHERE began_ns >= :since AND began_ns < :until ORDER BY began_ns",
                {"since": since_ns or 0, "until": 2**63 - 1 if until_ns is None else until_ns},
            )
        found: dict[str, tuple[int, ...]] = {}
        for instance, began_ns in rows:
            found[instance] = (*found.get(instance, ()), began_ns)
        return found

    def check(self) -> None:
        """Verify the file and that columns and bodies agree. Raises :class:`TraceStoreError`; reads everything."""
        self._database.check()
        after = 0
        while True:
            with self._database.reading() as session:
                rows = session.query(
                    f"SELECT seq, {COLUMNS} FROM records WHERE seq > :after ORDER BY seq LIMIT :batch",
                    {"after": after, "batch": _CHUNK},
                )
            for _, *stored in rows:
                if not _agree(stored, row_of(decode_record(stored[-1]))):
                    raise TraceStoreError(f"{self.name}: columns and body of record {stored[0]!r} differ")
            if not rows:
                break
            after = rows[-1][0]
        named = "SELECT tenant, run_id FROM runs"
        kept = "SELECT tenant, run_id FROM records WHERE run_id IS NOT NULL"
        for missing, problem in ((f"{kept} EXCEPT {named}", "not listed"), (f"{named} EXCEPT {kept}", "empty")):
            with self._database.reading() as session:
                ((runs,),) = session.query(f"SELECT count(*) FROM ({missing}) AS missing")
            if runs:
                raise TraceStoreError(f"{self.name}: {runs} runs are {problem}")


def _agree(stored: Sequence[object], made: Sequence[object]) -> bool:
    """Whether columns are those of their body. Some databases hold no NUL in a text."""
    return all(
        a == b or (isinstance(b, str) and a == b.replace("\0", "\ufffd")) for a, b in zip(stored, made, strict=True)
    )


def _tenant_of(session: TraceSession, run_id: str, tenant: str | None) -> str | None:
    """Whose run is meant; ``None`` when there is none of that name. Raises :class:`AmbiguousRunError`."""
    if tenant is not None:
        return tenant
    tenants = [row[0] for row in session.query("SELECT tenant FROM runs WHERE run_id = :run_id", {"run_id": run_id})]
    if len(tenants) > 1:
        raise AmbiguousRunError(run_id, tenants)
    return tenants[0] if tenants else None

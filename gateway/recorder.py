"""The last stage: a draft becomes one record, and the record becomes a bill, a trace, metrics, spans and a log line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial

from prometheus_client import Counter

from billing.counts import UsageReading
from billing.errors import LedgerError, LedgerFullError
from billing.ledger import Ledger
from billing.meter import charge
from billing.shelf import PriceShelf
from billing.usage import with_hits_of, with_inferred_tiers, with_output_of
from gateway.draft import Draft, Settled
from gateway.errors import LedgerFull
from gateway.protocols.base import AnswerReader, Ask
from gateway.protocols.counting import is_counted
from tracing.errors import UnstorableRecord
from tracing.export import SpanExport
from tracing.metrics import Metrics
from tracing.record import Charge, Outcome, RequestRecord, Usage, UsageSource
from tracing.store import TraceStore

_log = logging.getLogger(__name__)
_ONE_WORD = re.compile(r"[!#-<>-~]{1,128}")
_access = logging.getLogger("keepwarm.access")


class Recorder:
    """Closes drafts. A request that no key let in is counted and logged, and leaves no row: else anybody could fill
    the ledger."""

    def __init__(
        self,
        *,
        shelf: PriceShelf,
        ledger: Ledger,
        traces: TraceStore,
        metrics: Metrics,
        spans: SpanExport | None = None,
        regions: Mapping[str, str] | None = None,
    ) -> None:
        """``regions``: where instances run, where prices differ by it."""
        self._shelf, self._ledger, self._traces, self._metrics, self._spans = shelf, ledger, traces, metrics, spans
        self._regions = {} if regions is None else regions  # not a copy: instances come and go
        self._checks = Counter(
            "keepwarm_prompt_count_checks",
            "Prompt token counts of the gateway compared with the engine's",
            ("result",),
            registry=metrics.registry,
        )
        self._lost_rows = Counter("keepwarm_lost_rows", "Rows that the ledger did not take", registry=metrics.registry)
        self._has_failed = False

    @property
    def exports_spans(self) -> bool:
        """Whether spans go to a backend."""
        return self._spans is not None

    @property
    def ledger_failed(self) -> bool:
        """Whether the ledger refused a row, and has not written down all that it had taken since."""
        if self._has_failed and not self._ledger.status().pending:
            self._has_failed = False
        return self._has_failed

    def close(self, draft: Draft) -> RequestRecord:
        """Close the request's one record and hand it on. Never raises for a sink that fails; a lost row is an alarm
        that also takes the gateway out of readiness."""
        record = self._record(draft, self.settled(draft), draft.outcome or Outcome.ABORTED)
        self._compare(record, draft.counts_checked)
        if draft.is_admitted:
            self._keep(record)
        self._metrics.observe(record)
        if self._spans is not None:
            self._spans.export(record, None if draft.ask is None else partial(_said, draft.ask, draft.reader))
        if _access.isEnabledFor(logging.INFO):
            _access.info("%s", access_line(record))
        return record

    def settled(self, draft: Draft) -> Settled:
        """Return what the request came to. Once it has been told to the client, the record says the same."""
        if draft.settled is None:
            usage, problems = _usage_of(draft)
            draft.settled = Settled(usage, problems, self._charge(draft, usage))
        return draft.settled

    def admit(self, draft: Draft) -> None:
        """Note in the ledger's journal what will stand for the request if this process dies before ``close``.

        Raises ``LedgerFull`` when its bill might be lost: then nobody may be asked for an answer.
        """
        try:
            usage = Usage(source=UsageSource.MISSING)
            if_lost = Settled(usage, (), self._charge(draft, usage))
            self._ledger.admit(self._record(draft, if_lost, Outcome.DIED))
        except LedgerFullError as error:
            self._has_failed, draft.is_admitted = True, False
            raise LedgerFull("what this request costs cannot be written down now", retry_after_s=5) from error
        except LedgerError as error:
            self._has_failed = True
            _log.critical("the ledger did not note that %s was admitted: %s", draft.request_id, error)

    def _record(self, draft: Draft, settled: Settled, outcome: Outcome) -> RequestRecord:
        return RequestRecord(
            request_id=draft.request_id,
            endpoint=draft.endpoint,
            model=draft.model,
            served_model=draft.served_model,
            identity=draft.identity,
            stream=draft.stream,
            stamps=draft.stamps(),
            outcome=outcome,
            status=draft.status,
            usage=settled.usage,
            charge=settled.charge,
            link=draft.link,
            decision=draft.decision,
            attempts=tuple(draft.attempts),
            error=draft.error,
            gateway_prompt_tokens=draft.prompt_tokens,
            salted=draft.salted,
            tool_calls=draft.reader.seen.tool_calls if draft.reader is not None else (),
            tool_results=draft.tool_results,
            finish_reason=draft.reader.seen.finish_reason if draft.reader is not None else None,
            labels=draft.labels,
            traceparent=draft.traceparent,
            usage_problems=settled.problems,
            prefix=draft.marks,
            message_tip=draft.message_tip,
            prompt=draft.prompt_note(settled.usage),
        )

    def _charge(self, draft: Draft, usage: Usage) -> Charge:
        """Price by the book of the model and of the instance that was asked last."""
        model = draft.served_model or draft.model
        instance = draft.attempts[-1].instance if draft.attempts else None
        book = self._shelf.book_for(model, instance)
        region = None if instance is None else self._regions.get(instance)
        tier = draft.reader.seen.service_tier if draft.reader is not None else None
        return charge(usage, book, model, draft.arrived_ns, team=draft.identity.team, region=region, service_tier=tier)

    def _keep(self, record: RequestRecord) -> None:
        try:
            self._ledger.append(record)
        except LedgerError as error:
            self._has_failed = True
            self._lost_rows.inc()
            _log.critical("the ledger did not take the row of %s: %s", record.request_id, error)
        try:
            self._traces.append(record)
        except UnstorableRecord as error:
            _log.error("the trace of %s is not kept: %s", record.request_id, error)

    def _compare(self, record: RequestRecord, is_checked: bool) -> None:
        if is_checked and record.gateway_prompt_tokens is not None and record.usage.source is UsageSource.ENGINE:
            agrees = record.gateway_prompt_tokens == record.usage.prompt_tokens
            self._checks.labels("agrees" if agrees else "disagrees").inc()
            if not agrees:
                _log.warning(
                    "prompt tokens of %s: the gateway counts %d, the engine %d (model %s)",
                    record.request_id, record.gateway_prompt_tokens, record.usage.prompt_tokens, record.served_model,
                )  # fmt: skip


def _usage_of(draft: Draft) -> tuple[Usage, tuple[str, ...]]:
    reading = draft.reader.usage() if draft.reader is not None else None
    if reading is None or not is_counted(reading):
        problems, recovered = () if reading is None else reading.problems, draft.recovered_usage()
        if reading is None or recovered.source is UsageSource.RECOVERED:
            reading = UsageReading(recovered, problems)
        if recovered.source is not UsageSource.RECOVERED or draft.begun_hits is None:
            return reading.usage, tuple(str(problem) for problem in problems)
    elif draft.is_undercounted:
        reading = with_output_of(reading, draft.seen_tokens)
    usage = reading.usage
    if draft.begun_hits is not None:
        reading = with_hits_of(reading, UsageReading(draft.begun_hits, ()))
        usage = reading.usage
    elif any(predicted := draft.predicted_hits()):
        usage = with_inferred_tiers(usage, predicted)
    return usage, tuple(str(problem) for problem in reading.problems)


def _said(ask: Ask, reader: AnswerReader | None) -> tuple[str, str]:
    """Return a request and its answer as text, for spans that may show them."""
    values = (ask.native or ask.translated).form.values
    asked = next((values[name] for name in ("messages", "input", "prompt") if name in values), "")
    answered = None if reader is None else reader.seen.message()
    return _text(asked), _text(answered)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""


def access_line(record: RequestRecord) -> str:
    """Return one line of ``name=value`` words about a request, with nothing of what was said in it."""
    usage, stamps, link, charge = record.usage, record.stamps, record.link, record.charge
    line = (
        f"id={_word(record.request_id)} key={_word(record.identity.key_id)} endpoint={_word(record.endpoint)}"
        f" model={_word(record.served_model or '-')} instance={_word(record.instance or '-')}"
        f" run={_word(link.run_id) if link else '-'} step={link.step if link else '-'}"
        f" status={record.status} outcome={record.outcome.value}"
        f" prompt={usage.prompt_tokens} hit={usage.hit_tokens} output={usage.output_tokens}"
        f" ttft_ms={'-' if stamps.ttft_ns is None else f'{stamps.ttft_ns / 1e6:.1f}'}"
        f" ms={(stamps.closed_ns - stamps.arrived_ns) / 1e6:.1f}"
        f" cost_nano={'unpriced' if charge.amount_nano is None else charge.amount_nano}"
    )
    return line if record.error is None else f"{line} error={_word(record.error)}"


def _word(text: str) -> str:
    """Return a text as one word: clients name models and runs, and must not forge log lines."""
    if _ONE_WORD.fullmatch(text):
        return text
    return "".join(c if c.isprintable() and c not in ' "=' else "_" for c in text[:128])

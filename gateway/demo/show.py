"""The demonstration from start to end: a run, a restart, a second instance, cold twins, and the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from billing.ledger_read import LedgerReader
from gateway.demo.agent import Agent
from gateway.demo.desk import PLAN, Desk
from gateway.demo.stage import Stage, StageError
from gateway.demo.summary import TWIN_MIN_PROMPT_TOKENS, run_summary
from tracing.record import RequestRecord
from tracing.store import TraceStore

if TYPE_CHECKING:
    from openai import OpenAI

_SETTLE_LIMIT_S = 10.0
_TWIN_OUTPUT_TOKENS = 24  # enough to begin a tool call; only the time to its first token is of interest


def perform(stage: Stage, client: OpenAI, say: Callable[[str], None]) -> dict[str, Any]:
    """Drive the whole demonstration against a running stage and return its summary. Raises ``StageError``."""
    model = client.models.list().data[0].id
    run = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    agent = Agent(client, model, Desk(stage.folder / "desk"), run, say)

    say(f"\nAn agent run of {len(PLAN) + 1} steps on {model}:")
    for tool in PLAN:
        agent.force(tool)
    agent.answer()

    home = _instance_of_last_step(stage, run, len(agent.bodies))
    say(f"\nRestarting {home}: its device and host memory are gone, its disk is not.")
    stage.restart(home)
    agent.ask("Write the note about what was ordered.")
    agent.force("write_note")

    say(f"\nDraining {home}: the next step goes to an instance that never saw this run, which finds it in the pool.")
    home = _instance_of_last_step(stage, run, len(agent.bodies))
    stage.drain(home)
    agent.ask("Which item is short?")
    agent.answer()
    stage.resume(home)

    records = _records(stage, run, len(agent.bodies))
    say("\nSending each prompt again under a salt of its own, so that nothing of it is warm:")
    twins = _send_twins(stage, client, f"{run}-cold-twins", agent.bodies, records)
    with LedgerReader(stage.home / "ledger.sqlite3") as ledger:
        amounts = {row.request_id: row.amount_nano for row in ledger.rows() if row.run_id == run}
    return run_summary(model, run, records, twins, amounts)


def _send_twins(
    stage: Stage, client: OpenAI, run: str, bodies: Iterable[dict[str, Any]], records: Iterable[RequestRecord]
) -> dict[str, RequestRecord]:
    """Send each long prompt once more, cold; return the twins' records by the request id of their originals.

    A twin asks for a shorter answer, which changes nothing of its prompt nor of its first token.
    """
    originals = {}
    for number, (body, record) in enumerate(zip(bodies, records, strict=True), start=1):
        if record.usage.prompt_tokens >= TWIN_MIN_PROMPT_TOKENS:
            originals[f"twin-{number}"] = record.request_id
            headers = {"x-keepwarm-run": run, "x-keepwarm-step-name": f"twin-{number}"}
            salted = {"cache_salt": f"{run}-{number}"}
            shorter = {**body, "max_tokens": _TWIN_OUTPUT_TOKENS}
            for _ in client.chat.completions.create(**shorter, extra_headers=headers, extra_body=salted):
                pass
    twins = _records(stage, run, len(originals)) if originals else []
    return {originals[record.labels["step_name"]]: record for record in twins}


def _instance_of_last_step(stage: Stage, run: str, steps: int) -> str:
    instance = _records(stage, run, steps)[-1].instance
    if instance is None:
        raise StageError("the last step reached no instance")
    return instance


def _records(stage: Stage, run: str, count: int) -> list[RequestRecord]:
    """Return the run's records in order; waits a moment, since the store commits in groups."""
    store = TraceStore(stage.home / "traces.sqlite3", read_only=True)
    try:
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        while len(records := store.run(run)) < count:
            if time.monotonic() > deadline:
                raise StageError(f"the trace store shows {len(records)} of the {count} requests of run {run}")
            time.sleep(0.05)
        return records
    finally:
        store.close()

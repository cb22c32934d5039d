"""Which agent run a request belongs to, found without asking the client to say so.

Evidence, strongest first: an explicit run header; the trace that the client says it is part of, and a session that it
names itself (some agents do); the response that it says it continues; the id of a tool call that we answered with; the
longest chain of messages that ends in an answer of ours; an answer of ours, quoted whole behind other words (a system
prompt with a clock in it, a compacted history). Without evidence a request starts a new run, so two identical first
prompts (twins) are two runs, and stay two:

- an answer's node in the message chain can be continued by whoever quotes the answer. If two runs gave the same
  answer to the same prompt, one continuation goes to each, oldest first, because a node prefers a run that has not been
  continued there yet;
- a prompt's own node (the chain without an answer) is evidence only while no answer is known: after a failure, when the
  client tries again, or when the answer could not be read; and only once.

A conversation that begins with what an open call for a sub-agent says is a run of its own, whose parent is the run that
made the call; so is one whose client names the session of its parent. A run that a call began has ended when the run
above brings that call's result.

A run is a set of nodes, not one tip: an auxiliary call (a title, a summary) adds a branch and leaves the nodes that the
main line continues from as they were. Within a run that was found by its name alone, a request follows the last one
that began like it (a *lane*); where it quotes an answer that nobody knows, its history was rewritten and it follows the
last step. Everything is kept per key (two keys never share a run), in bounded memory (``run_memory``), and without a
clock: time is the evidence's ``at_ns``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from tracing.messages import MessageChain, last_answer, said_name
from tracing.record import RequestRecord, RunLink
from tracing.run_memory import (
    MAX_CALLED,
    MAX_LANES,
    KeyMemory,
    MemoryOptions,
    Run,
    RunMemory,
    Step,
    StepState,
    preferred,
)
from tracing.sub_agents import openings, tasks_of

_NUMBERED = re.compile(r"(?:^|[^0-9a-zA-Z])\d{1,6}$")  # "call_0", "functions.bash:3": not unique beyond one answer


class LinkMethod(StrEnum):
    """The evidence that a link rests on (``RunLink.method``)."""

    HEADER = "header"
    TRACEPARENT = "traceparent"
    SESSION = "session"
    PREVIOUS_RESPONSE = "previous_response_id"
    TOOL_CALL = "tool_call_id"
    MESSAGE_CHAIN = "message_chain"
    QUOTED_ANSWER = "quoted_answer"
    SUB_AGENT = "sub_agent"  # a new run, called for by another
    NEW = "new"
    LEDGER = "ledger"  # the record was made from its ledger row, after its process had died


class RunEvidence(msgspec.Struct, frozen=True, gc=False):
    """What one request says about the run that it belongs to.

    ``message_hashes`` is :func:`tracing.messages.message_chain` of the prompt, ``tool_result_ids`` are all ids in the
    history, oldest first (:func:`tracing.messages.tool_result_ids`). ``messages`` is looked at only where the rest does
    not tell.
    """

    key_id: str
    request_id: str
    at_ns: int
    explicit_run_id: str | None = None
    session_id: str | None = None  # what the client's own headers call its session
    previous_response_id: str | None = None
    tool_result_ids: tuple[str, ...] = ()
    message_hashes: MessageChain = ()
    trace_id: str | None = None  # of the client's traceparent
    parent_session_id: str | None = None  # the session of the agent that this one works for
    parent_run_id: str | None = None  # the same, as an explicit run
    conversation_id: str | None = None  # what the client itself calls the conversation
    messages: Sequence[Mapping[str, object]] = ()

    @property
    def quotes_an_answer(self) -> bool:
        """Whether the conversation is under way."""
        return any(link.role == "assistant" for link in self.message_hashes)


class HearsOfRuns(Protocol):
    """Somebody who follows what becomes of runs."""

    def linked(self, key_id: str, run_id: str) -> object:
        """A step of the run has arrived."""

    def call_answered(self, key_id: str, run_id: str) -> object:
        """The call that began the run has its result: a sub-agent's run has ended."""


@dataclass(frozen=True, slots=True)
class _Match:
    step: Step
    method: LinkMethod
    confidence: float


class _Place(msgspec.Struct, frozen=True):
    """Where a request belongs."""

    run: Run
    method: LinkMethod
    confidence: float
    previous: Step | None


class RunLinker:
    """Links each request to a run and a step. Synchronous, deterministic, bounded; for one event loop."""

    def __init__(self, options: MemoryOptions | None = None) -> None:
        self._memory = RunMemory(options)
        self._listener: HearsOfRuns | None = None

    def tell(self, listener: HearsOfRuns) -> None:
        """Tell somebody of each step from now on."""
        self._listener = listener

    def knows(self, key_id: str, run_id: str) -> bool:
        """Tell whether a key has had this run lately."""
        return self._memory.has(key_id, run_id)

    def of_trace(self, key_id: str, trace_id: str) -> list[str]:
        """Return the runs of a key that have steps in a client's trace."""
        return [run.run_id for run in self._memory.named(key_id, ("trace", trace_id))]

    def link(self, evidence: RunEvidence) -> RunLink:
        """The run and step of a request that has just arrived.

        Cost: one look-up per tool-result id and per message, worst case. A new run is named after its first request.
        """
        memory = self._memory
        key = memory.of(evidence.key_id, evidence.at_ns)
        place = self._place(key, evidence, self._match(key, evidence))
        run, previous = place.run, place.previous
        if previous is not None:
            previous.continued = True
            if previous.tasks is not None:
                _close_tasks(previous, evidence.tool_result_ids)
        if self._listener is not None:
            self._listener.linked(evidence.key_id, run.run_id)
            for child in _answered_children(run, evidence) if run.called else ():
                self._listener.call_answered(evidence.key_id, child)
        step = memory.advance(run, evidence.request_id, evidence.at_ns)
        if evidence.message_hashes:
            memory.remember(step, ("prompt", evidence.message_hashes[-1].digest))
            _keep_lane(run, evidence.message_hashes[0].digest, step)
        if evidence.session_id is not None:
            memory.remember(step, ("session", evidence.session_id))
        if evidence.trace_id is not None:
            memory.remember(step, ("trace", evidence.trace_id))
        return RunLink(
            run.run_id,
            run.steps,
            place.method.value,
            place.confidence,
            previous.request_id if previous else None,
            parent_run_id=run.parent_id,
            parent_request_id=run.parent_request_id,
            parent_call_id=run.parent_call_id,
            conversation_id=evidence.conversation_id,
        )

    def answered(
        self,
        link: RunLink,
        request_id: str,
        tool_call_ids: Sequence[str] = (),
        message_chain: MessageChain = (),
        *,
        key_id: str,
        response_id: str | None = None,
        message: Mapping[str, object] | None = None,
    ) -> None:
        """Remember what an answer can be recognized by; call it before the answer's last bytes go to the client.

        ``message_chain`` is the prompt's chain continued with the assistant's ``message``; empty when it is not known.
        """
        memory = self._memory
        step = memory.step(key_id, link.run_id, request_id)
        if step is None:
            return
        memory.drop(step.run, ("request", request_id))
        step.state = StepState.ANSWERED if message_chain else StepState.OPAQUE
        for tool_call_id in tool_call_ids:
            memory.remember(step, ("tool", tool_call_id))
        if response_id is not None:
            memory.remember(step, ("response", response_id))
        if message_chain:
            memory.remember(step, ("answer", message_chain[-1].digest))
        if message is None:
            return
        if tool_call_ids:
            if tasks := tasks_of(message):
                step.tasks = tasks
                for name in tasks:
                    memory.remember(step, ("task", name))
        elif (said := said_name(message)) is not None:
            memory.remember(step, ("said", said))

    def unanswered(self, link: RunLink, request_id: str, *, key_id: str) -> None:
        """The request ended without a whole answer: the client may send the same prompt again, in the same run."""
        step = self._memory.step(key_id, link.run_id, request_id)
        if step is not None:
            self._memory.drop(step.run, ("request", request_id))
            step.state = StepState.FAILED

    def restore(self, records: Iterable[RequestRecord]) -> None:
        """Take up the runs of a trace store again after a restart; ``records`` oldest first."""
        restored: dict[str, Step] = {}
        for record in records:
            link, at_ns = record.link, record.stamps.arrived_ns
            if link is None:
                continue
            key = self._memory.of(record.identity.key_id, at_ns)
            run = key.runs.get(link.run_id) or self._memory.open(key, link.run_id, at_ns)
            be_child(run, link.parent_run_id, link.parent_request_id, link.parent_call_id)
            step = self._memory.advance(run, record.request_id, at_ns)
            run.steps = max(link.step, run.steps - 1)
            self._memory.drop(run, ("request", record.request_id))
            step.state = StepState.ANSWERED
            restored[record.request_id] = step
            if link.previous_request_id in restored:
                restored[link.previous_request_id].continued = True
            for call in record.tool_calls:
                self._memory.remember(step, ("tool", call.id))
            if record.message_tip is not None:
                self._memory.remember(step, ("answer", bytes.fromhex(record.message_tip)))

    def check(self) -> None:
        """Verify every invariant of the memory. Raises ``AssertionError``; linear in what is held."""
        self._memory.check()

    # ---- where a request belongs

    def _place(self, key: KeyMemory, evidence: RunEvidence, match: _Match | None) -> _Place:
        if evidence.explicit_run_id is not None:
            run = key.runs.get(evidence.explicit_run_id)
            if run is None:
                run = self._memory.open(key, evidence.explicit_run_id, evidence.at_ns)
                self._adopt(key, run, evidence)
            return _Place(run, LinkMethod.HEADER, 1.0, _former(run, evidence, match))
        if (child := self._sub_agent(key, evidence, match)) is not None:
            return child
        if evidence.trace_id is not None and (place := _in_trace(key, evidence, match)) is not None:
            return place
        if evidence.session_id is not None and (place := _in_session(key, evidence, match)) is not None:
            return place
        if match is not None and not (evidence.session_id is not None and evidence.parent_session_id is not None):
            return _Place(match.step.run, match.method, match.confidence, match.step)
        run = self._memory.open(key, f"run-{evidence.request_id}", evidence.at_ns)
        if self._adopt(key, run, evidence):
            return _Place(run, LinkMethod.SUB_AGENT, 1.0, None)
        confidence = 0.5 if evidence.quotes_an_answer else 1.0  # it quotes an answer that we don't remember
        return _Place(run, LinkMethod.NEW, confidence, None)

    def _sub_agent(self, key: KeyMemory, evidence: RunEvidence, match: _Match | None) -> _Place | None:
        """A new run for a conversation that begins with what an open call says."""
        if not key.task_lengths or match is not None or evidence.tool_result_ids:
            return None
        if evidence.session_id is not None and ("session", evidence.session_id) in key.index:
            known = key.index["session", evidence.session_id]
            if any(run.parent_id is not None for run in known):
                return None  # a session of a sub-agent's own
        found = _open_task(key, evidence)
        if found is None:
            return None
        step, call_id = found
        run = self._memory.open(key, f"run-{evidence.request_id}", evidence.at_ns)
        be_child(run, step.run.run_id, step.request_id, call_id)
        return _Place(run, LinkMethod.SUB_AGENT, 0.9, None)

    def _adopt(self, key: KeyMemory, run: Run, evidence: RunEvidence) -> bool:
        """Find a new run's parent by the name that the client gives it; whether there is one."""
        parent: Run | None = None
        if evidence.parent_run_id is not None:
            parent = key.runs.get(evidence.parent_run_id)
        elif evidence.parent_session_id is not None:
            parent = _root(key.index.get(("session", evidence.parent_session_id)))
        if parent is None or parent is run:
            return False
        found = _open_task(key, evidence) if key.task_lengths and not evidence.tool_result_ids else None
        if found is not None and found[0].run is parent:
            be_child(run, parent.run_id, found[0].request_id, found[1])
        else:
            be_child(run, parent.run_id, parent.last.request_id if parent.last is not None else None, None)
        return True

    # ---- evidence

    def _match(self, key: KeyMemory, evidence: RunEvidence) -> _Match | None:
        if evidence.previous_response_id is not None:
            steps = key.index.get(("response", evidence.previous_response_id))
            if steps:
                return _Match(preferred(steps.values()), LinkMethod.PREVIOUS_RESPONSE, 1.0)
        return _by_tool_call(key, evidence) or _by_chain(key, evidence) or _by_quotation(key, evidence)


def _by_tool_call(key: KeyMemory, evidence: RunEvidence) -> _Match | None:
    for tool_call_id in reversed(evidence.tool_result_ids):
        steps = key.index.get(("tool", tool_call_id))
        if not steps:
            continue
        step = preferred(steps.values())
        if len(steps) == 1 and not _NUMBERED.search(tool_call_id):
            return _Match(step, LinkMethod.TOOL_CALL, 0.99)
        # Some engines number their calls ("call_0") instead of naming them: the conversation tells them apart.
        chained = _by_chain(key, evidence)
        if chained is not None and chained.step.run in steps:
            return _Match(steps[chained.step.run], LinkMethod.TOOL_CALL, chained.confidence)
        if not step.continued:
            return _Match(step, LinkMethod.TOOL_CALL, 0.5)
    return None


def _by_chain(key: KeyMemory, evidence: RunEvidence) -> _Match | None:
    chain = evidence.message_hashes
    reworded: Mapping[Run, Step] = {}  # whose prompts are quoted whole, with other answers than ours behind them
    for position in range(len(chain) - 1, -1, -1):
        digest = chain[position].digest
        steps = key.index.get(("answer", digest))
        if steps:
            step = preferred(steps.values())
            step = reworded.get(step.run, step)
            free = sum(not other.continued for other in steps.values())
            confidence = 0.5 if free > 1 else 0.6 if step.continued else 0.95
            return _Match(step, LinkMethod.MESSAGE_CHAIN, confidence)
        steps = key.index.get(("prompt", digest))
        if steps:
            following = chain[position + 1].role if position + 1 < len(chain) else None
            usable = [step for step in steps.values() if _continues_prompt(step, following)]
            if usable:
                return _Match(usable[0], LinkMethod.MESSAGE_CHAIN, 0.7 if len(usable) == 1 else 0.5)
            if not reworded and following == "assistant":
                reworded = steps
    return None


def _by_quotation(key: KeyMemory, evidence: RunEvidence) -> _Match | None:
    """Find who gave the newest answer that is quoted, whatever stands before it; no guess between several."""
    if not evidence.messages or not evidence.quotes_an_answer:
        return None
    answer = last_answer(evidence.messages)
    said = None if answer is None else said_name(answer)
    steps = key.index.get(("said", said)) if said is not None else None
    if not steps or len(steps) > 1:
        return None
    return _Match(next(iter(steps.values())), LinkMethod.QUOTED_ANSWER, 0.8)


def _continues_prompt(step: Step, following: str | None) -> bool:
    """Whether a prompt that starts with ``step``'s prompt goes on where it ended (``following``: the next role)."""
    if step.continued:
        return False
    if step.state is StepState.FAILED:
        return True
    return step.state is StepState.OPAQUE and following == "assistant"


# ---- groups: traces and sessions


def _in_trace(key: KeyMemory, evidence: RunEvidence, match: _Match | None) -> _Place | None:
    """A request within a trace that is known: the run of the trace that it continues, else the trace's own."""
    steps = key.index.get(("trace", evidence.trace_id))
    if not steps:
        return None
    if match is not None:
        if match.step.run not in steps:
            return None
        return _Place(match.step.run, LinkMethod.TRACEPARENT, max(match.confidence, 0.95), match.step)
    run = _root(steps)
    assert run is not None
    return _Place(run, LinkMethod.TRACEPARENT, 0.9, _former(run, evidence, None))


def _in_session(key: KeyMemory, evidence: RunEvidence, match: _Match | None) -> _Place | None:
    steps = key.index.get(("session", evidence.session_id))
    if not steps:
        return None
    run = match.step.run if match is not None and match.step.run in steps else _root(steps)
    assert run is not None
    return _Place(run, LinkMethod.SESSION, 0.95, _former(run, evidence, match))


def _root(steps: Mapping[Run, Step] | None) -> Run | None:
    """The newest of the runs that nobody called for, else the newest."""
    if not steps:
        return None
    runs = list(steps)
    return next((run for run in reversed(runs) if run.parent_id is None), runs[-1])


def _former(run: Run, evidence: RunEvidence, match: _Match | None) -> Step | None:
    """Which step of a run a request follows that was found by the run's name."""
    if match is not None and match.step.run is run:
        return match.step
    if not evidence.message_hashes or evidence.quotes_an_answer:
        return run.last
    return run.lanes.get(evidence.message_hashes[0].digest)


def _keep_lane(run: Run, beginning: bytes, step: Step) -> None:
    run.lanes[beginning] = step
    run.lanes.move_to_end(beginning)
    if len(run.lanes) > MAX_LANES:
        run.lanes.popitem(last=False)


# ---- sub-agents


def _open_task(key: KeyMemory, evidence: RunEvidence) -> tuple[Step, str] | None:
    """Take the oldest open call whose argument the conversation begins with."""
    for name in openings(evidence.messages, key.task_lengths):
        for step in key.index.get(("task", name), {}).values():
            ids = step.tasks.get(name) if step.tasks is not None else None
            if ids:
                call_id = ids[0]
                _close_tasks(step, (call_id,))
                return step, call_id
    return None


def _close_tasks(step: Step, call_ids: Iterable[str]) -> None:
    """Calls that somebody took, or whose results are back, are open no more."""
    done = set(call_ids)
    for ids in (step.tasks or {}).values():
        ids[:] = [call_id for call_id in ids if call_id not in done]


def _answered_children(run: Run, evidence: RunEvidence) -> list[str]:
    """Take out the runs whose calls' results the evidence brings."""
    ended = (run.called.pop(call_id, None) for call_id in evidence.tool_result_ids)
    return [child for child in ended if child is not None]


def be_child(run: Run, parent_id: str | None, request_id: str | None, call_id: str | None) -> None:
    """Note which run called for this one, by which request and call.

    Calls that their engine only numbers come again in a conversation: their results do not tell that a run has ended.
    """
    run.parent_id, run.parent_request_id, run.parent_call_id = parent_id, request_id, call_id
    parent = run.key.runs.get(parent_id) if parent_id is not None else None
    if parent is not None and call_id is not None and not _NUMBERED.search(call_id):
        parent.called[call_id] = run.run_id
        if len(parent.called) > MAX_CALLED:
            del parent.called[next(iter(parent.called))]

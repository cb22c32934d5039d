"""Which agent run a request belongs to, found without asking the client to say so.

Evidence, strongest first: an explicit run header; a session that the client itself names (some agents do); the response
that the client says it continues; the id of a tool call that we answered with; the longest chain of messages that ends
in an answer of ours. Without evidence a request starts a new run, so two identical first prompts (twins) are two runs,
and stay two:

- an answer's node in the message chain can be continued by whoever quotes the answer. If two runs gave the same
  answer to the same prompt, one continuation goes to each, oldest first, because a node prefers a run that has not been
  continued there yet;
- a prompt's own node (the chain without an answer) is evidence only while no answer is known: after a failure, when the
  client tries again, or when the answer could not be read; and only once.

A run is a set of nodes, not one tip: an auxiliary call (a title, a summary) adds a branch and leaves the nodes that the
main line continues from as they were. Everything is kept per key (two keys never share a run), in bounded memory, and
without a clock: time is the evidence's ``at_ns``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tracing.messages import MessageChain
from tracing.record import RequestRecord, RunLink

_NUMBERED = re.compile(r"(?:^|[^0-9a-zA-Z])\d{1,6}$")  # "call_0", "functions.bash:3": not unique beyond one answer


class LinkMethod(StrEnum):
    """The evidence that a link rests on (``RunLink.method``)."""

    HEADER = "header"
    SESSION = "session"
    PREVIOUS_RESPONSE = "previous_response_id"
    TOOL_CALL = "tool_call_id"
    MESSAGE_CHAIN = "message_chain"
    NEW = "new"
    LEDGER = "ledger"  # the record was made from its ledger row, after its process had died


@dataclass(frozen=True, slots=True)
class LinkerOptions:
    """Bounds of the linker's memory; a run that falls out of them is continued as a new one."""

    window_ns: int = 6 * 3600 * 10**9  # a run idle for longer is forgotten
    max_keys: int = 512
    max_runs_per_key: int = 1024
    max_entries_per_run: int = 512  # newest nodes, tool-call ids and response ids of one run
    max_entries: int = 400_000  # over all keys; the key that holds most gives up its least recently used run


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """What one request says about the run that it belongs to.

    ``message_hashes`` is :func:`tracing.messages.message_chain` of the prompt, ``tool_result_ids`` are all ids in the
    history, oldest first (:func:`tracing.messages.tool_result_ids`).
    """

    key_id: str
    request_id: str
    at_ns: int
    explicit_run_id: str | None = None
    session_id: str | None = None  # what the client's own headers call its session
    previous_response_id: str | None = None
    tool_result_ids: tuple[str, ...] = ()
    message_hashes: MessageChain = ()


class _State(StrEnum):
    PENDING = "pending"  # no answer yet
    OPAQUE = "opaque"  # answered, and the answer's hash is not known
    ANSWERED = "answered"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _Step:
    """One request of a run, as later requests may refer to it."""

    run: _Run
    request_id: str
    state: _State = _State.PENDING
    continued: bool = False


@dataclass(slots=True, eq=False)
class _Run:
    key: _Key
    run_id: str
    last_ns: int
    steps: int = 0
    last: _Step | None = None
    entries: OrderedDict[tuple[str, object], None] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class _Key:
    """The memory of one key: runs least recently used first, and what points into them."""

    runs: OrderedDict[str, _Run] = field(default_factory=OrderedDict)
    # (kind, value) -> the steps that left it, oldest first, at most one a run. Kinds: "session", "tool", "response",
    # "answer", "prompt", "request"
    index: dict[tuple[str, object], dict[_Run, _Step]] = field(default_factory=dict)
    entries: int = 0


@dataclass(frozen=True, slots=True)
class _Match:
    step: _Step
    method: LinkMethod
    confidence: float


class RunLinker:
    """Links each request to a run and a step. Synchronous, deterministic, bounded; for one event loop."""

    def __init__(self, options: LinkerOptions | None = None) -> None:
        self._options = options or LinkerOptions()
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._entries = 0

    def link(self, evidence: RunEvidence) -> RunLink:
        """The run and step of a request that has just arrived.

        Cost: one look-up per tool-result id and per message, worst case. A new run is named after its first request.
        """
        key = self._key(evidence.key_id)
        self._expire(key, evidence.at_ns)
        match = self._match(key, evidence)
        session = self._by_session(key, evidence)
        if evidence.explicit_run_id is not None:
            run = key.runs.get(evidence.explicit_run_id) or self._open(key, evidence.explicit_run_id, evidence.at_ns)
            method, confidence = LinkMethod.HEADER, 1.0
            previous = match.step if match is not None and match.step.run is run else run.last
        elif session is not None:
            run, method, confidence = session, LinkMethod.SESSION, 0.95
            previous = match.step if match is not None and match.step.run is run else run.last
        elif match is not None:
            run, method, confidence, previous = match.step.run, match.method, match.confidence, match.step
        else:
            run = self._open(key, f"run-{evidence.request_id}", evidence.at_ns)
            method, previous = LinkMethod.NEW, None
            confidence = 0.5 if _quotes_an_answer(evidence) else 1.0  # it quotes an answer that we don't remember
        if previous is not None:
            previous.continued = True
        step = self._advance(key, run, evidence)
        if evidence.session_id is not None:
            self._remember(step, ("session", evidence.session_id))
        return RunLink(run.run_id, run.steps, method.value, confidence, previous.request_id if previous else None)

    def answered(
        self,
        link: RunLink,
        request_id: str,
        tool_call_ids: Sequence[str] = (),
        message_chain: MessageChain = (),
        *,
        key_id: str,
        response_id: str | None = None,
    ) -> None:
        """Remember what an answer can be recognized by; call it before the answer's last bytes go to the client.

        ``message_chain`` is the prompt's chain continued with the assistant's message; empty when it is not known.
        """
        step = self._step(key_id, link, request_id)
        if step is None:
            return
        self._drop(step.run, ("request", request_id))
        step.state = _State.ANSWERED if message_chain else _State.OPAQUE
        for tool_call_id in tool_call_ids:
            self._remember(step, ("tool", tool_call_id))
        if response_id is not None:
            self._remember(step, ("response", response_id))
        if message_chain:
            self._remember(step, ("answer", message_chain[-1].digest))

    def unanswered(self, link: RunLink, request_id: str, *, key_id: str) -> None:
        """The request ended without a whole answer: the client may send the same prompt again, in the same run."""
        step = self._step(key_id, link, request_id)
        if step is not None:
            self._drop(step.run, ("request", request_id))
            step.state = _State.FAILED

    def restore(self, records: Iterable[RequestRecord]) -> None:
        """Take up the runs of a trace store again after a restart; ``records`` oldest first."""
        restored: dict[str, _Step] = {}
        for record in records:
            link, key_id, at_ns = record.link, record.identity.key_id, record.stamps.arrived_ns
            if link is None:
                continue
            key = self._key(key_id)
            run = key.runs.get(link.run_id) or self._open(key, link.run_id, at_ns)
            step = self._advance(key, run, RunEvidence(key_id, record.request_id, at_ns))
            run.steps = max(link.step, run.steps - 1)
            self._drop(run, ("request", record.request_id))
            step.state = _State.ANSWERED
            restored[record.request_id] = step
            if link.previous_request_id in restored:
                restored[link.previous_request_id].continued = True
            for call in record.tool_calls:
                self._remember(step, ("tool", call.id))
            if record.message_tip is not None:
                self._remember(step, ("answer", bytes.fromhex(record.message_tip)))

    def check(self) -> None:
        """Verify every invariant of the memory. Raises ``AssertionError``; linear in what is held."""
        assert self._entries == sum(key.entries for key in self._keys.values())
        for key in self._keys.values():
            assert key.entries == sum(len(run.entries) for run in key.runs.values())
            pointed = {(run, name) for name, steps in key.index.items() for run in steps}
            assert pointed == {(run, name) for run in key.runs.values() for name in run.entries}
            assert len(key.runs) <= self._options.max_runs_per_key
            assert all(len(run.entries) <= self._options.max_entries_per_run for run in key.runs.values())
        assert len(self._keys) <= self._options.max_keys
        assert self._entries <= self._options.max_entries

    # ---- evidence

    def _match(self, key: _Key, evidence: RunEvidence) -> _Match | None:
        if evidence.previous_response_id is not None:
            steps = key.index.get(("response", evidence.previous_response_id))
            if steps:
                return _Match(_preferred(steps.values()), LinkMethod.PREVIOUS_RESPONSE, 1.0)
        return self._by_tool_call(key, evidence) or self._by_chain(key, evidence)

    def _by_session(self, key: _Key, evidence: RunEvidence) -> _Run | None:
        steps = key.index.get(("session", evidence.session_id)) if evidence.session_id is not None else None
        return list(steps)[-1] if steps else None

    def _by_tool_call(self, key: _Key, evidence: RunEvidence) -> _Match | None:
        for tool_call_id in reversed(evidence.tool_result_ids):
            steps = key.index.get(("tool", tool_call_id))
            if not steps:
                continue
            step = _preferred(steps.values())
            if len(steps) == 1 and not _NUMBERED.search(tool_call_id):
                return _Match(step, LinkMethod.TOOL_CALL, 0.99)
            # Some engines number their calls ("call_0") instead of naming them: the conversation tells them apart.
            chained = self._by_chain(key, evidence)
            if chained is not None and chained.step.run in steps:
                return _Match(steps[chained.step.run], LinkMethod.TOOL_CALL, chained.confidence)
            if not step.continued:
                return _Match(step, LinkMethod.TOOL_CALL, 0.5)
        return None

    def _by_chain(self, key: _Key, evidence: RunEvidence) -> _Match | None:
        chain = evidence.message_hashes
        for position in range(len(chain) - 1, -1, -1):
            digest = chain[position].digest
            steps = key.index.get(("answer", digest))
            if steps:
                step = _preferred(steps.values())
                free = sum(not other.continued for other in steps.values())
                confidence = 0.5 if free > 1 else 0.6 if step.continued else 0.95
                return _Match(step, LinkMethod.MESSAGE_CHAIN, confidence)
            steps = key.index.get(("prompt", digest))
            if steps:
                following = chain[position + 1].role if position + 1 < len(chain) else None
                usable = [step for step in steps.values() if _continues_prompt(step, following)]
                if usable:
                    return _Match(usable[0], LinkMethod.MESSAGE_CHAIN, 0.7 if len(usable) == 1 else 0.5)
        return None

    # ---- memory

    def _key(self, key_id: str) -> _Key:
        key = self._keys.get(key_id)
        if key is None:
            key = self._keys[key_id] = _Key()
            if len(self._keys) > self._options.max_keys:
                oldest_id = next(iter(self._keys))
                self._entries -= self._keys.pop(oldest_id).entries
        self._keys.move_to_end(key_id)
        return key

    def _open(self, key: _Key, run_id: str, at_ns: int) -> _Run:
        run = key.runs[run_id] = _Run(key, run_id, at_ns)
        if len(key.runs) > self._options.max_runs_per_key:
            self._forget(next(iter(key.runs.values())))
        return run

    def _advance(self, key: _Key, run: _Run, evidence: RunEvidence) -> _Step:
        key.runs.move_to_end(run.run_id)
        run.last_ns = max(run.last_ns, evidence.at_ns)
        run.steps += 1
        step = run.last = _Step(run, evidence.request_id)
        self._remember(step, ("request", evidence.request_id))
        if evidence.message_hashes:
            self._remember(step, ("prompt", evidence.message_hashes[-1].digest))
        return step

    def _step(self, key_id: str, link: RunLink, request_id: str) -> _Step | None:
        key = self._keys.get(key_id)
        run = key.runs.get(link.run_id) if key is not None else None
        if key is None or run is None:
            return None
        return key.index.get(("request", request_id), {}).get(run)

    def _remember(self, step: _Step, name: tuple[str, object]) -> None:
        run = step.run
        if run.key.runs.get(run.run_id) is not run:
            return  # forgotten for want of room while its request was on its way
        steps = run.key.index.setdefault(name, {})
        steps.pop(run, None)  # the newest step of a run stands for it
        steps[run] = step
        if name in run.entries:
            run.entries.move_to_end(name)
            return
        run.entries[name] = None
        self._count(run.key, 1)
        if len(run.entries) > self._options.max_entries_per_run:
            self._drop(run, next(iter(run.entries)))
        while self._entries > self._options.max_entries:
            fullest = max(self._keys.values(), key=lambda key: key.entries)
            self._forget(next(iter(fullest.runs.values())))

    def _drop(self, run: _Run, name: tuple[str, object]) -> None:
        if name not in run.entries:
            return
        del run.entries[name]
        steps = run.key.index[name]
        del steps[run]
        if not steps:
            del run.key.index[name]
        self._count(run.key, -1)

    def _forget(self, run: _Run) -> None:
        del run.key.runs[run.run_id]
        for name in list(run.entries):
            self._drop(run, name)

    def _count(self, key: _Key, change: int) -> None:
        key.entries += change
        self._entries += change

    def _expire(self, key: _Key, now_ns: int) -> None:
        while key.runs:
            oldest = next(iter(key.runs.values()))
            if now_ns - oldest.last_ns <= self._options.window_ns:
                return
            self._forget(oldest)


def _preferred(steps: Iterable[_Step]) -> _Step:
    """Of the runs that left the same evidence: the oldest that was not continued from there, else the newest."""
    candidates = list(steps)
    return next((step for step in candidates if not step.continued), candidates[-1])


def _continues_prompt(step: _Step, following: str | None) -> bool:
    """Whether a prompt that starts with ``step``'s prompt goes on where it ended (``following``: the next role)."""
    if step.continued:
        return False
    if step.state is _State.FAILED:
        return True
    return step.state is _State.OPAQUE and following == "assistant"


def _quotes_an_answer(evidence: RunEvidence) -> bool:
    return any(link.role == "assistant" for link in evidence.message_hashes)

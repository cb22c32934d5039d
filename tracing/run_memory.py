"""What the run linker remembers: runs by key, and what points into them. Bounded, synchronous, without a clock.

A *name* is ``(kind, value)``: something that a later request may say (the digest of a conversation that ends in an
answer of ours, a tool call's id, a session, a trace …). It points to the steps that left it, oldest first, at most one
a run.
Kinds: "session", "trace", "tool", "response", "answer", "said", "prompt", "task", "request".
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from tracing.sub_agents import Task

Name = tuple[str, object]

MAX_LANES = 16
"""Beginnings of conversations that one run is told apart by: the main line, sub-conversations, titles."""

MAX_CALLED = 256
"""Runs that the open calls of one run began."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Bounds of the memory; a run that falls out of them is continued as a new one."""

    window_ns: int = 6 * 3600 * 10**9  # a run idle for longer is forgotten
    max_keys: int = 512
    max_runs_per_key: int = 1024
    max_entries_per_run: int = 512  # newest names of one run
    max_entries: int = 400_000  # over all keys; the key that holds most gives up its least recently used run


class StepState(StrEnum):
    """What became of a step's request."""

    PENDING = "pending"  # no answer yet
    OPAQUE = "opaque"  # answered, and the answer's hash is not known
    ANSWERED = "answered"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Step:
    """One request of a run, as later requests may refer to it."""

    run: Run
    request_id: str
    state: StepState = StepState.PENDING
    continued: bool = False
    tasks: dict[Task, list[str]] | None = None  # calls for a sub-agent that nobody took yet, by what they say


@dataclass(slots=True, eq=False)
class Run:
    """One run. ``parent_id``: the run that called for it."""

    key: KeyMemory
    run_id: str
    last_ns: int
    parent_id: str | None = None
    parent_request_id: str | None = None
    parent_call_id: str | None = None
    steps: int = 0
    last: Step | None = None
    called: dict[str, str] = field(default_factory=dict)  # runs that its open calls began, by the calls' ids
    lanes: OrderedDict[bytes, Step] = field(default_factory=OrderedDict)
    entries: OrderedDict[Name, None] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class KeyMemory:
    """The memory of one key: runs least recently used first, and what points into them."""

    runs: OrderedDict[str, Run] = field(default_factory=OrderedDict)
    index: dict[Name, dict[Run, Step]] = field(default_factory=dict)
    entries: int = 0
    task_lengths: Counter[int] = field(default_factory=Counter)  # of names of kind "task"


class RunMemory:
    """The memory of all keys. For one event loop."""

    def __init__(self, options: MemoryOptions | None = None) -> None:
        self._options = options or MemoryOptions()
        self._keys: OrderedDict[str, KeyMemory] = OrderedDict()
        self._entries = 0

    def of(self, key_id: str, now_ns: int) -> KeyMemory:
        """Return a key's memory, without what has been idle too long; made where there is none."""
        key = self._keys.get(key_id)
        if key is None:
            key = self._keys[key_id] = KeyMemory()
            if len(self._keys) > self._options.max_keys:
                oldest_id = next(iter(self._keys))
                self._entries -= self._keys.pop(oldest_id).entries
        self._keys.move_to_end(key_id)
        while key.runs:
            oldest = next(iter(key.runs.values()))
            if now_ns - oldest.last_ns <= self._options.window_ns:
                break
            self.forget(oldest)
        return key

    def has(self, key_id: str, run_id: str) -> bool:
        """Tell whether a key's run is remembered."""
        key = self._keys.get(key_id)
        return key is not None and run_id in key.runs

    def named(self, key_id: str, name: Name) -> list[Run]:
        """Return the runs of a key that a name points into."""
        key = self._keys.get(key_id)
        return [] if key is None else list(key.index.get(name, ()))

    def open(self, key: KeyMemory, run_id: str, at_ns: int) -> Run:
        """Return a new run."""
        run = key.runs[run_id] = Run(key, run_id, at_ns)
        if len(key.runs) > self._options.max_runs_per_key:
            self.forget(next(iter(key.runs.values())))
        return run

    def advance(self, run: Run, request_id: str, at_ns: int) -> Step:
        """Return the run's next step."""
        run.key.runs.move_to_end(run.run_id)
        run.last_ns = max(run.last_ns, at_ns)
        run.steps += 1
        step = run.last = Step(run, request_id)
        self.remember(step, ("request", request_id))
        return step

    def step(self, key_id: str, run_id: str, request_id: str) -> Step | None:
        """Return a step whose answer is still to come, if it is not forgotten."""
        key = self._keys.get(key_id)
        run = key.runs.get(run_id) if key is not None else None
        if key is None or run is None:
            return None
        return key.index.get(("request", request_id), {}).get(run)

    def remember(self, step: Step, name: Name) -> None:
        """Let a name point to a step."""
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
        self._count(run.key, name, 1)
        if len(run.entries) > self._options.max_entries_per_run:
            self.drop(run, next(iter(run.entries)))
        while self._entries > self._options.max_entries:
            fullest = max(self._keys.values(), key=lambda key: key.entries)
            self.forget(next(iter(fullest.runs.values())))

    def drop(self, run: Run, name: Name) -> None:
        """Let a name no longer point into a run."""
        if name not in run.entries:
            return
        del run.entries[name]
        steps = run.key.index[name]
        del steps[run]
        if not steps:
            del run.key.index[name]
        self._count(run.key, name, -1)

    def forget(self, run: Run) -> None:
        """Forget a run."""
        del run.key.runs[run.run_id]
        for name in list(run.entries):
            self.drop(run, name)

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``; linear in what is held."""
        assert self._entries == sum(key.entries for key in self._keys.values())
        for key in self._keys.values():
            assert key.entries == sum(len(run.entries) for run in key.runs.values())
            pointed = {(run, name) for name, steps in key.index.items() for run in steps}
            assert pointed == {(run, name) for run in key.runs.values() for name in run.entries}
            assert key.task_lengths.total() == sum(name[0] == "task" for _, name in pointed)
            assert len(key.runs) <= self._options.max_runs_per_key
            assert all(len(run.entries) <= self._options.max_entries_per_run for run in key.runs.values())
            assert all(len(run.lanes) <= MAX_LANES for run in key.runs.values())
        assert len(self._keys) <= self._options.max_keys
        assert self._entries <= self._options.max_entries

    def _count(self, key: KeyMemory, name: Name, change: int) -> None:
        key.entries += change
        self._entries += change
        if name[0] == "task" and isinstance(name[1], tuple):
            length = name[1][0]
            key.task_lengths[length] += change
            if not key.task_lengths[length]:
                del key.task_lengths[length]


def preferred(steps: Iterable[Step]) -> Step:
    """Of the runs that left the same evidence: the oldest that was not continued from there, else the newest."""
    candidates = list(steps)
    return next((step for step in candidates if not step.continued), candidates[-1])

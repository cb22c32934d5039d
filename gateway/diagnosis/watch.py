"""The watch: compares each request with the one that it continues, in a thread of its own, after the answer is out.

The request's path costs one append to a queue. The thread takes what has come together every so often (waking it for
each request would have it compete with the event loop), compares, and hands each step's detail to the trace store. What
is kept of former requests is their text as it came in, in memory, within a bound of bytes; the least recently used go
first, and a step whose former request is gone is told as *unseen*. Nothing of the text is written down unless the
content policy allows words.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from urllib.parse import quote

import msgspec

from gateway.diagnosis.compare import compare
from gateway.diagnosis.digests import change_by_digests, system_digest
from gateway.diagnosis.sections import CONVERSATION, SAMPLING, SYSTEM, TOOLS, Kept, digest_of, keep
from gateway.protocols.base import AnswerReader, Ask
from tracing.content import ContentPolicy, redacted
from tracing.detail import Comparison, PromptChange, Reproduction, StepDetail
from tracing.record import RequestRecord

_log = logging.getLogger(__name__)
_HURRY_S = 1.0  # who asks before an answer goes out waits no longer for the step before


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Bounds of the watch."""

    content: ContentPolicy = ContentPolicy.HASHED
    memory_bytes: int = 64 << 20
    queue_requests: int = 10_000
    queue_bytes: int = 256 << 20  # of their bodies; as long as one waits, it takes some three times as much
    every_s: float = 0.1
    recent_per_key: int = 8  # of each key's runs, the newest requests, to check a request against before it is sent


class Build(msgspec.Struct, frozen=True, gc=False):
    """What an instance runs, for the record of a step."""

    engine: str | None = None
    weights_id: str | None = None
    template: str | None = None


@dataclass(slots=True)
class WatchStats:
    """Counters since the start."""

    compared: int = 0
    unseen: int = 0
    dropped: int = 0


class Remembered(msgspec.Struct, frozen=True):
    """A former request with what is known of it."""

    kept: Kept
    record: RequestRecord
    reproduction: Reproduction


Item = tuple[RequestRecord, Ask, AnswerReader | None, Build]


class PromptWatch:
    """See the module. ``take`` is called on the event loop; everything else happens in the thread."""

    def __init__(
        self,
        deliver: Callable[[StepDetail], None],
        build_of: Callable[[RequestRecord], Build],
        options: WatchOptions | None = None,
        detail_of: Callable[[str], StepDetail | None] = lambda request_id: None,
    ) -> None:
        """``detail_of``: what is stored of a step, for one whose request another process had."""
        self._detail_of = detail_of
        self._deliver, self._build_of, self._options = deliver, build_of, options or WatchOptions()
        self._queue: deque[Item] = deque()
        self._taken_bytes = self._done_bytes = 0  # one written by the loop alone, one by the thread alone
        self._memory: OrderedDict[str, Remembered] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._wake, self._hurry, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._idle = threading.Condition()
        self._busy = False
        self.stats = WatchStats()
        self._thread = threading.Thread(target=self._run, name="keepwarm-watch", daemon=True)
        self._thread.start()

    def take(self, record: RequestRecord, ask: Ask, reader: AnswerReader | None) -> None:
        """Note a request that ended; returns at once, and drops it when the queue is full."""
        if record.link is None:
            return
        waiting_bytes = self._taken_bytes - self._done_bytes
        if len(self._queue) >= self._options.queue_requests or waiting_bytes > self._options.queue_bytes:
            self.stats.dropped += 1
            return
        self._taken_bytes += _body_bytes(ask)
        self._queue.append((record, ask, reader, self._build_of(record)))  # as it is now: it may change in a moment
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything taken before is compared; whether that happened in time."""
        self._hurry.set()
        self._wake.set()
        with self._idle:
            return self._idle.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Compare what is queued and stop; whether that was done in time."""
        self._stopped.set()
        self._hurry.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def shows_words(self) -> bool:
        """Whether excerpts may be kept and shown as they are."""
        return self._options.content is ContentPolicy.FULL

    def verdict(self, previous_id: str | None, ask: Ask) -> str:
        """Return in a header's words how a request follows the one that it continues. Blocks: use a thread."""
        if previous_id is None:
            return Comparison.FIRST.value
        self.flush(_HURRY_S)
        former = self.former(previous_id)
        if former is None:
            return Comparison.UNSEEN.value
        comparison, change = compare(former.kept, keep("", ask, None), shows_words=False)
        if change is None:
            return comparison.value
        path = quote(change.path, safe="[]._-")
        return f"{comparison}; kind={change.kind}; path={path}; chars={change.start}-{change.end}"

    def former(self, request_id: str) -> Remembered | None:
        """Return a former request if its text is at hand."""
        with self._lock:
            return self._memory.get(request_id)

    def latest(self, key_id: str) -> list[Remembered]:
        """Return the newest request of each of a key's latest runs, the newest first."""
        found: dict[str, Remembered] = {}
        with self._lock:
            for each in reversed(self._memory.values()):
                link = each.record.link
                if each.record.identity.key_id == key_id and link is not None:
                    found.setdefault(link.run_id, each)
                if len(found) >= self._options.recent_per_key:
                    break
        return list(found.values())

    # ---- the thread

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._hurry.wait(self._options.every_s)
            self._busy = True
            self._wake.clear()
            if not self._stopped.is_set():
                self._hurry.clear()
            self._work_off()
            with self._idle:
                self._busy = False
                self._idle.notify_all()
            if self._stopped.is_set() and not self._queue:
                return

    def _work_off(self) -> None:
        """Compare what waits. A method of its own: between two rounds nothing holds the last request."""
        while self._queue:
            record, ask, reader, build = self._queue.popleft()
            self._one(record, ask, reader, build)
            self._done_bytes += _body_bytes(ask)

    def _one(self, record: RequestRecord, ask: Ask, reader: AnswerReader | None, build: Build) -> None:
        try:
            self._deliver(self._detail(record, ask, None if reader is None else reader.seen.message(), build))
        except Exception:  # the thread's boundary: one odd request must not end the watch
            _log.exception("the step %s could not be compared", record.request_id)

    def _detail(self, record: RequestRecord, ask: Ask, answer: Mapping[str, object] | None, build: Build) -> StepDetail:
        assert record.link is not None
        kept = keep(record.request_id, ask, answer)
        previous_id = record.link.previous_request_id
        former = None if previous_id is None else self.former(previous_id)
        comparison, change = Comparison.FIRST, None
        if former is not None:
            comparison, change = compare(former.kept, kept, shows_words=self._options.content.shows_words)
            self.stats.compared += 1
        elif previous_id is not None:
            comparison = Comparison.UNSEEN
            self.stats.unseen += 1
        if change is not None and self._options.content is ContentPolicy.REDACTED:
            change = _redacted(change)
        made = _reproduction(record, ask, kept, build)
        self._remember(Remembered(kept, record, made))
        before = former.reproduction if former is not None else None
        if comparison is Comparison.UNSEEN and previous_id is not None:
            stored = self._detail_of(previous_id)
            before = stored.reproduction if stored is not None else None
            change = None if before is None else change_by_digests(before, made, len(kept.text))
        differs = () if before is None else _differing(before, made)
        return StepDetail(record.request_id, comparison, made, previous_id, change, differs)

    def _remember(self, step: Remembered) -> None:
        with self._lock:
            self._memory[step.kept.request_id] = step
            self._used_bytes += step.kept.cost_bytes
            previous_id = step.record.link.previous_request_id if step.record.link is not None else None
            if previous_id is not None and previous_id in self._memory:
                self._memory.move_to_end(previous_id)  # a twin or an auxiliary call may continue it too
                self._memory.move_to_end(step.kept.request_id)
            while self._used_bytes > self._options.memory_bytes and len(self._memory) > 1:
                _, oldest = self._memory.popitem(last=False)
                self._used_bytes -= oldest.kept.cost_bytes


def _body_bytes(ask: Ask) -> int:
    return len((ask.native or ask.translated).body)


def _reproduction(record: RequestRecord, ask: Ask, kept: Kept, build: Build) -> Reproduction:
    values = (ask.native or ask.translated).form.values
    seed = values.get("seed")
    sampling: dict[str, str | int | float | bool | None] = {
        name: value
        for name in SAMPLING
        if (value := values.get(name)) is not None and isinstance(value, str | int | float | bool)
    }
    return Reproduction(
        model=record.served_model or record.model,
        weights_id=build.weights_id,
        engine=build.engine,
        instance=record.instance,
        template=build.template,
        seed=seed if isinstance(seed, int) else None,
        sampling=sampling,
        prompt_digest=digest_of(kept, (*TOOLS, *SYSTEM, *CONVERSATION)),
        tools_digest=digest_of(kept, TOOLS),
        system_digest=system_digest(kept, values),
    )


def _differing(former: Reproduction, latter: Reproduction) -> tuple[str, ...]:
    names = (field.name for field in fields(Reproduction) if field.name != "prompt_digest")
    return tuple(name for name in names if getattr(former, name) != getattr(latter, name))


def _redacted(change: PromptChange) -> PromptChange:
    before, after = (None if text is None else redacted(text) for text in (change.before, change.after))
    return replace(change, before=before, after=after)

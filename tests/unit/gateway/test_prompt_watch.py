"""The watch: what it delivers, forgets, drops, and knows of a step that another process served."""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any, cast

from billing.prices import PriceBook
from gateway.diagnosis.watch import Build, PromptWatch, WatchOptions
from gateway.protocols.base import AnswerReader, Ask, scan_body
from gateway.protocols.openai import CHAT
from gateway.protocols.seen import Seen
from tests.samples.prefixed import prefixed
from tracing.content import ContentPolicy
from tracing.detail import BreakKind, Comparison, StepDetail
from tracing.record import RequestRecord

BOOK = PriceBook.from_toml(
    'name = "b"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1, output = 3 }\n'
)
FILL = "Follow the rules. " * 40


def ask(system: str = "You help.", *more: str, **members: Any) -> Ask:
    messages = [
        {"role": "system", "content": f"{system} {FILL}"},
        *({"role": "user", "content": text} for text in more),
    ]
    return CHAT.read(scan_body(json.dumps({"model": "m", "messages": messages, **members}).encode()), None)


def step(number: int) -> RequestRecord:
    return prefixed(number, "abc", BOOK, run="r", previous=number - 1 if number else None)


def watched(options: WatchOptions | None = None, **more: Any) -> tuple[PromptWatch, list[StepDetail]]:
    details: list[StepDetail] = []
    build = Build("sglang 0.5.23", "weights", "chatml@1")
    return PromptWatch(details.append, lambda record: build, options or WatchOptions(every_s=0.001), **more), details


def test_each_step_is_told_with_how_it_could_be_repeated() -> None:
    watch, details = watched()
    watch.take(step(0), ask("You help.", "a", seed=7, temperature=0.5, user="jo"), None)
    watch.take(step(1), ask("You help.", "a", "b", seed=8), None)
    assert watch.flush(30)
    assert watch.close()
    first, second = details
    assert (first.comparison, second.comparison) == (Comparison.FIRST, Comparison.APPENDED)
    made = first.reproduction
    assert (made.seed, made.sampling, made.engine, made.weights_id, made.template) == (
        7, {"temperature": 0.5, "seed": 7}, "sglang 0.5.23", "weights", "chatml@1",
    )  # fmt: skip
    assert second.differs == ("seed", "sampling")
    assert made.system_digest == second.reproduction.system_digest is not None


def test_words_are_redacted_where_the_policy_says_so() -> None:
    watch, details = watched(WatchOptions(ContentPolicy.REDACTED, every_s=0.001))
    watch.take(step(0), ask("Write to jo@example.com.", "a"), None)
    watch.take(step(1), ask("Write to al@example.com.", "a"), None)
    watch.close()
    change = details[1].change
    assert change is not None
    assert change.before is not None
    assert "example.com" not in change.before
    assert "[email]" in change.before


def test_memory_is_bounded_and_what_is_gone_is_unseen() -> None:
    watch, details = watched(WatchOptions(memory_bytes=8_000, every_s=0.001))
    for number in range(20):
        watch.take(prefixed(number, "abc", BOOK, run=f"r{number}"), ask(), None)
    watch.take(prefixed(99, "abc", BOOK, run="r0", previous=0), ask(), None)
    assert watch.flush(30)
    assert watch.former("req-0") is None
    assert watch.former("req-99") is not None
    assert details[-1].comparison is Comparison.UNSEEN
    assert watch.stats.unseen == 1
    assert [each.record.request_id for each in watch.latest("key-a")][:2] == ["req-99", "req-19"]
    assert watch.latest("somebody-else") == []
    watch.close()


def test_digests_tell_the_section_where_another_process_had_the_step_before() -> None:
    first, known = watched()
    first.take(step(0), ask("You help.", "a"), None)
    first.close()
    second, details = watched(detail_of=lambda request_id: known[0] if request_id == "req-0" else None)
    second.take(step(1), ask("You hinder.", "a", "b"), None)
    second.close()
    change = details[0].change
    assert details[0].comparison is Comparison.UNSEEN
    assert change is not None
    assert (change.kind, change.section) == (BreakKind.SYSTEM_EDITED, "system")
    assert details[0].differs == ("system_digest",)


def test_nothing_holds_a_request_that_was_compared() -> None:
    class Reader:
        seen = Seen()

    reader = Reader()
    last, request = weakref.ref(reader), ask("You help.", "a")
    watch, details = watched()
    watch.take(step(0), request, cast("AnswerReader", reader))
    del reader
    assert watch.flush(30)
    assert len(details) == 1
    assert last() is None
    watch.close()


def test_what_waits_is_bounded_by_its_bodies() -> None:
    gate, seen = threading.Event(), list[StepDetail]()

    def deliver(detail: StepDetail) -> None:
        gate.wait()
        seen.append(detail)

    request = ask("You help.", "a")
    options = WatchOptions(queue_bytes=3 * len(request.body), every_s=0.001)
    watch = PromptWatch(deliver, lambda record: Build(), options)
    for number in range(6):  # the first is being compared all the while, and counts
        watch.take(prefixed(number, "abc", BOOK, run=f"r{number}"), request, None)
    assert watch.stats.dropped == 2
    gate.set()
    assert watch.flush(30)
    watch.take(step(9), request, None)
    watch.close()
    assert (len(seen), watch.stats.dropped) == (5, 2)


def test_a_full_queue_drops_and_one_odd_step_ends_nothing() -> None:
    gate = threading.Event()
    seen: list[StepDetail] = []

    def deliver(detail: StepDetail) -> None:
        gate.wait()
        if not seen:
            seen.append(detail)
            raise RuntimeError("the store is odd today")
        seen.append(detail)

    watch = PromptWatch(deliver, lambda record: Build(), WatchOptions(queue_requests=3, every_s=0.001))
    for number in range(50):
        watch.take(step(number), ask(), None)
    gate.set()
    assert watch.flush(30)
    watch.close()
    assert watch.stats.dropped >= 40
    assert len(seen) == 50 - watch.stats.dropped

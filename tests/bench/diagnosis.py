"""What diagnosis costs: a request's path, the thread beside it, and reading many records.

python -m tests.bench.diagnosis
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from billing.prices import PriceBook
from gateway.diagnosis.cards import diagnose
from gateway.diagnosis.compare import compare
from gateway.diagnosis.sections import keep
from gateway.diagnosis.watch import Build, PromptWatch
from gateway.protocols.base import Ask, scan_body
from gateway.protocols.openai import CHAT
from tests.samples.prefixed import STRIDE, prefixed
from tracing.detail import StepDetail

Json = dict[str, Any]
BOOK = PriceBook.from_toml(
    'name = "b"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1, hit = 0.1, output = 3 }\n'
)


def body(chars: int, clock: str = "08:15:42") -> Json:
    """Return a conversation of about so many characters, in messages of a thousand."""
    rest = [
        {"role": "assistant" if n % 2 else "user", "content": f"{n} " + "word " * 200} for n in range(chars // 1000)
    ]
    return {"model": "m", "messages": [{"role": "system", "content": f"It is {clock}. " + "rule " * 400}, *rest]}


def ask_of(value: Json) -> Ask:
    """Return a body as the gateway reads it."""
    return CHAT.read(scan_body(json.dumps(value).encode()), None)


def best_us(work: Callable[[], object], rounds: int = 7, each: int = 20) -> float:
    """Return the fastest round's time a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(each):
            work()
        times.append((time.perf_counter_ns() - start) / each / 1000)
    return min(times)


def main() -> None:
    """Print it."""
    print("compare two requests (µs)      appended   clock moved")
    for chars in (4_000, 40_000, 400_000):
        grown = body(chars)
        grown["messages"].append({"role": "user", "content": "more"})
        former, same = keep("a", ask_of(body(chars)), None), keep("b", ask_of(grown), None)
        moved = keep(
            "c", ask_of({**grown, "messages": [body(0, "08:15:57")["messages"][0], *grown["messages"][1:]]}), None
        )
        appended = best_us(lambda: compare(former, same, shows_words=False))  # noqa: B023 - called at once
        clock = best_us(lambda: compare(former, moved, shows_words=False), each=3)  # noqa: B023
        print(f"  {chars:>9,} characters        {appended:>8.1f}   {clock:>11.1f}")

    details: list[StepDetail] = []
    watch = PromptWatch(details.append, lambda record: Build())
    records = [prefixed(n, "abc", BOOK, run="r", previous=n - 1 if n else None) for n in range(5000)]
    ask = ask_of(body(4_000))
    taken = []
    start_cpu = time.process_time_ns()
    for record in records:
        start = time.perf_counter_ns()
        watch.take(record, ask, None)
        taken.append(time.perf_counter_ns() - start)
    watch.flush(60)
    thread_us = (time.process_time_ns() - start_cpu - sum(taken)) / len(records) / 1000
    watch.close()
    print(f"take (on the request's path): {statistics.median(taken) / 1000:.2f} µs")
    print(f"in the thread: {thread_us:.0f} µs a step")

    many = []
    for run in range(1000):
        for step in range(10):
            number = run * 10 + step
            parts = f"{chr(200 + run)}" * (step + 20)
            hits = (step + 18) * STRIDE if step else 0
            many.append(prefixed(number, parts, BOOK, hits=hits, run=f"r{run}", previous=number - 1 if step else None))
    start = time.perf_counter()
    cards = diagnose(many, {}, {BOOK.version: BOOK})
    took = time.perf_counter() - start
    print(f"diagnose {len(many):,} records of 20 to 29 marks: {took:.2f} s ({len(cards):,} cards)")


if __name__ == "__main__":
    main()

"""Any traffic, any aborts, any size of the device tier: right answers, in order, and no page left behind.

The yardstick is the same tiny model computing each prompt alone in one piece, in float64: there are no near ties.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.embedded.attention import Span
from engine_adapter.embedded.model import LlamaModel
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.host import HostTier
from tests.samples.engines import Answer, ask, assert_nothing_held, load_tiny_model, make_engine, make_tiny_model, run

PAGES, PAGE_TOKENS = 16, 4


@cache
def model() -> LlamaModel:
    with TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        return load_tiny_model(Path(folder))


@cache
def best_next(tokens: tuple[int, ...]) -> int:
    """Return the greedy continuation, computed from nothing."""
    layout = model().page_layout("yardstick", len(tokens))
    kv = DeviceTier(layout, pages=1).kv
    return int(model().forward([Span(tokens, 0, [0])], kv)[0].argmax())


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(best_next(tuple(tokens)))
    return tokens[len(prompt) :]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that share prefixes often: each is a cut of one of two texts, with a tail of its own."""
    text = draw(st.integers(0, 1))
    shared = [(7 * text + 3 * position) % 150 for position in range(draw(st.integers(0, 24)))]
    return shared + draw(st.lists(st.integers(150, 153), min_size=1, max_size=6))


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[int, list[int], int, int | None]]:
    """Requests as (steps before it comes, prompt, output tokens, steps after which it is aborted)."""
    request = st.tuples(st.integers(0, 4), prompts(), st.integers(1, 10), st.one_of(st.none(), st.integers(0, 12)))
    return draw(st.lists(request, min_size=1, max_size=7))


@settings(max_examples=40, deadline=None)
@given(
    requests=traffic(),
    step_tokens=st.integers(1, 40),
    mixed_tokens=st.integers(1, 12),
    max_running=st.integers(1, 5),
    with_host=st.booleans(),
)
def test_any_traffic_is_answered_rightly_and_leaves_nothing(
    requests: list[tuple[int, list[int], int, int | None]],
    step_tokens: int,
    mixed_tokens: int,
    max_running: int,
    with_host: bool,
) -> None:
    layout = model().page_layout("tiny", PAGE_TOKENS)
    lower = [HostTier(layout, capacity_bytes=12 * layout.page_bytes)] if with_host else []
    engine = make_engine(
        model(), pages=PAGES, lower=lower, page_tokens=PAGE_TOKENS,
        step_tokens=step_tokens, mixed_tokens=mixed_tokens, max_running=max_running,
    )  # fmt: skip
    answers: list[Answer] = []
    aborts: dict[int, list[int]] = {}
    now = 0
    for number, (pause, prompt, count, abort_after) in enumerate(requests):
        for _ in range(pause):
            engine.step()
            now += 1
            for target in aborts.pop(now, []):
                engine.abort(str(target))
        answers.append(ask(engine, str(number), prompt, count))
        if abort_after is not None:
            aborts.setdefault(now + 1 + abort_after, []).append(number)
    while aborts:
        engine.step()
        now += 1
        for target in aborts.pop(now, []):
            engine.abort(str(target))
    run(engine, *answers)
    for (_, prompt, count, abort_after), answer in zip(requests, answers, strict=True):
        expected = greedy(prompt, count)
        assert answer.tokens == expected[: len(answer.tokens)]
        assert answer.reason == ("length" if len(answer.tokens) == count else "abort")
        assert abort_after is not None or answer.reason == "length"
        if answer.tokens:
            assert sum(answer.hit_tokens) % PAGE_TOKENS == 0
            assert sum(answer.hit_tokens) < len(prompt)
    assert_nothing_held(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)
    engine.store.close()

"""The engine stepped by hand on a tiny model: reuse, batching, fairness, preemption, and failures that stay alone."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from engine_adapter.embedded import engine as engine_module
from engine_adapter.embedded.engine import Engine, GenerationEvent, GenerationRequest, RequestError, SamplingParams
from engine_adapter.embedded.model import LlamaModel
from engine_adapter.embedded.sessions import SessionPages
from kvstore.page import PageKey, Tier
from kvstore.tiers.device_copies import StreamCopies
from kvstore.tiers.host import HostTier
from tests.samples.engines import (
    VOCAB,
    Answer,
    ask,
    assert_nothing_held,
    load_tiny_model,
    make_engine,
    make_tiny_model,
    run,
)
from tests.samples.lazy_device import LazyDevice


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return load_tiny_model(folder)


def prompt(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def alone(model: LlamaModel, tokens: list[int], max_tokens: int = 8) -> list[int]:
    """Return what an engine answers that never saw anything else."""
    engine = make_engine(model, pages=100)
    answer = ask(engine, "alone", tokens, max_tokens)
    run(engine, answer)
    return answer.tokens


class Failing:
    """A constraint that raises at its n-th token, or ends there."""

    def __init__(self, at: int, *, raises: bool) -> None:
        self.left, self.raises = at, raises

    def mask(self) -> torch.Tensor | None:
        if self.raises and self.left == 0:
            raise RuntimeError("this grammar is broken")
        return None

    def accept(self, token_id: int) -> None:
        self.left -= 1

    def advance_forced(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return not self.raises and self.left == 0


class Forcing:
    """After the first token it forces a run of tokens, once; then everything is allowed."""

    finished = False

    def __init__(self, *run: int) -> None:
        self.run: tuple[int, ...] = run

    def mask(self) -> torch.Tensor | None:
        return None

    def accept(self, token_id: int) -> None:
        """Nothing to keep."""

    def advance_forced(self) -> list[int]:
        run, self.run = list(self.run), ()
        return run


def test_forced_tokens_are_told_at_once_and_what_follows_is_computed_on_them(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60)
    run_of_nine = tuple(prompt(9, seed=5))  # more than two pages, and the prompt ends inside one
    answer = ask(engine, "forced", prompt(10), 14, constraint=Forcing(*run_of_nine))
    stream = ask(engine, "stream", prompt(7, seed=2), 9)
    engine.step()
    assert tuple(answer.tokens[1:]) == run_of_nine
    run(engine, answer, stream)
    first = answer.tokens[0]
    assert answer.tokens == [first, *run_of_nine, *alone(model, [*prompt(10), first, *run_of_nine], 4)]
    assert stream.tokens == alone(model, prompt(7, seed=2), 9)
    assert_nothing_held(engine)


def test_a_forced_run_is_cut_at_the_length_and_at_a_stop_token(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60)
    cut = ask(engine, "cut", prompt(5), 3, constraint=Forcing(1, 2, 3, 4))
    ended = ask(engine, "stop", prompt(5), 9, constraint=Forcing(1, 2, 3), stop_token_ids=frozenset({2}))
    run(engine, cut, ended)
    assert (cut.tokens[1:], cut.reason) == ([1, 2], "length")
    assert (ended.tokens[1:], ended.reason) == ([1, 2], "stop")
    assert_nothing_held(engine)


def test_forced_tokens_that_find_no_page_cost_the_youngest_its_pages_and_nobody_a_token(model: LlamaModel) -> None:
    engine = make_engine(model, pages=9)
    run_of_nine = tuple(prompt(9, seed=5))
    old = ask(engine, "old", prompt(10), 14, constraint=Forcing(*run_of_nine))
    young = ask(engine, "young", prompt(9, seed=3), 12)
    run(engine, old, young)
    assert tuple(old.tokens[1:10]) == run_of_nine
    assert young.tokens == alone(model, prompt(9, seed=3), 12)
    assert_nothing_held(engine)


def test_a_prompt_hits_the_full_pages_of_another_but_never_its_last_token(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60)
    first = ask(engine, "first", prompt(16), 6)
    run(engine, first)
    again = ask(engine, "again", prompt(16), 6)
    longer = ask(engine, "longer", prompt(16) + first.tokens + prompt(5, seed=1), 6)
    run(engine, again, longer)
    assert first.hit_tokens == (0, 0, 0, 0)
    assert again.hit_tokens == (12, 0, 0, 0)
    assert longer.hit_tokens == (20, 0, 0, 0)  # 16 of the prompt, and the one full page of the output that was computed
    assert again.tokens == first.tokens
    assert longer.tokens == alone(model, prompt(16) + first.tokens + prompt(5, seed=1), 6)
    assert_nothing_held(engine)


def test_salts_do_not_share(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60)
    answers = []
    for number, salt in enumerate([None, "a", "b", "a", None]):
        answers.append(ask(engine, str(number), prompt(9), 2, salt=salt))
        run(engine, answers[-1])
    assert [answer.hit_tokens[Tier.DEVICE] for answer in answers] == [0, 0, 0, 8, 8]
    assert len({tuple(answer.tokens) for answer in answers}) == 1


def test_garbage_in_a_fresh_page_does_not_reach_an_answer(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60, step_tokens=5)
    engine.store.device.kv.fill_(torch.nan)
    answers = [ask(engine, str(n), prompt(n, seed=n), 7) for n in (1, 3, 4, 6, 13)]
    run(engine, *answers)
    for n, answer in zip((1, 3, 4, 6, 13), answers, strict=True):
        assert answer.tokens == alone(model, prompt(n, seed=n), 7)


def test_a_burst_on_one_cold_prefix_computes_it_once(model: LlamaModel) -> None:
    engine = make_engine(model, pages=100, step_tokens=16)
    shared = prompt(40)
    answers = [ask(engine, str(n), [*shared, n], 3) for n in range(4)]
    run(engine, *answers)
    assert [answer.hit_tokens[Tier.DEVICE] for answer in answers] == [0, 40, 40, 40]
    for n, answer in enumerate(answers):
        assert answer.tokens == alone(model, [*shared, n], 3)


def test_whoever_waits_for_a_prefix_computes_it_when_its_owner_leaves(model: LlamaModel) -> None:
    engine = make_engine(model, pages=100, step_tokens=8)
    first, second = (ask(engine, name, [*prompt(40), n], 2) for n, name in enumerate(("first", "second")))
    engine.step()
    engine.abort("first")
    run(engine, first, second)
    assert (first.reason, second.reason) == ("abort", "length")
    assert second.hit_tokens == (8, 0, 0, 0)
    assert second.tokens == alone(model, [*prompt(40), 1], 2)


def test_a_long_prompt_lets_streams_and_short_prompts_pass(model: LlamaModel) -> None:
    engine = make_engine(model, pages=200, step_tokens=32, mixed_tokens=16)
    stream = ask(engine, "stream", prompt(3, seed=1), 30)
    engine.step()
    long = ask(engine, "long", prompt(160, seed=2), 2)
    short = ask(engine, "short", prompt(6, seed=3), 2)
    for seen in range(2, 8):
        engine.step()
        assert len(stream.tokens) == seen  # a token in every step
    assert short.reason == "length"
    assert not long.tokens
    run(engine, stream, long)
    assert long.tokens == alone(model, prompt(160, seed=2), 2)


def test_the_long_prompt_moves_too_while_short_ones_keep_coming(model: LlamaModel) -> None:
    engine = make_engine(model, pages=200, step_tokens=16, mixed_tokens=16)
    long = ask(engine, "long", prompt(96, seed=2), 1)
    for number in range(14):
        ask(engine, f"short-{number}", prompt(14, seed=100 + number), 1)
        engine.step()
    assert long.reason == "length"


def test_priority_goes_first(model: LlamaModel) -> None:
    engine = make_engine(model, pages=100, max_running=1)
    low, high = ask(engine, "low", prompt(5), 2), ask(engine, "high", prompt(5, seed=1), 2, priority=1)
    engine.step()
    assert high.tokens
    assert not low.events
    run(engine, low, high)


def test_out_of_pages_the_youngest_waits_and_loses_nothing(model: LlamaModel) -> None:
    engine = make_engine(model, pages=14)
    answers = [ask(engine, str(n), prompt(7, seed=n), 24) for n in range(3)]
    run(engine, *answers)
    assert engine.load().preemptions > 0
    for n, answer in enumerate(answers):
        assert answer.tokens == alone(model, prompt(7, seed=n), 24)
        assert answer.hit_tokens == (0, 0, 0, 0)  # what it finds of itself when it comes back is no hit
    assert answers[0].reason == "length"
    assert_nothing_held(engine)


def test_nobody_overtakes_one_that_waits_for_room(model: LlamaModel) -> None:
    engine = make_engine(model, pages=12)
    first = ask(engine, "first", prompt(30, seed=1), 4)
    engine.step()
    big, small = ask(engine, "big", prompt(28, seed=2), 2), ask(engine, "small", prompt(3, seed=3), 2)
    run(engine, first)
    assert not big.events
    assert not small.events
    run(engine, big, small)
    assert_nothing_held(engine)


def test_lower_tiers_are_asked_while_others_go_on(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostTier(model.page_layout("tiny", 4), capacity_bytes=1 << 20)
    warm = make_engine(model, pages=60, lower=[host])
    first = ask(warm, "first", prompt(30), 4)
    run(warm, first)
    assert warm.store.flush(10)
    cold = make_engine(model, pages=60, lower=[host])
    promise: Future[list[Tier]] = Future()
    asked: list[tuple[list[PageKey], list[int]]] = []

    def fetch_later(keys: list[PageKey], slots: list[int]) -> Future[list[Tier]]:
        asked.append((keys, slots))
        return promise

    with monkeypatch.context() as patch:
        patch.setattr(cold.store, "fetch", fetch_later)
        again = ask(cold, "again", prompt(30), 4)
        assert not cold.step()
    other = ask(cold, "other", prompt(3, seed=9), 3)
    run(cold, other)
    assert not again.events
    assert cold.load().waiting == 1
    ((keys, slots),) = asked
    promise.set_result(cold.store.fetch(keys[:5], slots[:5]).result(5))
    run(cold, again)
    assert again.hit_tokens == (0, 20, 0, 0)  # five came; the other two were computed
    assert again.tokens == first.tokens
    third = ask(cold, "third", prompt(30), 4)
    run(cold, third)
    assert third.hit_tokens == (28, 0, 0, 0)


def test_a_fetch_that_fails_is_computed_instead(model: LlamaModel) -> None:
    host = HostTier(model.page_layout("tiny", 4), capacity_bytes=1 << 20)
    engine = make_engine(model, pages=60, lower=[host])
    broken: Future[list[Tier]] = Future()
    broken.set_exception(OSError("the medium is gone"))
    engine.store.fetch = lambda keys, slots: broken  # type: ignore[method-assign]
    answer = ask(engine, "r", prompt(30), 4)
    run(engine, answer)
    assert answer.hit_tokens == (0, 0, 0, 0)
    assert answer.tokens == alone(model, prompt(30), 4)


def test_answers_are_the_same_over_pages_that_crossed_by_streams(model: LlamaModel) -> None:
    """On CPU tensors; on a GPU in tests/integration/test_cuda_device.py."""
    host = HostTier(model.page_layout("tiny", 4), capacity_bytes=1 << 20)
    engine = make_engine(model, pages=60, lower=[host], copies=StreamCopies)
    cold = ask(engine, "cold", prompt(30))
    run(engine, cold)
    assert engine.store.flush(10)
    engine.store.device.clear()
    warm = ask(engine, "warm", prompt(30))
    run(engine, warm)
    assert (cold.hit_tokens, warm.hit_tokens) == ((0, 0, 0, 0), (0, 28, 0, 0))
    assert cold.tokens == warm.tokens == alone(model, prompt(30))
    assert_nothing_held(engine)


def test_a_device_that_nothing_can_be_copied_to_costs_nothing_but_hits(model: LlamaModel) -> None:
    lazy, host = LazyDevice(), HostTier(model.page_layout("tiny", 4), capacity_bytes=1 << 20)
    engine = make_engine(model, pages=60, lower=[host], copies=partial(StreamCopies, open_stream=lazy.open_stream))
    cold = ask(engine, "cold", prompt(30))
    run(engine, cold)
    assert engine.store.flush(10)
    engine.store.device.clear()
    lazy.faults = {"copy"}
    again = ask(engine, "again", prompt(30))
    run(engine, again)
    assert again.hit_tokens == (0, 0, 0, 0)
    assert again.tokens == cold.tokens
    assert engine.store.stats()[Tier.DEVICE].alarms["copy"] >= 7
    assert_nothing_held(engine)


def test_an_abort_while_pages_are_on_their_way_frees_them_afterwards(model: LlamaModel) -> None:
    host = HostTier(model.page_layout("tiny", 4), capacity_bytes=1 << 20)
    engine = make_engine(model, pages=20, lower=[host])
    promise: Future[list[Tier]] = Future()
    promise.set_running_or_notify_cancel()
    engine.store.fetch = lambda keys, slots: promise  # type: ignore[method-assign]
    answer = ask(engine, "r", prompt(30), 4)
    engine.step()
    engine.abort("r")
    engine.step()
    assert answer.reason == "abort"
    device = engine.store.device
    assert device.free_pages < device.slots  # the store may still write there
    promise.set_result([])
    engine.step()
    assert device.free_pages == device.slots


def test_stop_tokens_and_lengths_end_an_answer(model: LlamaModel) -> None:
    plain = alone(model, prompt(10), 8)
    engine = make_engine(model, pages=60)
    stop = ask(engine, "stop", prompt(10), 8, stop_token_ids=frozenset({plain[3]}))
    length = ask(engine, "length", prompt(10), 8)
    run(engine, stop, length)
    assert (stop.reason, stop.tokens) == ("stop", plain[: plain.index(plain[3]) + 1])
    assert (length.reason, length.tokens) == ("length", plain)


def test_seeded_answers_repeat_whatever_runs_beside_them(model: LlamaModel) -> None:
    engine = make_engine(model, pages=100)
    first = ask(engine, "first", prompt(10), 12, temperature=1.5, top_p=0.9, seed=5)
    run(engine, first)
    crowd = [ask(engine, f"c{n}", prompt(11, seed=n), 12, temperature=1.0) for n in range(3)]
    second = ask(engine, "second", prompt(10), 12, temperature=1.5, top_p=0.9, seed=5)
    other = ask(engine, "other", prompt(10), 12, temperature=1.5, top_p=0.9, seed=6)
    run(engine, second, other, *crowd)
    assert second.tokens == first.tokens
    assert other.tokens != first.tokens


def test_a_constraint_that_raises_ends_its_own_request_only(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60)
    bad = ask(engine, "bad", prompt(5), 9, constraint=Failing(2, raises=True))
    done = ask(engine, "done", prompt(5, seed=1), 9, constraint=Failing(4, raises=False))
    good = ask(engine, "good", prompt(5, seed=2), 9)
    run(engine, bad, done, good)
    assert bad.finished is not None
    assert (bad.finished.reason, bad.finished.error) == ("error", "this grammar is broken")
    assert len(bad.tokens) == 2
    assert (done.reason, len(done.tokens)) == ("stop", 4)
    assert good.tokens == alone(model, prompt(5, seed=2), 9)
    assert_nothing_held(engine)


def test_a_sink_that_raises_is_aborted_alone(model: LlamaModel) -> None:
    engine = make_engine(model, pages=60)
    seen: list[GenerationEvent] = []

    def deaf(event: GenerationEvent) -> None:
        seen.append(event)
        raise ConnectionResetError

    engine.submit(GenerationRequest("deaf", tuple(prompt(5)), SamplingParams(50, 0.0)), deaf)
    good = ask(engine, "good", prompt(5, seed=2), 9)
    run(engine, good)
    assert good.tokens == alone(model, prompt(5, seed=2), 9)
    assert len(seen) == 3  # admitted, one token, finished
    assert_nothing_held(engine)


@pytest.mark.parametrize("where", [(LlamaModel, "forward"), (engine_module, "greedy")], ids=["begun", "waited for"])
def test_a_step_that_fails_ends_those_in_it_and_no_others(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str]
) -> None:
    engine = make_engine(model, pages=60, max_running=1)
    unlucky, later = ask(engine, "unlucky", prompt(5), 4), ask(engine, "later", prompt(5), 4)

    def fail(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(*where, fail)
        engine.step()
    run(engine, unlucky, later)
    assert (unlucky.reason, later.reason) == ("error", "length")
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("tokens", "sampling", "code"),
    [
        ([], {}, "empty_prompt"),
        ([VOCAB], {}, "out_of_vocabulary"),
        ([-1], {}, "out_of_vocabulary"),
        ([1] * 78, {"max_tokens": 3}, "context_length_exceeded"),
        ([1], {"max_tokens": 0}, "invalid_request"),
        ([1], {"temperature": -0.1}, "invalid_request"),
        ([1], {"temperature": float("nan")}, "invalid_request"),
        ([1], {"top_p": 0.0}, "invalid_request"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_queued(
    model: LlamaModel, tokens: list[int], sampling: dict[str, float], code: str
) -> None:
    engine = make_engine(model, pages=20)  # 80 tokens
    params = SamplingParams(**{"max_tokens": 2, **sampling})  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refused:
        engine.submit(GenerationRequest("r", tuple(tokens), params), Answer().events.append)
    assert refused.value.code == code
    assert engine.load().requests == 0


def test_what_fills_the_device_tier_exactly_is_served(model: LlamaModel) -> None:
    engine = make_engine(model, pages=20)
    full = ask(engine, "full", prompt(60), 20)
    run(engine, full)
    assert full.tokens == alone(model, prompt(60), 20)


def test_live_ids_are_unique_and_the_queue_is_bounded(model: LlamaModel) -> None:
    engine = make_engine(model, pages=20, max_running=1, max_waiting=1)
    first = ask(engine, "a", prompt(3), 1)
    with pytest.raises(RequestError, match="live"):
        ask(engine, "a", prompt(3), 1)
    ask(engine, "b", prompt(3), 1)
    with pytest.raises(RequestError, match="too many"):
        ask(engine, "c", prompt(3), 1)
    run(engine, first)
    ask(engine, "a", prompt(3), 1)


def test_the_load_adds_up(model: LlamaModel) -> None:
    engine = make_engine(model, pages=20, max_running=1)
    assert engine.load().total_tokens == 80
    first, second = ask(engine, "a", prompt(9), 3), ask(engine, "b", prompt(9), 3)
    before = engine.load()
    assert (before.running, before.waiting, before.waiting_uncached_tokens) == (0, 2, 18)
    engine.step()
    during = engine.load()
    assert (during.running, during.waiting, during.used_tokens) == (1, 1, 12)
    run(engine, first, second)
    after = engine.load()
    assert (after.running, after.waiting, after.used_tokens) == (0, 0, 0)
    assert (after.requests, after.finished, after.generated_tokens) == (2, {"length": 2}, 6)
    assert (after.prompt_tokens, after.hit_tokens) == (18, (8, 0, 0, 0))


def test_the_thread_serves_and_stopping_it_aborts_what_is_left(model: LlamaModel) -> None:
    engine = make_engine(model, pages=40)
    ended, endless = threading.Event(), Answer()
    first: list[GenerationEvent] = []

    def sink(event: GenerationEvent) -> None:
        first.append(event)
        if len(first) == 5:
            ended.set()

    engine.start()
    engine.submit(GenerationRequest("first", tuple(prompt(5)), SamplingParams(3, 0.0)), sink)
    assert ended.wait(30)
    engine.submit(GenerationRequest("endless", tuple(prompt(5)), SamplingParams(100, 0.0)), endless.events.append)
    engine.stop()
    engine.stop()
    assert endless.reason in ("abort", "length")
    assert not engine.alive
    assert_nothing_held(engine)
    with pytest.raises(RequestError, match="stopping"):
        ask(engine, "late", prompt(3), 1)


def test_stopping_an_engine_that_never_ran_ends_what_was_queued(model: LlamaModel) -> None:
    engine: Engine = make_engine(model, pages=40)
    answer = ask(engine, "r", prompt(5), 3)
    engine.stop()
    assert answer.reason == "abort"


def test_pages_of_a_run_that_has_ended_go_before_older_ones_of_runs_that_have_not(model: LlamaModel) -> None:
    def hits(seed: int, *ended: str) -> int:
        """Of what the run with this seed has computed, when the room of one run was needed meanwhile."""
        engine = make_engine(model, pages=14)
        for number, session in enumerate(("old", "new")):
            run(engine, ask(engine, session, prompt(17, seed=number), 1, session=session))
        for session in ended:
            engine.close_session(session)
        run(engine, ask(engine, "other", prompt(25, seed=9), 1))
        again = ask(engine, "again", prompt(17, seed=seed), 1)
        run(engine, again)
        assert_nothing_held(engine)
        return again.hit_tokens[0]

    assert (hits(0), hits(1)) == (hits(0, "unknown"), hits(1, "unknown"))
    assert hits(0) < hits(1) == 16
    assert hits(1, "new") < hits(0, "new") == 16


def test_what_runs_share_stays_when_one_of_them_has_ended() -> None:
    pages = [bytes([number]) * 32 for number in range(6)]
    sessions = SessionPages(max_pages=9)
    sessions.used("a", pages[:3])
    sessions.used("b", [*pages[:2], pages[3]])
    sessions.used("a", pages[:5])
    assert sessions.close("a") == [pages[4], pages[2]]
    assert sessions.close("a") == []
    assert sessions.close("b") == [pages[3], pages[1], pages[0]]
    sessions.used("c", pages[:5])
    sessions.used("d", pages)  # more than there is room for: the older one is forgotten
    assert sessions.close("c") == []
    assert sessions.close("d") == pages[::-1]

"""Greedy output of the packaged model is that of transformers in float32, whatever was cached, promoted or recomputed.

One pass of transformers over prompt and output tells at every position which token its own greedy search takes there. A
step is excused where its two best logits are within 1e-3 (two orders of summation may then differ); excused steps are
counted and printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers

from engine_adapter.embedded.engine import Engine, EngineOptions
from engine_adapter.embedded.folders import resolve_model
from engine_adapter.embedded.model import LlamaModel
from engine_adapter.embedded.weights import load_model, weights_id
from kvstore.page import PageLayout, Tier
from kvstore.store import TieredStore
from kvstore.tiers.base import PageTier
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.engines import Answer, ask, assert_nothing_held, run

pytestmark = pytest.mark.model

PAGE_TOKENS = 16
OUTPUT_TOKENS = 18  # more than a page, so that every output crosses a page's end
NEAR_TIE = 1e-3
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 250)


@dataclass
class Judge:
    """Compares outputs with transformers, and counts."""

    reference: transformers.PreTrainedModel
    steps: int = 0
    excused: int = 0
    seen: dict[tuple[int, ...], set[tuple[int, ...]]] = field(default_factory=dict)

    @torch.inference_mode()
    def agree(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Raise ``AssertionError`` at the first token that transformers would not have taken."""
        if tuple(output) in self.seen.setdefault(tuple(prompt), set()):
            self.steps += len(output)
            return
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = self.reference(ids, logits_to_keep=len(output)).logits[0]
        best, chosen = logits.topk(2), logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        for position, token in enumerate(output):
            near = bool(best.values[position, 0] - best.values[position, 1] < NEAR_TIE)
            if token != int(best.indices[position, 0]):
                behind = float(best.values[position, 0] - chosen[position])
                assert behind < NEAR_TIE, f"token {position} after {len(prompt)} is {behind:.4f} behind the best"
            self.steps += 1
            self.excused += near
        self.seen[tuple(prompt)].add(tuple(output))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On busy cores two threads of one product mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("default")


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaModel:
    return load_model(folder, torch.float32)


@pytest.fixture(scope="module")
def layout(model: LlamaModel, folder: Path) -> PageLayout:
    return model.page_layout(weights_id(folder), PAGE_TOKENS)


@pytest.fixture(scope="module")
def judge(folder: Path) -> Iterator[Judge]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    judge = Judge(reference)
    yield judge
    print(f"\n{judge.steps} greedy steps agree with transformers, {judge.excused} of them near ties (< {NEAR_TIE})")


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    """Real prose: random tokens make flat, tied distributions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    return tokenizer(licence)["input_ids"]


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    """Prompts that end before, at and after page boundaries, from different places of the text."""
    return [text[37 * number : 37 * number + length] for number, length in enumerate(LENGTHS)]


def engine_on(model: LlamaModel, layout: PageLayout, lower: Sequence[PageTier] = (), **options: int) -> Engine:
    return Engine(model, TieredStore(DeviceTier(layout, pages=160), lower), EngineOptions(**options))


def answer_all(engine: Engine, prompts: Sequence[Sequence[int]], judge: Judge) -> list[Answer]:
    """Send all prompts at once and hold every output against transformers."""
    answers = [ask(engine, f"{number}", prompt, OUTPUT_TOKENS) for number, prompt in enumerate(prompts)]
    run(engine, *answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.reason == "length"
        judge.agree(prompt, answer.tokens)
    return answers


def reusable(prompt: Sequence[int]) -> int:
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def hits(answers: Sequence[Answer], tier: Tier) -> list[int]:
    return [answer.hit_tokens[tier] for answer in answers]


@pytest.mark.parametrize(("step_tokens", "mixed_tokens"), [(512, 128), (23, 7)])
def test_cold_then_cached_in_any_mix_of_chunks_and_batches(
    model: LlamaModel, layout: PageLayout, prompts: list[list[int]], judge: Judge, step_tokens: int, mixed_tokens: int
) -> None:
    engine = engine_on(model, layout, step_tokens=step_tokens, mixed_tokens=mixed_tokens)
    some = prompts if step_tokens > PAGE_TOKENS * 2 else prompts[1::2]
    cold = answer_all(engine, some, judge)
    assert not any(hits(cold, Tier.DEVICE))
    warm = answer_all(engine, some, judge)
    assert hits(warm, Tier.DEVICE) == [reusable(prompt) for prompt in some]
    assert_nothing_held(engine)


def test_one_at_a_time_is_what_the_batch_was(
    model: LlamaModel, layout: PageLayout, prompts: list[list[int]], judge: Judge
) -> None:
    engine = engine_on(model, layout)
    for prompt in prompts[::4]:
        answer_all(engine, [prompt], judge)


def test_the_next_step_of_a_conversation_hits_its_own_output(
    model: LlamaModel, layout: PageLayout, text: list[int], judge: Judge
) -> None:
    engine = engine_on(model, layout)
    prompt = text[:50]
    for turn in range(2):
        (answer,) = answer_all(engine, [prompt], judge)
        computed = (len(prompt) + OUTPUT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
        prompt = prompt + answer.tokens + text[200 + 13 * turn : 213 + 13 * turn]
        (probe,) = answer_all(engine, [prompt], judge)
        assert probe.hit_tokens[Tier.DEVICE] == computed


def test_promoted_pages_and_gaps_among_them(
    model: LlamaModel, layout: PageLayout, prompts: list[list[int]], judge: Judge, tmp_path: Path
) -> None:
    some = [prompt for prompt in prompts if len(prompt) in (17, 33, 64, 129)]
    wanted = [reusable(prompt) for prompt in some]
    host = HostTier(layout, capacity_bytes=64 * layout.page_bytes)
    disk = DiskTier(layout, tmp_path / "pages", capacity_bytes=64 * layout.page_bytes)
    first = engine_on(model, layout, [host, disk])
    answer_all(first, some, judge)
    assert_nothing_held(first)

    from_host = engine_on(model, layout, [host, disk])
    assert hits(answer_all(from_host, some, judge), Tier.HOST) == wanted

    host.clear()
    from_disk = engine_on(model, layout, [host, disk], step_tokens=48, mixed_tokens=16)
    assert hits(answer_all(from_disk, some, judge), Tier.DISK) == wanted

    lost = [key for number, (key, _) in enumerate(host.scan()) if number % 3 == 1]
    host.remove(lost)
    disk.remove(lost)
    with_gaps = engine_on(model, layout, [host, disk])
    warmed = answer_all(with_gaps, some[:2], judge)
    mixed = answer_all(with_gaps, some, judge)
    assert hits(mixed[:2], Tier.DEVICE) == wanted[:2]
    assert sum(map(sum, (answer.hit_tokens for answer in warmed + mixed[2:]))) < sum(wanted)
    assert any(hits(warmed + mixed[2:], Tier.HOST))
    for engine in (from_host, from_disk, with_gaps):
        assert_nothing_held(engine)


def test_generate_itself_gives_the_same(
    model: LlamaModel, layout: PageLayout, prompts: list[list[int]], judge: Judge
) -> None:
    engine = engine_on(model, layout)
    prompt = prompts[LENGTHS.index(33)]
    (answer,) = answer_all(engine, [prompt], judge)
    ids = torch.tensor([prompt])
    generated = judge.reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None
    )
    theirs = generated[0, len(prompt) :].tolist()
    if theirs != answer.tokens:  # only a near tie may part them, and what follows it is then another text
        judge.agree(prompt, theirs)

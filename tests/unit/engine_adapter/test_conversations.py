"""Conversations that grow, branch, are respelled, collide and are forgotten: always the ids of one rendered whole."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from engine_adapter import conversations as module
from engine_adapter.conversations import Anchor, Anchors
from engine_adapter.model_templates import TemplateChoice
from engine_adapter.prompt import EncodedPrompt, PromptEncoder
from engine_adapter.template import ChatTemplate, load_named

SIZES = (1, 4)


def tokenizer() -> Tokenizer:
    """One token a byte, and ChatML's two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def encoder_of(source: str | None = None, *, conversation_bytes: int = 1 << 24) -> PromptEncoder:
    template = load_named("chatml-tools", {}) if source is None else ChatTemplate(source, name="model")
    choice = TemplateChoice(template, template, is_own=source is not None, is_shaped=False)
    return PromptEncoder(tokenizer(), choice, memo_bytes=1 << 16, conversation_bytes=conversation_bytes)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Ends:
    """Tells messages' ends apart, as someone does who has compared the requests already."""

    def __init__(self) -> None:
        self._anchors: dict[str, dict[bytes, Anchor]] = {}

    def of(self, messages: list[dict[str, Any]]) -> Anchors:
        return [self._anchors.setdefault(json.dumps(messages[: end + 1]), {}) for end in range(len(messages))]


def ask(
    encoder: PromptEncoder, messages: list[dict[str, Any]], *, ends: Ends | None = None, seed: int = 1
) -> EncodedPrompt:
    anchors = ends.of(messages) if ends is not None else None
    sent = json.loads(json.dumps(messages))
    return encoder.encode_chat_hashed(sent, seed=seed, block_sizes=SIZES, anchors=anchors)


def assert_same(found: EncodedPrompt, wanted: EncodedPrompt) -> None:
    assert found.ids.tolist() == wanted.ids.tolist()
    assert len(found) == len(wanted)
    assert found.has_markers == wanted.has_markers
    for size in SIZES:
        assert found.hashes[size].tolist() == wanted.hashes[size].tolist()


TEXTS = st.sampled_from(["", "a", "b", " ", "\n", "äß", "日本", "<|im_end|>", "\U000f0000", "\U000f0001x", "a" * 40])
MESSAGES = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS)


@given(
    moves=st.lists(
        st.tuples(st.integers(0, 30), st.lists(MESSAGES, min_size=1, max_size=4), st.booleans(), st.integers(1, 2)),
        min_size=1,
        max_size=14,
    )
)
@settings(max_examples=120, deadline=None)
def test_any_order_of_growing_and_branching_gives_what_a_whole_rendering_gives(
    moves: list[tuple[int, list[dict[str, Any]], bool, int]],
) -> None:
    remembering, forgetful, ends = encoder_of(), encoder_of(conversation_bytes=0), Ends()
    seen: list[list[dict[str, Any]]] = [[user("s")]]
    for which, added, is_told, seed in moves:
        base = seen[which % len(seen)]
        messages = [*base[: 1 + which % (len(base) + 1)], *added]
        seen.append(messages)
        told = ask(remembering, messages, ends=ends if is_told else None, seed=seed)
        assert_same(told, ask(forgetful, messages, seed=seed))


LOOPS = {
    "last": "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}<|im_end|>{% endfor %}",
    "length": "{% for m in messages %}{{ loop.length }}{{ m.content }}<|im_end|>{% endfor %}",
    "revindex": "{% for m in messages %}{% if loop.revindex < 3 %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "neighbours": "{% for m in messages %}{{ (loop.previtem or m).role }}{{ m.content }}{{ (loop.nextitem or m).role }}"
    "<|im_end|>{% endfor %}",
    "nothing next": "{% for m in messages %}{% if loop.nextitem is undefined %}z{% endif %}{{ m.content }}<|im_end|>"
    "{% endfor %}",
    "end": "{% for m in messages %}{{ messages[-1].content }}<|im_end|>{% endfor %}",
    "count": "{% for m in messages %}{{ messages | length }}{{ m.content }}<|im_end|>{% endfor %}",
    "contains": "{% for m in messages %}{{ m == messages[loop.index0 + 1] }}{{ m.content }}<|im_end|>{% endfor %}",
    "json": "{% for m in messages %}{{ messages | tojson | length }}<|im_end|>{% endfor %}",
    "inner loop": "{% for m in messages %}{% for n in messages %}{{ n.role }}{% endfor %}<|im_end|>{% endfor %}",
    "slice": "{% set rest = messages[1:] %}{{ messages[0].content }}<|im_end|>"
    "{% for m in rest %}{{ loop.index0 }}{{ m.content }}<|im_end|>{% endfor %}",
    "reassigned": "{% set first = messages[0].content %}{% set messages = messages[1:] %}{{ first }}<|im_end|>"
    "{% for m in messages %}{{ first if loop.first }}{{ m.content }}<|im_end|>{% endfor %}{{ messages | length }}",
    "reversed": "{% for m in messages[::-1] %}{{ m.content }}<|im_end|>{% endfor %}",
    "cut off": "{% for m in messages[:-1] %}{{ m.content }}<|im_end|>{% endfor %}",
    "carried": "{% set ns = namespace(n=0, all='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.all = ns.all ~ m.role[0] %}{{ ns.n }}{{ m.content }}<|im_end|>{% endfor %}{{ ns.all }}{{ ns.n }}",
    "carried list": "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m.role] %}"
    "{{ m.content }}<|im_end|>{% endfor %}{{ ns.seen | join }}",
    "carried view": "{% set ns = namespace(v=none) %}{% for m in messages %}{% set ns.v = messages[loop.index0:] %}"
    "{{ m.content }}<|im_end|>{% endfor %}{{ ns.v | length }}",
    "history": "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ m.content if loop.index0 >= ns.last else m.content | upper }}<|im_end|>{% endfor %}",
    "two spaces": "{% set a = namespace(x=1) %}{% set b = a %}{% for m in messages %}{% set b.x = b.x + 1 %}"
    "{{ a.x }}{{ m.content }}<|im_end|>{% endfor %}",
    "epilogue": "{% set ns = namespace(x='e') %}{% set tail = messages[0].role %}"
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ ns.x }}{{ tail }}{{ messages | length }}",
    "macro": "{% set name = messages[0].content %}{% macro line(m) %}{{ name }}{{ messages | length }}{{ m.content }}"
    "{% endmacro %}{% for m in messages %}{{ line(m) }}<|im_end|>{% endfor %}",
    "break": "{% for m in messages %}{% if m.content == 'b' %}{% break %}{% endif %}{{ m.content }}<|im_end|>"
    "{% endfor %}{{ messages | length }}",
    "continue": "{% for m in messages %}{% if m.content == 'b' %}{% continue %}{% endif %}{{ m.content }}<|im_end|>"
    "{% endfor %}",
    "clock": "{% for m in messages %}{{ strftime_now('%Y')[:2] }}{{ m.content }}<|im_end|>{% endfor %}",
    "clock before": "{% set year = strftime_now('%Y')[:2] %}{% for m in messages %}{{ year }}{{ m.content }}<|im_end|>"
    "{% endfor %}",
    "cycle": "{% for m in messages %}{{ loop.cycle('x', 'y', 'z') }}{{ m.content }}<|im_end|>{% endfor %}",
    "changed": "{% for m in messages %}{{ loop.changed(m.role) }}{{ m.content }}<|im_end|>{% endfor %}",
    "filtered": "{% for m in messages if m.content %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}",
    "else": "{% for m in messages %}{{ m.content }}<|im_end|>{% else %}none{% endfor %}",
    "no loop": "{{ messages | map(attribute='content') | join('<|im_end|>') }}",
    "selected": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{{ users | length }}{{ m.content }}<|im_end|>{% endfor %}",
    "no seal": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "shadowed": "{% for loop_a in messages %}{% for x in [1, 2] %}{{ loop.last }}{% endfor %}{{ loop_a.content }}"
    "{{ loop.index }}<|im_end|>{% endfor %}",
}
NEVER_SETTLED = {"length", "revindex", "end", "count", "json", "inner loop", "reversed", "cut off", "carried view"}
NEVER_SETTLED |= {"macro", "changed", "filtered", "else", "no loop", "clock"}
SETTLED_BUT_THE_LAST = {"last", "neighbours", "nothing next", "contains"}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS.keys())
def test_whatever_a_template_looks_at_a_longer_conversation_is_rendered_right(source: str) -> None:
    remembering, forgetful, chance = encoder_of(source), encoder_of(source, conversation_bytes=0), random.Random(4)
    for _ in range(12):
        messages = [user(chance.choice("abc"))]
        for _ in range(8):
            assert_same(ask(remembering, messages), ask(forgetful, messages))
            if chance.random() < 0.2:
                messages = messages[: chance.randint(1, len(messages))]
            role = chance.choice([user, answer])
            messages = [*messages, *(role(chance.choice(["a", "b", "cc", ""])) for _ in range(chance.randint(1, 3)))]


@pytest.mark.parametrize("name", LOOPS)
def test_as_much_is_settled_as_more_messages_cannot_change(name: str) -> None:
    template = encoder_of(LOOPS[name])._choice.template
    messages = [user("a"), answer("c"), answer("d")]
    state = template.resume(messages, None, None, add_generation_prompt=True).state
    settled = state.position if state is not None else 0
    assert settled == (0 if name in NEVER_SETTLED else 2 if name in SETTLED_BUT_THE_LAST else 3)


def test_equal_values_of_other_types_are_other_conversations() -> None:
    encoder = encoder_of("{% for m in messages %}{{ m.content }}{{ m.x }}<|im_end|>{% endfor %}")
    prompts = [encoder.encode_chat([{**user("a"), "x": x}, user("b")]) for x in (1, True, 1.0)]
    assert len({tuple(ids) for ids in prompts}) == 3


def test_tools_and_options_part_conversations() -> None:
    encoder, fresh = encoder_of(), encoder_of(conversation_bytes=0)
    messages, longer = [user("a"), answer("b"), user("c")], [user("a"), answer("b"), user("c"), answer("d"), user("e")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    turned = [{"type": "function", "function": {"name": "f", "parameters": {"a": 2, "b": 1}}}]
    for offered in (None, tools, turned):
        encoder.encode_chat(messages, offered)
        assert encoder.encode_chat(longer, offered) == fresh.encode_chat(longer, offered)
    assert encoder.conversation_stats().conversations == 3


def test_the_memo_stays_within_its_bytes_and_forgets_the_oldest() -> None:
    encoder = encoder_of(conversation_bytes=100_000)
    for number in range(60):
        chat = [user(f"{number} " * 200)]
        ask(encoder, chat)
        ask(encoder, [*chat, answer("x"), user("y")])
        stats = encoder.conversation_stats()
        assert stats.used_bytes <= 100_000
    assert 2 < stats.conversations < 60
    memo = encoder._conversations
    assert len(memo._slots) == stats.conversations
    assert sum(slot.used_bytes for slot in memo._slots) == stats.used_bytes
    assert {slot for found in memo._points.values() for slot, _ in found} <= set(memo._slots)
    before = stats.resumed
    ask(encoder, [user("59 " * 200), answer("x"), user("y"), answer("z")])
    assert encoder.conversation_stats().resumed == before + 1
    ask(encoder, [user("0 " * 200), answer("x"), user("y"), answer("z")])
    assert encoder.conversation_stats().resumed == before + 1


def test_a_conversation_keeps_a_bounded_number_of_points() -> None:
    encoder = encoder_of()
    messages = [user("start")]
    for number in range(3 * module.MAX_POINTS):
        messages = [*messages, answer(str(number)), user("go on")]
        ask(encoder, messages)
    memo = encoder._conversations
    assert len(memo._slots) == 1
    (slot,) = memo._slots
    assert slot.conversation is not None
    assert len(slot.conversation.points) == len(slot.keys) == len(memo._points) == module.MAX_POINTS
    assert encoder.conversation_stats().fresh == 1


def test_digests_only_say_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest that is always the same, conversations of equal lengths are still told apart."""
    monkeypatch.setattr(module.xxhash, "xxh3_64_intdigest", lambda data: 7)
    encoder, forgetful = encoder_of(), encoder_of(conversation_bytes=0)
    openings = [f"task {number:03}" for number in range(20)]
    chats = [[user(opening), answer("same"), user("same")] for opening in openings]
    for _ in range(3):
        for number, chat in enumerate(chats):
            assert_same(ask(encoder, chat), ask(forgetful, chat))
            chats[number] = [*chat, answer("more"), user("same")]
    stats = encoder.conversation_stats()
    assert (stats.conversations, stats.fresh, stats.resumed) == (20, 20, 40)


def test_a_told_conversation_goes_on_and_branches_without_being_read_again() -> None:
    encoder, forgetful, ends = encoder_of(), encoder_of(conversation_bytes=0), Ends()
    messages = [user("a"), answer("b"), user("c")]
    ask(encoder, messages, ends=ends)
    assert encoder.conversation_stats().fresh == 1
    for other in range(5):  # an answer to another last message, and what follows it
        again = [*messages[:-1], user(f"c{other}")]
        assert encoder.goes_on(ends.of(again))
        assert_same(ask(encoder, again, ends=ends), ask(forgetful, again))
        longer = [*again, answer("d"), user("e")]
        assert_same(ask(encoder, longer, ends=ends), ask(forgetful, longer))
    stats = encoder.conversation_stats()
    assert (stats.fresh, stats.resumed) == (1, 11)


def test_what_anchors_hold_is_forgotten_with_the_conversation() -> None:
    encoder, forgetful, ends = encoder_of(conversation_bytes=60_000), encoder_of(conversation_bytes=0), Ends()
    first = [user("a" * 500), answer("b"), user("c")]
    ask(encoder, first, ends=ends)
    for number in range(40):
        ask(encoder, [user(f"{number} " * 300), answer("b"), user("c")], ends=ends)
        assert encoder.conversation_stats().used_bytes <= 60_000
    assert not encoder.goes_on(ends.of(first))
    assert_same(ask(encoder, first, ends=ends), ask(forgetful, first))
    slots = {anchor.slot for place in ends.of(first) for anchor in place.values()}
    assert sum(slot.ids.nbytes for slot in slots if slot.conversation is None) == 0


def test_another_models_anchors_are_nobodys() -> None:
    one, other, ends = encoder_of(), encoder_of("{% for m in messages %}{{ m.content }}{% endfor %}"), Ends()
    messages = [user("a"), answer("b"), user("c")]
    ask(one, messages, ends=ends)
    assert not other.goes_on(ends.of(messages))
    assert ask(other, messages, ends=ends).ids.tolist() == ask(other, messages).ids.tolist()


def test_many_threads_on_one_conversation_get_what_one_gets() -> None:
    encoder, forgetful, ends = encoder_of(), encoder_of(conversation_bytes=0), Ends()
    stem = [user("a" * 300)]
    chats = [[*stem, *(m for step in range(n) for m in (answer(f"{step}"), user(f"u{step % 3}")))] for n in range(12)]
    wanted = [ask(forgetful, chat) for chat in chats]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(60):
                number = chance.randrange(len(chats))
                told = ends if chance.random() < 0.5 else None
                assert_same(ask(encoder, chats[number], ends=told), wanted[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures

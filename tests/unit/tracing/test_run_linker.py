from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.samples.agent_runs import RunShape, agent_run
from tracing.messages import MessageChain, message_chain, new_tool_result_ids, tool_result_ids
from tracing.record import RunLink
from tracing.run_memory import MemoryOptions
from tracing.runs import LinkMethod, RunEvidence, RunLinker

Message = dict[str, object]
SYSTEM: Message = {"role": "system", "content": "You are careful."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*ids: str) -> Message:
    functions = [{"id": id_, "type": "function", "function": {"name": "look", "arguments": "{}"}} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def result(id_: str) -> Message:
    return {"role": "tool", "tool_call_id": id_, "content": f"result of {id_}"}


class Gateway:
    """The linker as the gateway drives it, for one key."""

    def __init__(self, options: MemoryOptions | None = None, key_id: str = "key-1") -> None:
        self.linker = RunLinker(options)
        self.key_id = key_id
        self.now_ns = 10**18
        self.requests = 0

    def ask(self, messages: Sequence[Message], **explicit: str) -> tuple[RunLink, str]:
        self.requests += 1
        self.now_ns += 1
        request_id = f"r{self.requests}"
        evidence = RunEvidence(
            self.key_id,
            request_id,
            self.now_ns,
            tool_result_ids=tool_result_ids(messages),
            message_hashes=message_chain(messages),
            **explicit,
        )
        return self.linker.link(evidence), request_id

    def step(self, messages: Sequence[Message], answer: Message | None, **explicit: str) -> RunLink:
        response_id = explicit.pop("response_id", None)
        link, request_id = self.ask(messages, **explicit)
        self.answer(link, request_id, messages, answer, response_id)
        self.linker.check()
        return link

    def answer(
        self,
        link: RunLink,
        request_id: str,
        messages: Sequence[Message],
        answer: Message | None,
        response_id: str | None = None,
    ) -> None:
        if answer is None:
            self.linker.unanswered(link, request_id, key_id=self.key_id)
            return
        ids = [call["id"] for call in answer.get("tool_calls", [])]
        chain = message_chain([*messages, answer])
        self.linker.answered(link, request_id, ids, chain, key_id=self.key_id, response_id=response_id)


def test_the_explicit_header_names_the_run_and_steps_count_from_one() -> None:
    gateway = Gateway()
    first = gateway.step([user("a")], says("x"), explicit_run_id="nightly")
    second = gateway.step([user("something else")], says("y"), explicit_run_id="nightly")
    assert (first.run_id, first.step, first.method, first.confidence) == ("nightly", 1, "header", 1.0)
    assert (second.run_id, second.step, second.previous_request_id) == ("nightly", 2, None)


def test_the_header_wins_over_tool_call_ids() -> None:
    gateway = Gateway()
    prompt = [user("a")]
    gateway.step(prompt, calls("call_aaaaaaaa"), explicit_run_id="one")
    link = gateway.step([*prompt, calls("call_aaaaaaaa"), result("call_aaaaaaaa")], says("x"), explicit_run_id="two")
    assert (link.run_id, link.step, link.method) == ("two", 1, "header")


def test_a_tool_call_id_finds_the_run_even_when_the_history_was_rewritten() -> None:
    gateway = Gateway()
    first = gateway.step([SYSTEM, user("a")], calls("call_aaaaaaaa"))
    rewritten = [user("summary of everything"), calls("call_aaaaaaaa"), result("call_aaaaaaaa")]
    second = gateway.step(rewritten, says("x"))
    assert (second.run_id, second.step, second.method) == (first.run_id, 2, LinkMethod.TOOL_CALL)
    assert second.previous_request_id == "r1"
    assert 0.9 < second.confidence < 1.0


def test_the_response_id_finds_the_run_without_any_message() -> None:
    gateway = Gateway()
    first = gateway.step([user("a")], says("x"), response_id="resp_1")
    second = gateway.step([user("only the new turn")], says("y"), previous_response_id="resp_1")
    assert (second.run_id, second.method) == (first.run_id, LinkMethod.PREVIOUS_RESPONSE)


def test_the_message_chain_finds_the_run_without_any_id() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    first = gateway.step(prompt, says("hello there"))
    second = gateway.step([*prompt, says("hello there"), user("b")], says("y"))
    assert (second.run_id, second.step, second.method) == (first.run_id, 2, LinkMethod.MESSAGE_CHAIN)


def test_cache_markers_reasoning_and_spelling_do_not_break_the_chain() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    answer = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "let me see",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x":1,"y":2}'}}],
    }
    first = gateway.step(prompt, answer)
    echoed = {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{ "y": 2, "x": 1 }'}}
        ],
    }
    marked_user = {
        "role": "user",
        "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    }
    marked_system = {**SYSTEM, "cache_control": {"type": "ephemeral"}}
    second = gateway.step([marked_system, marked_user, echoed, user("and?")], says("y"))
    assert (second.run_id, second.method) == (first.run_id, LinkMethod.MESSAGE_CHAIN)


def test_a_cache_marker_on_any_kind_of_part_is_ignored() -> None:
    gateway = Gateway()
    image: Message = {"type": "image_url", "image_url": {"url": "data:,x"}}
    tool: Message = {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "r"}]}
    marker = {"cache_control": {"type": "ephemeral"}}
    marked_tool = {**tool, **marker, "content": [{"type": "text", "text": "r", **marker}]}
    first = gateway.step([{"role": "user", "content": [image, tool]}], says("x"))
    second = gateway.step(
        [{"role": "user", "content": [{**image, **marker}, marked_tool]}, says("x"), user("b")], says("y")
    )
    other = {**image, "image_url": {"url": "data:,y"}}
    third = gateway.step([{"role": "user", "content": [other, tool]}, says("x"), user("b")], says("y"))
    assert (second.run_id, second.method) == (first.run_id, LinkMethod.MESSAGE_CHAIN)
    assert third.run_id != first.run_id


def test_twins_stay_two_runs_from_the_first_prompt_to_the_last() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    one = gateway.step(prompt, calls("call_aaaaaaaa"))
    two = gateway.step(prompt, calls("call_bbbbbbbb"))
    assert one.run_id != two.run_id
    two_again = gateway.step([*prompt, calls("call_bbbbbbbb"), result("call_bbbbbbbb")], says("x"))
    one_again = gateway.step([*prompt, calls("call_aaaaaaaa"), result("call_aaaaaaaa")], says("x"))
    assert (one_again.run_id, two_again.run_id) == (one.run_id, two.run_id)
    assert (one_again.step, two_again.step) == (2, 2)


def test_twins_with_equal_answers_get_one_continuation_each() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    runs = {gateway.step(prompt, says("same")).run_id for _ in range(3)}
    assert len(runs) == 3
    continued = [gateway.step([*prompt, says("same"), user("b")], says("same again")) for _ in range(3)]
    assert {link.run_id for link in continued} == runs
    assert [link.step for link in continued] == [2, 2, 2]
    assert continued[0].confidence == 0.5  # which of the twins went on can't be known


def test_numbered_tool_call_ids_are_told_apart_by_the_conversation() -> None:
    gateway = Gateway()
    one = gateway.step([user("a")], calls("call_0"))
    two = gateway.step([user("b")], calls("call_0"))
    one_again = gateway.step([user("a"), calls("call_0"), result("call_0")], calls("call_1"))
    two_again = gateway.step([user("b"), calls("call_0"), result("call_0")], calls("call_1"))
    assert (one_again.run_id, two_again.run_id) == (one.run_id, two.run_id)


def test_a_client_that_gives_calls_ids_of_its_own_stays_one_run_and_its_twin_another() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    told = [gateway.step(prompt, calls(f"call_{twin}aaaaaaa")) for twin in "bc"]
    histories = [[*prompt, calls(f"own-{twin}-x"), result(f"own-{twin}-x")] for twin in "bc"]
    second = [gateway.step(said, calls(f"call_{twin}ddddddd")) for twin, said in zip("bc", histories, strict=True)]
    third = [gateway.step([*said, calls("own-y"), result("own-y")], says("done")) for said in histories]
    assert [link.run_id for link in second] == [link.run_id for link in told] == [link.run_id for link in third]
    assert [link.step for link in third] == [3, 3]
    assert {link.method for link in second + third} == {LinkMethod.MESSAGE_CHAIN}
    stranger = gateway.step([*prompt, {**calls("own-z"), "content": "but"}, result("own-z")], says("x"))
    assert stranger.run_id not in {link.run_id for link in told}


def test_a_numbered_id_of_a_finished_conversation_is_no_evidence_for_another() -> None:
    gateway = Gateway()
    one = gateway.step([user("a")], calls("call_0"))
    gateway.step([user("a"), calls("call_0"), result("call_0")], says("done"))
    stranger = gateway.step([user("b"), calls("call_0"), result("call_0")], says("x"))
    assert stranger.run_id != one.run_id
    assert stranger.confidence == 0.5  # it quotes an answer that nobody here gave


def test_an_auxiliary_call_on_the_same_history_does_not_poison_the_chain() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    history = [*prompt, says("an answer")]
    first = gateway.step(prompt, says("an answer"))
    title = gateway.step([*history, user("Give this chat a title")], says("A chat"))
    main = gateway.step([*history, user("b")], says("more"))
    after = gateway.step([*history, user("b"), says("more"), user("c")], says("x"))
    assert {title.run_id, main.run_id, after.run_id} == {first.run_id}
    assert (main.previous_request_id, after.previous_request_id) == ("r1", "r3")
    assert [first.step, title.step, main.step, after.step] == [1, 2, 3, 4]


def test_an_auxiliary_call_under_the_same_header_leaves_the_previous_step_right() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    gateway.step(prompt, calls("call_aaaaaaaa"), explicit_run_id="s")
    gateway.step([user("title for: a")], says("A"), explicit_run_id="s")
    main = gateway.step(
        [*prompt, calls("call_aaaaaaaa"), result("call_aaaaaaaa")], says("x"), explicit_run_id="s"
    )  # fmt: skip
    assert (main.step, main.previous_request_id) == (3, "r1")


def test_a_retry_after_a_failure_is_the_next_step_of_the_same_run() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    failed = gateway.step(prompt, None)
    retried = gateway.step(prompt, says("x"))
    twin = gateway.step(prompt, says("x"))
    assert (retried.run_id, retried.step) == (failed.run_id, 2)
    assert twin.run_id != failed.run_id


def test_an_answer_that_nobody_read_is_continued_by_its_prompt_once() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    link, request_id = gateway.ask(prompt)
    gateway.linker.answered(link, request_id, key_id="key-1")
    second = gateway.step([*prompt, says("whatever"), user("b")], says("y"))
    third = gateway.step([*prompt, says("whatever else"), user("b")], says("y"))
    assert second.run_id == link.run_id
    assert third.run_id != link.run_id


def test_a_known_answer_is_not_continued_by_another_answer() -> None:
    gateway = Gateway()
    prompt = [SYSTEM, user("a")]
    first = gateway.step(prompt, says("mine"))
    other = gateway.step([*prompt, says("not mine"), user("b")], says("y"))
    assert other.run_id != first.run_id


def test_two_keys_never_share_a_run() -> None:
    gateway = Gateway()
    prompt = [user("a")]
    first = gateway.step(prompt, calls("call_aaaaaaaa"))
    gateway.key_id = "key-2"
    stranger = gateway.step([*prompt, calls("call_aaaaaaaa"), result("call_aaaaaaaa")], says("x"))
    assert stranger.run_id != first.run_id


def test_out_of_order_answers_still_link() -> None:
    gateway = Gateway()
    one, one_id = gateway.ask([user("a")])
    two, two_id = gateway.ask([user("b")])
    gateway.answer(two, two_id, [user("b")], calls("call_bbbbbbbb"))
    gateway.answer(one, one_id, [user("a")], calls("call_aaaaaaaa"))
    again = gateway.step([user("a"), calls("call_aaaaaaaa"), result("call_aaaaaaaa")], says("x"))
    assert again.run_id == one.run_id


def test_a_run_idle_for_longer_than_the_window_is_forgotten() -> None:
    gateway = Gateway(MemoryOptions(window_ns=1000))
    prompt = [user("a")]
    first = gateway.step(prompt, says("x"))
    gateway.now_ns += 2000
    late = gateway.step([*prompt, says("x"), user("b")], says("y"))
    assert late.run_id != first.run_id
    assert late.confidence == 0.5


@pytest.mark.parametrize(
    "options",
    [
        MemoryOptions(max_runs_per_key=5),
        MemoryOptions(max_entries=50),
        MemoryOptions(max_entries_per_run=6),
        MemoryOptions(max_keys=2),
    ],
)
def test_memory_is_bounded_whatever_arrives(options: MemoryOptions) -> None:
    gateway = Gateway(options)
    for number in range(200):
        gateway.key_id = f"key-{number % 7}"
        prompt = [user(f"a{number % 40}")]
        gateway.step([*prompt, calls("call_aaaaaaaa"), result("call_aaaaaaaa")], calls(f"call_{number:08x}"))
    gateway.linker.check()


def test_runs_are_taken_up_again_from_the_store_after_a_restart() -> None:
    records = agent_run(RunShape(steps=4))
    linker = RunLinker()
    linker.restore(records[:3])
    evidence = RunEvidence(
        records[0].identity.key_id, "after", records[2].stamps.closed_ns, tool_result_ids=(records[2].tool_calls[0].id,)
    )
    link = linker.link(evidence)
    assert (link.run_id, link.step, link.previous_request_id) == (records[0].link.run_id, 4, records[2].request_id)
    linker.check()


def test_arguments_of_any_depth_have_a_chain() -> None:
    def chain(arguments: str) -> MessageChain:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return message_chain([{"role": "assistant", "tool_calls": [call]}])

    assert chain("[" * 100_000) != chain("[" * 100_001)


@pytest.mark.parametrize("as_parts", [True, False])
def test_calls_that_come_back_as_text_are_found_by_their_ids(as_parts: bool) -> None:
    quoted = "I look.\nCalling tools:\n" + str(
        [
            {"id": name, "type": "function", "function": {"name": "look", "arguments": {"q": "{'id': 'no'"}}}
            for name in ("call_1a", "call_2b")
        ]
    )
    content: object = [{"type": "text", "text": quoted}] if as_parts else quoted
    history = [user("go"), {"role": "assistant", "content": content}, user("Observation:\nfound")]
    assert tool_result_ids(history) == ("call_1a", "call_2b")
    assert new_tool_result_ids(history) == ()
    assert tool_result_ids([user(quoted), says("Calling tools:\nnone")]) == ()
    assert _step_after(history, "call_2b") == 2


def _step_after(history: list[Message], call_id: str) -> int:
    linker = RunLinker()
    first = linker.link(RunEvidence("k", "r1", 1, message_hashes=message_chain(history[:1])))
    linker.answered(first, "r1", [call_id], message_chain([says("x")], message_chain(history[:1])), key_id="k")
    evidence = RunEvidence(
        "k", "r2", 2, tool_result_ids=tool_result_ids(history), message_hashes=message_chain(history)
    )
    return linker.link(evidence).step


def test_a_session_that_the_client_names_joins_what_nothing_else_does() -> None:
    gateway = Gateway()
    first = gateway.step([SYSTEM, user("task")], calls("a"), session_id="s1")
    title = gateway.step([user("a title for: task")], says("A task"), session_id="s1")
    main = gateway.step([SYSTEM, user("task"), calls("a"), result("a")], says("done"), session_id="s1")
    rewritten = gateway.step([SYSTEM, user("summary of it all")], says("go on"), session_id="s1")
    other = gateway.step([SYSTEM, user("task")], calls("a"), session_id="s2")
    assert {title.run_id, main.run_id, rewritten.run_id} == {first.run_id}
    assert other.run_id != first.run_id
    assert [link.step for link in (first, title, main, rewritten)] == [1, 2, 3, 4]
    assert main.previous_request_id == "r1"
    assert title.method == LinkMethod.SESSION


def test_code_agents_quote_answers_with_calls_and_marks_that_the_model_never_wrote() -> None:
    gateway = Gateway()
    code = "I look.\n<code>\nprint(look(q='a'))\n"
    first = gateway.step([SYSTEM, user("task")], says(code))
    quoted = code + "</code>\nCalling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {}}]"
    second = gateway.step([SYSTEM, user("task"), says(quoted), user("Observation: b")], says("done"))
    assert (second.run_id, second.method) == (first.run_id, LinkMethod.MESSAGE_CHAIN)
    assert message_chain([user(quoted)]) != message_chain([user(code)])


@pytest.mark.parametrize("header", [{}, {"explicit_run_id": "mine"}], ids=["by the chain", "by a header"])
def test_a_step_whose_last_answer_is_reworded_follows_that_answer(header: dict[str, str]) -> None:
    gateway = Gateway()
    first = [SYSTEM, user("a")]
    gateway.step(first, says("one"), **header)
    second = [*first, says("one"), user("b")]
    before = gateway.step(second, says("two"), **header)
    link = gateway.step([*second, says("two, in other words"), user("c")], says("three"), **header)
    assert (link.run_id, link.step, link.previous_request_id) == (before.run_id, 3, "r2")


def test_a_call_of_the_api_before_there_were_tools_is_part_of_the_conversation() -> None:
    gateway, asked = Gateway(), [SYSTEM, user("hi")]
    called: Message = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"x": 1}'}}
    other: Message = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"x": 2}'}}
    first, twin = gateway.step(asked, called), gateway.step(asked, other)
    found: Message = {"role": "function", "name": "look", "content": "three"}
    assert gateway.step([*asked, called, found], says("3")).run_id == first.run_id
    assert gateway.step([*asked, other, found], says("4")).run_id == twin.run_id != first.run_id


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call", "shell_call", "computer_call"])
def test_the_calls_of_every_tool_that_responses_know_link_their_results(kind: str) -> None:
    gateway, asked = Gateway(), [user("hi")]
    link, request_id = gateway.ask(asked)
    gateway.linker.answered(link, request_id, ["c1"], message_chain(asked), key_id=gateway.key_id)
    called: Message = {"type": kind, "call_id": "c1", "name": "look", "input": "x"}
    rewritten = [
        user("what was before is told anew"),
        called,
        {"type": f"{kind}_output", "call_id": "c1", "output": "o"},
    ]
    assert new_tool_result_ids(rewritten) == ("c1",)
    assert gateway.step(rewritten, says("done")).run_id == link.run_id


def test_what_a_custom_tool_is_given_is_part_of_the_conversation() -> None:
    one, other = ({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": text} for text in "ab")
    assert message_chain([one]) != message_chain([other])
    assert [link.role for link in message_chain([one])] == ["assistant"]
    assert message_chain([one]) == message_chain([{**one, "call_id": "d", "id": "ctc_1", "status": "completed"}])


def test_items_of_kinds_that_nobody_knows_are_told_apart_by_all_that_they_say() -> None:
    chains = [message_chain([{"type": kind, "id": "i", "says": said}]) for kind in ("alien", "other") for said in "ab"]
    assert len(set(chains)) == 4

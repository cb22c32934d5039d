"""Runs within runs: sub-agents by the call that they begin with or by their session, traces, quoted answers, lanes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tracing.messages import message_chain, tool_result_ids
from tracing.record import RunLink
from tracing.runs import LinkMethod, RunEvidence, RunLinker
from tracing.sub_agents import TASK_TOOL, openings, tasks_of

Message = dict[str, object]
SYSTEM: Message = {"role": "system", "content": "You are careful."}
WORKER: Message = {"role": "system", "content": "You are a worker."}
LONG = "The archive holds seven items, of which the third was asked for; here is all that is known of it."


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*wanted: tuple[str, str, Mapping[str, object]]) -> Message:
    functions = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for id_, name, arguments in wanted
    ]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def result(id_: str, text: str = "r") -> Message:
    return {"role": "tool", "tool_call_id": id_, "content": text}


class Gateway:
    def __init__(self) -> None:
        self.linker, self.requests = RunLinker(), 0

    def ask(self, messages: Sequence[Message], **named: str) -> tuple[RunLink, str]:
        self.requests += 1
        request_id = f"r{self.requests}"
        evidence = RunEvidence(
            "k",
            request_id,
            10**18 + self.requests,
            tool_result_ids=tool_result_ids(messages),
            message_hashes=message_chain(messages),
            messages=messages,
            **named,
        )
        return self.linker.link(evidence), request_id

    def answer(self, link: RunLink, request_id: str, messages: Sequence[Message], answer: Message) -> None:
        ids = [call["id"] for call in answer.get("tool_calls") or []]
        chain = message_chain([*messages, answer])
        self.linker.answered(link, request_id, ids, chain, key_id="k", message=answer)
        self.linker.check()

    def step(self, messages: Sequence[Message], answer: Message, **named: str) -> RunLink:
        link, request_id = self.ask(messages, **named)
        self.answer(link, request_id, messages, answer)
        return link


def test_a_conversation_that_begins_with_an_open_call_is_its_child() -> None:
    gateway = Gateway()
    task = calls(("t1", "Task", {"description": "look", "prompt": "Find item 7."}))
    parent = gateway.step([SYSTEM, user("go")], task)
    told = user("<reminder>Be quick.</reminder>\n\nFind item 7.\n")  # programs put words of their own in front
    child = gateway.step([WORKER, told], says(LONG))
    again = gateway.step([WORKER, told, says(LONG), user("more")], says("no"))
    back = gateway.step([SYSTEM, user("go"), task, result("t1")], says("done"))
    late = gateway.step([WORKER, user("Find item 7.")], says("x"))
    assert (child.method, child.parent_run_id) == (LinkMethod.SUB_AGENT, parent.run_id)
    assert (child.parent_request_id, child.parent_call_id) == ("r1", "t1")
    assert child.run_id != parent.run_id
    assert (again.run_id, again.step, again.parent_run_id) == (child.run_id, 2, parent.run_id)
    assert back.run_id == parent.run_id
    assert late.parent_run_id is None  # its result is back: nobody waits for it any more


def test_an_exchange_that_nobody_had_stands_in_front_of_a_task() -> None:
    gateway = Gateway()
    task = calls(("t1", "agent", {"prompt": "Count the lines."}))
    parent = gateway.step([SYSTEM, user("go")], task)
    set_up = [WORKER, user("This is the folder: a, b."), says("Understood.")]
    told = [*set_up, user("Count the lines.")]
    other = gateway.step([*told, says("What?"), user("Count the words.")], says("6"))  # the task was said, but not last
    under_way = gateway.step([*set_up, calls(("?", "look", {})), result("?"), user("Count the lines.")], says("7"))
    child = gateway.step(told, says(LONG))
    again = gateway.step([*told, says(LONG), user("more")], says("no"))
    assert (other.parent_run_id, under_way.parent_run_id) == (None, None)
    assert (child.method, child.parent_run_id, child.parent_call_id) == (LinkMethod.SUB_AGENT, parent.run_id, "t1")
    assert (again.run_id, again.step) == (child.run_id, 2)


def test_each_of_several_equal_calls_has_one_child_and_twins_keep_their_own() -> None:
    gateway = Gateway()
    first = calls(("a", "agent", {"task": "same"}), ("b", "agent", {"task": "same"}))
    second = calls(("c", "agent", {"task": "same"}))
    one = gateway.step([SYSTEM, user("one")], first)
    two = gateway.step([SYSTEM, user("two")], second)
    children = [gateway.step([WORKER, user("same")], says(f"{n}")) for n in range(4)]
    assert [child.parent_call_id for child in children] == ["a", "b", "c", None]
    assert [child.parent_run_id for child in children] == [one.run_id, one.run_id, two.run_id, None]
    assert len({child.run_id for child in children}) == 4


def test_a_session_says_whose_agent_it_is() -> None:
    gateway = Gateway()
    main = gateway.step([SYSTEM, user("go")], calls(("t", "task", {"prompt": "x"})), session_id="s1")
    child = gateway.step([WORKER, user("x")], says("y"), session_id="s2", parent_session_id="s1")
    further = gateway.step(
        [WORKER, user("x"), says("y"), user("z")], says("y"), session_id="s2", parent_session_id="s1"
    )
    assert (child.parent_run_id, child.parent_call_id) == (main.run_id, "t")
    assert (further.run_id, further.parent_run_id) == (child.run_id, main.run_id)


def test_a_child_in_its_parents_session_stays_itself() -> None:
    gateway = Gateway()
    task = calls(("t", "spawn_agent", {"message": "Look at this."}))
    main = gateway.step([SYSTEM, user("go")], task, session_id="s")
    look = calls(("u", "look", {}))
    child = gateway.step([WORKER, user("Look at this.")], look, session_id="s")
    child_2 = gateway.step([WORKER, user("Look at this."), look, result("u")], says("d"), session_id="s")
    main_2 = gateway.step([SYSTEM, user("go"), task, result("t")], says("done"), session_id="s")
    title = gateway.step([user("A title, please")], says("T"), session_id="s")
    assert child.run_id == child_2.run_id != main.run_id == main_2.run_id == title.run_id
    assert title.previous_request_id is None


def test_a_trace_joins_what_nothing_else_does_and_parts_nothing() -> None:
    gateway = Gateway()
    plan = gateway.step([user("plan")], says("a plan"), trace_id="t1")
    act = gateway.step([SYSTEM, user("act")], says(LONG), trace_id="t1")
    other = gateway.step([user("plan")], says("a plan"), trace_id="t2")
    turn = gateway.step([SYSTEM, user("act"), says(LONG), user("and now?")], says("so"), trace_id="t3")
    assert (act.run_id, act.method, act.previous_request_id) == (plan.run_id, LinkMethod.TRACEPARENT, None)
    assert other.run_id != plan.run_id
    assert (turn.run_id, turn.method) == (plan.run_id, LinkMethod.MESSAGE_CHAIN)  # a new trace goes on with a run


def test_an_answer_that_is_quoted_whole_is_known_behind_another_system_prompt() -> None:
    gateway = Gateway()
    first = gateway.step([{"role": "system", "content": "It is 8:15."}, user("go")], says(LONG))
    second = gateway.step(
        [{"role": "system", "content": "It is 8:16."}, user("go"), says(LONG), user("on")], says("short")
    )
    third = gateway.step([{"role": "system", "content": "x"}, user("go"), says("short"), user("?")], says("b"))
    assert (second.run_id, second.method, second.previous_request_id) == (
        first.run_id,
        LinkMethod.QUOTED_ANSWER,
        "r1",
    )
    assert third.run_id != first.run_id  # anybody may have said so little


def test_a_call_that_an_agent_reads_in_a_text_and_writes_anew_is_still_its_answer() -> None:
    gateway = Gateway()
    words = "Thought: the third shelf has not been searched, so I look there.\nAction: look\nAction Input: "
    asked = [SYSTEM, user("find it")]
    first = gateway.step(asked, says(words + '{"shelf": 3, "row": "b"}'))
    second = gateway.step([*asked, says(words + "{'shelf': 3, 'row': 'b'}"), user("Observation: nothing")], says("no"))
    other = gateway.step([*asked, says(words + "{'shelf': 4, 'row': 'b'}"), user("Observation: nothing")], says("no"))
    assert (second.run_id, second.method) == (first.run_id, LinkMethod.QUOTED_ANSWER)
    assert other.run_id != first.run_id


def test_a_run_that_was_named_follows_what_began_alike() -> None:
    gateway = Gateway()
    named = {"explicit_run_id": "n"}
    gateway.step([SYSTEM, user("go")], says("a"), **named)
    gateway.step([WORKER, user("title")], says("b"), **named)
    rewritten = gateway.step([SYSTEM, user("a summary of it")], says("c"), **named)
    edited = gateway.step([user("odd"), says("never said by us"), user("?")], says("d"), **named)
    assert rewritten.previous_request_id == "r1"
    assert edited.previous_request_id == "r3"


def test_names_of_tools_that_begin_sub_agents() -> None:
    for name in (
        "Task",
        "agent",
        "Agent",
        "sub_agent",
        "spawn_worker",
        "delegate_to_x",
        "dispatch-agent",
        "run_subagent",
    ):
        assert TASK_TOOL.search(name), name
    for name in ("lookup", "bash", "agenda", "multitasking", "read_file"):
        assert not TASK_TOOL.search(name), name
    assert tasks_of(calls(("a", "look", {"prompt": "x"}))) == {}
    odd = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "agent", "arguments": "no json"}}, 1]}
    assert tasks_of(odd) == {}
    assert list(openings([{"role": "user", "content": [{"type": "image"}, 3]}], [5])) == []


class Told:
    """Hears of steps and ends."""

    def __init__(self) -> None:
        self.steps, self.ended = list[str](), list[str]()

    def linked(self, key_id: str, run_id: str) -> None:
        self.steps.append(run_id)

    def call_answered(self, key_id: str, run_id: str) -> None:
        self.ended.append(run_id)


def test_a_sub_agents_run_has_ended_when_its_call_is_answered() -> None:
    gateway, told = Gateway(), Told()
    gateway.linker.tell(told)
    two = calls(("t1", "Task", {"prompt": "one"}), ("t2", "Task", {"prompt": "two"}))
    parent = gateway.step([SYSTEM, user("go")], two)
    first, second = (gateway.step([WORKER, user(text)], says(text)) for text in ("one", "two"))
    gateway.step([SYSTEM, user("a title for: go")], says("Going"))
    assert not told.ended
    results = [SYSTEM, user("go"), two, result("t1"), result("t2")]
    gateway.step(results, says("done"))
    assert told.ended == [first.run_id, second.run_id]
    gateway.step([*results, says("done"), user("more")], says("again"))  # the results are in every prompt from now on
    assert told.ended == [first.run_id, second.run_id]
    assert told.steps.count(parent.run_id) >= 3


def test_the_result_of_a_call_that_is_only_numbered_ends_nothing() -> None:
    gateway, told = Gateway(), Told()
    gateway.linker.tell(told)
    task = calls(("call_0", "Task", {"prompt": "look"}))
    gateway.step([SYSTEM, user("go")], task)
    child = gateway.step([WORKER, user("look")], says("seen"))
    assert child.parent_call_id == "call_0"
    gateway.step([SYSTEM, user("go"), task, result("call_0")], says("done"))
    assert not told.ended

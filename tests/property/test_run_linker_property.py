"""Random interleavings of append-only runs are reconstructed exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tracing.messages import message_chain, tool_result_ids
from tracing.record import RunLink
from tracing.runs import RunEvidence, RunLinker

Message = dict[str, object]


@dataclass
class Conversation:
    """One agent: it appends what it is answered and the tool's result, and asks again."""

    number: int
    topic: int
    messages: list[Message] = field(default_factory=list)
    pending: tuple[RunLink, str] | None = None
    links: list[tuple[RunLink, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"topic {self.topic}"}]


class World:
    def __init__(self, conversations: list[Conversation], tool_ids: str, auxiliary: bool = False) -> None:
        self.linker = RunLinker()
        self.conversations = conversations
        self.tool_ids = tool_ids
        self.auxiliary = auxiliary
        self.requests = 0

    def advance(self, conversation: Conversation) -> None:
        """Send the conversation's next request, or deliver the answer to the one on its way."""
        if conversation.pending is None:
            conversation.pending = self.send(conversation.messages)
            conversation.links.append(conversation.pending)
            return
        link, request_id = conversation.pending
        conversation.pending = None
        step = len(conversation.links)
        ids = {
            "unique": [f"call_{conversation.number:04x}{step:04x}"],
            "numbered": [f"call_{step}"],
            "none": [],
        }[self.tool_ids]
        answer: Message = {"role": "assistant", "content": f"answer {conversation.number} {step}"}
        if ids:
            answer["tool_calls"] = [{"id": ids[0], "function": {"name": "f", "arguments": "{}"}}]
        follow: Message = {"role": "user", "content": "go on"}
        if ids:
            follow = {"role": "tool", "tool_call_id": ids[0], "content": "r"}
        conversation.messages.append(answer)
        self.linker.answered(link, request_id, ids, message_chain(conversation.messages), key_id="k")
        if self.auxiliary and step % 2:
            self.send([*conversation.messages, {"role": "user", "content": "give it a title"}])
        conversation.messages.append(follow)

    def send(self, messages: list[Message]) -> tuple[RunLink, str]:
        self.requests += 1
        request_id = f"r{self.requests}"
        evidence = RunEvidence(
            "k",
            request_id,
            10**18 + self.requests,
            tool_result_ids=tool_result_ids(messages),
            message_hashes=message_chain(messages),
        )
        return self.linker.link(evidence), request_id


interleavings = st.lists(st.integers(0, 4), min_size=1, max_size=80)


def play(world: World, schedule: list[int]) -> None:
    for turn in schedule:
        world.advance(world.conversations[turn % len(world.conversations)])
    world.linker.check()
    runs = [{link.run_id for link, _ in each.links} for each in world.conversations if each.links]
    assert all(len(ids) == 1 for ids in runs), "a run was split"
    assert len(set.union(*runs)) == len(runs), "runs were merged"
    for each in world.conversations:
        previous = [None, *(request_id for _, request_id in each.links)]
        assert [link.previous_request_id for link, _ in each.links] == previous[: len(each.links)]


@settings(deadline=None)
@given(interleavings, st.lists(st.integers(0, 1), min_size=1, max_size=5))
def test_runs_with_unique_tool_ids_are_exact_even_as_twins(schedule: list[int], topics: list[int]) -> None:
    world = World([Conversation(number, topic) for number, topic in enumerate(topics)], "unique")
    play(world, schedule)
    for each in world.conversations:
        assert [link.step for link, _ in each.links] == list(range(1, len(each.links) + 1))


@settings(deadline=None)
@given(interleavings, st.lists(st.integers(0, 1), min_size=1, max_size=5), st.sampled_from(["numbered", "none"]))
def test_runs_without_unique_ids_are_exact_by_their_answers(
    schedule: list[int], topics: list[int], tool_ids: str
) -> None:
    play(World([Conversation(number, topic) for number, topic in enumerate(topics)], tool_ids), schedule)


@settings(deadline=None)
@given(interleavings, st.lists(st.integers(0, 1), min_size=1, max_size=4), st.sampled_from(["unique", "none"]))
def test_auxiliary_calls_between_the_steps_change_nothing(
    schedule: list[int], topics: list[int], tool_ids: str
) -> None:
    conversations = [Conversation(number, topic) for number, topic in enumerate(topics)]
    play(World(conversations, tool_ids, auxiliary=True), schedule)

"""The broadcaster: what changed and nothing else, bounded for each client, ended with the gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from gateway.console.live import Client, Live, LiveOptions, Parts, TooManyClients, Topic

TOPIC = Topic("overview", None, "1h")
OPTIONS = LiveOptions(tick_s=0.001, clients=2, queue=2)


class Shown:
    """What a topic shows, as a test says; counts how often it was asked."""

    def __init__(self) -> None:
        self.parts = Parts({"a": "<p>1</p>"}, {"step-1": "<li>1</li>"})
        self.asked = 0

    def __call__(self, topic: Topic) -> Parts:
        self.asked += 1
        return self.parts


async def told(client: Client) -> dict[str, dict[str, str]]:
    async for message in client.messages(30):
        assert message is not None
        assert message.startswith("data: ")
        assert message.endswith("\n\n")
        assert "\n" not in message[:-2]
        return dict(json.loads(message[6:]))
    raise AssertionError("it ended")


async def running(live: Live, check: Callable[[], object]) -> None:
    """Let the broadcaster run while a check does."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(live.run())
        await check()  # type: ignore[misc]
        task.cancel()


async def test_a_client_hears_of_what_changed_and_of_nothing_else() -> None:
    shown = Shown()
    live = Live(shown, options=OPTIONS)

    async def check() -> None:
        client = live.join(TOPIC)
        assert await told(client) == {"replaced": {"a": "<p>1</p>"}, "added": {"step-1": "<li>1</li>"}}
        shown.parts = Parts({"a": "<p>1</p>", "b": "<p>2</p>"}, {"step-1": "<li>other</li>", "step-2": "<li>2</li>"})
        assert await told(client) == {"replaced": {"b": "<p>2</p>"}, "added": {"step-2": "<li>2</li>"}}

    await running(live, check)


async def test_who_comes_later_is_told_what_its_page_lacks() -> None:
    live = Live(Shown(), options=OPTIONS)

    async def check() -> None:
        await told(live.join(TOPIC))
        late = live.join(TOPIC, known=["step-1"])
        assert await told(late) == {"replaced": {"a": "<p>1</p>"}, "added": {}}

    await running(live, check)


async def test_what_takes_long_to_render_is_looked_at_less_often() -> None:
    times = list[float]()

    def render(topic: Topic) -> Parts:
        times.append(time.monotonic())
        time.sleep(0.01)  # what it takes
        return Parts({"a": f"<p>{len(times)}</p>"})

    live = Live(render, options=LiveOptions(tick_s=0.001, share=0.1))

    async def check() -> None:
        client = live.join(TOPIC)
        for _ in range(3):
            await told(client)
        assert all(later - before >= 0.1 for before, later in pairwise(times))

    await running(live, check)


async def test_nothing_is_read_while_nobody_is_there() -> None:
    shown = Shown()
    live = Live(shown, options=OPTIONS)

    async def check() -> None:
        client = live.join(TOPIC)
        await told(client)
        live.leave(client)
        await asyncio.sleep(0.01)  # the tick that runs may end
        asked = shown.asked
        await asyncio.sleep(0.02)
        assert shown.asked == asked

    await running(live, check)


async def test_a_client_that_does_not_read_is_dropped_and_holds_nothing() -> None:
    shown = Shown()
    live = Live(shown, options=OPTIONS)

    async def check() -> None:
        slow = live.join(TOPIC)
        for number in range(10_000):
            shown.parts = Parts({"a": str(number)})
            await asyncio.sleep(0)
            if slow.is_dropped:
                break
            await asyncio.sleep(0.001)
        assert slow.is_dropped
        assert [message async for message in slow.messages(30)] == []

    await running(live, check)


async def test_there_is_a_limit_and_a_gateway_that_leaves_takes_nobody_and_ends_all() -> None:
    is_leaving = False
    live = Live(Shown(), lambda: is_leaving, OPTIONS)

    async def check() -> None:
        nonlocal is_leaving
        clients = [live.join(TOPIC), live.join(Topic("run", "a", "x"))]
        with pytest.raises(TooManyClients):
            live.join(TOPIC)
        is_leaving = True
        for client in clients:
            assert all([message is not None async for message in client.messages(30)])
            live.leave(client)
        with pytest.raises(TooManyClients):
            live.join(TOPIC)

    await running(live, check)


async def test_a_broadcaster_that_ends_ends_its_clients() -> None:
    live = Live(Shown(), options=OPTIONS)
    clients: list[Client] = []

    async def check() -> None:
        clients.append(live.join(TOPIC))
        await told(clients[0])

    await running(live, check)
    assert [message async for message in clients[0].messages(30)] == []


async def test_a_page_that_fails_ends_for_those_who_look_and_for_nobody_else() -> None:
    def render(topic: Topic) -> Parts:
        if topic.name == "run":
            raise ValueError("a fault")
        return Parts({"a": "<p>1</p>"})

    live = Live(render, options=OPTIONS)

    async def check() -> None:
        broken, whole = live.join(Topic("run", None, "x")), live.join(TOPIC)
        assert [message async for message in broken.messages(30)] == []
        live.leave(broken)
        assert await told(whole) == {"replaced": {"a": "<p>1</p>"}, "added": {}}

    await running(live, check)

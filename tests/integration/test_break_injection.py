"""A real client loop with one fault in it at a time: the card names the place, the kind, and what it cost."""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from billing.ledger_read import LedgerReader
from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.prompt import PromptEncoder
from gateway.commands import doctor
from gateway.diagnosis.cards import BreakCard, diagnose
from gateway.diagnosis.doctor import ailments, doctor_json
from tests.gateways import Client, gateway_for
from tests.samples.caching_engine import CachingEngine
from tracing.detail import BreakKind, Comparison, Party, StepDetail
from tracing.record import RequestRecord

pytestmark = pytest.mark.model

Json = dict[str, Any]
Fault = Callable[[Json, int], None]
FRESH, HIT = 1_000, 100  # nano-units a token
PRICES = 'name = "t"\ncurrency = "USD"\n[[price]]\nmodels = ["m"]\nrates = { fresh = 1, hit = 0.1, output = 3 }\n'
RULES = " ".join(f"Rule {n}: answer the question, look things up when unsure, and cite item {n}." for n in range(40))
HEAD = "You are careful. Today is "
STEPS = 4
FAULTY = 3  # the step with the fault


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(ensure_default_model())


def tool(name: str, text: str = "Looks something up.") -> Json:
    schema = {"type": "object", "properties": {"q": {"type": "string", "description": text}}, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def body_of(history: list[Json], at: str = "2026-11-30T08:15:42Z", **more: Any) -> Json:
    system = {"role": "system", "content": f"{HEAD}{at}. {RULES}"}
    tools = [tool("look"), tool("find"), tool("count")]
    return {"model": "m", "messages": [system, *copy.deepcopy(history)], "tools": tools, **more}


class Loop:
    """An agent: it asks, calls its tool, and sends everything again; ``fault`` changes a body before it is sent."""

    def __init__(self, client: Client, engine: CachingEngine) -> None:
        self.client, self.engine = client, engine
        self.records: list[RequestRecord] = []
        self.request_ids: list[str] = []
        self.titled_after = 0  # the step behind which another model's title is asked for

    async def run(
        self, fault: Fault, steps: int = STEPS, run: str = "r", label: str = "agent", topic: str = ""
    ) -> None:
        history: list[Json] = [{"role": "user", "content": f"What is item 7? {'Be exact. ' * 30}{topic}"}]
        for step in range(1, steps + 1):
            body = body_of(history)
            for each in body["tools"]:
                each["function"]["parameters"]["title"] = topic  # no run shares a prefix with another's
            fault(body, step)
            headers = {"x-keepwarm-run": run}
            async with self.client.session.post(
                f"{self.client.url}/c/{label}/v1/chat/completions", json=body, headers=headers
            ) as response:
                assert response.status == 200, await response.text()
                self.request_ids.append(response.headers["x-keepwarm-request-id"])
                message = (await response.json())["choices"][0]["message"]
            result = f"Result of step {step}: " + "found in the archive. " * 20
            ids = [call["id"] for call in message.get("tool_calls") or []]
            history += [message, *({"role": "tool", "tool_call_id": id_, "content": result} for id_ in ids)]
            if not ids:
                history.append({"role": "user", "content": result})
            if step == self.titled_after:
                await self._title(headers, label)

    async def _title(self, headers: dict[str, str], label: str) -> None:
        system = {"role": "system", "content": "Write a title. " + "Be short. " * 60}
        body = {"model": "m", "messages": [system, {"role": "user", "content": "What is item 7?"}]}
        url = f"{self.client.url}/c/{label}/v1/chat/completions"
        async with self.client.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            self.request_ids.append(response.headers["x-keepwarm-request-id"])

    async def cards(self) -> tuple[list[BreakCard], list[RequestRecord], dict[str, StepDetail]]:
        gateway = self.client.gateway
        assert gateway.compared is not None
        await self.client.until(lambda: len(self.client.stored()) >= len(self.request_ids))
        assert await asyncio.to_thread(gateway.compared.flush, 10.0)
        records = self.client.stored()
        details = gateway.traces.details(self.request_ids)
        assert details.keys() == set(self.request_ids)
        with LedgerReader(gateway.ledger_place) as reader:
            books = reader.price_books()
        return diagnose(records, details, books), records, details


@asynccontextmanager
async def gateway_of(
    encoder: PromptEncoder, home: Path, **settings: Any
) -> AsyncIterator[tuple[Client, CachingEngine]]:
    """Be a gateway in front of one engine, at known prices."""
    prices = home / "prices.toml"
    prices.write_text(PRICES)
    async with CachingEngine(encoder) as engine:
        instances = [{"id": "e0", "url": engine.url, "adapter": "openai", "models": ["m"]}]
        models = [{"name": "m", "tokenizer": str(ensure_default_model())}]
        async with gateway_for(
            [engine],
            home,
            ready_limit_s=90,
            instances=instances,
            models=models,
            billing={"prices": str(prices)},
            **settings,
        ) as client:
            yield client, engine


def only_at(step: int, change: Callable[[Json], None]) -> Fault:
    def fault(body: Json, now: int) -> None:
        if now == step:
            change(body)

    return fault


def in_system(text: str) -> Callable[[Json], None]:
    def change(body: Json) -> None:
        body["messages"][0]["content"] = body["messages"][0]["content"].replace("2026-11-30T08:15:42Z", text)

    return change


def _uuid(body: Json, step: int) -> None:
    id_ = f"0f8fad5b-d9cb-469f-a165-70867728950{'f' if step == FAULTY else 'e'}"
    body["messages"][0]["content"] = body["messages"][0]["content"].replace("2026-11-30T08:15:42Z", id_)


def _counter(body: Json, step: int) -> None:
    count = 1 if step < FAULTY else 2
    body["messages"][0]["content"] = body["messages"][0]["content"].replace(
        "2026-11-30T08:15:42Z", f"a day, turn {count}"
    )


def _reorder(body: Json) -> None:
    body["tools"].reverse()


def _key_order(body: Json) -> None:
    function = body["tools"][1]["function"]
    body["tools"][1]["function"] = dict(reversed(function.items()))


def _more_tools(body: Json) -> None:
    body["tools"].insert(1, tool("extra"))


def _edit_system(body: Json) -> None:
    body["messages"][0]["content"] = body["messages"][0]["content"].replace("careful", "reckless")


def _rewrite(body: Json) -> None:
    body["messages"][1]["content"] = body["messages"][1]["content"].replace("item 7", "thing seven")


def _window(body: Json) -> None:
    del body["messages"][1]


def _respell(body: Json) -> None:
    call = body["messages"][2]["tool_calls"][0]["function"]
    call["arguments"] = call["arguments"].replace(": ", ":")


DATE = len(HEAD)
STAMP = "2026-11-30T08:15:42Z"
CASES: list[tuple[str, Fault, BreakKind, str, str, tuple[int, int]]] = [
    ("clock", only_at(FAULTY, in_system("2026-11-30T08:15:57Z")), BreakKind.TIMESTAMP, "system",
     "messages[0].content", (DATE, DATE + len(STAMP))),
    ("date", only_at(FAULTY, in_system("2026-12-01")), BreakKind.TIMESTAMP, "system",
     "messages[0].content", (DATE, DATE + 10)),
    ("uuid", _uuid, BreakKind.UUID, "system", "messages[0].content", (DATE, DATE + 36)),
    ("counter", _counter, BreakKind.COUNTER, "system", "messages[0].content", (DATE + 12, DATE + 13)),
    ("tools reordered", only_at(FAULTY, _reorder), BreakKind.TOOLS_REORDERED, "tools", "tools[0]", (0, 0)),
    ("tool added", only_at(FAULTY, _more_tools), BreakKind.TOOLS_CHANGED, "tools", "tools[1]", (0, 0)),
    ("key order", only_at(FAULTY, _key_order), BreakKind.SPELLING, "tools", "tools[1].function", (0, 0)),
    ("system edited", only_at(FAULTY, _edit_system), BreakKind.SYSTEM_EDITED, "system",
     "messages[0].content", (8, 16)),
    ("history edited", only_at(FAULTY, _rewrite), BreakKind.HISTORY_REWRITTEN, "messages[1]",
     "messages[1].content", (8, 19)),
    ("window slid", only_at(FAULTY, _window), BreakKind.HISTORY_REWRITTEN, "messages[1]", "messages[1]", (0, 0)),
]  # fmt: skip


def _no_thoughts(body: Json, step: int) -> None:
    for message in body["messages"]:
        message.pop("reasoning_content", None)


def _thinking(number: int) -> Json:
    thought = f"I think about item {number}. " + "It is somewhere. " * 40
    call = {"id": f"call_think{number}x", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}}
    return {"content": None, "reasoning_content": thought, "tool_calls": [call]}


Told = tuple[list[BreakCard], list[RequestRecord], list[StepDetail]]


@pytest.fixture(scope="module")
def all_told(encoder: PromptEncoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Return what is told of a run with each fault, all through one gateway."""
    faults = {case[0]: case[1] for case in CASES}
    faults |= {
        "none": lambda body, step: None,
        "shortened": only_at(FAULTY, _shorten),
        "rewound": only_at(FAULTY, _rewind),
        "spelling": only_at(2, _respell),
        "title": lambda body, step: None,
        "thoughts": _no_thoughts,
    }

    async def tell() -> dict[str, Told]:
        home = tmp_path_factory.mktemp("faults")
        async with gateway_of(encoder, home, tracing={"content": "full"}) as (client, engine):
            loop, ids = Loop(client, engine), dict[str, list[str]]()
            for name, fault in faults.items():
                loop.request_ids, loop.titled_after = [], 2 if name == "title" else 0
                engine.answers = [_thinking(n) for n in range(STEPS)] if name == "thoughts" else []
                await loop.run(fault, run=name, topic=name)
                ids[name] = loop.request_ids
            loop.request_ids, loop.titled_after = [], 0
            await loop.run(lambda body, step: engine.evict() if step == FAULTY else None, run="evicted", topic="e")
            ids["evicted"] = loop.request_ids
            loop.request_ids = [id_ for some in ids.values() for id_ in some]
            cards, records, details = await loop.cards()
        return {
            name: (
                [card for card in cards if card.run_id == name],
                [record for record in records if record.request_id in some],
                [details[id_] for id_ in some],
            )
            for name, some in ids.items()
        }

    return asyncio.run(tell())


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_fault_is_told_with_its_place_kind_and_cost(
    all_told: dict[str, Told], case: tuple[str, Fault, BreakKind, str, str, tuple[int, int]]
) -> None:
    name, _, kind, section, path, (start, end) = case
    cards, records, details = all_told[name]
    card = next(card for card in cards if card.step == FAULTY)
    assert (card.kind, card.party) == (kind, Party.CLIENT)
    assert card.change is not None
    assert (card.change.section, card.change.path) == (section, path)
    if end:
        assert (card.change.start, card.change.end) == (start, end)
    assert card.lost_nano == card.lost_tokens * (FRESH - HIT)
    record, before = records[FAULTY - 1], records[FAULTY - 2]
    assert record.usage.hit_tokens < before.usage.prompt_tokens - 256
    could = before.usage.prompt_tokens - record.usage.hit_tokens
    assert card.lost_tokens <= record.usage.prompt_tokens - record.usage.hit_tokens
    assert abs(card.lost_tokens - could) <= 256 or kind in (BreakKind.TOOLS_CHANGED, BreakKind.HISTORY_REWRITTEN)
    assert card.repair
    assert not [card for card in cards if card.step is not None and card.step < FAULTY]
    assert details[0].comparison is Comparison.FIRST
    assert details[1].comparison is Comparison.APPENDED
    assert ailments(cards)[0].agent == "agent"


def test_a_run_that_only_appends_has_no_cards(all_told: dict[str, Told]) -> None:
    cards, records, details = all_told["none"]
    assert cards == []
    assert [detail.comparison for detail in details] == [Comparison.FIRST, *[Comparison.APPENDED] * (STEPS - 1)]
    assert all(record.usage.hit_tokens for record in records[1:])
    assert {detail.reproduction.instance for detail in details} == {"e0"}
    assert details[1].reproduction.template is not None
    assert details[1].differs == ()


@pytest.mark.parametrize("name", ["shortened", "rewound"])
def test_a_history_that_is_cut_short_is_no_break(all_told: dict[str, Told], name: str) -> None:
    cards, _, details = all_told[name]
    assert cards == []
    assert details[FAULTY - 1].comparison is Comparison.SHORTENED


def test_a_tool_call_in_another_spelling_is_told_with_its_place(all_told: dict[str, Told]) -> None:
    change = all_told["spelling"][2][1].change
    assert change is not None
    assert (change.kind, change.path) == (BreakKind.ECHO_TOOL_JSON, "messages[2].tool_calls[0].function.arguments")
    assert (change.start, change.end, change.before_end) == (5, 5, 6)


def test_an_auxiliary_call_does_not_poison_the_chain(all_told: dict[str, Told]) -> None:
    cards, records, details = all_told["title"]
    assert cards == []
    assert {record.link.run_id for record in records if record.link} == {"title"}
    assert (details[2].comparison, details[2].previous_request_id) == (Comparison.FIRST, None)
    assert {detail.comparison for detail in (details[1], *details[3:])} == {Comparison.APPENDED}


def test_what_the_engine_forgot_is_not_the_clients_doing(all_told: dict[str, Told]) -> None:
    (card,) = all_told["evicted"][0]
    assert card.step == FAULTY
    assert card.party is not Party.CLIENT
    assert card.change is None


def test_what_is_said_of_an_answer_that_comes_back_otherwise(all_told: dict[str, Told]) -> None:
    change = all_told["thoughts"][2][1].change
    assert change is not None
    assert (change.kind, change.path) == (BreakKind.ECHO_REASONING, "messages[2].reasoning_content")


def _shorten(body: Json) -> None:
    del body["messages"][2:]


def _rewind(body: Json) -> None:
    body["messages"][2:] = [{"role": "user", "content": "Forget that. " + "Tell me something else. " * 20}]


async def test_words_stay_where_the_policy_keeps_them(
    encoder: PromptEncoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway_of(encoder, tmp_path) as (client, engine):
        loop = Loop(client, engine)
        await loop.run(only_at(FAULTY, in_system("2026-11-30T08:15:57Z")))
        cards, _, details = await loop.cards()
    change = details[loop.request_ids[FAULTY - 1]].change
    assert change is not None
    assert (change.before, change.after) == (None, None)
    assert change.before_hash != change.after_hash
    assert "2026-11-30" not in str(doctor_json(cards, STEPS, limit=10))
    capsys.readouterr()
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["last", "--home", str(tmp_path), "--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == STEPS
    assert told["lost_tokens"] == sum(card.lost_tokens for card in cards) > 0
    (client,) = [each for each in told["by_party"] if each["party"] == "client"]
    assert client["lost_nano"] == {"USD": sum(card.lost_nano or 0 for card in cards)}
    assert doctor.run(parser.parse_args(["--home", str(tmp_path), "--since", "1h"])) == 0
    assert "timestamp at messages[*].content" in capsys.readouterr().out

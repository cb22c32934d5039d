"""Break injection through the official clients: each kind of break, one change at one step, against a running gateway.

What clients break is done by the clients' own calls. What the service loses is done to scripted engines that publish
real events on real sockets, count tokens with the real tokenizer, and cache blocks as engines do; the same on real
models is in ``tests/e2e/client_breaks.py``. Each case is held against a twin: the same run without the change.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from billing.ledger_read import LedgerReader
from billing.row import LedgerRow
from engine_adapter.base import InstanceFacts
from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.prompt import PromptEncoder
from gateway.diagnosis.cards import BreakCard, diagnose
from tests.gateways import Client, gateway_for
from tests.samples.faulty_agents import FAULTY, HEAD, STAMP, STEPS, UUID, Agent, AnthropicAgent, OpenAIAgent
from tests.samples.sdk import anthropic_client, openai_client
from tests.samples.told_engine import MarkedEngine, ToldEngine
from tracing.detail import BreakKind, Comparison, Party, StepDetail
from tracing.record import RequestRecord

pytestmark = pytest.mark.model

Json = dict[str, Any]
Change = Callable[[Json], None]
FRESH, HIT = 1_000, 100  # nano-units a token
RATES = "rates = { fresh = 1, hit = 0.1, output = 3, write = 1 }"
PRICES = f"""
name = "t"
currency = "USD"
[[price]]
models = ["brief"]
cache_lifetime_s = 1
{RATES}
[[price]]
models = ["short"]
cache_minimum_tokens = 100000
{RATES}
[[price]]
models = ["*"]
{RATES}
"""
STRIDE = 128  # tokens between two marks of a prompt: what a loss is told to


@dataclass(frozen=True)
class Case:
    """A change, and what must be said of it."""

    name: str
    kind: BreakKind
    change: Change
    section: str
    path: str
    chars: tuple[int, int] = (0, 0)
    answers: list[Json] = field(default_factory=list)  # what the model says, where it matters
    model: str = "m"


def system_to(text: str) -> Change:
    def change(call: Json) -> None:
        if isinstance(call.get("system"), list):
            part = call["system"][0]
            part["text"] = part["text"].replace(STAMP, text)
        else:
            part = call["messages"][0]
            part["content"] = part["content"].replace(STAMP, text)

    return change


def in_system(old: str, new: str) -> Change:
    def change(call: Json) -> None:
        part, name = (call["system"][0], "text") if "system" in call else (call["messages"][0], "content")
        assert old in part[name]
        part[name] = part[name].replace(old, new, 1)

    return change


def _reverse_tools(call: Json) -> None:
    call["tools"].reverse()


def _turn_schema(call: Json) -> None:
    function = call["tools"][1]["function"]
    function["parameters"] = dict(reversed(function["parameters"].items()))


def _rewrite(call: Json) -> None:
    content = call["messages"][1 if call["messages"][0]["role"] == "system" else 0]
    part, name = (content["content"][0], "text") if isinstance(content["content"], list) else (content, "content")
    part[name] = part[name].replace("item 7", "thing seven")


def _extra(**members: Any) -> Change:
    def change(call: Json) -> None:
        call["extra_body"] = members

    return change


def _member(name: str, value: object) -> Change:
    def change(call: Json) -> None:
        call[name] = value

    return change


def _one_more_tool(call: Json) -> None:
    call["tools"].insert(1, {**call["tools"][0], "function": {**call["tools"][0]["function"], "name": "extra"}})


def _of_answers(edit: Callable[[Json], None]) -> Change:
    """Change the newest answer, as the program gives it back."""

    def change(call: Json) -> None:
        edit(next(message for message in reversed(call["messages"]) if message["role"] == "assistant"))

    return change


def _without_thought(message: Json) -> None:
    if isinstance(message["content"], list) if "content" in message else False:
        message["content"] = [part for part in message["content"] if part["type"] != "thinking"]
    message.pop("reasoning_content", None)


def _respelled(message: Json) -> None:
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))


def _shouted(message: Json) -> None:
    part, name = (message["content"][0], "text") if isinstance(message["content"], list) else (message, "content")
    part[name] = part[name].replace("Well, ", "Now, ", 1)


NOTES = [f"note {n} of what was found" for n in range(40)]
AT = len(HEAD)
UUID_AT = AT + len(f"{STAMP}, request ")
THOUGHT = "I think about it. " + "It is somewhere in there. " * 40


def _call(number: int, **more: Any) -> Json:
    function = {"name": "look", "arguments": json.dumps({"q": "x", "notes": NOTES})}
    return {
        "content": None,
        "tool_calls": [{"id": f"call_{number}q9z", "type": "function", "function": function}],
        **more,
    }


def _said(number: int) -> Json:
    return {"content": f"Well, this is what I know of {number}. " + "It is somewhere in there. " * 30}


OPENAI = [
    Case("clock", BreakKind.TIMESTAMP, system_to("2026-11-30T08:15:57Z"), "system", "messages[0].content",
         (AT, AT + len(STAMP))),
    Case("date", BreakKind.TIMESTAMP, system_to("2026-12-01"), "system", "messages[0].content", (AT, AT + 10)),
    Case("uuid", BreakKind.UUID, in_system(UUID, UUID[:-1] + "f"), "system", "messages[0].content",
         (UUID_AT, UUID_AT + 36)),
    Case("counter", BreakKind.COUNTER, in_system("Rule 3:", "Rule 4:"), "system", "messages[0].content"),
    Case("tools reordered", BreakKind.TOOLS_REORDERED, _reverse_tools, "tools", "tools[0]"),
    Case("key order", BreakKind.SPELLING, _turn_schema, "tools", "tools[1].function.parameters"),
    Case("white space", BreakKind.SPELLING, in_system("careful. Today", "careful.  Today"), "system",
         "messages[0].content", (17, 18)),
    Case("system edited", BreakKind.SYSTEM_EDITED, in_system("careful", "reckless"), "system", "messages[0].content",
         (8, 16)),
    Case("history rewritten", BreakKind.HISTORY_REWRITTEN, _rewrite, "messages[1]", "messages[1].content", (8, 19)),
    Case("template", BreakKind.TEMPLATE_CHANGED, _extra(chat_template_kwargs={"tone": "Be brief."}), "params",
         "chat_template_kwargs"),
    Case("adapter", BreakKind.TEMPLATE_CHANGED, _extra(lora_path="tuned"), "params", "lora_path"),
    Case("namespace", BreakKind.NAMESPACE_CHANGED, _extra(cache_salt="mine"), "params", "cache_salt"),
    Case("reasoning stripped", BreakKind.ECHO_REASONING, _of_answers(_without_thought), "messages[4]",
         "messages[4].reasoning_content", answers=[_call(n, reasoning_content=THOUGHT) for n in range(STEPS)]),
    Case("tool added", BreakKind.TOOLS_CHANGED, _one_more_tool, "tools", "tools[1]"),
    Case("model", BreakKind.MODEL_CHANGED, _member("model", "other"), "model", "model"),
    Case("tool choice", BreakKind.PARAMS_CHANGED, _member("tool_choice", "none"), "params", "tool_choice"),
    Case("tool json", BreakKind.ECHO_TOOL_JSON, _of_answers(_respelled), "messages[4]",
         "messages[4].tool_calls[0].function.arguments", answers=[_call(n + 10) for n in range(STEPS)],
         model="literal"),
    Case("answer reworded", BreakKind.ECHO_TEXT, _of_answers(_shouted), "messages[4]", "messages[4].content",
         answers=[_said(n) for n in range(STEPS)]),
]  # fmt: skip
ANTHROPIC = [
    Case("clock", BreakKind.TIMESTAMP, system_to("2026-11-30T08:15:57Z"), "system", "system[0].text",
         (AT, AT + len(STAMP))),
    Case("uuid", BreakKind.UUID, in_system(UUID, UUID[:-1] + "f"), "system", "system[0].text", (UUID_AT, UUID_AT + 36)),
    Case("counter", BreakKind.COUNTER, in_system("Rule 3:", "Rule 4:"), "system", "system[0].text"),
    Case("tools reordered", BreakKind.TOOLS_REORDERED, _reverse_tools, "tools", "tools[0]"),
    Case("white space", BreakKind.SPELLING, in_system("careful. Today", "careful.  Today"), "system",
         "system[0].text", (17, 18)),
    Case("system edited", BreakKind.SYSTEM_EDITED, in_system("careful", "reckless"), "system", "system[0].text",
         (8, 16)),
    Case("history rewritten", BreakKind.HISTORY_REWRITTEN, _rewrite, "messages[0]", "messages[0].content[0].text",
         (8, 19)),
    Case("reasoning stripped", BreakKind.ECHO_REASONING, _of_answers(_without_thought), "messages[3]",
         "messages[3].reasoning_content", answers=[_call(n + 30, reasoning_content=THOUGHT) for n in range(STEPS)]),
    Case("answer reworded", BreakKind.ECHO_TEXT, _of_answers(_shouted), "messages[3]", "messages[3].content",
         answers=[_said(n + 50) for n in range(STEPS)]),
]  # fmt: skip
CASES = [("openai", case) for case in OPENAI] + [("anthropic", case) for case in ANTHROPIC]


@dataclass
class Told:
    """What is said of one run."""

    cards: list[BreakCard]
    records: list[RequestRecord]
    details: list[StepDetail]
    rows: list[LedgerRow]


class Runs:
    """A gateway, and the runs through it."""

    def __init__(self, client: Client, engines: dict[str, ToldEngine], agents: dict[str, Agent] | None = None) -> None:
        self.client, self.engines = client, engines
        self.agents: dict[str, Agent] = agents or {}

    async def tell(self) -> dict[str, Told]:
        """Return what is told of each run."""
        gateway, ids = self.client.gateway, [id_ for agent in self.agents.values() for id_ in agent.request_ids]
        assert gateway.compared is not None
        await self.client.until(lambda: len(self.client.stored()) >= len(ids))
        assert await asyncio.to_thread(gateway.compared.flush, 10.0)
        records = self.client.stored()
        details = gateway.traces.details(ids)
        assert await asyncio.to_thread(gateway.ledger.flush, 10.0)
        rows = {row.request_id: row for row in gateway.ledger.rows()}
        with LedgerReader(gateway.ledger_place) as reader:
            books = reader.price_books()
        cards = diagnose(records, details, books, restarts=gateway.traces.lives())
        return {
            name: Told(
                [card for card in cards if card.request_id in agent.request_ids],
                [record for record in records if record.request_id in agent.request_ids],
                [details[id_] for id_ in agent.request_ids],
                [rows[id_] for id_ in agent.request_ids],
            )
            for name, agent in self.agents.items()
        }


def template_of(folder: Path, *, forgets: bool = False) -> Path:
    """Return a template that has a variable and shows reasoning; one that ``forgets`` shows it once, as Qwen's does."""
    import engine_adapter.template

    text = (Path(engine_adapter.template.__file__).parent / "templates" / "chatml-tools.jinja").read_text()
    text = text.replace(" + cut", "")  # only the templates of the folder have it
    marked = "'<|im_start|>assistant\\n' + (message.content or '')"
    assert marked in text
    shown = "(message.reasoning_content or '' if loop.last else '')" if forgets else "(message.reasoning_content or '')"
    thought = f"'<|im_start|>assistant\\n' + {shown} + (message.content or '')"
    tone = "{%- if tone is defined -%}{{- '<|im_start|>system\\n' + tone + '<|im_end|>\\n' -}}{%- endif -%}\n"
    path = folder / ("forgetful.jinja" if forgets else "template.jinja")
    path.write_text(tone + text.replace(marked, thought))
    return path


@asynccontextmanager
async def fleet(home: Path) -> AsyncIterator[Runs]:
    """Be a gateway in front of an engine for each model, and two for ``pair``, taken in turn."""
    template, forgetful = template_of(home), template_of(home, forgets=True)
    model = ensure_default_model()
    encoder = PromptEncoder.load(model, template=str(template))
    prices = home / "prices.toml"
    prices.write_text(PRICES)
    literal = PromptEncoder.load(model, template="chatml-tools")  # prints a call's arguments as they are spelled
    encoders = {"literal": literal, "forgetful": PromptEncoder.load(model, template=str(forgetful))}
    named = {"e0": "m", "pair0": "pair", "pair1": "pair"}
    named |= {name: name for name in ("brief", "short", "other", "literal", "forgetful")}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, model_name in named.items():
            engine = ToldEngine(
                encoders.get(name, encoder), model_name, caches=name != "short", tells_ids=name == "forgetful"
            )
            engines[name] = await stack.enter_async_context(engine)
            stack.callback(engine.told.publisher.close)
        marked = await stack.enter_async_context(MarkedEngine(models=["marked"]))
        instances = [{"id": name, "url": engine.url, "adapter": "sglang"} for name, engine in engines.items()]
        instances.append({"id": "marked", "url": marked.url, "adapter": "openai", "speaks": ["messages"]})
        names = ("m", "pair", "brief", "short", "other")
        models: list[Json] = [{"name": n, "tokenizer": str(model), "template": str(template)} for n in names]
        models.append({"name": "literal", "tokenizer": str(model), "template": "chatml-tools"})
        models.append({"name": "forgetful", "tokenizer": str(model), "template": str(forgetful)})
        client = await stack.enter_async_context(
            gateway_for(
                [*engines.values(), marked],
                home,
                ready_limit_s=90,
                instances=instances,
                models=[*models, {"name": "marked", "tokenizer": "none"}],
                billing={"prices": str(prices)},
                routing={"policy": "round-robin"},
                health={"interval_s": 0.5, "timeout_s": 10.0},
                tracing={"content": "full"},
            )
        )
        yield Runs(client, engines)


def _twin(api: str, case: Case) -> str:
    """Return the run that says the same and changes nothing."""
    return f"{api} {case.name}, not" if case.answers else f"{api} plain"


async def _run(agent: Agent, change: Change | None = None, before: Callable[[], Any] | None = None) -> None:
    for step in range(1, STEPS + 1):
        if step == FAULTY and before is not None:
            await before()
        await agent.step(change if step == FAULTY else None)


def _facts(runs: Runs, name: str) -> InstanceFacts:
    facts = runs.client.gateway.fleet.instances[name].facts
    assert facts is not None
    return facts


async def _all(runs: Runs, openai: Any, anthropic: Any) -> None:
    engine = runs.engines["e0"]
    for api, case in CASES:
        for name, change in ((f"{api} {case.name}", case.change), (_twin(api, case), None)):
            if name not in runs.agents:
                runs.engines["literal" if case.model == "literal" else "e0"].answers = list(case.answers)
                make: Any = OpenAIAgent if api == "openai" else AnthropicAgent
                agent: Agent = make(openai if api == "openai" else anthropic, name, case.model)
                runs.agents[name] = agent
                await _run(agent, change)
    engine.answers = []
    gateway = runs.client.gateway

    async def heard(*names: str) -> None:
        """Wait until the index knows what these engines said."""
        feeds = [(gateway.fleet.instances[name].feed, runs.engines[name].told.publisher) for name in names]
        await runs.client.until(lambda: all(f is not None and f.next_sequence == p.sequence for f, p in feeds))

    for name, model in (
        ("brief", "brief"),
        ("routed", "pair"),
        ("short", "short"),
        ("evicted", "m"),
        ("restarted", "m"),
    ):
        runs.agents[name] = OpenAIAgent(openai, name, model)
    agents = runs.agents
    for _ in range(FAULTY - 1):
        for name in ("brief", "routed", "short", "evicted", "restarted"):
            await agents[name].step()
            await heard("pair0", "pair1")
    used_ns = runs.client.stored()[-1].stamps.closed_ns
    for name in ("brief", "e0"):
        runs.engines[name].evict()
    await heard("brief", "e0")
    await agents["evicted"].step()
    await agents["restarted"].step()  # it has what the eviction took by now: what is lost next is the restart's
    await engine.close()
    await runs.client.until(lambda: gateway.fleet.instances["e0"].feed is None)
    await engine.begin_anew()
    await runs.client.until(lambda: gateway.fleet.instances["e0"].takes_requests)
    await runs.client.until(lambda: gateway.traces.flush(5.0) and bool(gateway.traces.lives().get("e0")))
    await heard("e0")
    await agents["restarted"].step()
    await agents["short"].step()
    await runs.client.until(lambda: time.time_ns() > used_ns + 1_100_000_000)  # a price's lifetime is whole seconds
    await agents["brief"].step()

    agents["weights"] = OpenAIAgent(openai, "weights", "m")
    for step in range(1, STEPS + 1):
        if step == FAULTY:
            engine.update_weights("v2")
            await runs.client.until(lambda: str(_facts(runs, "e0").weights_id).endswith("@v2"))
        await agents["weights"].step()
        await heard("e0")
    runs.engines["forgetful"].answers = [_call(n + 70, reasoning_content=THOUGHT) for n in range(STEPS)]
    agents["forgetful"] = OpenAIAgent(openai, "forgetful", "forgetful")
    await _run(agents["forgetful"])

    for name in ("marked", "marked, not"):
        agent = AnthropicAgent(anthropic, name, "marked", marks=True)
        runs.agents[name] = agent

        async def no_mark(agent: AnthropicAgent = agent, name: str = name) -> None:
            agent.marks = name != "marked"

        await _run(agent, None, no_mark)


@pytest.fixture(scope="module")
def all_told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    async def tell() -> dict[str, Told]:
        async with (
            fleet(tmp_path_factory.mktemp("breaks")) as runs,
            openai_client(runs.client.url) as openai,
            anthropic_client(runs.client.url) as anthropic,
        ):
            await _all(runs, openai, anthropic)
            return await runs.tell()

    return asyncio.run(tell())


@pytest.mark.parametrize(("api", "case"), CASES, ids=[f"{api}: {case.name}" for api, case in CASES])
def test_what_a_client_changes_is_told_with_its_place_kind_and_money(
    all_told: dict[str, Told], api: str, case: Case
) -> None:
    told, twin = all_told[f"{api} {case.name}"], all_told[_twin(api, case)]
    assert twin.cards == []
    (card,) = told.cards
    assert (card.step, card.kind, card.party) == (FAULTY, case.kind, Party.CLIENT)
    change = card.change
    assert change is not None
    assert (change.section, change.path) == (case.section, case.path)
    if case.chars[1]:
        assert (change.start, change.end) == case.chars
    assert card.repair
    _costs(card, told, twin)


def _costs(card: BreakCard, told: Told, twin: Told) -> None:
    """The money is the lost tokens at the difference of the ledger's prices, and what the twin did not pay."""
    at = FAULTY - 1
    assert card.lost_nano == card.lost_tokens * (FRESH - HIT)
    lost = twin.records[at].usage.hit_tokens - told.records[at].usage.hit_tokens
    row, other = told.rows[at], twin.rows[at]
    # What is not sent any more is not lost; of an answer's own tokens nobody says how many of them came back.
    unsent = 0 if card.kind.startswith("echo") else max(other.prompt_tokens - row.prompt_tokens, 0)
    assert abs(card.lost_tokens - (lost - unsent)) <= STRIDE
    assert row.amount_nano is not None
    assert other.amount_nano is not None
    longer = row.prompt_tokens - other.prompt_tokens
    outputs = (row.output_tokens - other.output_tokens) * 3 * FRESH
    assert row.amount_nano - other.amount_nano == lost * (FRESH - HIT) + longer * FRESH + outputs


@pytest.mark.parametrize(
    ("run", "kind", "party", "step"),
    [
        ("brief", BreakKind.EXPIRED, Party.GATEWAY, FAULTY),
        ("evicted", BreakKind.EVICTED, Party.GATEWAY, FAULTY),
        ("restarted", BreakKind.RESTARTED, Party.GATEWAY, FAULTY + 1),
        ("routed", BreakKind.ROUTED_ELSEWHERE, Party.GATEWAY, 2),
        ("short", BreakKind.BELOW_MINIMUM, Party.NOBODY, 2),
    ],
)
def test_what_the_service_loses_is_told_apart(
    all_told: dict[str, Told], run: str, kind: BreakKind, party: Party, step: int
) -> None:
    told = all_told[run]
    card = next(card for card in told.cards if card.step == step)
    assert (card.kind, card.party, card.change) == (kind, party, None)
    assert card.lost_nano == card.lost_tokens * (FRESH - HIT)
    before, record = told.records[step - 2].usage, told.records[step - 1].usage
    assert before.prompt_tokens - STRIDE <= card.lost_tokens + record.hit_tokens <= record.prompt_tokens
    assert told.details[step - 1].comparison is Comparison.APPENDED
    assert card.repair


def test_other_weights_are_told_of_and_not_an_eviction(all_told: dict[str, Told]) -> None:
    told = all_told["weights"]
    (card,) = told.cards
    assert (card.step, card.kind, card.party, card.change) == (FAULTY, BreakKind.TEMPLATE_CHANGED, Party.TEMPLATE, None)
    assert "weights_id" in told.details[FAULTY - 1].differs
    before, record = told.records[FAULTY - 2].usage, told.records[FAULTY - 1].usage
    assert record.hit_tokens == 0
    assert before.prompt_tokens - STRIDE <= card.lost_tokens <= record.prompt_tokens
    assert card.lost_nano == card.lost_tokens * (FRESH - HIT)


def test_a_template_that_rewrites_quoted_answers_is_told_of(all_told: dict[str, Told]) -> None:
    """It drops the reasoning of answers that are not the last message; the client sends it back as it was."""
    told = all_told["forgetful"]
    thought_tokens = len(PromptEncoder.load(ensure_default_model()).encode_text(THOUGHT))
    assert [detail.comparison for detail in told.details[1:]] == [Comparison.APPENDED] * (STEPS - 1)
    assert [card.step for card in told.cards] == list(range(2, STEPS + 1))
    for card, (before, record) in zip(told.cards, pairwise(told.records), strict=True):
        assert (card.kind, card.party, card.change) == (BreakKind.ECHO_TEMPLATE, Party.TEMPLATE, None)
        assert record.usage.hit_tokens <= before.usage.prompt_tokens
        again = before.usage.output_tokens - thought_tokens  # the call, which stands at another place now
        assert abs(card.lost_tokens - again) <= 4
        assert card.lost_nano == card.lost_tokens * (FRESH - HIT)


def test_a_cache_marker_that_is_gone_is_told_where_the_engine_goes_by_markers(all_told: dict[str, Told]) -> None:
    assert all_told["marked, not"].cards == []  # there it moves at every step, as Claude Code moves it
    (card,) = (card for card in all_told["marked"].cards if card.step == FAULTY)
    assert (card.kind, card.party) == (BreakKind.CACHE_CONTROL, Party.CLIENT)
    assert card.change is not None
    assert card.change.path == "messages[2].content[0].cache_control"
    assert card.lost_nano == card.lost_tokens * (FRESH - HIT)
    before, record = (all_told["marked"].records[at].usage for at in (FAULTY - 2, FAULTY - 1))
    assert card.lost_tokens == before.prompt_tokens - record.hit_tokens > 0


async def test_another_template_is_told_of_across_a_restart_of_the_service(tmp_path: Path) -> None:
    """Engine and gateway begin anew with another template; the client only goes on."""
    model, prices, other = ensure_default_model(), tmp_path / "prices.toml", template_of(tmp_path)
    prices.write_text(PRICES)
    other.write_text(other.read_text().replace("# Tools", "# Functions"))
    agent: OpenAIAgent | None = None
    async with ToldEngine(PromptEncoder.load(model)) as engine:
        for template in ("chatml-tools", str(other)):
            engine.rendered_by(PromptEncoder.load(model, template=template))
            instances = [{"id": "e0", "url": engine.url, "adapter": "sglang"}]
            models = [{"name": "m", "tokenizer": str(model), "template": template}]
            billing = {"prices": str(prices)}
            async with (
                gateway_for(
                    [engine], tmp_path, ready_limit_s=90, instances=instances, models=models, billing=billing
                ) as client,
                openai_client(client.url) as openai,
            ):
                agent = agent or OpenAIAgent(openai, "upgraded")
                agent.client = openai
                await agent.step()
                await agent.step()
                told = (await Runs(client, {"e0": engine}, {"upgraded": agent}).tell())["upgraded"]
        engine.told.publisher.close()
    (card,) = told.cards
    assert (card.step, card.kind, card.party, card.change) == (FAULTY, BreakKind.TEMPLATE_CHANGED, Party.TEMPLATE, None)
    assert told.details[FAULTY - 1].comparison is Comparison.UNSEEN
    assert "template" in told.details[FAULTY - 1].differs
    assert card.lost_nano == card.lost_tokens * (FRESH - HIT) > 0

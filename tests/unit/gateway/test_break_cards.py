"""Cards from records alone: what we lost and what the client broke, by evidence; money at the price difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from billing.attribution import attribute
from billing.prices import PriceBook
from gateway.diagnosis.cards import BreakCard, diagnose
from gateway.diagnosis.doctor import ailments, by_party, doctor_json, render_doctor
from tests.samples.prefixed import SECOND, STRIDE, prefixed
from tracing.detail import BreakKind, Comparison, Party, PromptChange, Reproduction, StepDetail
from tracing.record import HitSource, PromptNote, RequestRecord

HEAD = 'name = "b"\ncurrency = "USD"\n'
PRICE = '[[price]]\nmodels = ["m"]\nrates = { fresh = 1, hit = 0.1, output = 3 }\n'
BOOK = PriceBook.from_toml(HEAD + PRICE)
SHORT_LIVED = PriceBook.from_toml(HEAD + PRICE + "cache_lifetime_s = 300\ncache_minimum_tokens = 300\n")
LOST_NANO = 900  # a token as fresh (1 a million) less as hit


def change_of(kind: BreakKind, *, kept: int = 0, repeated: int = 900, total: int = 1000) -> PromptChange:
    return PromptChange(
        kind, "system", "messages[0].content", 3, 9, 3, 9, "a" * 16, "b" * 16, kept, repeated, total
    )  # fmt: skip


def detail_of(record: RequestRecord, comparison: Comparison, change: PromptChange | None = None) -> StepDetail:
    return StepDetail(record.request_id, comparison, Reproduction(), None, change)


def told(
    records: list[RequestRecord], details: list[StepDetail] | None = None, book: PriceBook = BOOK, **more: object
) -> list[BreakCard]:
    found = {detail.request_id: detail for detail in details or []}
    return diagnose(records, found, {book.version: book}, **more)  # type: ignore[arg-type]


def test_a_change_of_the_clients_is_told_by_its_kind_and_price() -> None:
    first, second = prefixed(0, "abcdef", BOOK, run="r"), prefixed(1, "axcdef", BOOK, hits=STRIDE, run="r", previous=0)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change_of(BreakKind.TIMESTAMP))])
    assert (card.kind, card.party, card.lost_tokens) == (BreakKind.TIMESTAMP, Party.CLIENT, 5 * STRIDE)
    assert card.lost_nano == card.lost_tokens * LOST_NANO
    assert card.change is not None
    assert "[3:9]" in card.repair


def test_only_what_is_said_again_could_have_hit() -> None:
    first, second = prefixed(0, "abcdef", BOOK, run="r"), prefixed(1, "axyzef", BOOK, hits=STRIDE, run="r", previous=0)
    change = change_of(BreakKind.HISTORY_REWRITTEN, kept=200, repeated=300)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change)])
    assert card.lost_tokens == second.usage.prompt_tokens * 300 // 1000
    assert told([first, second], [detail_of(second, Comparison.SHORTENED)]) == []


def test_a_difference_that_no_text_explains_is_unknown_or_the_templates() -> None:
    first, second = prefixed(0, "abcdef", BOOK, run="r"), prefixed(1, "axcdef", BOOK, hits=STRIDE, run="r", previous=0)
    assert [card.kind for card in told([first, second])] == [BreakKind.UNKNOWN]
    appended = detail_of(second, Comparison.APPENDED)
    assert [card.kind for card in told([first, second], [appended])] == [BreakKind.UNKNOWN]
    rewritten = structs.replace(second, prompt=PromptNote("template_rewrites"))
    assert [card.kind for card in told([first, rewritten], [appended])] == [BreakKind.ECHO_TEMPLATE]
    changed = replace(appended, differs=("template",))
    (card,) = told([first, second], [changed])
    assert (card.kind, card.party) == (BreakKind.TEMPLATE_CHANGED, Party.TEMPLATE)


def test_of_an_unseen_step_only_another_template_is_told() -> None:
    first, second = prefixed(0, "abcdef", BOOK, run="r"), prefixed(1, "axcdef", BOOK, hits=STRIDE, run="r", previous=0)
    unseen = detail_of(second, Comparison.UNSEEN)
    assert [card.kind for card in told([first, second], [replace(unseen, differs=("template",))])] == [
        BreakKind.TEMPLATE_CHANGED
    ]
    rewritten = structs.replace(second, prompt=PromptNote("template_rewrites"))
    assert [card.kind for card in told([first, rewritten], [unseen])] == [BreakKind.UNKNOWN]


@pytest.mark.parametrize(
    ("instance", "kind"), [("e0", BreakKind.TEMPLATE_CHANGED), ("e1", BreakKind.RESTARTED)], ids=["there", "elsewhere"]
)
def test_other_weights_explain_what_is_gone_where_they_changed(instance: str, kind: BreakKind) -> None:
    """Two instances may name the same weights differently."""
    first = prefixed(0, "abcdef", BOOK, run="r", instance="e0")
    second = prefixed(1, "abcdef", BOOK, run="r", previous=0, instance=instance, seen={instance: 0})
    (card,) = told([first, second], [replace(detail_of(second, Comparison.APPENDED), differs=("weights_id",))])
    assert card.kind is kind


def test_of_a_quotation_only_what_it_says_again_is_lost() -> None:
    first = prefixed(0, "abcdef", BOOK, run="r")
    second = prefixed(1, "abcdefgh", BOOK, hits=first.usage.prompt_tokens, run="r", previous=0)
    first = structs.replace(first, usage=structs.replace(first.usage, output_tokens=500))
    appended = detail_of(second, Comparison.APPENDED)
    for lost in (70, 90):
        note = PromptNote("template_rewrites", echo_lost_tokens=lost)
        (card,) = told([first, structs.replace(second, prompt=note)], [appended])
        assert (card.kind, card.lost_tokens) == (BreakKind.ECHO_TEMPLATE, lost)


def test_what_we_lost_is_told_apart() -> None:
    first = prefixed(0, "abcdef", BOOK, run="r", instance="e0")
    known = 6 * STRIDE
    elsewhere = prefixed(1, "abcdef", BOOK, run="r", previous=0, instance="e1", seen={"e0": known, "e1": 0})
    evicted = prefixed(1, "abcdef", BOOK, run="r", previous=0, instance="e0", seen={"e0": 0})
    gone = prefixed(1, "abcdef", BOOK, run="r", previous=0, instance="e1", seen={"e1": 0})
    kinds = [told([first, each])[0].kind for each in (elsewhere, evicted, gone)]
    assert kinds == [BreakKind.ROUTED_ELSEWHERE, BreakKind.EVICTED, BreakKind.RESTARTED]
    began = {"e0": (first.stamps.closed_ns + 1,)}
    assert told([first, evicted], restarts=began)[0].kind is BreakKind.RESTARTED
    assert all(told([first, each])[0].party is Party.GATEWAY for each in (elsewhere, evicted, gone))


def test_prices_say_how_long_and_from_what_length_on_prefixes_are_cached() -> None:
    first = prefixed(0, "abcdef", SHORT_LIVED, run="r", at_s=0)
    late = prefixed(1, "abcdef", SHORT_LIVED, run="r", previous=0, at_s=1000, seen={"engine-0": 0})
    assert told([first, late], book=SHORT_LIVED)[0].kind is BreakKind.EXPIRED
    short = [prefixed(0, "ab", SHORT_LIVED, run="r"), prefixed(1, "ab", SHORT_LIVED, run="r", previous=0)]
    (card,) = told(short, book=SHORT_LIVED)
    assert (card.kind, card.party) == (BreakKind.BELOW_MINIMUM, Party.NOBODY)


def test_an_engine_that_tells_nothing_is_accused_of_nothing() -> None:
    first = prefixed(0, "abcdef", BOOK, run="r")
    second = prefixed(1, "abcdef", BOOK, run="r", previous=0, hit_source=HitSource.UNKNOWN)
    assert [card.kind for card in told([first, second])] == [BreakKind.UNKNOWN]


def test_an_answer_that_comes_back_otherwise_loses_what_was_generated() -> None:
    first = prefixed(0, "abcdef", BOOK, run="r", output=500)
    hits = first.usage.prompt_tokens
    second = prefixed(1, "abcdefghij", BOOK, run="r", previous=0, hits=hits)
    change = change_of(BreakKind.ECHO_TOOL_JSON)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change)])
    assert (card.kind, card.lost_tokens) == (BreakKind.ECHO_TOOL_JSON, 500)
    assert told([first, second], [detail_of(second, Comparison.APPENDED)]) == []


def test_places_are_estimated_where_prompts_are_not_known() -> None:
    first = structs.replace(prefixed(0, "abcdef", BOOK, run="r"), prefix=None)
    second = structs.replace(prefixed(1, "axcdef", BOOK, run="r", previous=0, hits=STRIDE), prefix=None)
    change = change_of(BreakKind.UUID, kept=100, repeated=850)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change)])
    prompt = second.usage.prompt_tokens
    assert (card.kind, card.is_estimated) == (BreakKind.UUID, True)
    assert card.lost_tokens == prompt * 100 // 1000 + prompt * 850 // 1000 - STRIDE
    cold = structs.replace(prefixed(1, "abcdef", BOOK, run="r", previous=0, seen={"engine-0": 0}), prefix=None)
    (lost,) = told([first, cold], [detail_of(cold, Comparison.APPENDED)])
    assert (lost.party, lost.is_estimated) == (Party.GATEWAY, True)


def test_agents_are_told_by_what_costs_most_and_totals_agree() -> None:
    records, details = list[RequestRecord](), list[StepDetail]()
    for number, agent in enumerate(("cheap", "dear", "dear")):
        one, two = 2 * number, 2 * number + 1
        parts = chr(65 + number) * (8 if agent == "dear" else 4)
        first = prefixed(one, parts, BOOK, run=f"r{number}", at_s=10 * number)
        second = prefixed(two, parts[0] + "x" + parts[2:], BOOK, hits=STRIDE, run=f"r{number}", previous=one,
                          at_s=10 * number + 5)  # fmt: skip
        records += [structs.replace(each, labels={"agent": agent}) for each in (first, second)]
        details.append(detail_of(second, Comparison.CHANGED, change_of(BreakKind.COUNTER)))
    cards = told(records, details)
    worst, other = ailments(cards)
    assert (worst.agent, worst.breaks, len(worst.runs), other.agent) == ("dear", 2, 2, "cheap")
    assert sum(each.lost_tokens for each in (worst, other)) == sum(card.lost_tokens for card in cards)
    assert by_party(cards)[Party.CLIENT][2]["USD"] == sum(card.lost_nano or 0 for card in cards)
    text = render_doctor(cards, len(records), limit=1)
    assert "1. dear: counter at messages[*].content" in text
    assert "cheap" not in text
    assert doctor_json(cards, 6, limit=9)["lost_tokens"] == sum(card.lost_tokens for card in cards)
    assert render_doctor([], 6, limit=1).startswith("6 steps: no hit was lost")


def test_without_texts_the_doctor_counts_as_attribution_does() -> None:
    records = [
        prefixed(0, "abcdef", BOOK, run="r"),
        prefixed(1, "axcdef", BOOK, hits=STRIDE, run="r", previous=0, at_s=1),
        prefixed(2, "abcdef", BOOK, run="s", at_s=2),
        prefixed(3, "axcdefg", BOOK, hits=2 * STRIDE, run="s", previous=2, at_s=3),
    ]
    cards, found = told(records), attribute(records, {BOOK.version: BOOK}, unit="run")
    for run in ("r", "s"):
        mine, sums = [card for card in cards if card.run_id == run], found.units[run, "USD"]
        assert sum(card.lost_tokens for card in mine) == sums.lost_tokens > 0
        assert sum(card.lost_nano or 0 for card in mine) == sums.lost_nano


def test_the_first_token_was_late_by_the_share_that_was_lost() -> None:
    first, second = prefixed(0, "abcdef", BOOK, run="r"), prefixed(1, "axcdef", BOOK, hits=STRIDE, run="r", previous=0)
    stamps = structs.replace(
        second.stamps, sent_ns=second.stamps.arrived_ns, first_token_ns=second.stamps.arrived_ns + SECOND
    )
    second = structs.replace(second, stamps=stamps, stream=True)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change_of(BreakKind.TIMESTAMP))])
    computed = second.usage.prompt_tokens - second.usage.hit_tokens
    assert card.lost_ttft_ns == SECOND * card.lost_tokens // computed
    assert second.link is not None
    alone = structs.replace(second, link=structs.replace(second.link, previous_request_id=None))
    assert told([first, alone]) == []


@pytest.mark.parametrize("kind", [BreakKind.TEMPLATE_CHANGED, BreakKind.NAMESPACE_CHANGED, BreakKind.MODEL_CHANGED])
def test_a_change_that_leads_to_another_cache_explains_what_the_same_tokens_lost(kind: BreakKind) -> None:
    first = prefixed(0, "abcdef", BOOK, run="r")
    second = prefixed(1, "abcdef", BOOK, run="r", previous=0)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change_of(kind))])
    assert (card.kind, card.party, card.lost_tokens) == (kind, Party.CLIENT, 6 * STRIDE)
    (card,) = told([first, second], [detail_of(second, Comparison.CHANGED, change_of(BreakKind.TIMESTAMP))])
    assert card.kind is BreakKind.UNKNOWN  # what the text says is in the tokens, and these are the same

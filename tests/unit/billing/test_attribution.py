"""Attribution: who wrote and read prefixes, exactly; lost hits by cause; waste; credits for what was lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from billing.attribution import Attribution, attribute
from billing.attribution_lost import Cause, lost_hit_grants
from billing.attribution_waste import WasteKind
from billing.ledger import Ledger
from billing.ledger_read import LedgerReader
from billing.periods import post
from billing.prices import PriceBook
from billing.settlement import missing_credits
from billing.verify import verify_ledger
from tests.samples.billed import START_NS
from tests.samples.prefixed import SECOND, STRIDE, prefixed
from tracing.record import HitSource, Outcome, RequestRecord, Usage, UsageSource

HEAD = 'name = "b"\ncurrency = "USD"\n'
PRICE = '[[price]]\nmodels = ["m"]\nrates = { fresh = 1, hit = 0.1, output = 3 }\n'
COSTS = "[costs]\ngpu_hour = 2\ngpus_per_instance = 2\nprefill_tokens_per_s = 1000\n"
CREDITS = '[lost_hit_credits]\ncauses = ["eviction", "routing"]\nshare = "0.5"\n'


def book(head: str = "", tables: str = "", price: str = PRICE) -> PriceBook:
    return PriceBook.from_toml(HEAD + head + tables + price)


BOOK = book(tables=COSTS + CREDITS)


def told(records: list[RequestRecord], prices: PriceBook = BOOK, unit: str = "team") -> Attribution:
    return attribute(records, {prices.version: prices}, unit=unit)


def causes(*records: RequestRecord, prices: PriceBook = BOOK, **restarts: tuple[int, ...]) -> dict[Cause, int]:
    named = {name.replace("_", "-"): at for name, at in restarts.items()}
    found = attribute(records, {prices.version: prices}, restarts=named)
    return {cause: values[1] for (cause, _), values in found.lost_by_cause().items()}


def test_who_computed_a_prefix_and_who_read_it() -> None:
    records = [
        prefixed(0, "ab", BOOK, team="a"),
        prefixed(1, "abc", BOOK, hits=2 * STRIDE, team="b"),
        prefixed(2, "abcd", BOOK, hits=3 * STRIDE, team="a"),
    ]
    found = told(records)
    flows = {(writer, reader): flow.tokens for (writer, reader, _), flow in found.flows.items()}
    assert flows == {("a", "b"): 256, ("a", "a"): 256, ("b", "a"): 128}
    assert found.flows["a", "b", "USD"].saved_nano == 256 * 900
    a, b = found.units["a", "USD"], found.units["b", "USD"]
    assert (a.own_hit_tokens, a.others_hit_tokens, a.given_tokens) == (256, 128, 256)
    assert (b.own_hit_tokens, b.others_hit_tokens, b.given_tokens) == (0, 256, 128)
    assert a.saved_gpu_ns == 384 * 2 * 10**9 // 1000
    assert (a.transfer_nano, b.transfer_nano) == (0, 0)


def test_a_prefix_that_was_computed_again_is_its_last_writers() -> None:
    records = [
        prefixed(0, "ab", BOOK, team="a"),
        prefixed(1, "ab", BOOK, team="b"),
        prefixed(2, "abc", BOOK, hits=2 * STRIDE, team="c"),
    ]
    assert set(told(records).flows) == {("b", "c", "USD")}


def test_what_nobody_was_seen_to_compute_is_nobodys() -> None:
    records = [prefixed(0, "ab", BOOK, hits=2 * STRIDE), prefixed(1, "", BOOK, hits=5)]
    found = told(records)
    assert {(writer, flow.tokens) for (writer, _, _), flow in found.flows.items()} == {("-", 2 * STRIDE + 5)}


def test_readers_pay_their_share_of_a_write_where_the_book_says_so() -> None:
    prices = book('prefix_writes = "readers"\n')
    records = [
        prefixed(0, "ab", prices, team="a", rest=0),
        prefixed(1, "abc", prices, hits=2 * STRIDE, team="b", rest=0),
        prefixed(2, "abd", prices, hits=2 * STRIDE, team="c", rest=0),
        prefixed(3, "abe", prices, hits=2 * STRIDE, team="b", rest=0),
    ]
    found = told(records, prices)
    transfers = {name: sums.transfer_nano for (name, _), sums in found.units.items()}
    # a computed 256 tokens for 256,000; it used them once, b twice, c once; each of the two parts is split by itself
    assert transfers == {"a": -192_000, "b": 128_000, "c": 64_000}


@pytest.mark.parametrize("rule", ["writer", "readers"])
def test_shares_are_exact_whatever_was_read(rule: str) -> None:
    chance = random.Random(5)
    price = PRICE.replace("hit = 0.1", "hit = 0.0377").replace("fresh = 1", "fresh = 0.9973")
    prices = book(f'prefix_writes = "{rule}"\n', price=price)
    records = []
    for number in range(300):
        parts = "".join(chance.choice("ab") for _ in range(chance.randrange(0, 6)))
        hits = chance.randrange(0, len(parts) * STRIDE + 10)
        records.append(prefixed(number, parts, prices, hits=hits, team=chance.choice("xyz")))
    found = told(records, prices)
    assert sum(flow.saved_nano for flow in found.flows.values()) == sum(r.charge.saved_nano or 0 for r in records)
    assert sum(flow.tokens for flow in found.flows.values()) == sum(r.usage.hit_tokens for r in records)
    assert sum(sums.transfer_nano for sums in found.units.values()) == 0
    assert any(sums.transfer_nano for sums in found.units.values()) == (rule == "readers")
    assert sum(sums.cost_nano for sums in found.units.values()) == sum(r.charge.amount_nano or 0 for r in records)


def test_shared_prefixes_are_told_with_their_length_and_readers() -> None:
    records = [prefixed(0, "ab", BOOK, team="a")]
    records += [prefixed(number, "abc", BOOK, hits=2 * STRIDE, team="b") for number in range(1, 4)]
    records.append(prefixed(4, "abc", BOOK, hits=3 * STRIDE, team="c"))
    longest, shorter = sorted(told(records).prefixes, key=lambda each: -each.tokens)
    assert (shorter.tokens, shorter.reads, shorter.read_tokens) == (256, 4, 4 * 256)
    assert (shorter.writer, shorter.readers, shorter.saved_nano) == ("a", ("b", "c"), 4 * 256 * 900)
    assert (longest.tokens, longest.reads, longest.read_tokens, longest.readers) == (384, 1, 128, ("c",))


class TestLostHits:
    def test_none_is_lost_when_all_was_hit_or_none_was_known(self) -> None:
        assert causes(prefixed(0, "ab", BOOK), prefixed(1, "ab", BOOK, hits=256)) == {}

    def test_what_was_still_being_computed_was_not_lost(self) -> None:
        assert causes(prefixed(0, "ab", BOOK, at_s=0), prefixed(1, "ab", BOOK, at_s=0)) == {}

    def test_routing(self) -> None:
        second = prefixed(1, "ab", BOOK, instance="engine-1", seen={"engine-0": 256, "engine-1": 0})
        assert causes(prefixed(0, "ab", BOOK), second) == {Cause.ROUTING: 256}

    def test_who_went_on_with_an_answer_was_not_where_it_was_routed(self) -> None:
        """The hits are those of the engine that began, and so is the choice that they are held against."""
        routed = prefixed(1, "ab", BOOK, instance="engine-1", seen={"engine-0": 256, "engine-1": 0})
        went_on = replace(routed, attempts=(*routed.attempts, replace(routed.attempts[0], instance="engine-0")))
        assert causes(prefixed(0, "ab", BOOK), went_on) == {Cause.ROUTING: 256}

    def test_routing_and_eviction_in_one_request(self) -> None:
        second = prefixed(1, "abc", BOOK, instance="engine-1", seen={"engine-0": 128, "engine-1": 0})
        assert causes(prefixed(0, "abc", BOOK), second) == {Cause.ROUTING: 128, Cause.EVICTION: 256}

    def test_eviction(self) -> None:
        second = prefixed(1, "abc", BOOK, seen={"engine-0": 0, "engine-1": 0})
        assert causes(prefixed(0, "abc", BOOK), second) == {Cause.EVICTION: 384}

    def test_a_router_that_does_not_know_blames_nobody(self) -> None:
        second = prefixed(1, "abc", BOOK, seen={"engine-0": 0}, exact=False)
        assert causes(prefixed(0, "abc", BOOK), second) == {Cause.UNKNOWN: 384}
        assert causes(prefixed(0, "abc", BOOK), prefixed(1, "abc", BOOK)) == {Cause.UNKNOWN: 384}

    def test_restart(self) -> None:
        gone = prefixed(1, "abc", BOOK, instance="engine-1", seen={"engine-1": 0})
        assert causes(prefixed(0, "abc", BOOK), gone) == {Cause.RESTART: 384}
        second = prefixed(100, "abc", BOOK, seen={"engine-0": 0})
        assert causes(prefixed(0, "abc", BOOK), second, engine_0=(START_NS + 50 * SECOND,)) == {Cause.RESTART: 384}
        assert causes(prefixed(0, "abc", BOOK), second, engine_0=(START_NS - SECOND,)) == {Cause.EVICTION: 384}

    def test_expiry_and_below_minimum(self) -> None:
        price = PRICE.replace("rates", "cache_minimum_tokens = 300\ncache_lifetime_s = 60\nrates")
        prices = book(price=price)
        late = prefixed(100, "abc", prices, seen={"engine-0": 0})
        assert causes(prefixed(0, "abc", prices), late, prices=prices) == {Cause.EXPIRY: 384}
        soon = prefixed(30, "abc", prices, seen={"engine-0": 0})
        assert causes(prefixed(0, "abc", prices), soon, prices=prices) == {Cause.EVICTION: 384}
        short = prefixed(100, "ab", prices, seen={"engine-0": 0})
        assert causes(prefixed(0, "ab", prices), short, prices=prices) == {Cause.BELOW_MINIMUM: 256}

    def test_an_engine_that_tells_nothing(self) -> None:
        second = prefixed(1, "abc", BOOK, seen={"engine-0": 0}, hit_source=HitSource.UNKNOWN)
        assert causes(prefixed(0, "abc", BOOK), second) == {Cause.UNKNOWN: 384}

    def test_a_client_that_changes_what_it_had_sent(self) -> None:
        first = prefixed(0, "abcd", BOOK, run="r")
        grown = prefixed(1, "abcde", BOOK, hits=512, run="r", previous=0)
        assert causes(first, grown) == {}
        edited = prefixed(1, "aXcde", BOOK, hits=128, run="r", previous=0)
        assert causes(first, edited) == {Cause.CLIENT_CHANGED: 384}
        shorter = prefixed(1, "aX", BOOK, hits=128, run="r", previous=0)
        assert causes(first, shorter) == {Cause.CLIENT_CHANGED: 128}

    def test_money_and_credit(self) -> None:
        second = prefixed(1, "abc", BOOK, seen={"engine-0": 0})
        found = told([prefixed(0, "abc", BOOK), second])
        (loss,) = found.lost
        assert (loss.amount_nano, loss.credit_nano) == (384 * 900, 384 * 450)
        sums = found.units["a", "USD"]
        assert (sums.lost_tokens, sums.lost_nano, sums.credit_nano) == (384, 384 * 900, 384 * 450)


def test_money_of_two_currencies_is_never_added() -> None:
    euro = PriceBook.from_toml((HEAD + PRICE).replace("USD", "EUR").replace("fresh = 1", "fresh = 2"))
    records = [prefixed(n, "abc", book, at_s=n) for n, book in enumerate((BOOK, BOOK, euro))]
    found = attribute(records, {book.version: book for book in (BOOK, euro)})
    lost = {currency: amount for (_, currency), (_, _, amount, _) in found.lost_by_cause().items()}
    assert lost == {"USD": 384 * 900, "EUR": 384 * 1900}


class TestWaste:
    def kinds(self, *records: RequestRecord) -> dict[WasteKind, tuple[int, ...]]:
        return {kind: values for (kind, _), values in told(list(records)).waste_by_kind().items()}

    def test_a_conversation_sent_twice(self) -> None:
        second = prefixed(1, "ab", BOOK, hits=256, digest="d")
        found = self.kinds(prefixed(0, "ab", BOOK, digest="d"), second)
        assert found == {WasteKind.DUPLICATE: (1, 30, second.charge.amount_nano)}
        assert self.kinds(prefixed(0, "ab", BOOK, digest="d"), prefixed(1, "ab", BOOK, digest="e")) == {}
        late = prefixed(601, "ab", BOOK, digest="d")
        assert self.kinds(prefixed(0, "ab", BOOK, digest="d"), late) == {}
        other = prefixed(1, "ab", BOOK, digest="d", team="b")
        assert self.kinds(prefixed(0, "ab", BOOK, digest="d"), other) == {}

    def test_abandoned_and_prefilled_again(self) -> None:
        first = prefixed(0, "ab", BOOK, digest="d", outcome=Outcome.ABORTED)
        second = prefixed(1, "ab", BOOK, hits=200, digest="d")
        assert self.kinds(first, second) == {
            WasteKind.ABANDONED: (1, 286, first.charge.amount_nano),
            WasteKind.RE_PREFILLED: (1, 66, 66_000),
        }

    def test_what_nothing_was_computed_for_wastes_nothing(self) -> None:
        refused = replace(
            prefixed(0, "ab", BOOK, digest="d", outcome=Outcome.REJECTED), usage=Usage(source=UsageSource.NONE)
        )
        assert self.kinds(refused, prefixed(1, "ab", BOOK, digest="d")) == {}


def test_credits_for_lost_hits_are_posted_once_and_verify(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    records = [prefixed(0, "abc", BOOK), prefixed(1, "abc", BOOK, seen={"engine-0": 0}, run="r")]
    with Ledger(path) as ledger:
        ledger.register(BOOK)
        for record in records:
            ledger.append(record)
    granted = lost_hit_grants(told(records).lost)
    for rows in (1, 0):
        with LedgerReader(path) as reader:
            missing = missing_credits(granted, reader.credits(), "lost_hits", "2026-09", START_NS + 10**15)
        assert len(missing) == rows
        post(path, missing)
    with LedgerReader(path) as reader:
        by_run = {group.key[0]: group.sums.amount_nano for group in reader.report(("run",)).groups}
        (credit,) = reader.credits()
    assert credit.amount_nano == -384 * 450
    assert by_run["r"] == (records[1].charge.amount_nano or 0) - 384 * 450
    assert verify_ledger(path).faults == []


def test_units_are_runs_agents_or_whatever_is_asked_for() -> None:
    records = [prefixed(0, "ab", BOOK, run="r"), prefixed(1, "ab", BOOK, hits=256, run="s")]
    assert set(told(records, unit="run").flows) == {("r", "s", "USD")}
    assert set(told(records, unit="agent").units) == {("agent-a", "USD")}
    unmarked = replace(records[0], prefix=None)
    assert told([unmarked]).unmarked == 1

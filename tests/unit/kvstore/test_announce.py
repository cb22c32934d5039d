"""Tier changes as KV events."""

from __future__ import annotations

from kvstore.announce import parents_first, tier_events
from kvstore.block import event_hash
from kvstore.events import BlocksRemoved, BlocksStored
from kvstore.page import Tier, key_content_hash
from kvstore.tiers.base import PagesRemoved, PagesStored
from tests.samples.pages import chain, strangers


def name(entry: tuple[bytes, object]) -> int:
    return event_hash(key_content_hash(entry[0]))


def test_a_chain_is_one_event() -> None:
    pages = chain(3, salt="tenant")
    (event,) = tier_events(PagesStored(Tier.DISK, tuple(pages)), 4)
    assert event == BlocksStored(
        hashes=tuple(map(name, pages)),
        parent=None,
        token_ids=tuple(range(12)),
        block_size=4,
        tier=Tier.DISK,
        salt="tenant",
    )


def test_the_middle_of_a_chain_names_its_parent() -> None:
    pages = chain(4)
    (event,) = tier_events(PagesStored(Tier.HOST, tuple(pages[2:])), 4)
    assert isinstance(event, BlocksStored)
    assert (event.parent, event.token_ids) == (name(pages[1]), tuple(range(8, 16)))


def test_what_does_not_continue_is_another_event() -> None:
    pages, other = chain(3), strangers(1, first_token=500)
    events = tier_events(PagesStored(Tier.HOST, (pages[0], pages[1], *other, pages[2])), 4)
    assert [event.hashes for event in events] == [
        (name(pages[0]), name(pages[1])), (name(other[0]),), (name(pages[2]),)
    ]  # fmt: skip


def test_removals_are_one_event() -> None:
    pages = chain(2)
    events = tier_events(PagesRemoved(Tier.POOL, tuple(key for key, _ in pages)), 4)
    assert events == [BlocksRemoved(tuple(map(name, pages)), Tier.POOL)]


def test_shuffled_chains_are_put_together_again() -> None:
    first, second = chain(4), chain(3, salt="other")
    shuffled = [first[2], second[1], first[0], second[0], first[3], second[2], first[1]]
    assert parents_first(shuffled) == [*first, *second]
    assert parents_first([first[3], first[2]]) == [first[2], first[3]]
    assert parents_first([]) == []

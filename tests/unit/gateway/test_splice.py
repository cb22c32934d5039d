"""The stream of an engine that goes on with an answer, as the client's reader gets it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_adapter.openai_compatible import OpenAICompatible
from engine_adapter.sglang import Sglang
from gateway.protocols.sse import data_of
from gateway.splice import Journal, Seam, SeamStops, Splice, whole_usage, with_hits
from tests.scripted_engine import DONE, chunk, event, stream, usage, usage_chunk
from tracing.record import HitSource, Usage, UsageSource

Json = dict[str, Any]
HEAD = {"id": "first", "created": 17, "model": "m"}


def through(splice: Splice, events: list[bytes]) -> list[Json]:
    """Return the chunks that come out; the end mark as an empty one."""
    out = [made for one in events for made in splice(one)]
    return [json.loads(data) if (data := data_of(made)) != b"[DONE]" else {} for made in out]


def said(chunks: list[Json]) -> tuple[str, str, list[str]]:
    """Return text, reasoning and finish reasons."""
    choices = [c["choices"][0] for c in chunks if c.get("choices")]
    text = "".join(c["delta"].get("content", "") for c in choices)
    reasoning = "".join(c["delta"].get("reasoning_content", "") for c in choices)
    return text, reasoning, [c["finish_reason"] for c in choices if c["finish_reason"]]


def spliced(seam: Seam | None, events: list[bytes], adapter: OpenAICompatible | None = None) -> list[Json]:
    return through(Splice(HEAD, adapter or Sglang(), seam, shows_private=False), events)


def test_one_id_one_role_and_the_counts_of_the_whole() -> None:
    detail = {"sglext": {"cached_tokens_details": {"device": 11, "host": 1}}}
    chunks = spliced(Seam(text="one ", prompt_tokens=10, said_tokens=3), stream(["two ", "three"], 14, 12, **detail))
    assert said(chunks) == ("two three", "", ["stop"])
    assert all(c["id"] == "first" and c["created"] == 17 for c in chunks if c)
    assert not any("role" in c["choices"][0]["delta"] for c in chunks if c.get("choices"))
    (counted,) = [c for c in chunks if c.get("usage")]
    assert counted["usage"] == usage(10, 6, 10)  # 14 + 2 in all; of its 12 hits two lie behind the prompt
    assert "sglext" not in counted
    assert chunks[-1] == {}


def test_without_a_count_of_the_prompt_what_was_said_is_taken_off_what_the_engine_counted() -> None:
    assert whole_usage(usage(14, 2), Seam(said_tokens=3)) == usage(11, 5)


def test_an_engine_that_restores_all_by_itself_counts_for_itself() -> None:
    chunks = through(
        Splice(HEAD, Sglang(), None, shows_private=True), [event(usage_chunk(10, 6, sglext={"x": 1})), DONE]
    )
    assert chunks[0]["usage"] == usage(10, 6)
    assert chunks[0]["sglext"] == {"x": 1}


def test_an_empty_finish_reason_is_no_end() -> None:
    """Some engines send one with every chunk: a stop text that is held back must not be shown for it."""
    pieces = [event(chunk({"content": text}, finish="")) for text in ("", "O", "P", " more")]
    chunks = spliced(Seam(text="say ST", stops=["STOP"]), [*pieces, event(chunk({}, finish="stop")), DONE])
    assert said(chunks) == ("", "", ["stop"])
    assert chunks[-1] == {}
    assert len(chunks) == 2


def test_hits_are_those_of_the_engine_that_began() -> None:
    detail = {"sglext": {"cached_tokens_details": {"device": 18, "host": 0}, "output_ids": [[1]]}}
    ended = [event(usage_chunk(18, 6, 18, **detail)), DONE]
    cold = Usage(fresh_tokens=18, source=UsageSource.RECOVERED, hit_source=HitSource.INFERRED)
    warm = replace(cold, fresh_tokens=6, hit_host_tokens=8, hit_disk_tokens=4)
    for hits, told in ((cold, 0), (warm, 12)):
        splice = Splice(HEAD, Sglang(), None, shows_private=True, hits=hits)
        (shown, _) = through(splice, ended)
        assert shown["usage"] == usage(18, 6, told)
        tiers = shown["sglext"]["cached_tokens_details"]
        assert (tiers["host"], tiers["disk"], shown["sglext"]["output_ids"]) == (told and 8, told and 4, [[1]])
        own = splice.own_hits()
        assert own is not None
        assert own.hit_device_tokens == 18  # what is learned of the engine that went on


def test_hits_that_nobody_knows_are_not_told() -> None:
    bought = {"prompt_cache_hit_tokens": 18, "prompt_cache_miss_tokens": 0, "cached_tokens": 18}
    shown = with_hits({**usage(18, 6, 18), **bought}, Usage(fresh_tokens=18, hit_source=HitSource.UNKNOWN))
    assert shown == {"prompt_tokens": 18, "completion_tokens": 6, "total_tokens": 24, "prompt_tokens_details": None}


def test_text_that_was_held_back_and_comes_again_is_not_told_twice() -> None:
    for words in (["\n\n", "And"], ["\n", "\nAnd"], ["\n\nAnd"], ["\n\nA", "nd"]):
        assert said(spliced(Seam(text="x\n\n", held="\n\n"), stream(words)))[0] == "And"


def test_text_that_was_held_back_and_does_not_come_again_costs_nothing_of_the_rest() -> None:
    assert said(spliced(Seam(text="x\n\n", held="\n\n"), stream([" And"])))[0] == " And"
    assert said(spliced(Seam(text="x\n\n", held="\n\n"), stream(["\n", "And"])))[0] == "And"


def test_an_engine_that_takes_text_for_reasoning_is_corrected() -> None:
    thought = [event(chunk({"reasoning_content": "still "})), event(chunk({"content": "text"}))]
    assert said(spliced(Seam(text="It is "), thought)) == ("still text", "", [])


@given(cuts=st.lists(st.integers(0, 40), max_size=6))
def test_raw_reasoning_ends_at_its_mark_wherever_it_is_cut(cuts: list[int]) -> None:
    raw = "of two\n</think>\n\nIt is </b> four"
    places = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    chunks = spliced(Seam(in_reasoning=True, raw=True), stream([raw[a:b] for a, b in pairwise(places)]))
    assert said(chunks)[:2] == ("It is </b> four", "of two\n")


@given(
    whole=st.text("abc", min_size=1, max_size=14),
    stops=st.lists(st.text("abc", min_size=2, max_size=4), min_size=1, max_size=2),
    seam=st.integers(0, 14),
    cuts=st.lists(st.integers(0, 14), max_size=5),
)
def test_a_stop_text_across_the_seam_is_found_however_it_comes(
    whole: str, stops: list[str], seam: int, cuts: list[int]
) -> None:
    seam = min(seam, len(whole))
    assume(not any(stop in whole[:seam] for stop in stops))  # it would have ended there
    watch, shown = SeamStops(whole[:seam], stops), ""
    places = sorted({seam, len(whole), *(cut for cut in cuts if seam <= cut <= len(whole))})
    for a, b in pairwise(places):
        shown += watch.take(whole[a:b], is_last=b == len(whole))
    across = [
        (at, stop) for stop in stops for at in range(seam) if whole.startswith(stop, at) and at + len(stop) > seam
    ]
    assert (watch.matched is not None) == bool(across)
    assert shown == ("" if across else whole[seam:])
    if across:
        assert any(at == min(across)[0] and stop == watch.matched for at, stop in across)


def test_the_end_at_a_stop_text_is_the_streams_end() -> None:
    chunks = spliced(Seam(text="say ST", stops=["STOP"]), [*stream(["O", "P and", " more"])])
    assert said(chunks) == ("", "", ["stop"])
    assert chunks[-1] == {}
    assert len([c for c in chunks if not c]) == 1


def test_words_that_only_began_like_a_stop_text_are_told() -> None:
    assert said(spliced(Seam(text="say ST", stops=["STOP"]), stream(["O", "RM", " now"]))) == ("ORM now", "", ["stop"])
    assert said(spliced(Seam(text="say ST", stops=["STOP"]), stream(["O"]))) == ("O", "", ["stop"])


def test_completions_are_spliced_alike() -> None:
    pieces = [{"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": t, "finish_reason": f}]}
              for t, f in (("two ", None), ("three", None), ("", "length"))]  # fmt: skip
    chunks = spliced(Seam(text="one ", said_tokens=1), [*map(event, pieces), event(usage_chunk(11, 2)), DONE])
    assert "".join(c["choices"][0]["text"] for c in chunks if c.get("choices")) == "two three"
    assert [c["usage"] for c in chunks if c.get("usage")] == [usage(10, 3)]


def test_errors_and_comments_go_through() -> None:
    error = event({"error": {"message": "ouch"}})
    assert [*Splice(HEAD, Sglang(), None, shows_private=True)(error)] == [error]
    assert [*Splice(HEAD, Sglang(), None, shows_private=True)(b": beat\n\n")] == [b": beat\n\n"]


def test_the_journal_takes_ids_out_of_events_and_knows_what_came_of_them() -> None:
    journal, pieces = Journal(), 0
    journal.follow(lambda: pieces)
    assert journal.begun() is None
    assert list(journal(b": ids 3 4\ndata: {}\n\n")) == [b"data: {}\n\n"]
    assert list(journal(b"data: {}\n\n")) == [b"data: {}\n\n"]
    pieces = 2
    begun = journal.begun()
    assert begun is not None
    assert (list(begun.ids), begun.parts) == ([3, 4], 2)
    journal.is_whole = False
    assert journal.begun() is None

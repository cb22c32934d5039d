from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gateway.replay.errors import TraceError
from gateway.replay.formats import read_trace
from gateway.replay.workload import load_workload

RST1 = {"format": "rst1", "name": "t", "block": 64, "closed": True}
OWN = {"format": "keepwarm-requests-1", "name": "mine", "block": 16, "closed": False}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def problem_of(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        load_workload(path)
    return caught.value


def test_rst1_rows_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.rst", RST1, [3, 1, 0.5, 2, 200, 7, 0, [5, 2, 9, 1]], "\n", [3, 1, 1, 0, 260, 0, 3, []])
    packed = tmp_path / "t.rst.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    header, rows = read_trace(plain)
    first, second = rows
    assert (header.block_tokens, header.closed, header.name) == (64, True, "t")
    assert (first.session, first.context, first.at_s, first.think_s, first.blocks) == (3, 1, 0.5, 2.0, [5, 6, 9])
    assert (second.line, second.keep, second.output_tokens) == (4, 3, 1)
    assert list(read_trace(packed)[1]) == [first, second]


def test_mooncake_requests_have_no_header_and_milliseconds(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [0, 4]}
    header, rows = read_trace(write(tmp_path / "m.jsonl", row, {**row, "timestamp": 2000}))
    assert (header.format, header.block_tokens, header.closed) == ("mooncake", 512, False)
    assert [(r.at_s, r.session, r.prompt_tokens, r.blocks) for r in rows] == [
        (1.5, -1, 700, [0, 4]),
        (2.0, -1, 700, [0, 4]),
    ]


def test_our_own_format_needs_only_tokens_and_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "o.jsonl", OWN, {"in": 40, "out": 2, "blocks": [1, 2]}, {"in": 9, "out": 1, "blocks": []})
    workload = load_workload(path)
    assert [len(workload.hashes(request.path)) for request in workload.requests] == [2, 0]


def test_open_traces_begin_at_their_first_arrival(tmp_path: Path) -> None:
    rows = [{"t": 1.7e9 + t, "in": 9, "out": 1, "blocks": []} for t in (5, 2)]
    workload = load_workload(write(tmp_path / "o.jsonl", OWN, *rows))
    assert [request.at_s for request in workload.requests] == [0, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([1, 0, 0, 0, 100, 1, 0], "8 items"),
        ([1, 0, 0, 0, 100, 1, 0, [5]], "pairs"),
        ([1, 0, 0, 0, 100, 1, 0, [5, -1]], "count of a run"),
        ([1, 0, 0, 0, 100, 1, 0, [5, 10**12]], "count of a run"),
        ([1, 0, 0, 0, 0, 1, 0, []], "in must be"),
        ([1, 0, 0, 0, 1 << 40, 1, 0, []], "in must be a whole number of 1 to 1,099,511,627,775"),
        ([1, 0, 0, 0, None, 1, 0, []], "in is missing"),
        ([-1, 0, 0, 0, 100, 1, 1, []], "names no session"),
        ([1, 0, "x" * 10_000, 0, 100, 1, 0, []], "xxx...xxx"),
        ([1, 0, -2, 0, 100, 1, 0, []], "t must be"),
        ([1, 0, 0, "x", 100, 1, 0, []], "think must be"),
        ([1, 0, 0, True, 100, 1, 0, []], "think must be"),
        ([1, 0, 0, 0, 100, 1, 9, []], "keeps 9 blocks of a request that had 1"),
        ({"in": 1}, "8 items"),
        ("{broken\n", "at character 2"),
        ("[" * 100_000 + "\n", "nested too deeply"),
        ("[" + " " * (16 << 20) + "]\n", "longer than 16 MiB"),
    ],
)
def test_a_malformed_row_is_told_with_its_line(tmp_path: Path, line: object, words: str) -> None:
    error = problem_of(write(tmp_path / "t.rst", RST1, [1, 0, 0, 0, 100, 1, 0, [5, 1]], line))
    assert error.line == 3
    assert words in str(error)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ([1, 2], "starts with an object"),
        ({"format": "parquet"}, "unknown format 'parquet'"),
        ({"messages": []}, "neither a header"),
        ({**RST1, "block": 0}, "block must be"),
        ({**RST1, "closed": "yes"}, "closed must be"),
        ("\x00\x01", "JSON"),
        ({"timestamp": 1, "hash_ids": [1], "output_length": 1}, "input_length is missing"),
    ],
)
def test_a_bad_first_line_is_told(tmp_path: Path, first: object, words: str) -> None:
    error = problem_of(write(tmp_path / "t", first))
    assert error.line == 1
    assert words in str(error)


def test_unknown_members_of_our_format_are_refused(tmp_path: Path) -> None:
    error = problem_of(write(tmp_path / "o", OWN, {"in": 4, "out": 1, "blocks": [], "thinks": 3}))
    assert "'thinks'" in str(error)


def test_an_empty_and_a_missing_and_a_cut_file_are_errors(tmp_path: Path) -> None:
    assert "no request" in str(problem_of(write(tmp_path / "h", RST1)))
    assert str(problem_of(write(tmp_path / "e"))).endswith("e: it is empty")
    assert "No such file" in str(problem_of(tmp_path / "gone"))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(RST1).encode() * 50)[:60])
    assert "gzip file is cut off" in str(problem_of(cut))
    cut.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 100)  # a header, and a block of a type that there is not
    assert "damaged" in str(problem_of(cut))


def test_a_second_header_is_told(tmp_path: Path) -> None:
    assert "second header" in str(problem_of(write(tmp_path / "o", OWN, {"in": 4, "out": 1, "blocks": []}, OWN)))


def test_lines_whose_time_goes_back_are_known_where_times_count(tmp_path: Path) -> None:
    rows = [{"t": t, "in": 9, "out": 1, "blocks": [], "session": 1} for t in (5, 2, 3, 1)]
    assert load_workload(write(tmp_path / "o", OWN, *rows)).early_lines == (3, 5)
    assert load_workload(write(tmp_path / "c", {**OWN, "closed": True}, *rows)).early_lines == ()


def test_moments_since_the_epoch_are_times_in_milliseconds_too(tmp_path: Path) -> None:
    row = {"timestamp": 1_764_547_200_000, "input_length": 700, "output_length": 3, "hash_ids": [0]}
    assert load_workload(write(tmp_path / "m", row)).span_s == 0

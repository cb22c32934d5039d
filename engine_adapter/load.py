"""How busy an engine is, in its own words: scraped from what it answers, or pushed over a socket.

Sources: the Prometheus text of vLLM 0.32, SGLang 0.5.23 and llama.cpp's server; SGLang's ``/v1/loads`` and its load
socket. Recordings: ``tests/captures``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine, or one data-parallel rank of it, at one moment. ``None``: it does not tell."""

    running: int
    waiting: int
    used_share: float | None = None  # of its KV cache, 0 … 1
    waiting_tokens: int | None = None  # prompt tokens in its queue that it will have to compute
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Where a rank publishes its load (a ZMQ endpoint)."""

    endpoint: str
    topic: str
    rank: int = 0


Gauges = Mapping[str, float]
"""A rank's metrics by name."""


def gauges_by_rank(body: bytes, names: frozenset[str], rank_label: str) -> dict[int, Gauges]:
    """Return these metrics of a Prometheus page, by the number in ``rank_label``. O(page).

    What cannot be read says nothing. Of several samples of one name and rank (tensor-parallel ranks tell the same) the
    largest counts.
    """
    found: dict[int, dict[str, float]] = {}
    for name, labels, value in _samples(body, names):
        rank = labels.get(rank_label, "0")
        of_rank = found.setdefault(int(rank) if rank.isdecimal() else 0, {})
        of_rank[name] = max(of_rank.get(name, value), value)
    return dict(found)


def labels_of(body: bytes, name: str) -> Mapping[str, str]:
    """Return the labels of a metric's first sample, such as an info metric's; nothing where there is none."""
    return next((labels for _, labels, _ in _samples(body, frozenset({name}))), {})


def decode_load_stat(payload: bytes) -> EngineLoad | None:
    """Return what SGLang's load socket says: ``["LoadStat", running, waiting, used, limit, rank, …]``."""
    try:
        kind, running, waiting, used, limit, rank, *rest = msgspec.msgpack.decode(payload, type=list)
        if kind != "LoadStat":
            return None
        return EngineLoad(
            running=int(running),
            waiting=int(waiting),
            used_share=used / limit if limit else None,
            waiting_tokens=int(rest[0]) if rest and rest[0] is not None else None,
            rank=int(rank or 0),
        )
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return None


def _samples(body: bytes, names: frozenset[str]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield the samples of these names. Lines of others are not parsed: a page has hundreds of them."""
    lines = [line for line in body.decode("utf-8", "replace").splitlines() if _name_of(line) in names]
    for line in lines:
        try:
            for family in text_string_to_metric_families(line + "\n"):
                for sample in family.samples:
                    yield sample.name, sample.labels, float(sample.value)
        except ValueError:
            continue


def _name_of(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]

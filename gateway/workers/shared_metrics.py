"""One ``/metrics`` for all workers: each leaves its counters in a file, and whoever is asked adds them up.

A worker writes its file before it answers, and every few seconds; so what is shown is made of files alone, each of
which only grows, and a sum never falls, whichever worker answers. The file of a worker that died is added to that of
all dead ones. Counters and histograms are sums; of gauges those that each worker has a part of are summed, the others
are what the answering worker sees.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

WRITE_S = 2.0
_SUMMED_GAUGES = frozenset({"keepwarm_in_flight", "keepwarm_trace_waiting_records"})
_LASTING_GAUGES = frozenset({"keepwarm_saved_nano"})  # gauges by name alone: a sum over time that may fall
_DEAD = "dead"

Sample = tuple[str, dict[str, str], float]


class Family(msgspec.Struct, array_like=True):
    """One metric with its samples, as a file holds it."""

    name: str
    text: str
    kind: str
    samples: list[Sample]


class SharedMetrics:
    """The counters of one worker's life, and the sum with all others'. Blocks: use a thread."""

    def __init__(self, folder: Path, worker: int, own: CollectorRegistry, common: CollectorRegistry) -> None:
        """``own``: what this worker counts; ``common``: what is the same in all, such as the ledger's sums."""
        self._folder, self._own, self._common = folder, own, common
        self._path = folder / f"{worker}-{os.getpid()}"

    def write(self) -> None:
        """Leave what was counted until now."""
        with _locked(self._folder):
            self._write()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        with _locked(self._folder):
            self._write()
            families = _sum(_read(path) for path in sorted(self._folder.glob("[0-9d]*")))
        registry = CollectorRegistry()
        registry.register(_Fixed([*self._seen_here(), *families]))
        return generate_latest(registry) + generate_latest(self._common)

    async def run(self) -> None:
        """Leave it every few seconds, for ever."""
        while True:
            await asyncio.sleep(WRITE_S)
            await asyncio.to_thread(self.write)

    def _seen_here(self) -> Iterator[Metric]:
        return (metric for metric in self._own.collect() if not _is_summed(metric.type, metric.name))

    def _write(self) -> None:
        families = [
            Family(metric.name, metric.documentation, metric.type,
                   [(s.name, dict(s.labels), s.value) for s in metric.samples if not s.name.endswith("_created")])
            for metric in self._own.collect()
            if _is_summed(metric.type, metric.name)
        ]  # fmt: skip
        _replace(self._path, families)


def bury(folder: Path, worker: int, pid: int) -> None:
    """Add the file of a dead worker to that of all dead ones."""
    path, grave = folder / f"{worker}-{pid}", folder / _DEAD
    with _locked(folder):
        left = [family for family in _read(path) if family.kind != "gauge" or family.name in _LASTING_GAUGES]
        _replace(grave, _families(_sum([_read(grave), left])))
        path.unlink(missing_ok=True)


def _is_summed(kind: str, name: str) -> bool:
    return kind in ("counter", "histogram", "summary") or name in _SUMMED_GAUGES | _LASTING_GAUGES


def _sum(files: Iterator[list[Family]] | Sequence[list[Family]]) -> list[Metric]:
    """Add up samples of one name and labels."""
    metrics: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in files:
        for family in families:
            metrics.setdefault(family.name, Metric(family.name, family.text, family.kind))
            values = sums.setdefault(family.name, {})
            for name, given, value in family.samples:
                at = (name, tuple(given.items()))
                values[at] = values.get(at, 0.0) + value
    for name, values in sums.items():
        for (sample, labels), value in values.items():
            metrics[name].add_sample(sample, dict(labels), value)
    return list(metrics.values())


def _families(metrics: Sequence[Metric]) -> list[Family]:
    return [
        Family(m.name, m.documentation, m.type, [(s.name, dict(s.labels), s.value) for s in m.samples]) for m in metrics
    ]


def _read(path: Path) -> list[Family]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Family])
    except (FileNotFoundError, msgspec.MsgspecError):
        return []


def _replace(path: Path, families: list[Family]) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(msgspec.json.encode(families))
    new.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Be the only one who reads and writes there."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Fixed(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

"""What an answer says of a prediction: the engine's own total, whoever placed it in tiers."""

from __future__ import annotations

import pytest

from gateway.residency import cached_tokens, watch_events
from radix_index.predict import PredictionStats
from tracing.record import HitSource, Usage, UsageSource


@pytest.mark.parametrize("source", [HitSource.REPORTED, HitSource.TOTAL, HitSource.INFERRED])
def test_an_engines_total_scores_the_prediction(source: HitSource) -> None:
    usage = Usage(fresh_tokens=32, hit_disk_tokens=64, source=UsageSource.ENGINE, hit_source=source)
    assert cached_tokens(usage) == 64
    stats = PredictionStats()
    watch_events(stats, 64, 16).answered(usage)
    watch_events(stats, 96, 16).answered(usage)
    assert (stats.answers, stats.exact) == (2, 1)


@pytest.mark.parametrize(
    "usage",
    [
        Usage(fresh_tokens=96, source=UsageSource.ENGINE, hit_source=HitSource.UNKNOWN),
        Usage(hit_disk_tokens=64, source=UsageSource.RECOVERED, hit_source=HitSource.INFERRED),
    ],
)
def test_what_the_engine_did_not_count_scores_nothing(usage: Usage) -> None:
    stats = PredictionStats()
    watch_events(stats, 64, 16).answered(usage)
    assert (cached_tokens(usage), stats.answers) == (None, 0)

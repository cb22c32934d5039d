"""What is expected of tiers that an engine's store does not read."""

from __future__ import annotations

from gateway.tier_use import Hits, TierUse
from tracing.record import HitSource, Usage, UsageSource

HELD: Hits = (100, 0, 0, 400)


def answered(device: int = 0, pool: int = 0, unknown: int = 0, source: HitSource = HitSource.REPORTED) -> Usage:
    return Usage(
        fresh_tokens=600 - device - pool - unknown, hit_device_tokens=device, hit_pool_tokens=pool,
        hit_unknown_tokens=unknown, output_tokens=5, source=UsageSource.ENGINE, hit_source=source,
    )  # fmt: skip


def test_a_tier_that_is_read_is_counted_on() -> None:
    use = TierUse()
    for _ in range(20):
        use.saw(HELD, answered(100, 400))
        use.saw(HELD, answered(unknown=500, source=HitSource.TOTAL))
    assert not use.refuses
    assert use.taken(HELD) == HELD


def test_a_tier_that_several_answers_did_not_read_is_not() -> None:
    use = TierUse()
    use.saw(HELD, answered(100))
    assert use.taken(HELD) == HELD, "one answer says little"
    for _ in range(3):
        use.saw(HELD, answered(100))
    assert use.taken(HELD) == (100, 0, 0, 0)
    assert use.taken((0, 0, 300, 100)) == (0, 0, 300, 0), "of other tiers nothing was said"
    assert use.refused() == (3,)


def test_totals_say_it_too_and_pages_that_moved_up_were_read() -> None:
    total, moved = TierUse(), TierUse()
    for _ in range(5):
        total.saw(HELD, answered(unknown=100, source=HitSource.TOTAL))
        moved.saw(HELD, answered(device=500))
    assert total.refused() == (3,)
    assert not moved.refuses


def test_it_is_counted_on_again_once_answers_tell_of_hits_there() -> None:
    use = TierUse()
    for _ in range(20):
        use.saw(HELD, answered(100))
    for _ in range(4):
        use.saw(HELD, answered(100, 400))
    assert use.taken(HELD) == HELD


def test_who_does_not_count_says_nothing() -> None:
    use = TierUse()
    for _ in range(20):
        use.saw(HELD, answered(source=HitSource.UNKNOWN))
        use.saw(HELD, Usage(fresh_tokens=600))
        use.saw((500, 0, 0, 0), answered(100))
    assert not use.refuses

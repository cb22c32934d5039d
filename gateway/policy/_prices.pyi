"""See ``gateway.policy.pricing``."""

from collections.abc import Callable, Sequence

from gateway.policy.costs import Fetch
from gateway.policy.load import Load
from gateway.policy.pricing import Offer, Price

def prices(
    offers: Sequence[Offer],
    terms: tuple[float, ...],
    prompt_tokens: int,
    source: int,
    memory_wait_s: Callable[[Load, float, float], float],
    fetched: Callable[
        [Load, tuple[int, int, int, int], int, int, int, float, float], tuple[float, float, int, Fetch | None]
    ],
    make: type[Price],
    /,
) -> list[Price]: ...

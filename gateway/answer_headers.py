"""What an answer tells of itself: which request, run and step it was, where it came from, what of it was cached, and
what it cost; and what is left of the caller's limits.

Which of these a caller sees is the gateway's policy, or the key's own. What is known at the start stands in headers of
every answer; what is known at the end stands in headers of whole answers and, where that is wanted, in a comment before
the end of a stream, which every client of server-sent events skips.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.draft import Draft, Settled
from gateway.limits.limiter import limit_headers
from tracing.record import Charge, HitSource

DEFAULT_SHOWN = frozenset({"run", "step", "instance", "hit", "predicted-hit"})
_AT_THE_END = frozenset({"hit", "cost"})
_NANO = 10**9


class AnswerHeaders:
    """Makes them. ``settle`` tells what a request that has its answer came to."""

    def __init__(
        self,
        settle: Callable[[Draft], Settled],
        shown: frozenset[str] = DEFAULT_SHOWN,
        *,
        summarizes_streams: bool = False,
    ) -> None:
        self._settle, self._shown, self._summarizes = settle, shown, summarizes_streams

    def of(self, draft: Draft, *, is_whole: bool = False) -> dict[str, str]:
        """Return the headers. ``is_whole``: the engine's answer is there, and its usage known."""
        shown = self._of_caller(draft)
        headers = {"x-keepwarm-request-id": draft.request_id, **draft.protocol.headers(draft.request_id)}
        if draft.link is not None:
            if "run" in shown:
                headers["x-keepwarm-run"] = draft.link.run_id
            if "step" in shown:
                headers["x-keepwarm-step"] = str(draft.link.step)
        if draft.decision is not None:
            if "instance" in shown:
                headers["x-keepwarm-instance"] = draft.decision.instance
            if "predicted-hit" in shown:
                headers["x-keepwarm-predicted-hit"] = str(draft.decision.predicted_hit_tokens)
        if is_whole:
            headers |= {f"x-keepwarm-{name}": value for name, value in self._end(draft, shown).items()}
        if draft.verdict is not None:
            headers["x-keepwarm-break"] = draft.verdict
        if draft.limits:
            headers |= limit_headers(draft.limits, draft.now_ns())
        return headers

    def summary(self, draft: Draft) -> bytes:
        """Return the comment before a stream's end; nothing where it is not wanted."""
        if not self._summarizes:
            return b""
        said = self._end(draft, self._of_caller(draft))
        return f": keepwarm {' '.join(f'{name}={value}' for name, value in said.items())}\n\n".encode() if said else b""

    def _of_caller(self, draft: Draft) -> frozenset[str]:
        caller = draft.caller
        return self._shown if caller is None or caller.shows is None else caller.shows

    def _end(self, draft: Draft, shown: frozenset[str]) -> dict[str, str]:
        if _AT_THE_END.isdisjoint(shown):
            return {}
        settled, said = self._settle(draft), dict[str, str]()
        if "hit" in shown and settled.usage.hit_source is not HitSource.UNKNOWN:
            said["hit"] = str(settled.usage.hit_tokens)
        if "cost" in shown:
            said["cost"] = money(settled.charge)
        return said


def money(charge: Charge) -> str:
    """Return an amount in units of its currency, to the last of its nine decimals: ``0.000012340;USD``."""
    if charge.amount_nano is None:
        return "unpriced"
    sign, amount = "-" if charge.amount_nano < 0 else "", abs(charge.amount_nano)
    return f"{sign}{amount // _NANO}.{amount % _NANO:09};{charge.currency}"

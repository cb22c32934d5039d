"""How long and how much is kept for whom: time to live and byte quotas by namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.page import Namespace


@dataclass(frozen=True, slots=True)
class Retention:
    """What one namespace may have of one tier. ``None`` is without limit."""

    ttl_s: float | None = None  # from when a page is first stored; carried along when it is promoted
    quota_bytes: int | None = None  # rounded down to whole pages


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """A rule for everybody, and others for some."""

    default: Retention = field(default_factory=Retention)
    by_namespace: Mapping[Namespace, Retention] = field(default_factory=dict)

    @property
    def has_quotas(self) -> bool:
        """Whether anybody has a quota."""
        return any(rule.quota_bytes is not None for rule in (self.default, *self.by_namespace.values()))

    @property
    def shortest_ttl_s(self) -> float | None:
        """The shortest life that any page has; ``None`` where all live for ever."""
        lives = [rule.ttl_s for rule in (self.default, *self.by_namespace.values()) if rule.ttl_s is not None]
        return min(lives, default=None)

    def rule(self, namespace: Namespace) -> Retention:
        """Return what holds for a namespace."""
        return self.by_namespace.get(namespace, self.default)
